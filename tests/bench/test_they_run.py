"""The measurements still run and still print their tables; what they measure is not judged here."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ARGUMENTS = {
    "depths": ("--profile", "smoke", "nemotron_nas"),
    "load": ("--sizes", "tiny", "--gb", "0.001", "--dtype", "float32", "--rounds", "1"),
    "overhead": ("--profile", "smoke", "nemotron_nas"),
    "seeds": ("--profile", "smoke", "--seeds", "1", "nemotron_nas"),
    "wire": ("--profile", "smoke", "--rounds", "1", "nemotron_nas"),
    "witness": ("--configurations", "1", "--tokens", "6", "nemotron_nas"),
}


def test_every_measurement_is_tried() -> None:
    assert set(ARGUMENTS) == {path.stem for path in HERE.glob("*.py") if not path.stem.startswith("test_")}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_it_runs(name: str) -> None:
    environment = os.environ | {"PYTHONPATH": str(HERE.parents[1]), "MLX_DISABLE_COMPILE": "1"}
    done = subprocess.run(
        [sys.executable, str(HERE / f"{name}.py"), *ARGUMENTS[name]], capture_output=True, text=True, env=environment
    )
    assert "Traceback" not in done.stderr, done.stderr
    if name != "seeds":  # so small a budget may leave a property without a decisive step, which it reports
        assert done.returncode == 0, done.stderr
    table = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert len(table) >= 3
    if name == "load" and find_spec("mlx_lm") is not None:
        assert [row.split("|")[1].strip() for row in table[2:]] == [
            "ours",
            "ours, every weight checked for NaN",
            "mlx-lm",
        ]
