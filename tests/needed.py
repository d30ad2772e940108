"""Modules that a test needs and the package does not."""

from __future__ import annotations

import importlib
import os
from typing import Any

import pytest


def needed(name: str) -> Any:
    """The module; without it the test is skipped, and on CI, which installs it, broken."""
    if os.environ.get("CI"):
        return importlib.import_module(name)
    return pytest.importorskip(name, reason=f"{name} is not installed: pip install -e '.[dev]'")
