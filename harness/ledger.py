"""The ledger: what must be true of every sequence, kept without any array library.

A sequence is a plain list of the absolute positions it holds.  A front trim drops from the head of that list (behind
the sinks), a rollback from its tail; ``live_len`` and ``live_start`` follow from it.  The scheduler's arithmetic is
written here a second time on purpose: the ledger is the independent half of every comparison.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from harness.media import Place
from harness.operations import (
    EnforceMaxKvSize,
    Fork,
    Operation,
    Owner,
    QuantizeCache,
    Reset,
    Restore,
    Rollback,
    SaveLoad,
    Snapshot,
    TrimFront,
    rows_after,
)
from harness.rules import CacheRule, Run, fits, runs_of

SINKS = 4  # slots that the second generation of enforce_max_kv_size keeps, and the floor of a context shift


@dataclass(frozen=True)
class SequenceState:
    """A snapshot of one sequence. ``trimmed``: a front trim has removed something; ``removed``: any trim or rollback
    has, so that the live length is no longer the number of tokens ever written. ``read``: how many positions were read
    with images, and ``images`` those of them where an image stands, one range for each run of placeholders;
    ``forgotten``: some cache no longer has a key that another one holds; ``storage``: how its rows are stored;
    ``held``: the positions of its keys, run by run."""

    offset: int
    live_start: int
    live_len: int
    trimmed: bool
    removed: bool
    read: int = 0
    images: tuple[range, ...] = ()
    forgotten: bool = False
    storage: str = "rows"
    held: tuple[Run, ...] = ()

    def __str__(self) -> str:
        return f"offset {self.offset}, live_start {self.live_start}, live_len {self.live_len}"


@dataclass(frozen=True)
class Append:
    """What one forward saw: the positions held before it, the positions of its own tokens, and their M-RoPE ids (three
    times the position, as long as the sequence has no image). ``numbers``: of its tokens, counted over all that the
    program processes; ``held_numbers``: of those held, in slot order. After a rollback a position comes a second time,
    a number never does. ``padding`` and ``behind``: in a batch, slots in front of the keys held and behind the new ones
    that hold nothing; ``rows``: how many sequences the forward extends; ``ruled``: the padding in front on layers whose
    caches have these rules, where every row has forgotten as much as it does by itself; ``storage``: of those held."""

    held: tuple[int, ...]
    positions: range
    places: tuple[Place, ...]
    held_numbers: tuple[int, ...]
    numbers: range
    padding: int = 0
    behind: int = 0
    rows: int = 1
    ruled: tuple[tuple[CacheRule, int], ...] = ()
    storage: str = "rows"

    @property
    def slots(self) -> int:
        """Keys that attention receives, those that hold nothing included."""
        return self.padding + len(self.held) + len(self.positions) + self.behind


@dataclass
class SequenceLedger:
    """One sequence. ``owner`` decides whether the scheduler can trim it at all; ``prompt``: the M-RoPE ids of the
    positions from 0 on that were read with images, ``prompt_tokens`` their tokens, ``images`` the runs of
    placeholders among them and ``source`` what the target was given to look at; ``numbers``: see ``Append``, as many
    as are held; ``begun``: it has had a forward.

    ``held`` is what a cache without a rule holds. ``kept`` says for every rule among the layers what a cache with that
    rule still has; ``refused``: the last trim or rollback was one that such a cache cannot do, or the last quantisation
    one of rows that cannot be stored so, so nobody did it; ``dense``: some cache has no rule; ``storage``: of all."""

    owner: Owner = "pool"
    held: list[int] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    offset: int = 0
    trimmed: bool = False
    removed: bool = False
    prompt: list[Place] = field(default_factory=list)
    prompt_tokens: tuple[int, ...] = ()
    images: tuple[range, ...] = ()
    source: object = None
    begun: bool = False
    kept: dict[CacheRule, list[int]] = field(default_factory=dict)
    refused: bool = False
    dense: bool = True
    storage: str = "rows"

    @property
    def live_len(self) -> int:
        return len(self.held)

    @property
    def seen_len(self) -> int:
        """Keys that the next token sees in the cache that shows it most: what a scheduler bounds."""
        if self.dense:
            return self.live_len
        return max(map(self.seen_by, self.kept))

    def seen_by(self, rule: CacheRule | None) -> int:
        """Keys that the next token sees in a cache with this rule."""
        return self.live_len if rule is None else len(rule.seen_from(self.offset, self.kept[rule]))

    @property
    def live_start(self) -> int:
        return self.offset - len(self.held)

    def state(self) -> SequenceState:
        lengths = self.offset, self.live_start, self.live_len
        forgotten = any(len(kept) < len(self.held) for kept in self.kept.values())
        prompt = len(self.prompt)
        held = runs_of(self.held)
        return SequenceState(*lengths, self.trimmed, self.removed, prompt, self.images, forgotten, self.storage, held)

    def read(self, tokens: tuple[int, ...], places: list[Place], images: tuple[range, ...], source: object) -> None:
        """A prompt with images, of which the forwards from position 0 on will take their tokens."""
        self.prompt_tokens, self.prompt, self.images, self.source = tokens, places, images, source

    def append(self, tokens: int, number: int = 0) -> Append:
        """``tokens`` new tokens at the absolute positions [offset, offset + tokens), numbered from ``number`` on."""
        positions = range(self.offset, self.offset + tokens)
        read = self.prompt[self.offset : self.offset + tokens]
        delta = max(map(max, self.prompt)) + 1 - len(self.prompt) if self.prompt else 0  # what images save, behind them
        behind = ((position + delta,) * 3 for position in positions[len(read) :])
        numbers = range(number, number + tokens)
        places, held_numbers = (*read, *behind), tuple(self.numbers)
        seen = Append(tuple(self.held), positions, places, held_numbers, numbers, storage=self.storage)
        self.held.extend(positions)
        self.numbers.extend(numbers)
        self.kept = {rule: [*rule.kept_from(self.offset, kept), *positions] for rule, kept in self.kept.items()}
        self.offset += tokens
        self.begun = True
        return seen

    def trim_front(self, n: int, keep: int = 0) -> int:
        """Drop n positions behind the first ``keep``; returns how many went. A model-owned sequence loses none.

        A cache with a rule drops by position, so it can keep no others than its own sinks, and with those not even
        trim: then no layer does.
        """
        if self.owner == "model":
            return 0
        n = min(max(n, 0), len(self.held))
        keep = min(max(keep, 0), len(self.held) - n)
        self.refused = n > 0 and (bool(self.kept and keep) or any(rule.sinks for rule in self.kept))
        if self.refused:
            return 0
        self.kept = {rule: [p for p in kept if p >= self.live_start + n] for rule, kept in self.kept.items()}
        del self.held[keep : keep + n], self.numbers[keep : keep + n]
        if n:
            self.trimmed = self.removed = True
        return n

    def rollback(self, n: int) -> int:
        """Drop the newest n positions; the next token takes the position ``offset - n``.

        A cache with a rule refuses, and with it all layers, where that token would see a key that is gone, and where
        ``CacheRule.stuck`` says so.
        """
        if self.owner == "model":
            return 0
        n = min(max(n, 0), len(self.held))
        end = self.offset - n
        for rule, kept in self.kept.items():
            gone = set(rule.seen_from(end, self.held[: len(self.held) - n])).difference(kept)
            self.refused |= n > 0 and (bool(gone) or rule.stuck(self.offset, n, len(kept)))
        if self.refused:
            return 0
        self.kept = {rule: [p for p in kept if p < end] for rule, kept in self.kept.items()}
        if n:
            del self.held[-n:], self.numbers[-n:]
            self.offset -= n
            self.removed = True
            del self.prompt[self.offset :]  # other tokens will follow, as if it had ended here
            self.prompt_tokens = self.prompt_tokens[: self.offset]
            self.images = tuple(run for run in self.images if run.stop <= self.offset)
        return n

    def enforce(self, rule: EnforceMaxKvSize) -> int:
        """``enforce_max_kv_size`` in its three generations; returns how many positions went.

        A discard larger than what is not kept is cut to it: an unbounded n_discard is how llama.cpp's server was
        crashed (ggml-org/llama.cpp#24212), and it would eat the slots that ``keep`` promises.
        """
        if self.owner == "model" or self.seen_len <= rule.limit:
            return 0
        excess = len(self.held) - rule.limit
        if rule.generation == "trim":
            return self.trim_front(excess)
        if rule.generation == "sinks":
            return self.trim_front(excess, min(SINKS, rule.limit - 1))
        keep = max(0, min(rule.keep, rule.limit - SINKS))
        loose = len(self.held) - keep
        return self.trim_front(min(max(excess, rule.n_discard or loose // 2), loose), keep)

    def remove(self, operation: Operation) -> int:
        """Apply a trimming operation; returns how many positions went."""
        self.refused = False
        if isinstance(operation, TrimFront):
            return self.trim_front(operation.n, operation.keep)
        if isinstance(operation, Rollback):
            return self.rollback(operation.n)
        if isinstance(operation, EnforceMaxKvSize):
            return self.enforce(operation)
        raise TypeError(f"{operation!r} removes nothing")

    def copied(self, owner: Owner) -> SequenceLedger:
        """The same state under this owner, sharing no list with it."""
        twin = replace(self, owner=owner, kept=dict(self.kept))  # the lists in ``kept`` are never written to
        twin.held, twin.numbers, twin.prompt = list(self.held), list(self.numbers), list(self.prompt)
        return twin


def _paddings(lengths: Iterable[int], pads: bool) -> list[int]:
    """What each lacks of the longest; nothing where nobody pads."""
    there = list(lengths)
    return [(max(there) - length) * pads for length in there]


class PoolLedger:
    """All sequences of a pool, and its slots for snapshots (by number, as far as they hold one)."""

    def __init__(
        self,
        owners: tuple[Owner, ...],
        rules: Iterable[CacheRule | None] = (None,),
        storage: str = "rows",
        widths: Iterable[tuple[int, int]] = (),
        pads: bool = True,
    ) -> None:
        """``rules``: of the caches of a sequence, None of one without; ``storage``: of their rows, at first;
        ``widths``: numbers in a row of their keys and of their values; ``pads``: are the rows of a batch told with the
        padding that makes them equally long?"""
        self._rules = tuple(dict.fromkeys(rules))
        self._storage = storage
        self._widths = frozenset(width for both in widths for width in both)
        self.sequences = [self._fresh(owner) for owner in owners]
        self.slots: dict[int, SequenceLedger] = {}
        self.batch: tuple[int, ...] = ()
        self._pads = pads

    def _fresh(self, owner: Owner) -> SequenceLedger:
        kept: dict[CacheRule, list[int]] = {rule: [] for rule in self._rules if rule is not None}
        return SequenceLedger(owner, kept=kept, dense=None in self._rules, storage=self._storage)

    def gather(self, operation: Operation) -> bool:
        """Let join and leave the batch who does so as the operation begins; returns whether anyone did."""
        before = self.batch
        rows = rows_after(before, operation, [sequence.owner for sequence in self.sequences])
        # One cache holds all rows of a batch: who stores them otherwise than its first sequence stays out.
        self.batch = tuple(row for row in rows if self.sequences[row].storage == self.sequences[rows[0]].storage)
        return self.batch != before

    def append(self, counts: tuple[int, ...], number: int) -> list[Append]:
        """``counts`` new tokens for each row of the batch, numbered row after row from ``number`` on."""
        rows = [self.sequences[row] for row in self.batch]
        rules = (None, *self._rules)
        paddings = {rule: _paddings((row.seen_by(rule) for row in rows), self._pads) for rule in rules}
        behinds = _paddings(counts, self._pads)
        appends = []
        for at, (row, count) in enumerate(zip(rows, counts, strict=True)):
            ruled = tuple((rule, paddings[rule][at]) for rule in self._rules if rule is not None)
            padding, behind = paddings[None][at], behinds[at]
            seen = row.append(count, number)
            appends.append(replace(seen, padding=padding, behind=behind, rows=len(rows), ruled=ruled))
            number += count
        return appends

    def apply(self, operation: Operation) -> bool:
        """Apply an operation on the whole state of a sequence; returns whether it did anything.

        It does nothing to or from a model-owned sequence, whose caches the pool does not have, nor from an empty slot.
        """
        index = operation.index
        sequence = self.sequences[index]
        if sequence.owner != "pool":
            return False
        if isinstance(operation, Snapshot):
            self.slots[operation.slot] = sequence.copied("pool")
        elif isinstance(operation, Restore):
            if operation.slot not in self.slots:
                return False
            self.sequences[index] = self.slots[operation.slot].copied("pool")
        elif isinstance(operation, Fork):
            if self.sequences[operation.into].owner != "pool":
                return False
            self.sequences[operation.into] = sequence.copied("pool")
        elif isinstance(operation, Reset):
            self.sequences[index] = replace(self._fresh("pool"), storage=sequence.storage)
        elif isinstance(operation, QuantizeCache):
            sequence.refused = sequence.storage != "rows" or not all(
                fits(operation.storage, width) for width in self._widths
            )
            if sequence.refused:
                return False
            sequence.storage = operation.storage
        elif not isinstance(operation, SaveLoad):
            raise TypeError(f"{operation!r} copies nothing")
        return True
