"""Planted bugs: the harness is judged by finding them, and by keeping quiet about harmless variations."""

from __future__ import annotations

from harness.faults import reference, trims, widths, windows
from harness.faults.images import IMAGE_FAULTS
from harness.faults.model import Fault
from harness.faults.reference import VARIATIONS

FAULTS: tuple[Fault, ...] = reference.FAULTS + widths.FAULTS + trims.FAULTS + windows.FAULTS

ALL_FAULTS: tuple[Fault, ...] = FAULTS + IMAGE_FAULTS

__all__ = ["ALL_FAULTS", "FAULTS", "IMAGE_FAULTS", "VARIATIONS", "Fault"]
