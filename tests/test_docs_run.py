"""Every command in the code blocks of README.md and CONTRIBUTING.md runs, here or where this file says.

What is written for a night or for a person's own files runs here with a smaller budget, or on files of the same kind.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_workflows import MAKEFILE

ROOT = Path(__file__).parents[1]
DOCS = ("README.md", "CONTRIBUTING.md")
SMALL = ("--profile", "smoke")
FEWEST = (*SMALL, "--programs", "1")

#: In this order, one folder for all: command -> (exit code, further arguments that make it cheap).
RUN: dict[str, tuple[int, tuple[str, ...]]] = {
    "kv-harness doctor": (0, ()),
    "kv-harness run --profile smoke --families qwen2_vl --path text": (0, ()),
    "kv-harness run --families qwen2_vl --path text --policy offset": (1, SMALL),
    "kv-harness replay reports/findings/mask_key_axis-d5f0c95e.json": (1, ()),
    "kv-harness explain reports/findings/mask_key_axis-d5f0c95e.json": (0, ()),
    "kv-harness synth qwen2_vl my-checkpoint": (0, ()),
    "kv-harness validate my-checkpoint --before offset": (0, ()),
    "kv-harness run --target mlx_lm:./my-checkpoint,mlx_lm:./my-checkpoint@live-window": (0, FEWEST),
    "kv-harness validate ./my-checkpoint --engine mlx_lm --before library": (0, ()),
    "kv-harness validate ./my-checkpoint --engine 'wire:./my-engine --model ./my-checkpoint'": (0, ()),
    "kv-harness validate ./my-checkpoint --before mlx_lm --after 'wire:./my-engine --model ./my-checkpoint'": (0, ()),
    "kv-harness wire-check 'python harness/wire/examples/toy.py'": (0, ()),
    "g++ -std=c++17 -O2 -o toy harness/wire/examples/toy.cpp": (0, ()),
    "kv-harness wire-check ./toy": (0, ()),
    "kv-harness run --target wire:./toy": (0, SMALL),
    "kv-harness wire-check 'python -m harness.wire.worker mlx_lm:./my-checkpoint@live-window'": (0, ()),
    "kv-harness run --target mlx_lm:MODEL_TYPE,mlx_lm:MODEL_TYPE@live-window --profile quick": (0, FEWEST),
    "kv-harness live-safety --only MODEL_TYPE": (0, ("--programs", "1")),
}
#: What stands for the reader's own; whatever is relative to the checkout is where that lies.
REAL = {
    "MODEL_TYPE": "llama",
    "./my-engine --model ./my-checkpoint": "python -m harness.wire.worker mlx_lm:./my-checkpoint@live-window",
    "harness/wire/examples": str(ROOT / "harness" / "wire" / "examples"),
}
#: Too long for here, or not for a test: command -> (file that runs the same, what stands there, why not here).
ELSEWHERE: dict[str, tuple[str, str, str]] = {
    "pip install -e .": ("Makefile", "install -q --no-compile -c constraints.txt -e", "needs the network"),
    "pip install -e '.[mlx-lm]'": ("pyproject.toml", '"mlx-kv-harness[mlx-lm]",', "needs the network; part of dev"),
    "pip install 'mlx-kv-harness[mlx-lm] @ git+URL'": (
        *("tests/test_pytest_plugin.py", "as an install of the wheel makes it", "URL is the reader's"),
    ),
    "kv-harness run --families qwen2_vl": ("Makefile", "kv-harness run --profile '$(PROFILE)'", "a minute"),
    "kv-harness run --target mlx_lm:llama,mlx_lm:llama@live-window": (
        *("tests/test_docs_run.py", '"MODEL_TYPE": "llama"', "here, as the line with MODEL_TYPE"),
    ),
    "kv-harness run --target mlx_lm:qwen3@max-kv-size=12": (
        *("tests/targets/test_mlx_lm_max_kv_size.py", "max-kv-size", "ten seconds, and finds what is known"),
    ),
    "kv-harness run --target mlx_lm:qwen3@batch-generator,mlx_lm:qwen3@batch-generator-in-pieces,"
    "mlx_lm:qwen3@speculative": ("tests/targets/test_mlx_lm_generator.py", "@batch-generator", "minutes"),
    "kv-harness run --target mlx_vlm:qwen2_vl,mlx_vlm:qwen2_vl+images": (
        *("Makefile", "tests/targets/test_mlx_vlm.py tests/targets/test_mlx_vlm_text.py", "needs torch: make parity"),
    ),
    "kv-harness validate CHECKPOINT --max-kv-size 1024 --prefill-chunk-size 512 --tokens 2048 --before offset": (
        *("tests/test_published_crash.py", "2048", "ten minutes; the same crash without a checkpoint"),
    ),
    "pytest --kv-target mlx_lm:qwen3 --kv-profile quick -n auto": (
        *("tests/test_pytest_plugin.py", '"--kv-target", target, "--kv-profile"', "needs an install, as is made there"),
    ),
    "pytest 'kv-harness::mlx_lm:qwen3[tiny-rows]'": (
        *("tests/test_pytest_plugin.py", "def test_a_name_can_be_given_back", "needs an install, as is made there"),
    ),
}
COMMAND = r"(kv-harness (?!\d+\.\d)|pip |pytest |make |python |g\+\+ )"  # a run's first line tells its version
NEEDS_MLX_LM = ("mlx_lm", "live-safety", "my-engine")


def commands(name: str) -> list[str]:
    """Of a page's code blocks, without comments; the synopses under "Commands" are tests/test_readme.py's."""
    text = re.sub(r"(?ms)^## Commands\n.*?^```\n.*?^```\n", "", (ROOT / name).read_text(encoding="utf-8"))
    found = []
    for block in re.findall(r"(?ms)^```\n(.*?)^```$", text):
        for line in block.splitlines():
            parts = re.sub(r"\s+#.*", "", line.removeprefix("$ ")).split(" && ")
            found += [part.strip() for part in parts if re.match(COMMAND, part)]
    return found


WRITTEN = [command for name in DOCS for command in commands(name)]


def test_every_command_has_its_place() -> None:
    """And nothing is listed that no page shows any more."""
    listed = [command for command in WRITTEN if not command.startswith("make ")]
    assert len(listed) > 20
    assert set(listed) == RUN.keys() | ELSEWHERE.keys() and not RUN.keys() & ELSEWHERE.keys()


def test_what_runs_elsewhere_is_there() -> None:
    for command, (path, words, reason) in ELSEWHERE.items():
        assert reason and words in (ROOT / path).read_text(encoding="utf-8"), f"{command}: not in {path}"


def test_every_target_of_make_exists() -> None:
    """Those of a merge are run by `.ci/run`, the others by a person or at night."""
    targets = re.search(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)
    assert targets is not None
    named = {word for command in WRITTEN if command.startswith("make ") for word in command.split()[1:]}
    assert len(named) > 10 and named <= set(targets[1].split())
    merged = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert all(name in merged for name in ("lint", "test", "run PROFILE=smoke", "parity"))


def _arguments(command: str, folder: Path) -> list[str]:
    """What is executed; a trace's name is that of the trace that is there, whatever its digest is today."""
    for placeholder, real in REAL.items():
        command = command.replace(placeholder, real)
    words = shlex.split(command)
    words = [re.sub(r"^(wire:)?python ", lambda found: f"{found[1] or ''}{sys.executable} ", word) for word in words]
    for number, word in enumerate(words):
        if word.startswith("reports/findings/"):
            (trace,) = (folder / "reports" / "findings").glob(f"{Path(word).name.rpartition('-')[0]}-*.json")
            words[number] = str(trace.relative_to(folder))
    return [sys.executable, "-m", "harness.cli", *words[1:]] if words[0] == "kv-harness" else words


def _cannot(command: str) -> bool:
    """Does it need what is not here? On CI all is."""
    if os.environ.get("CI"):
        return False
    without_library = importlib.util.find_spec("mlx_lm") is None and any(word in command for word in NEEDS_MLX_LM)
    return without_library or (shutil.which("g++") is None and ("g++" in command or "./toy" in command))


def test_every_command_that_is_cheap_runs(tmp_path: Path) -> None:
    """One behind the other, as a reader would: some need what another wrote."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    wrong, left_out = [], []
    for command, (code, more) in RUN.items():
        if _cannot(command):
            left_out.append(command)
            continue
        arguments = [*_arguments(command, tmp_path), *more]
        done = subprocess.run(
            arguments, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600, check=False
        )
        if done.returncode != code or "Traceback" in done.stderr:
            wrong.append(f"{command}: {done.returncode}, not {code}\n{(done.stdout + done.stderr)[-2000:]}")
    assert not wrong, "\n\n".join(wrong)
    if left_out:
        pytest.skip(f"the others ran; mlx-lm or g++ is missing for {len(left_out)}: {left_out[0]}")
