"""Lengths: the keys that attention receives, what the caches say of themselves, and what a trim reports."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import ClassVar

from harness.execution import Execution
from harness.findings import Violation
from harness.judging import Judgement, Property, attention_calls, nothing_is_removed
from harness.ledger import Append, SequenceState
from harness.operations import EnforceMaxKvSize
from harness.oracle import of_layer
from harness.steps import Step
from harness.target import CacheLengths, Capability, Target


class KeysEqualLedgerLiveLength(Property):
    id = "keys_equal_ledger_live_length"
    sentence = (
        "Attention receives, and every cache of every sequence reports, exactly as many keys as the ledger holds."
    )
    decisive_when = "a trim or a rollback has removed keys from the sequence"
    needs: ClassVar = frozenset({Capability.ATTENTION, Capability.LENGTHS})
    feels: ClassVar = frozenset({"trims"})

    def never_decisive(self, target: Target) -> str | None:
        return nothing_is_removed(target)

    def judge_step(self, run: Execution, step: Step) -> Judgement:
        steps = decisive = 0
        for forward in step.forwards:
            chunk = len(forward.append.positions)
            found = False
            for number, (layer, call) in enumerate(attention_calls(run, forward)):
                append = of_layer(forward.append, run.target.rules[number])
                held, slots = len(append.held), append.slots
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
        if step.removal is not None and step.refuses != (step.removal.refused is not None):
            return Judgement(steps, decisive)  # trim_reports_what_it_removed says it better
        for violation in self._cache_reports(run, step):
            return Judgement(steps + 1, decisive + 1, violation=violation)
        if step.told:
            steps += 1
            decisive += any(told.state.removed and told.lengths for told in step.told)
        return Judgement(steps, decisive)

    @staticmethod
    def _cache_reports(run: Execution, step: Step) -> Iterator[Violation]:
        layers = tuple(zip(run.target.attention_layers, run.target.rules, strict=True))
        for sequence, told in enumerate(step.told):
            state = told.state
            for (layer, rule), cache in zip(layers, told.lengths, strict=False):
                seen = told.held if rule is None else rule.seen_from(state.offset, told.held)
                if (cache.offset, cache.live_start, cache.live_len) != (state.offset, state.live_start, len(seen)):
                    yield Violation(step.index, _cache_message(step, sequence, layer, cache, state, len(seen)))
            for (layer, rule), rows in zip(layers, told.rows, strict=False):
                if rows.positions is None:
                    continue
                seen = told.held if rule is None else rule.seen_from(state.offset, told.held)
                missing = set(seen).difference(rows.positions)
                strange = set(rows.positions).difference(told.held)
                if missing or strange or any(a >= b for a, b in pairwise(rows.positions)):
                    yield Violation(step.index, _positions_message(step, sequence, layer, missing, strange))


def _padding(append: Append) -> str:
    pads = append.padding + append.behind
    return f", {pads} slots of padding in a batch of {append.rows}" if append.rows > 1 else ""


def _would_visit(step: Step) -> bool:
    """Would an engine that ignores ownership visit the caches? A bound does nothing before it is exceeded."""
    operation = step.operation
    return not isinstance(operation, EnforceMaxKvSize) or step.before.live_len > operation.limit


def _positions_message(step: Step, sequence: int, layer: int, missing: set[int], strange: set[int]) -> str:
    what = "does not hold its positions once each, in their order"
    what = f"lacks position {min(missing)}, which the next token sees" if missing else what
    what = f"holds position {min(strange)}, which the ledger does not" if strange else what
    return f"layer {layer}: the cache of sequence {sequence} {what}, after {step.operation.text()}"


def _cache_message(step: Step, sequence: int, layer: int, cache: CacheLengths, state: SequenceState, seen: int) -> str:
    acted = step.operation.index
    where = f"after {step.operation.text()}" + (f" on sequence {acted}" if sequence not in step.acted else "")
    return (
        f"layer {layer}: the cache of sequence {sequence} says offset {cache.offset}, live_start {cache.live_start}, "
        f"live_len {cache.live_len} {where}; the ledger says {state}"
        + (f", of which its next token sees {seen}" if seen != state.live_len else "")
    )


class TrimReportsWhatItRemoved(Property):
    id = "trim_reports_what_it_removed"
    sentence = (
        "A trim or rollback removes the ledger's number from every cache of a pool-owned sequence and says so, or is "
        "refused where a cache can no longer do it; of a model-owned sequence it visits no cache."
    )
    decisive_when = "there is something to remove or to refuse, or a trim is due on a model-owned sequence"
    needs: ClassVar = frozenset({Capability.LENGTHS})
    feels: ClassVar = frozenset({"trims"})

    def never_decisive(self, target: Target) -> str | None:
        refused = Capability.ROLLBACK in target.capabilities  # what every cache must refuse decides, too
        return None if refused else nothing_is_removed(target)

    def judge_step(self, run: Execution, step: Step) -> Judgement | None:
        if step.removal is None or step.removal.error is not None or step.expected_removed is None:
            return None
        removed, expected = step.removal.removed, step.expected_removed
        layers = run.target.attention_layers
        owned = step.owner == "pool"
        decisive = expected > 0 or step.refuses or (not owned and _would_visit(step))
        message = None
        if step.refuses != (step.removal.refused is not None):
            message = (
                f"it was refused ({step.removal.refused}), and nothing is in its way"
                if step.removal.refused is not None
                else "it was not refused, although a cache no longer has what would be needed"
            )
        elif not owned and removed:
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
