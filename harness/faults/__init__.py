"""Planted bugs: the harness is judged by finding them, and by keeping quiet about harmless variations."""

from __future__ import annotations

from harness.faults import reference, trims, widths, windows
from harness.faults.images import IMAGE_FAULTS
from harness.faults.model import Fault
from harness.faults.reference import VARIATIONS

FAULTS: tuple[Fault, ...] = reference.FAULTS + widths.FAULTS + trims.FAULTS + windows.FAULTS

OFFSET_MASK_WITH_IMAGES = next(fault for fault in IMAGE_FAULTS if fault.id == "offset-mask-with-images-only")
"""The control of the path with images: a run that sees no image cannot find it."""

ALL_FAULTS: tuple[Fault, ...] = FAULTS + IMAGE_FAULTS

__all__ = ["ALL_FAULTS", "FAULTS", "IMAGE_FAULTS", "OFFSET_MASK_WITH_IMAGES", "VARIATIONS", "Fault"]
