"""All families of mlx-lm that have an entry, by model type, and why others of the original report have none."""

from __future__ import annotations

from harness.targets import mlx_lm_families, mlx_lm_hybrids
from harness.targets.mlx_lm_family import Family as Family

FAMILIES: dict[str, tuple[Family, ...]] = {
    name: family if isinstance(family, tuple) else (family,)
    for name, family in (mlx_lm_families.FAMILIES | mlx_lm_hybrids.FAMILIES).items()
}

WITHOUT_ENTRY: dict[str, str] = {
    "llama4": "its layers show chunks while their caches hold more than a chunk, which no rule of ours can say yet",
}
