"""Memory: what a cache may hold, what a trim or a reset gives back, and what nobody may keep."""

from __future__ import annotations

from typing import ClassVar

from harness.execution import Execution
from harness.findings import Violation
from harness.judging import Evidence, Judgement, Property
from harness.ledger import Append
from harness.operations import EnforceMaxKvSize, Reset, TrimFront
from harness.rules import CacheRule
from harness.steps import Step
from harness.target import Capability

GROWTH = 256  # slots by which a cache may be larger than what it holds


class MemoryIsGivenBack(Property):
    """A cache that grows may double its buffers, as many engines do, so that growth is bounded by twice the most keys.
    That bound never counts as decisive: any forward could break it, and a PASS shall mean that memory was given
    back."""

    id = "memory_is_given_back"
    sentence = (
        "Behind a front trim a cache holds buffers for its live keys and at most 256 slots more, behind a reset none, "
        "and at any time for twice the most keys that one had to hold so far and at most 256 slots more, or for its "
        "whole window or chunk."
    )
    decisive_when = "before a front trim or a reset the cache held more than it may hold afterwards"
    needs: ClassVar = frozenset({Capability.BYTES})

    def judge_step(self, run: Execution, step: Step) -> Judgement | None:
        """Of a rollback the last part alone: what it drops is about to be written again."""
        if not step.told:
            return None
        given_back = self._given_back(run, step)
        if given_back is not None and given_back.violation is not None:
            return given_back
        if (message := _grown_too_far(run, step)) is not None:
            return Judgement(1, 1, violation=Violation(step.index, message))
        return given_back

    @staticmethod
    def _given_back(run: Execution, step: Step) -> Judgement | None:
        operation, index = step.operation, step.operation.index
        reset = isinstance(operation, Reset) and step.effective
        trimmed = isinstance(operation, (TrimFront, EnforceMaxKvSize)) and bool(step.expected_removed)
        if not (reset or trimmed) or not step.index:
            return None
        before, after = run.steps[step.index - 1].told[index].memory, step.told[index].memory
        # A batch holds as many slots for every row as its longest has keys.
        rows = step.rows if index in step.rows else ()
        live = max((len(step.told[row].held) for row in rows), default=step.after.live_len)
        decisive = False
        for layer, was, now in zip(run.target.attention_layers, before, after, strict=False):
            allowed = 0 if reset else (live + GROWTH) * was.per_slot
            if now.held > allowed:
                why = "a reset leaves nothing" if reset else f"{live} keys and {GROWTH} slots of {was.per_slot} bytes"
                message = (
                    f"layer {layer}: the cache holds {now.held} bytes after {operation.text()}, allowed are {allowed} "
                    f"({why}; it held {was.held} before)"
                )
                return Judgement(1, 1, violation=Violation(step.index, message))
            decisive |= was.held > allowed
        return Judgement(1, int(decisive))


class NothingIsKeptAlive(Property):
    id = "nothing_is_kept_alive"
    sentence = (
        "Once everybody has left the batch, every sequence is reset and every snapshot is overwritten by an empty one, "
        "the engine as a whole holds no more keys and values than when it was opened, but those that the model owns "
        "and a slot a cache."
    )
    decisive_when = "the engine held others at the end of the program"
    needs: ClassVar = frozenset({Capability.FOOTPRINT, Capability.BYTES, Capability.RESET})

    def judge_run(self, evidence: Evidence) -> Judgement | None:
        left = evidence.emptied
        if left is None:
            return None
        allowed = left.allowed + _scratch(evidence.run)
        if left.error is not None:
            message = f"the engine could not be emptied: {' '.join(left.error.split())}"
        elif left.after > allowed:
            message = (
                f"the engine holds {left.after} bytes of keys and values when everybody has left the batch, every "
                f"sequence is reset and every snapshot overwritten, allowed are {allowed} (it held {left.opened} when "
                f"it was opened, {left.owned} are of sequences that the model owns, the rest is a slot a cache; "
                f"before, it held {left.before})"
            )
        else:
            return Judgement(1, int(left.before > allowed))
        return Judgement(1, 1, violation=Violation(None, message))


def _scratch(run: Execution) -> int:
    """Bytes of one slot of every cache: an engine may keep room for the token in hand."""
    total = 0
    for sequence in range(len(run.owners)):
        told = [step.told[sequence].memory for step in run.steps if step.told]
        total += sum(max(cache.per_slot for cache in each) for each in zip(*filter(None, told), strict=True))
    return total


def _grown_too_far(run: Execution, step: Step) -> str | None:
    """What a cache holds beyond twice the most that any had to hold so far. Of any, and not of this one: copies, files
    and batches bring the buffers of one sequence to another."""
    layers = zip(run.target.attention_layers, run.target.rules, strict=True)
    for number, (layer, rule) in enumerate(layers):
        for sequence, told in enumerate(step.told):
            if len(told.memory) <= number or not (per_slot := told.memory[number].per_slot):
                continue
            held, live = told.memory[number].held, 0 if rule is not None else len(told.held)
            if held <= (2 * live + GROWTH) * per_slot:  # nearly always, and then nobody need count
                continue
            appends = (f.append for each in run.steps[: step.index + 1] for f in each.forwards)
            most = max((_slots(append, rule) for append in appends), default=0)
            # A ring may be there as a whole from its first token on.
            allowed = max(2 * most + GROWTH, _width(rule) or 0) * per_slot
            if held > allowed:
                return (
                    f"layer {layer}: the cache of sequence {sequence} holds {held} bytes after "
                    f"{step.operation.text()}, allowed are {allowed} (slots of {per_slot} "
                    f"bytes, for twice the {most} keys that one had to hold so far and {GROWTH} more)"
                )
    return None


def _width(rule: CacheRule | None) -> int | None:
    """Keys that a cache with such a rule needs to hold between forwards; None for all."""
    return None if rule is None else rule.keeps or rule.window or rule.chunk


def _slots(append: Append, rule: CacheRule | None) -> int:
    """Of a forward: keys that a cache had to hold in it at most, padding included."""
    width = _width(rule)
    new = len(append.positions) + append.behind
    return append.slots if width is None else min(append.slots, width + new)
