"""What a report says of the software it ran on."""

from __future__ import annotations

import platform
from importlib import metadata

from harness import __version__

ABSENT = "absent"
DISTRIBUTIONS: tuple[str, ...] = ("mlx", "numpy", "hypothesis", "pytest", "pytest-xdist", "tabulate")


def versions() -> dict[str, str]:
    """Versions of the harness, Python, the libraries that decide results, and the platform.

    A distribution that is not installed is ``absent``.  Nothing is imported for it, and no user, host or path
    is named: a report is made to be published.
    """
    return {
        "kv-harness": __version__,  # of the code that runs; an installed distribution may be another
        "python": platform.python_version(),
        **{name: _version(name) for name in DISTRIBUTIONS},
        "platform": _platform(),
    }


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ABSENT


def _platform() -> str:
    """System, machine and the version that matters for wheels.

    ``platform.platform()`` would add the name of the kernel, and that is whatever its builder typed.
    """
    if platform.system() == "Darwin":
        parts = ("macOS", platform.mac_ver()[0], platform.machine())
    else:
        parts = (platform.system(), platform.machine(), " ".join(platform.libc_ver()))
    return " ".join(part for part in parts if part.strip())
