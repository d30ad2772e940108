"""The memory of paged caches: blocks of slots, counted and reused."""

from collections import Counter
from collections.abc import Sequence

import mlx.core as mx

from .side import Side, check_pair
from .storage import Storage, check_storage


class BlockPool:
    """Blocks of ``block`` slots for the keys and values of one layer, of any number of sequences (vLLM, arXiv
    2309.06180).

    A block belongs to as many caches as have it in their table. It is free when there are none; the block that was
    freed last is taken first, with the rows of whoever had it still inside. The pool grows as it must and never
    shrinks. Its rows have one B, H, D and dtype; while no block is in use, an append may bring others.

    Attributes:
        block: slots of a block.
        storage: of the rows, as of a ``KVCache``.
    """

    def __init__(self, block: int = 16, storage: Storage = "rows") -> None:
        """Make a pool without memory. Raises ValueError for a block without slots or an unknown storage."""
        if block < 1:
            raise ValueError(f"a block must have at least one slot, got block {block}")
        check_storage(storage)
        self.block = block
        self.storage: Storage = storage
        self._sides: tuple[Side, Side] | None = None
        self._owners: list[int] = []  # of every block: in how many tables it is
        self._free: list[int] = []  # the last is taken first

    @property
    def free(self) -> int:
        """Number of blocks that nobody has."""
        return len(self._free)

    @property
    def in_use(self) -> int:
        """Number of blocks that somebody has, each counted once."""
        return len(self._owners) - len(self._free)

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks, free ones as well."""
        return sum(side.nbytes for side in self._sides or ())

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one slot; 0 as long as nothing was written."""
        return self.nbytes // self._sides[0].capacity if self._sides and self._sides[0].capacity else 0

    @property
    def bound(self) -> tuple[Side, Side] | None:
        """Keys and values like which all others must be, while any block is in use; None otherwise."""
        return self._sides if self.in_use else None

    @property
    def dtypes(self) -> tuple[mx.Dtype, mx.Dtype]:
        """Of the keys and of the values as they were given. Only behind ``bind``."""
        return self._bound[0].dtype, self._bound[1].dtype

    def owners(self, block: int) -> int:
        """In how many tables the block is."""
        return self._owners[block]

    def bind(self, keys: mx.array, values: mx.array) -> None:
        """Make ready for rows like these; ValueError, and nothing changed, where other rows are in use."""
        check_pair(keys, values, self.storage, self.bound)
        if self.in_use:
            return
        new = Side(self.storage, keys), Side(self.storage, values)
        if [(side.bound, side.dtype) for side in self._sides or ()] != [(side.bound, side.dtype) for side in new]:
            self._sides, self._owners, self._free = new, [], []

    def take(self, count: int) -> list[int]:
        """Blocks for one table; what is in them is whatever was left there."""
        if count > self.free:
            self._grow(count - self.free)
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._owners[block] = 1
        return taken

    def share(self, blocks: Sequence[int]) -> None:
        """Blocks in use are now in one table more. Raises RuntimeError, and changes nothing, where one is free."""
        for block in blocks:
            if not self._owners[block]:
                raise RuntimeError(f"block {block} is free: nothing in it can be shared")
        for block in blocks:
            self._owners[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Blocks are in one table less; those in none are free.

        Raises RuntimeError, and changes nothing, where a block would be in fewer than none.
        """
        for block, count in Counter(blocks).items():
            if not 0 <= block < len(self._owners) or self._owners[block] < count:
                raise RuntimeError(f"double free: block {block} is not in use so often")
        for block in reversed(blocks):
            self._owners[block] -= 1
            if self._owners[block] == 0:
                self._free.append(block)

    def own(self, block: int) -> int:
        """The block itself where one table alone has it; else a copy, for the one that wants to write."""
        if self._owners[block] == 1:
            return block
        (copy,) = self.take(1)
        for side in self._bound:
            for array in side.arrays:
                array[:, :, self._slots_of(copy)] = array[:, :, self._slots_of(block)]
        self.release([block])
        return copy

    def write(self, slots: mx.array, stored: Sequence[Sequence[mx.array]]) -> None:
        """Put what ``storage.encode`` made of keys and of values, ``[B, H, n, *]``, into ``slots``, int32 ``[n]``."""
        for side, parts in zip(self._bound, stored, strict=True):
            for array, part in zip(side.arrays, parts, strict=True):
                array[:, :, slots] = part

    def read(self, slots: mx.array) -> list[list[mx.array]]:
        """What is stored in ``slots``, int32 ``[n]``, of keys and of values: inverse of ``write``."""
        return [[array[:, :, slots] for array in side.arrays] for side in self._bound]

    @property
    def _bound(self) -> tuple[Side, Side]:
        if self._sides is None:
            raise RuntimeError("nothing was written to this pool yet")
        return self._sides

    def _slots_of(self, block: int) -> slice:
        return slice(block * self.block, (block + 1) * self.block)

    def _grow(self, count: int) -> None:
        """Make at least ``count`` more blocks."""
        old = len(self._owners)
        for side in self._bound:
            side.reserve((old + count) * self.block, old * self.block)
        new = self._bound[0].capacity // self.block - old
        self._owners += [0] * new
        self._free = [*reversed(range(old, old + new)), *self._free]
