"""``kv-harness doctor``: what stands in the way is named, and only that fails."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

import harness.reporting.environment
import harness.workers
from harness import cli
from harness.commands import doctor
from harness.commands.doctor import Check
from harness.probe import Record
from harness.targets import reference


def said(out: Path, device: str | None = None) -> dict[str, Check]:
    return {check.name: check for check in doctor.checks(out, device)}


def test_here_it_can_be_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--out", str(tmp_path / "new" / "reports")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "the harness can be used" and not [line for line in lines if line.startswith("FAIL")]
    assert not (tmp_path / "new").exists()  # it only looks
    bites = next(line for line in lines if "the historic bug" in line)
    assert "the mask has 9 keys, attention received 7" in bites


def test_a_package_that_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    whole = harness.reporting.environment.versions
    gone = {"tabulate": "absent", "pytest": "absent"}
    monkeypatch.setattr(harness.reporting.environment, "versions", lambda: whole() | gone)
    found = said(tmp_path)
    assert (found["tabulate"].verdict, found["pytest"].verdict) == ("FAIL", "WARN")
    assert "pip install tabulate" in found["tabulate"].detail


def test_an_old_python(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 10, 4))
    assert doctor._python() == Check("FAIL", "Python", "3.10.4, at least 3.11 is needed")


def test_a_folder_that_is_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert said(tmp_path / "file" / "reports")["reports"].verdict == "FAIL"
    assert cli.main(["doctor", "--out", str(tmp_path / "file")]) == 2
    assert capsys.readouterr().err == "kv-harness: error: cannot be used like this: reports (see above)\n"


def test_threads_and_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(harness.workers, "processors", lambda: 8)
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "8")
    monkeypatch.setattr(os, "sysconf", lambda name: {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1000}[name])
    found = said(tmp_path)
    assert (found["processors"].verdict, found["memory"].verdict) == ("WARN", "WARN")


def test_a_device_that_is_not_there(tmp_path: Path) -> None:
    found = said(tmp_path, "gpu")
    if found["device"].verdict == "FAIL":
        assert "the historic bug" not in found and found["device"].detail
    else:
        assert found["the historic bug"].verdict == "OK"


def test_a_probe_that_sees_nothing_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As with a compiled function: the mask is as wrong as ever, and nobody sees it."""
    monkeypatch.setattr(Record, "attention", lambda _: ())
    found = said(tmp_path)["the historic bug"]
    assert found.verdict == "FAIL" and "was not found" in found.detail


def test_a_wrong_model_is_not_taken_for_a_right_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    targets = reference.targets
    monkeypatch.setattr(reference, "targets", lambda family, _: targets(family, "offset"))
    found = said(tmp_path)["the historic bug"]
    assert found.verdict == "FAIL" and "was found in a right model" in found.detail


def test_a_model_that_does_not_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no kernel")

    monkeypatch.setattr(reference, "targets", broken)
    assert said(tmp_path)["a model runs"] == Check("FAIL", "a model runs", "RuntimeError: no kernel")


def test_whether_mlx_compiles_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import mlx.core as mx

    monkeypatch.setenv("MLX_DISABLE_COMPILE", "1")
    off = said(tmp_path)["compilation"]
    assert off == Check("OK", "compilation", "off, no compile cache is used (MLX_DISABLE_COMPILE=1)")
    monkeypatch.delenv("MLX_DISABLE_COMPILE")

    def kept(made: Any) -> Any:
        first: list[Any] = []
        return lambda *given: first[0] if first else first.append(made(*given)) or first[0]

    monkeypatch.setattr(mx, "compile", kept)
    on = doctor._compiling()
    assert on.verdict == "WARN" and "compile cache hides" in on.detail and "is not set" in on.detail
