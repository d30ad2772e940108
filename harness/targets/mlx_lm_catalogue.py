"""All families of mlx-lm that have an entry, by model type."""

from __future__ import annotations

from harness.targets import mlx_lm_families
from harness.targets.mlx_lm_family import Family as Family

FAMILIES: dict[str, Family] = {**mlx_lm_families.FAMILIES}
