"""Versions: true, complete, and nothing that identifies a person or a machine."""

import json
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import harness
from harness.reporting import versions

ROOT = Path(harness.__file__).parent.parent


def test_it_names_what_decides_a_result() -> None:
    found = versions()
    libraries = ["mlx", "numpy", "hypothesis", "pytest", "pytest-xdist", "tabulate"]
    assert list(found) == ["kv-harness", "python", *libraries, "platform"]
    assert found["kv-harness"] == harness.__version__
    assert found["python"] == platform.python_version()
    assert {name: found[name] for name in libraries} == {name: metadata.version(name) for name in libraries}


def test_what_is_not_installed_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    real = metadata.version

    def version(name: str) -> str:
        if name == "mlx":
            raise metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(metadata, "version", version)
    assert versions()["mlx"] == "absent"
    assert versions()["numpy"] == real("numpy")


def test_it_names_no_user_no_host_and_no_path(monkeypatch: pytest.MonkeyPatch) -> None:
    uname = platform.uname_result("Linux", "secret", "6.1.0-secret", "#1 secret@secret", "x86_64")
    monkeypatch.setattr(platform, "uname", lambda: uname)
    for name in ("HOME", "USER", "LOGNAME", "HOSTNAME"):
        monkeypatch.setenv(name, "/secret")
    text = " ".join(versions().values())
    assert "Linux x86_64" in text  # it was asked
    assert "secret" not in text
    assert "/" not in text and "\\" not in text


@pytest.mark.parametrize(
    ("system", "machine", "expected"),
    [
        ("Darwin", "arm64", "macOS 15.1 arm64"),
        ("Linux", "x86_64", "Linux x86_64 glibc 2.36"),
        ("Linux", "", "Linux glibc 2.36"),
    ],
)
def test_platform(monkeypatch: pytest.MonkeyPatch, system: str, machine: str, expected: str) -> None:
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(platform, "mac_ver", lambda: ("15.1", ("", "", ""), "arm64"))
    monkeypatch.setattr(platform, "libc_ver", lambda: ("glibc", "2.36"))
    assert versions()["platform"] == expected


def test_reporting_imports_neither_mlx_nor_hypothesis() -> None:
    code = (
        "import json, sys; from harness.reporting import versions, load_schema; load_schema(); versions()\n"
        "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    imported = set(json.loads(run.stdout))
    assert "tabulate" in imported  # the list is what it should be
    assert not imported & {"mlx", "hypothesis", "pytest", "xdist", "jsonschema", "reference_models"}
