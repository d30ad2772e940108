"""Planted bugs: the harness is judged by finding them, and by keeping quiet about harmless variations."""

from __future__ import annotations

from harness.faults import (
    batch_kinds,
    batch_memory,
    batch_models,
    batches,
    blocks,
    copies,
    deep,
    far,
    image_outputs,
    images,
    kernels,
    kinds,
    memory,
    numbers,
    one_path,
    outputs,
    purity,
    quantised,
    reference,
    states,
    trims,
    widths,
    windows,
    wiring,
)
from harness.faults.model import Fault

FAULTS: tuple[Fault, ...] = (
    reference.FAULTS
    + widths.FAULTS
    + trims.FAULTS
    + windows.FAULTS
    + copies.FAULTS
    + states.FAULTS
    + kinds.FAULTS
    + blocks.FAULTS
    + quantised.FAULTS
    + deep.FAULTS
    + kernels.FAULTS
    + batches.FAULTS
    + batch_models.FAULTS
    + purity.FAULTS
    + wiring.FAULTS
    + batch_kinds.FAULTS
    + batch_memory.FAULTS
    + outputs.FAULTS
    + one_path.FAULTS
    + numbers.FAULTS
    + far.FAULTS
    + memory.FAULTS
)
IMAGE_FAULTS: tuple[Fault, ...] = (
    images.IMAGE_FAULTS + copies.IMAGE_FAULTS + batch_models.IMAGE_FAULTS + purity.IMAGE_FAULTS + image_outputs.FAULTS
)
VARIATIONS: tuple[Fault, ...] = (
    reference.VARIATIONS
    + copies.VARIATIONS
    + batches.VARIATIONS
    + batch_models.VARIATIONS
    + purity.VARIATIONS
    + one_path.VARIATIONS
    + memory.VARIATIONS
)
OF_OUTPUTS: tuple[Fault, ...] = outputs.FAULTS + one_path.FAULTS + image_outputs.FAULTS
"""Those that show in the logits alone."""
ALL_FAULTS: tuple[Fault, ...] = FAULTS + IMAGE_FAULTS

OFFSET_MASK_WITH_IMAGES = next(fault for fault in IMAGE_FAULTS if fault.id == "offset-mask-with-images-only")
"""The control of the path with images: a run that sees no image cannot find it."""

__all__ = ["ALL_FAULTS", "FAULTS", "IMAGE_FAULTS", "OFFSET_MASK_WITH_IMAGES", "OF_OUTPUTS", "VARIATIONS", "Fault"]
