"""Planted bugs: the harness is judged by finding them, and by keeping quiet about harmless variations."""

from __future__ import annotations

from harness.faults import reference, windows
from harness.faults.images import IMAGE_FAULTS
from harness.faults.model import Fault
from harness.faults.reference import VARIATIONS

FAULTS: tuple[Fault, ...] = reference.FAULTS + windows.FAULTS

__all__ = ["FAULTS", "IMAGE_FAULTS", "VARIATIONS", "Fault"]
