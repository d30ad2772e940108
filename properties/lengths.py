"""Lengths: the keys that attention receives, what the caches say of themselves, and what a trim reports."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from harness.execution import Execution, Step
from harness.findings import Violation
from harness.judging import Judgement, Property, attention_calls
from harness.ledger import Append, SequenceState
from harness.operations import EnforceMaxKvSize
from harness.target import CacheLengths, Capability


class KeysEqualLedgerLiveLength(Property):
    id = "keys_equal_ledger_live_length"
    sentence = (
        "Attention receives, and every cache of every sequence reports, exactly as many keys as the ledger holds."
    )
    decisive_when = "a trim or a rollback has removed keys from the sequence"
    needs: ClassVar = frozenset({Capability.ATTENTION, Capability.LENGTHS})

    def judge_step(self, run: Execution, step: Step) -> Judgement:
        steps = decisive = 0
        for forward in step.forwards:
            held, chunk, slots = len(forward.append.held), len(forward.append.positions), forward.append.slots
            found = False
            for layer, call in attention_calls(run, forward):
                found = True
                for what, length in (("keys", call.key_len), ("values", call.value_len)):
                    if length != slots:
                        return Judgement(
                            steps + 1,
                            decisive + 1,
                            violation=Violation(
                                step.index,
                                f"layer {layer}: attention received {length} {what}, the sequence holds {held} and the "
                                f"chunk adds {chunk}{_padding(forward.append)}",
                            ),
                        )
            steps += found
            decisive += found and forward.removed
        for violation in self._cache_reports(run, step):
            return Judgement(steps + 1, decisive + 1, violation=violation)
        if step.told:
            steps += 1
            decisive += any(told.state.removed for told in step.told)
        return Judgement(steps, decisive)

    @staticmethod
    def _cache_reports(run: Execution, step: Step) -> Iterator[Violation]:
        for sequence, told in enumerate(step.told):
            state = told.state
            for layer, cache in zip(run.target.attention_layers, told.lengths, strict=False):
                if (cache.offset, cache.live_start, cache.live_len) != (
                    state.offset,
                    state.live_start,
                    state.live_len,
                ):
                    yield Violation(step.index, _cache_message(step, sequence, layer, cache, state))


def _padding(append: Append) -> str:
    pads = append.padding + append.behind
    return f", {pads} slots of padding in a batch of {append.rows}" if append.rows > 1 else ""


def _would_visit(step: Step) -> bool:
    """Would an engine that ignores ownership visit the caches? A bound does nothing before it is exceeded."""
    operation = step.operation
    return not isinstance(operation, EnforceMaxKvSize) or step.before.live_len > operation.limit


def _cache_message(step: Step, sequence: int, layer: int, cache: CacheLengths, state: SequenceState) -> str:
    acted = step.operation.index
    where = f"after {step.operation.text()}" + (f" on sequence {acted}" if sequence not in step.acted else "")
    return (
        f"layer {layer}: the cache of sequence {sequence} says offset {cache.offset}, live_start {cache.live_start}, "
        f"live_len {cache.live_len} {where}; the ledger says {state}"
    )


class TrimReportsWhatItRemoved(Property):
    id = "trim_reports_what_it_removed"
    sentence = "A trim or rollback removes the ledger's number from every cache of a pool-owned sequence and says so; "
    sentence += "of a model-owned sequence it visits no cache."
    decisive_when = "there is something to remove, or a trim is due on a model-owned sequence"
    needs: ClassVar = frozenset({Capability.LENGTHS})

    def judge_step(self, run: Execution, step: Step) -> Judgement | None:
        if step.removal is None or step.removal.error is not None or step.expected_removed is None:
            return None
        removed, expected = step.removal.removed, step.expected_removed
        layers = run.target.attention_layers
        owned = step.owner == "pool"
        decisive = expected > 0 or (not owned and _would_visit(step))
        message = None
        if not owned and removed:
            message = f"the sequence is model-owned, yet {len(removed)} caches were trimmed (removed {list(removed)})"
        elif owned and expected > 0 and len(removed) != len(layers):
            message = f"{len(removed)} caches were visited, the sequence has {len(layers)}"
        elif wrong := [(layer, n) for layer, n in zip(layers, removed, strict=False) if n != expected]:
            layer, count = wrong[0]
            message = (
                f"layer {layer}: the cache reports {count} removed, the ledger removed {expected} "
                f"(live_len {step.before.live_len})"
            )
        if message is not None:
            message = f"{step.operation.text()}: {message}"
            return Judgement(1, 1, violation=Violation(step.index, message))
        return Judgement(1, int(decisive))
