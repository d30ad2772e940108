"""Planted bugs: the harness is judged by finding them, and by keeping quiet about harmless variations."""

from __future__ import annotations

from harness.faults import copies, images, reference, states, windows
from harness.faults.model import Fault

FAULTS: tuple[Fault, ...] = reference.FAULTS + windows.FAULTS + copies.FAULTS + states.FAULTS
IMAGE_FAULTS: tuple[Fault, ...] = images.IMAGE_FAULTS + copies.IMAGE_FAULTS
VARIATIONS: tuple[Fault, ...] = reference.VARIATIONS + copies.VARIATIONS

__all__ = ["FAULTS", "IMAGE_FAULTS", "VARIATIONS", "Fault"]
