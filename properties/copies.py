"""Copies: what a snapshot gives back, what forks share, what goes through a file, and who else notices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

from harness.comparison import compare_bytes
from harness.execution import Execution
from harness.findings import Violation
from harness.judging import Judgement, Property
from harness.operations import BATCHES, Batch, Fork, QuantizeCache, Reset, Restore, SaveLoad, Snapshot
from harness.steps import Step
from harness.target import CacheLengths, Capability
from harness.telling import Told

_TOLD = frozenset({Capability.LENGTHS, Capability.ROWS})


class SnapshotsGiveBackWhatTheyTook(Property):
    id = "snapshots_give_back_what_they_took"
    sentence = (
        "A restored sequence has the lengths and, byte for byte, the rows that were there when its snapshot was taken, "
        "whatever happened since."
    )
    decisive_when = "a snapshot was restored over another state"
    needs: ClassVar = _TOLD | {Capability.SNAPSHOT}

    def judge_step(self, run: Execution, step: Step) -> Judgement | None:
        operation = step.operation
        if not isinstance(operation, Restore) or not step.effective or not step.told:
            return None
        taken = next(
            other
            for other in reversed(run.steps[: step.index])
            if other.effective and isinstance(other.operation, Snapshot) and other.operation.slot == operation.slot
        )
        was, layers = taken.told[taken.operation.index], run.target.attention_layers
        message = first_change(layers, was, step.told[operation.index])
        decisive = first_change(layers, was, run.steps[step.index - 1].told[operation.index]) is not None
        if message is None:
            return Judgement(1, int(decisive))
        where = f"{operation.text()} on sequence {operation.index}: unlike at the Snapshot of step {taken.index}"
        return Judgement(1, 1, violation=Violation(step.index, f"{where}, {message}"))


class ForksShareNothing(Property):
    id = "forks_share_nothing"
    sentence = (
        "A fork holds what its source holds, and from then on nothing that happens to the one changes a byte or a "
        "length of the other."
    )
    decisive_when = "a fork of a sequence with keys into another state, or a change to one of two with a common past"
    needs: ClassVar = _TOLD | {Capability.FORK, Capability.SEQUENCES}

    def judge_step(self, run: Execution, step: Step) -> Judgement | None:
        if not step.told or not step.index:
            return None
        operation, layers = step.operation, run.target.attention_layers
        before = run.steps[step.index - 1].told
        looked = decisive = 0
        if isinstance(operation, Fork) and step.effective:
            source = step.told[operation.index]
            message = first_change(layers, source, step.told[operation.into])
            if message is not None:
                where = f"{operation.text()} of sequence {operation.index}: in the fork, unlike in its source"
                return Judgement(1, 1, violation=Violation(step.index, f"{where}, {message}"))
            looked += 1
            decisive += bool(source.held) and first_change(layers, source, before[operation.into]) is not None
        pasts = _pasts(run, step.index)
        acted = {pasts[sequence] for sequence in step.acted}
        for sequence in _others(run, step):
            if pasts[sequence] not in acted:
                continue
            looked += 1
            message = first_change(layers, before[sequence], step.told[sequence])
            if message is not None:
                where = f"{_named(step)} changed sequence {sequence}, with which it shares a past"
                return Judgement(looked, decisive + 1, violation=Violation(step.index, f"{where}: {message}"))
            decisive += _changes(step) and bool(before[sequence].held)
        return Judgement(looked, decisive)


class SequencesAreIsolated(Property):
    id = "sequences_are_isolated"
    sentence = (
        "An operation on one sequence, also one that is refused or fails, never changes a byte or a length of another."
    )
    decisive_when = "an operation changes its sequence, is refused or raises, while another one holds keys"
    needs: ClassVar = _TOLD | {Capability.SEQUENCES}

    def judge_step(self, run: Execution, step: Step) -> Judgement | None:
        if not step.index or isinstance(step.operation, Batch) or not (step.told or step.bystanders):
            return None
        before = run.steps[step.index - 1].told
        now = step.bystanders or [(sequence, step.told[sequence]) for sequence in _others(run, step)]
        looked = decisive = 0
        for sequence, told in now:
            looked += 1
            message = first_change(run.target.attention_layers, before[sequence], told)
            if message is not None:
                where = f"{_named(step)} changed sequence {sequence}"
                return Judgement(looked, decisive + 1, violation=Violation(step.index, f"{where}: {message}"))
            acts = _changes(step) or step.refuses or step.error is not None
            decisive += acts and bool(before[sequence].held)
        return Judgement(looked, decisive)


class SaveAndLoadChangeNothing(Property):
    id = "save_and_load_change_nothing"
    sentence = (
        "Caches that went through a file have the same lengths and, byte for byte, the same rows, in slots of the same "
        "size."
    )
    decisive_when = "the sequence holds keys"
    needs: ClassVar = _TOLD | {Capability.SAVE_LOAD}

    def judge_step(self, run: Execution, step: Step) -> Judgement | None:
        if not isinstance(step.operation, SaveLoad) or not step.effective or not step.told or not step.index:
            return None
        index = step.operation.index
        old, new = run.steps[step.index - 1].told[index], step.told[index]
        message = first_change(run.target.attention_layers, old, new)
        if message is None:
            layers = zip(run.target.attention_layers, old.lengths, old.memory, new.memory, strict=False)
            for layer, lengths, a, b in layers:
                # A cache that shows nothing may have buffers left, as one behind a rollback to where its chunk begins,
                # and no file needs to keep those.
                if lengths.live_len and a.per_slot != b.per_slot:
                    message = f"layer {layer}: a slot of {a.per_slot} bytes became one of {b.per_slot}"
                    break
        if message is not None:
            return Judgement(1, 1, violation=Violation(step.index, f"{_named(step)}: {message}"))
        return Judgement(1, int(bool(old.held)))


def first_change(layers: Sequence[int], old: Told, new: Told) -> str | None:
    """What differs between two states, with layer, slot, position and numbers; None if nothing does."""
    if len(old.lengths) != len(new.lengths) or len(old.rows) != len(new.rows):
        return f"{len(old.lengths)} caches became {len(new.lengths)}"
    for layer, was, now in zip(layers, old.lengths, new.lengths, strict=False):
        if was != now:
            return f"layer {layer}: {_lengths(was)} became {_lengths(now)}"
    for layer, a, b in zip(layers, old.rows, new.rows, strict=False):
        if a.positions != b.positions:
            return f"layer {layer}: rows of positions {_listed(a.positions)} became those of {_listed(b.positions)}"
        for what, left, right in (("key", a.keys, b.keys), ("value", a.values, b.values)):
            if left.shape[-2] == right.shape[-2] == 0:
                continue  # without a row the other axes say nothing
            if left.shape != right.shape or left.dtype != right.dtype:
                was_of, is_of = (f"{side.dtype}{list(side.shape)}" for side in (left, right))
                return f"layer {layer}: {what}s of shape {was_of} became {is_of}"
            difference = compare_bytes(left, right)
            if not difference.same_bytes:
                slot = (difference.index or (0, 0, 0, 0))[-2]
                held = old.held if a.positions is None else a.positions
                position = f" (position {held[slot]})" if slot < len(held) else ""
                return (
                    f"layer {layer}: the {what} row in slot {slot}{position} differs, {difference.left:.9g} became "
                    f"{difference.right:.9g} (largest difference {difference.largest:.3g})"
                )
    return None


def _listed(positions: tuple[int, ...] | None) -> str:
    return "[]" if positions is None else str(list(positions))


def _lengths(cache: CacheLengths) -> str:
    return f"offset {cache.offset}, live_start {cache.live_start}, live_len {cache.live_len}"


def _named(step: Step) -> str:
    text = step.operation.text()
    return text if isinstance(step.operation, BATCHES) else f"{text} on sequence {step.operation.index}"


def _others(run: Execution, step: Step) -> Iterator[int]:
    """Sequences that the operation must leave as they are; the source of a Fork is one of them. None of a Batch, which
    is about all that join, stay or leave."""
    if isinstance(step.operation, Batch):
        return iter(())
    return (sequence for sequence in range(len(run.owners)) if sequence not in step.acted)


def _changes(step: Step) -> bool:
    """Did the operation change the state of a sequence?"""
    quantised = isinstance(step.operation, QuantizeCache) and bool(step.effective)
    return bool(step.forwards) or bool(step.expected_removed) or step.replaced is not None or quantised


def _pasts(run: Execution, before: int) -> list[int]:
    """A number for every sequence in front of step ``before``: the same for those of which one is a fork of the other,
    or which came out of one snapshot."""
    pasts = list(range(len(run.owners)))
    slots: dict[int, int] = {}
    for step in run.steps[:before]:
        operation = step.operation
        if not step.effective:
            continue
        if isinstance(operation, Snapshot):
            slots[operation.slot] = pasts[operation.index]
        elif isinstance(operation, Restore):
            pasts[operation.index] = slots[operation.slot]
        elif isinstance(operation, Fork):
            pasts[operation.into] = pasts[operation.index]
        elif isinstance(operation, Reset):
            pasts[operation.index] = len(run.owners) + step.index
    return pasts
