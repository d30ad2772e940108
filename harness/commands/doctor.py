"""``kv-harness doctor``: can this installation find the bug? Exit code 2 if something is in the way."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from harness.commands import UsageError, out_option

EXTRAS = ("mlx-lm", "mlx-vlm", "transformers", "torch")
"""What other targets and the comparisons of ``make parity`` need; nothing else does."""


@dataclass(frozen=True)
class Check:
    """``FAIL``: the harness cannot be used so; ``WARN``: something of it cannot, or a result would mean less."""

    verdict: Literal["OK", "WARN", "FAIL"]
    name: str
    detail: str


def register(commands: Any, device_option: Callable[[argparse.ArgumentParser], None]) -> None:
    """Add the command to the subparsers of the command line."""
    doctor = commands.add_parser("doctor", help="check this installation: versions, device, memory, and does it bite?")
    out_option(doctor)
    device_option(doctor)
    doctor.set_defaults(act=_doctor)


def _doctor(arguments: argparse.Namespace) -> int:
    failed = []
    for check in checks(arguments.out, arguments.device):
        print(f"{check.verdict:<5} {check.name}: {check.detail}", flush=True)
        failed += [check.name] * (check.verdict == "FAIL")
    if failed:
        raise UsageError(f"cannot be used like this: {', '.join(failed)} (see above)")
    print("the harness can be used")
    return 0


def checks(out: Path, device: str | None = None) -> Iterator[Check]:
    """All checks, cheapest first; those behind a failure that they need are left out."""
    yield _python()
    yield from _packages()
    yield _processors()
    yield _memory()
    yield _folder(out)
    try:
        from harness.targets import reference
    except ImportError as error:
        yield Check("FAIL", "MLX", f"cannot be loaded ({error}); on Linux install 'mlx[cpu]', on macOS 'mlx'")
        return
    if device is not None:
        try:
            reference.use_device(device)
        except reference.TargetError as error:
            yield Check("FAIL", "device", str(error))
            return
    yield Check("OK", "device", reference.device())
    yield _compiling()
    try:
        yield _repeats()
        yield _bites()
    except Exception as error:  # whatever it is, it is what stands in the way
        yield Check("FAIL", "a model runs", f"{type(error).__name__}: {error}")


def _python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    return Check("OK" if sys.version_info >= (3, 11) else "FAIL", "Python", f"{version}, at least 3.11 is needed")


def _packages() -> Iterator[Check]:
    from harness.reporting.environment import ABSENT, versions

    for name, version in versions().items():
        if name == "python":
            continue
        needed = name not in ("pytest", "pytest-xdist")  # for the test suite alone
        missing: Literal["WARN", "FAIL"] = "FAIL" if needed else "WARN"
        said = f"{version}: pip install {name}" if version == ABSENT else version
        yield Check("OK" if version != ABSENT else missing, name, said)
    for name in EXTRAS:
        try:
            yield Check("OK", name, metadata.version(name))
        except metadata.PackageNotFoundError:
            yield Check("OK", name, "not installed; only targets and comparisons of that name need it")


def _processors() -> Check:
    from harness.workers import processors

    threads = os.environ.get("OPENBLAS_NUM_THREADS")
    said = f"{processors()} for this process (--jobs auto); NumPy's matrices in {threads or 'all'} thread(s)"
    return Check("OK" if threads == "1" or processors() == 1 else "WARN", "processors", said)


def _compiling() -> Check:
    """A compiled function hides its calls from the probe: MLX runs its Python once and keeps what it made of it."""
    from harness.targets.device import compiles

    told = os.environ.get("MLX_DISABLE_COMPILE")
    set_to = "MLX_DISABLE_COMPILE is not set" if told is None else f"MLX_DISABLE_COMPILE={told}"
    if compiles():
        said = f"on, and what is in the compile cache hides its calls: set MLX_DISABLE_COMPILE=1 ({set_to})"
        return Check("WARN", "compilation", said)
    return Check("OK", "compilation", f"off, no compile cache is used ({set_to})")


def _memory() -> Check:
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return Check("WARN", "memory", "this system does not tell")
    enough = total >= 2 << 30
    return Check("OK" if enough else "WARN", "memory", f"{total / 2**30:.1f} GiB; tiny models need 1, a process each")


def _folder(out: Path) -> Check:
    nearest = next(path for path in (out, *out.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        return Check("FAIL", "reports", f"{nearest}: {error.strerror or error}; choose another folder with --out")
    return Check("OK", "reports", f"{out} can be written")


def _repeats() -> Check:
    """The A/A control, on the smallest model there is."""
    import properties

    found = _judged("live", "same_program_same_bytes")
    same = found is None
    return Check("OK" if same else "WARN", properties.BY_ID["same_program_same_bytes"].id, found or "the same twice")


def _bites() -> Check:
    """The historic bug is found, and nothing where it is not."""
    wrong, right = (_judged(policy, "mask_key_axis_equals_live_keys") for policy in ("offset", "live"))
    if wrong is None:
        return Check("FAIL", "the historic bug", "was not found: the probe does not see the attention calls of MLX")
    if right is not None:
        return Check("FAIL", "the historic bug", f"was found in a right model: {right}")
    return Check("OK", "the historic bug", f"is found ({wrong}), and not in the right model")


def _judged(policy: Any, name: str) -> str | None:
    """What this property finds in a plain program with a trim on a small model; None: nothing."""
    import properties
    from harness.findings import FindingError
    from harness.judge import judge_program
    from harness.operations import Chunk, Prefill, Program, TrimFront
    from harness.targets import reference

    target = reference.targets(reference.FAMILIES[0], policy)[0]
    try:
        judge_program(target, Program((Prefill(6), TrimFront(2), Chunk(3))), [properties.BY_ID[name]])
    except FindingError as error:
        return error.finding.message
    return None
