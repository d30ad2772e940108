"""What caches that forget by a rule of their own have in common."""

from collections.abc import Sequence

import mlx.core as mx

from .errors import CannotTrim
from .kv_cache import KVCache
from .runs import as_array, found, in_slots, joined
from .side import Storage
from .visibility import VisibilityRule


def check_front(rule: VisibilityRule, tokens: int, n: int, keep: int) -> None:
    """Raise CannotTrim where a cache with this rule, in which ``tokens`` are left, must refuse to drop the first n of
    them behind ``keep``."""
    n = min(n, tokens)
    keep = min(keep, tokens - n)
    if n and (rule.sinks or keep):
        raise CannotTrim(
            f"cannot trim {n} tokens from the front of a cache with {rule.sinks} sinks, keeping {keep}: "
            "its keys go by position"
        )


def check_rollback(rule: VisibilityRule, offset: int, live_start: int, held: Sequence[range], n: int) -> None:
    """Raise CannotTrim where a cache with this rule that stands at ``offset`` and holds the positions ``held`` must
    refuse to drop its n newest tokens: a key that the next token would see is gone."""
    target = offset - min(n, offset - live_start)
    wanted = sum(len(range(max(part.start, live_start), part.stop)) for part in rule.before(target))
    there = sum(len(run) for _, run in found(held, rule.before(target)))
    if there < wanted:
        raise CannotTrim(
            f"cannot roll back {n} tokens to position {target}: {wanted - there} of the {wanted} keys that it sees "
            "are gone"
        )


class RuledKVCache(KVCache):
    """A cache that drops, at the start of every append, what the first new token does not see any more.

    The tokens behind the first see no earlier key that the first does not see, so nothing that is seen is lost, however
    the tokens are cut into forwards. What the first sees and the others do not is the business of the mask: a forward
    of one token needs none.

    After an append of several tokens more keys may be held than the next token sees: ``held_len`` counts slots in use,
    ``live_len`` the keys that the next token will see, without its own. Beside sinks, the positions held are always
    consecutive and end at ``offset``.

    Attributes:
        live_start: absolute position of the first token that no front trim removed. The keys from there on may be gone
            nevertheless: by the rule.
    """

    def __init__(self, rule: VisibilityRule, limit: int, storage: Storage = "rows") -> None:
        """``limit``: slots that are enough while tokens come one by one. Raises ValueError for an unknown storage."""
        super().__init__(storage)
        self._rule, self._limit = rule, limit

    @property
    def rule(self) -> VisibilityRule:
        """Which earlier positions a query sees; only those of them that are held count."""
        return self._rule

    @property
    def live_len(self) -> int:
        """Number of keys held that the next token will see, without its own."""
        return sum(len(run) for _, run in self._seen_from(self.offset))

    def key_positions(self, l: int) -> mx.array:
        """Positions of all keys, in the order in which ``update_and_fetch`` of l tokens would return them now: int32
        ``[live_len + l]``. Nothing changes."""
        return as_array(self._after(l))

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Drop what the first of n new tokens does not see, append them, and return all that is held then.

        Args:
            keys: ``[B, Hk, n, Dk]``, float16, bfloat16 or float32.
            values: ``[B, Hv, n, Dv]``, likewise.

        Returns:
            ``(keys, values)``, ``[B, Hk, live_len + n, Dk]`` and ``[B, Hv, live_len + n, Dv]``, ``live_len`` of before,
            in the dtype of the input: the old keys by ascending position, then the new ones, unless the new one took
            the slot of another (see ``key_positions``).

        Raises:
            ValueError: as ``KVCache.update_and_fetch``. The cache is unchanged then.
        """
        sides, n = self._sides_for(keys, values), keys.shape[2]
        slot = self._overwritten(n)
        if slot is None and self.held_len > self.live_len:
            self._keep(self._seen_from(self.offset))
        used = self.held_len
        at = used if slot is None else slot
        self._held = self._after(n)
        self.offset += n
        for side, rows in zip(sides, (keys, values), strict=True):
            side.reserve(self.held_len, used)
            side.write(at, rows)
        return sides[0].held(self.held_len), sides[1].held(self.held_len)

    def trim_front(self, n: int, keep: int = 0) -> int:
        """Forget the n oldest tokens, by position: every key before the new ``live_start`` goes. Buffers of the least
        capacity are left.

        ``live_start`` grows by n, whether or not the keys of those tokens were still held, so that layers with a cache
        of another kind agree on what is seen. When every token goes, the buffers are dropped.

        Args:
            n: tokens, clamped to ``[0, offset - live_start]``; 0 changes nothing.
            keep: must be 0 unless nothing is left to keep: slots are no positions here.

        Returns:
            The number of tokens forgotten.

        Raises:
            ValueError: n or keep is negative.
            CannotTrim: the rule has sinks, or ``keep`` asks for some. The cache is unchanged then.
        """
        self.check_trim_front(n, keep)
        n = min(n, self.offset - self.live_start)
        if n == 0:
            return 0
        self.live_start += n
        if self.live_start == self.offset:
            self._held, self._keys, self._values = [], None, None
        else:
            # Moved even where they are in order at the front, as on a ring that has just turned: to be given back.
            self._keep(found(self._held, [range(self.live_start, self.offset)]))
            self._evaluate()
        return n

    def rollback(self, n: int) -> int:
        """Drop the n newest tokens: ``offset`` falls, ``live_start`` stays, the buffers stay allocated.

        Args:
            n: tokens to drop, clamped to ``[0, offset - live_start]``; 0 changes nothing.

        Returns:
            The number of tokens dropped.

        Raises:
            ValueError: n is negative.
            CannotTrim: a key that the next token of the shorter sequence would see is not held any more (it was
                overwritten or dropped after tokens behind it came). The cache is unchanged then. More tokens may be
                possible where fewer are not: all of them always are, and so is a return to the start of a chunk.
        """
        self.check_rollback(n)
        n = min(n, self.offset - self.live_start)
        if n:
            self.offset -= n
            self._rearrange([range(self.offset)])
        return n

    def check_trim_front(self, n: int, keep: int = 0) -> None:
        """Raise what ``trim_front`` would raise, and change nothing."""
        super().check_trim_front(n, keep)
        check_front(self.rule, self.offset - self.live_start, n, keep)

    def check_rollback(self, n: int) -> None:
        """Raise what ``rollback`` would raise, and change nothing."""
        super().check_rollback(n)
        check_rollback(self.rule, self.offset, self.live_start, self._held, n)

    def _overwritten(self, n: int) -> int | None:
        """The slot that an append of n tokens takes instead of one of its own; None to append behind the others."""
        return None

    def _seen_from(self, query: int) -> list[tuple[int, range]]:
        """What is held of the earlier keys that a token at ``query`` sees: ``(first slot, positions)``, ascending."""
        return found(self._held, self.rule.before(query))

    def _after(self, n: int) -> list[range]:
        """What an append of n tokens would hold, in slot order."""
        new, slot = range(self.offset, self.offset + n), self._overwritten(n)
        if slot is None:
            return joined([*(run for _, run in self._seen_from(self.offset)), new])
        return joined([*in_slots(self._held, 0, slot), new, *in_slots(self._held, slot + n, self.held_len)])

    def _rearrange(self, wanted: list[range]) -> None:
        """Hold the ``wanted`` positions alone, by ascending position; only buffers whose last slots go stay."""
        parts = found(self._held, wanted)
        end = 0
        for slot, run in parts:
            if slot != end:
                self._keep(parts)
                self._evaluate()
                return
            end += len(run)
        self._held = joined(run for _, run in parts)

    def _keep(self, parts: list[tuple[int, range]]) -> None:
        """Move these ``(first slot, positions)`` together, in this order, and forget the rest."""
        for side in (self._keys, self._values):
            if side is not None:
                side.take([range(slot, slot + len(run)) for slot, run in parts])
        self._held = joined(run for _, run in parts)

    def _evaluate(self) -> None:
        """Now: a lazy copy would hold the old, larger buffer until somebody reads it."""
        mx.eval([side.arrays for side in (self._keys, self._values) if side is not None])

    def _check_slots(self, slots: set[int]) -> None:
        """Raise ValueError unless arrays of so many slots are those of the positions read."""
        if slots != {self.held_len} or any(run.stop > self.offset for run in self._held):
            raise ValueError(f"arrays of {sorted(slots)} slots for {self.held_len} keys below {self.offset}")
        try:
            self.check_rollback(0)
        except CannotTrim as error:
            raise ValueError(f"keys are missing: {error}") from error
