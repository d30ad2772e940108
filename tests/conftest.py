"""Set before any test module imports MLX, and the device that ``kv-harness --device`` reads as well."""

import os

os.environ.setdefault("MLX_DISABLE_COMPILE", "1")  # a compiled function hides its calls from the probe
os.environ.setdefault("MLX_ENABLE_TF32", "0")  # on a GPU; TF32 is not float32
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # pytest -n auto is parallel enough

if os.environ.get("KV_HARNESS_DEVICE"):
    from harness.targets.reference import use_device

    use_device(os.environ["KV_HARNESS_DEVICE"])
