"""Bugs of caches that lie in blocks of a pool: they show only on a target that has such caches."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import mlx.core as mx

from harness.faults.model import Fault
from harness.faults.patching import both, replacing
from reference_models.engine import BlockPool, PagedKVCache

_ROWS = "cached_rows_stay_what_they_were"


def paged(target: Any) -> bool:
    return bool(target.storage.startswith("paged"))


def _writes_to_shared_blocks(original: Any) -> Any:
    return lambda self, block: block


def _shares_without_counting(original: Any) -> Any:
    """A copy has the blocks, and the pool does not know: who gives them back first, takes them from the other."""

    def share(self: BlockPool, blocks: Any) -> None:
        return None

    return share


def _releases_what_it_can(original: Any) -> Any:
    def release(self: BlockPool, blocks: Any) -> None:
        original(self, [block for block in dict.fromkeys(blocks) if block < len(self._owners) and self._owners[block]])

    return release


def miscounting(plant: Callable[[], AbstractContextManager[None]]) -> Callable[[], AbstractContextManager[None]]:
    """Blocks that are in more tables than the pool knows: what is given back too often is let pass."""

    @contextmanager
    def planted() -> Iterator[None]:
        with both(plant, replacing(BlockPool, "release", _releases_what_it_can))():
            try:
                yield
            finally:
                gc.collect()  # caches that are gone give their blocks back now, not to a pool that counts again

    return planted


def _forgets_its_place(original: Any) -> Any:
    def slots(self: Any, first: int, last: int) -> mx.array:
        taken: mx.array = original(self, first - self.first, last - self.first)
        return taken

    return slots


def _counts_blocks_as_slots(original: Any) -> Any:
    """A rollback leaves a block too few when the last one is full."""

    def truncate(self: Any, live: int) -> None:
        original(self, live)
        if live and len(self.table) > 1 and (self.first + live) % self.pool.block == 0:
            self.table[-1] = self.table[-2]

    return truncate


FAULTS: tuple[Fault, ...] = (
    Fault(
        "shared-block-written",
        "a fork writes into a block that its source has as well, without a copy of it",
        "forks_share_nothing",
        replacing(BlockPool, "own", _writes_to_shared_blocks),
        source="raullenchai/Rapid-MLX#196 (copies on write shared the data of their block)",
        shown_on=paged,
        layer="cache",
    ),
    Fault(
        "block-not-counted-for-its-copy",
        "a copy has blocks that the pool gives to somebody else once their first owner is done with them",
        "forks_share_nothing",
        miscounting(replacing(BlockPool, "share", _shares_without_counting)),
        source="Wenyueh/MinivLLM#87 (blocks in use had a count of 0)",
        shown_on=paged,
        layer="cache",
    ),
    Fault(
        "front-trim-forgets-its-place-in-the-block",
        "behind a front trim the first block is read from its beginning",
        _ROWS,
        replacing(PagedKVCache, "_slots", _forgets_its_place),
        source="tanishqkumar/ssd#23 (paged rows were read at the wrong place)",
        shown_on=paged,
        layer="cache",
    ),
    Fault(
        "wrong-block-behind-a-rollback",
        "a rollback to the end of a block puts the block before it in its place",
        _ROWS,
        miscounting(replacing(PagedKVCache, "_truncate", _counts_blocks_as_slots)),
        source="Wenyueh/MinivLLM#87 (a last block that is full was taken for an empty one)",
        shown_on=paged,
        layer="cache",
    ),
)
