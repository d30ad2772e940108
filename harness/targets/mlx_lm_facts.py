"""What can be seen of a family of mlx-lm without judging it: who owns its caches, and who measures its masks."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from harness.targets import mlx_lm_caches as held
from harness.targets.mlx_lm_target import LIVE_WINDOW, MlxLmTarget


@dataclass(frozen=True)
class Facts:
    """``owner``: whose code makes the caches; ``caches``: how many of each kind; ``attention``: how keys are made;
    ``mask_length``: where the key axis of its masks comes from; ``states``: some layers have no keys."""

    owner: str
    caches: str
    attention: str
    mask_length: str
    states: bool


def facts(target: MlxLmTarget) -> Facts:
    """Of one configuration of a family. Raises NotInstalled."""
    kinds = Counter(held.kind_of(cache) for cache in target.fresh_caches)
    counted = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    owner = "the model (make_cache)" if target.makes_caches else "the library (make_prompt_cache)"
    return Facts(owner, counted, target.family.attention, _mask_length(target), target.has_states)


def _mask_length(target: MlxLmTarget) -> str:
    """Whether the masks are as long as a cache says: our caches say the offset in the place of the live length, and
    behind a front trim either the masks follow or they do not."""
    if not target.has_keys:
        return "no masks of keys"
    if target.trims_itself:
        return "start_position of the cache"
    followed = _off_by(replace(target, caches=LIVE_WINDOW, policy="offset"))
    lived = _off_by(replace(target, caches=LIVE_WINDOW))
    if lived:
        return "a cache that gets no keys"
    return "make_mask of the cache" if followed else "not from the cache"


def _off_by(target: MlxLmTarget) -> bool:
    """Is a mask of a chunk behind a front trim not as long as its keys?"""
    session = target.open(("pool",))
    session.forward(0, range(1, 6))
    session.trim_front(0, 2, 0)
    seen = session.forward(0, (6, 7))
    return seen.error is not None or any(call.mask_keys not in (None, call.key_len) for call in seen.attention)
