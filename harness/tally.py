"""Counts what a campaign measured: per property, and which states its programs reached."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from harness.execution import Execution
from harness.findings import Finding
from harness.judging import Evidence, Judgement, Property, is_blind
from harness.operations import (
    BATCHES,
    Chunk,
    Decode,
    Fork,
    Prefill,
    Reset,
    Restore,
    Rollback,
    SaveLoad,
    Verify,
    tokens_of,
)
from harness.steps import Step
from harness.target import Target

IMAGE_STATES = (
    "with_images",
    "trim_cut_image",
    "chunk_cut_image",
    "chunk_behind_image",
    "rolled_back_into_image",
    "chunk_after_cut_image",
    "with_videos",
)
"""Counters of ``Coverage`` that only prompts with images can reach."""

GROWTH = 256  # slots by which the engines under test enlarge a KV cache; crossing it is a state worth reaching


def target_label(target: Target) -> str:
    """A configuration within its family: variant and cache storage."""
    return f"{target.identity.variant}, {target.identity.storage}"


@dataclass
class PropertyTally:
    """Of one property. ``examples``: programs in which it looked at something; ``worst``: largest difference met."""

    examples: int = 0
    steps: int = 0
    decisive_steps: int = 0
    worst: float | None = None
    violations: int = 0
    inconclusive: int = 0
    by_target: dict[str, int] = field(default_factory=dict)  # decisive steps per configuration
    kinds: Counter[str] = field(default_factory=Counter)  # decisive steps by what a judgement says that they were


@dataclass
class Coverage:
    """How many programs reached a state (and a few totals). All counts include those that Hypothesis ran while
    shrinking."""

    programs: int = 0
    operations: int = 0
    forwards: int = 0
    trimmed: int = 0
    trimmed_keeping_sinks: int = 0
    trimmed_to_zero: int = 0
    rolled_back: int = 0
    chunk_after_trim: int = 0
    decode_after_trim: int = 0
    crossed_256_slots: int = 0
    crossed_512_slots: int = 0
    passed_position_1024: int = 0
    several_sequences: int = 0
    model_owned: int = 0
    stopped_by_error: int = 0
    blind_forwards: int = 0
    with_images: int = 0
    trim_cut_image: int = 0
    chunk_cut_image: int = 0
    chunk_behind_image: int = 0
    rolled_back_into_image: int = 0
    chunk_after_cut_image: int = 0
    with_videos: int = 0
    verified_in_part: int = 0
    restored_after_trim: int = 0
    forked_and_used_both: int = 0
    saved_after_trim: int = 0
    reset_and_reused: int = 0
    batched: int = 0
    batched_as_kv_heads: int = 0
    batched_unlike_kv_heads: int = 0
    batched_with_padding: int = 0
    batched_after_trim: int = 0
    left_a_batch: int = 0
    batched_four_rows: int = 0

    def to_json(self) -> dict[str, int]:
        return asdict(self)


@dataclass
class Tally:
    """A Listener for ``harness.judge.Judge``."""

    properties: dict[str, PropertyTally] = field(default_factory=dict)
    coverage: Coverage = field(default_factory=Coverage)
    targets: dict[str, int] = field(default_factory=dict)
    forward_seconds: float = 0.0
    forwards_made: int = 0  # with those of the comparison runs
    _looked: set[str] = field(default_factory=set)
    _target: str = ""

    def on_step(self, run: Execution, step: Step) -> None:
        """Remember the configuration; the step itself is counted when its program ends (``on_end``)."""
        self._target = target_label(run.target)

    def on_judgement(self, prop: Property, judgement: Judgement) -> None:
        tally = self.properties.setdefault(prop.id, PropertyTally())
        tally.steps += judgement.steps
        tally.decisive_steps += judgement.decisive
        tally.by_target[self._target] = tally.by_target.get(self._target, 0) + judgement.decisive
        tally.kinds.update(judgement.kinds)
        tally.violations += judgement.violation is not None
        tally.inconclusive += judgement.inconclusive is not None
        if judgement.worst is not None:
            tally.worst = judgement.worst if tally.worst is None else max(tally.worst, judgement.worst)
        if judgement.steps:
            self._looked.add(prop.id)

    def undecide(self, prop: str, label: str) -> None:
        """What this property met on that configuration could not have failed."""
        counted = self.properties[prop]
        counted.decisive_steps -= counted.by_target.get(label, 0)
        counted.by_target[label] = 0
        if not counted.decisive_steps:
            counted.kinds.clear()

    def on_finding(self, finding: Finding) -> None:
        """A finding is counted as a violation of its property (``on_judgement``)."""

    def on_end(self, evidence: Evidence) -> None:
        for name in self._looked:
            self.properties[name].examples += 1
        self._looked.clear()
        self._count(evidence.run)
        for run in evidence.executions:
            for step in run.steps:
                self.forwards_made += len(step.forwards)
                self.forward_seconds += sum(forward.seen.seconds for forward in step.forwards)
        self.forwards_made += len(evidence.other_forwards)
        self.forward_seconds += sum(seen.seconds for seen in evidence.other_forwards)

    def _count(self, run: Execution) -> None:
        cover, steps = self.coverage, run.steps
        name = target_label(run.target)
        self.targets[name] = self.targets.get(name, 0) + 1
        cover.programs += 1
        cover.operations += len(steps)
        cover.forwards += sum(len(step.forwards) for step in steps)
        cover.blind_forwards += sum(is_blind(run, forward) for step in steps for forward in step.forwards)
        cover.several_sequences += len({f.sequence for step in steps for f in step.forwards}) > 1
        cover.model_owned += any(step.owner == "model" for step in steps)
        cover.stopped_by_error += any(step.error is not None for step in steps)
        removing = [s for s in steps if s.expected_removed and not isinstance(s.operation, (Rollback, Verify))]
        cover.trimmed += bool(removing)
        cover.trimmed_keeping_sinks += any(_kept_sinks(step) for step in removing)
        cover.trimmed_to_zero += any(step.after.live_len == 0 for step in removing)
        cover.rolled_back += any(bool(s.expected_removed) and isinstance(s.operation, Rollback) for s in steps)
        cover.chunk_after_trim += any(
            step.before.trimmed and isinstance(step.operation, (Prefill, Chunk)) and step.operation.tokens > 1
            for step in steps
        )
        cover.decode_after_trim += any(step.before.trimmed and isinstance(step.operation, Decode) for step in steps)
        for name, met in (_image_states(run) | _copy_states(run) | _batch_states(run)).items():
            setattr(cover, name, getattr(cover, name) + met)
        cover.crossed_256_slots += any(step.before.live_len <= GROWTH < step.after.live_len for step in steps)
        cover.crossed_512_slots += any(step.before.live_len <= 2 * GROWTH < step.after.live_len for step in steps)
        cover.passed_position_1024 += any(step.before.offset <= 1024 < step.after.offset for step in steps)

    def summary(self) -> dict[str, Any]:
        return {"coverage": self.coverage.to_json(), "targets": dict(sorted(self.targets.items()))}


def _kept_sinks(step: Step) -> bool:
    """Did this trim leave a gap: are keys held whose positions are not one contiguous run?"""
    return bool(step.told) and bool(held := step.told[step.operation.index].held) and held[0] < step.after.live_start


def _image_states(run: Execution) -> dict[str, bool]:
    """Which of the states that need an image a run reached, by the names of ``Coverage``."""
    met = dict.fromkeys(IMAGE_STATES, False)
    cut: set[int] = set()  # sequences that hold a part of an image
    for step in run.steps:
        operation, offset = step.operation, step.after.offset
        if isinstance(operation, BATCHES):
            continue  # its rows are counted where they go on by themselves
        if isinstance(operation, Prefill) and operation.media:
            met["with_images"] = True
            met["with_videos"] |= any(each.frames for each in operation.media)
        images = step.before.images or step.after.images
        for forward in step.forwards:
            start = forward.append.positions.start
            met["chunk_cut_image"] |= any(span.start < start < span.stop for span in images)
            met["chunk_after_cut_image"] |= operation.index in cut and len(forward.append.positions) > 1
            met["chunk_behind_image"] |= len(forward.append.positions) > 1 and any(
                span.stop <= start and forward.append.held for span in images
            )
        if not step.expected_removed:
            continue
        if isinstance(operation, (Rollback, Verify)):
            met["rolled_back_into_image"] |= any(
                span.start < offset < span.stop <= step.before.offset for span in images
            )
        elif step.told:
            held = set(step.told[operation.index].held)
            read = [range(span.start, min(span.stop, offset)) for span in images]
            if any(0 < len(held.intersection(span)) < len(span) for span in read):
                met["trim_cut_image"] = True
                cut.add(operation.index)
            else:
                cut.discard(operation.index)
    return met


def _batch_states(run: Execution) -> dict[str, bool]:
    """Which of the states that need a batch a run reached, by the names of ``Coverage``."""
    met = dict.fromkeys(
        (
            *("batched", "batched_as_kv_heads", "batched_unlike_kv_heads"),
            *("batched_with_padding", "batched_after_trim", "left_a_batch", "batched_four_rows"),
        ),
        False,
    )
    before: tuple[int, ...] = ()
    for step in run.steps:
        appends = [forward.append for forward in step.forwards if forward.append.rows > 1]
        met["batched"] |= bool(appends)
        met["batched_four_rows"] |= any(append.rows > 3 for append in appends)
        alike = frozenset[bool]().union(*(forward.as_kv_heads for forward in step.forwards))
        met["batched_as_kv_heads"] |= True in alike
        met["batched_unlike_kv_heads"] |= False in alike
        met["batched_with_padding"] |= any(append.padding + append.behind for append in appends)
        met["batched_after_trim"] |= any(len(append.held) != append.positions.start for append in appends)
        met["left_a_batch"] |= bool(set(before) - set(step.rows))
        before = step.rows
    return met


def _copy_states(run: Execution) -> dict[str, bool]:
    """Which of the states that need a copy, a verify round or a reset a run reached, by the names of ``Coverage``."""
    met = dict.fromkeys(
        ("verified_in_part", "restored_after_trim", "forked_and_used_both", "saved_after_trim", "reset_and_reused"),
        False,
    )
    trimmed: set[int] = set()  # sequences that lost keys from the front since they began
    reset: set[int] = set()
    forks: list[tuple[set[int], set[int]]] = []  # the two of each fork, and those of them that went on
    for step in run.steps:
        operation, index = step.operation, step.operation.index
        if isinstance(operation, Verify):
            met["verified_in_part"] |= 0 < operation.accept < operation.drafts
        if tokens_of(operation):
            met["reset_and_reused"] |= index in reset
            for two, used in forks:
                used |= two & {index}
                met["forked_and_used_both"] |= used == two
        if step.replaced is not None:  # a new start of that sequence: what was forked before is over for it
            forks = [pair for pair in forks if step.replaced not in pair[0]]
        if isinstance(operation, Restore) and step.effective:
            met["restored_after_trim"] |= index in trimmed
        elif isinstance(operation, Fork) and step.effective and step.before.live_len:
            forks.append(({index, operation.into}, set()))
        elif isinstance(operation, SaveLoad) and step.effective:
            met["saved_after_trim"] |= step.before.trimmed and step.before.live_len > 0
        elif isinstance(operation, Reset) and step.effective and step.before.offset:
            reset.add(index)
        if step.after.trimmed:
            trimmed.add(index)
    return met
