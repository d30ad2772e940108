"""Planted bugs: the harness is judged by finding them, and by keeping quiet about harmless variations."""

from __future__ import annotations

from harness.faults import image_outputs, images, one_path, outputs, reference, windows
from harness.faults.model import Fault

FAULTS: tuple[Fault, ...] = reference.FAULTS + windows.FAULTS + outputs.FAULTS + one_path.FAULTS
IMAGE_FAULTS: tuple[Fault, ...] = images.IMAGE_FAULTS + image_outputs.FAULTS
VARIATIONS: tuple[Fault, ...] = reference.VARIATIONS + one_path.VARIATIONS
OF_OUTPUTS: tuple[Fault, ...] = outputs.FAULTS + one_path.FAULTS + image_outputs.FAULTS
"""Those that show in the logits alone."""

__all__ = ["FAULTS", "IMAGE_FAULTS", "OF_OUTPUTS", "VARIATIONS", "Fault"]
