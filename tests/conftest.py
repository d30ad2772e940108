"""Set before any test module imports MLX, and the device that ``kv-harness --device`` reads as well."""

import os

import pytest

os.environ.setdefault("MLX_DISABLE_COMPILE", "1")  # a compiled function hides its calls from the probe
os.environ.setdefault("MLX_ENABLE_TF32", "0")  # on a GPU; TF32 is not float32
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # pytest -n auto is parallel enough

if os.environ.get("KV_HARNESS_DEVICE"):
    from harness.targets.reference import use_device

    use_device(os.environ["KV_HARNESS_DEVICE"])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A name that holds an address is another one in every process: ``-n`` then fails without a test to blame."""
    if odd := [item.nodeid for item in items if " at 0x" in item.nodeid]:
        raise pytest.UsageError(f"the name of a test holds an address: {odd[0]:.200}")
