"""The property that watches arguments: what it says, what decides; and what the watch of the reference target sees."""

from __future__ import annotations

import contextlib

import mlx.core as mx
import pytest
from kv_harness_on_fakes import PURE, fake, judge, quirky

from harness.execution import Execution, execute
from harness.faults import purity
from harness.media import Media
from harness.operations import (
    Batch,
    BatchDecode,
    Chunk,
    Decode,
    Operation,
    Prefill,
    Program,
    Reset,
    Rollback,
    Snapshot,
    TrimFront,
)
from harness.target import Capability
from harness.targets.reference import ReferenceTarget, targets
from harness.targets.watch import Watch

TRIMMED = Program((Prefill(4), Chunk(2), TrimFront(2), Decode(1)))


@pytest.mark.parametrize(
    ("bug", "step", "words"),
    [
        ("writes into its tokens", 0, "Prefill(4): the tokens changed in place (entry [0, 1]): was 4, is 0"),
        ("arguments grow", 0, "Prefill(4): the offset changed in place: was of shape [1], is of shape [2]"),
        (
            "a trim writes into keys given out",
            2,
            "layer 4: the keys that the cache gave out changed in place (entry [0, 0, 2, 0]): was 1, is 0",
        ),
    ],
)
def test_what_was_written_into_is_told_with_its_place(bug: str, step: int, words: str) -> None:
    finding = judge(fake(bug), TRIMMED, PURE).finding
    assert finding is not None and finding.violation.step == step
    count = len(TRIMMED.operations)
    place = f" (operation {step + 1} of {count})" if step + 1 < count else ""
    assert finding.message.startswith(TRIMMED.operations[step].text()) and finding.message.endswith(words + place)


@pytest.mark.parametrize(
    ("operations", "decisive"),
    [
        ((Prefill(4),), 3),  # its own three
        ((Prefill(4), Chunk(2)), 9),  # and three that it might have reached
        ((Prefill(4), TrimFront(2)), 6),
        ((Prefill(4), TrimFront(0)), 3),  # nothing changed
        ((Prefill(4), Snapshot(0)), 3 + 3),
        ((Prefill(4), Prefill(2, 1)), 6),  # of the other sequence: out of reach
        ((Prefill(4), Prefill(2, 1), TrimFront(2)), 6),
        ((Prefill(4), Prefill(2, 1), TrimFront(1, sequence=1)), 9),
        ((Prefill(4), Reset()), 6),
        ((TrimFront(2),), 0),
    ],
)
def test_an_array_decides_if_it_could_have_been_written_into(operations: tuple[Operation, ...], decisive: int) -> None:
    outcome = judge(fake(), Program(operations, ("pool", "pool")), PURE)
    assert outcome.finding is None and outcome.decisive(PURE) == decisive


def test_without_anything_to_watch_nothing_is_decided() -> None:
    assert judge(quirky("gives nothing to watch"), TRIMMED, PURE).looked(PURE) == 0
    assert judge(fake(lacks=frozenset({Capability.ARGUMENTS})), TRIMMED, PURE).looked(PURE) == 0


def test_who_else_holds_an_array_sees_what_is_written_into_it() -> None:
    """What the watch rests on, in the MLX that is installed."""
    given = mx.array([1, 2, 3])
    other, view, sum_, twin = given, given[:2], given + 10, mx.array(given)
    given += 1
    given[0] = 7
    assert other.tolist() == [7, 3, 4] and other is given
    assert (view.tolist(), sum_.tolist(), twin.tolist()) == ([1, 2], [11, 12, 13], [1, 2, 3])


def test_the_watch_tells_every_change_once() -> None:
    watch, tokens = Watch(), mx.array([[4, 5]])
    with watch.over(tokens, (), {}):
        tokens[0, 1] = 9
    told = watch.told()
    assert (told.given, told.held) == (1, 0)
    (change,) = told.changed
    assert (change.what, change.call, change.index, change.was, change.now) == ("the tokens", None, (0, 1), "5", "9")
    assert watch.told().changed == ()
    tokens += mx.array([[0], [0]])
    (change,) = watch.told().changed
    assert (change.index, change.was, change.now) == ((), "of shape [1, 2]", "of shape [2, 2]")


def test_an_array_is_watched_up_to_the_end_of_the_next_forward() -> None:
    watch, first, second = Watch(), mx.array([1]), mx.array([1])
    with watch.over(first, (), {}):
        pass
    with watch.over(second, (), {}):
        first += 1
    assert [change.what for change in watch.told().changed] == ["the tokens"]
    with watch.over(mx.array([1]), (), {}):
        pass
    first += 1
    assert watch.told().changed == ()


PROGRAM = Program(
    (Prefill(7), Decode(2), Chunk(3), TrimFront(3), Prefill(2, 1), Batch((0, 1)), BatchDecode(2), Batch(()), Decode(1)),
    ("pool", "pool"),
)
IMAGES = Program((Prefill(6, media=(Media(1, 2, 2, 0),)), Chunk(3), Rollback(5), Chunk(2)))


def watched(target: ReferenceTarget, program: Program) -> Execution:
    return execute(target, program, tell=False, attention=True)


def changes(run: Execution) -> list[str]:
    return [change.what for step in run.steps if step.arguments for change in step.arguments.changed]


@pytest.mark.parametrize(
    "target",
    targets("olmo3")[:3] + targets("mistral4")[:2] + targets("qwen2_vl")[:1],
    ids=lambda target: target.identity.name,
)
def test_the_reference_models_write_into_nothing(target: ReferenceTarget) -> None:
    run = watched(target, PROGRAM)
    assert not run.stopped and changes(run) == []
    layers = len(target.attention_layers)
    for step in run.steps:
        assert step.arguments is not None
        assert step.arguments.given >= sum(1 + 2 * layers for _ in step.forwards) / max(1, len(step.rows))
        assert bool(step.arguments.held) == (step.index > 0)


def test_nothing_is_watched_unless_it_is_asked_for() -> None:
    run = execute(targets("olmo3")[0], PROGRAM)
    assert all(step.arguments is None for step in run.steps)


IMPURE = [fault for fault in purity.FAULTS if fault.breaks == "operations_are_pure"]


@pytest.mark.parametrize("fault", IMPURE, ids=lambda fault: fault.id)
def test_nothing_stays_replaced(fault: purity.Fault) -> None:
    target = next(target for target in targets("qwen2_vl") if fault.shown_on(target))
    program = Program((Prefill(6), Decode(2))) if "ring" in fault.id else PROGRAM
    with fault.plant():
        assert changes(watched(target, program))
    assert changes(watched(target, program)) == []


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (None, None),
        (purity.IMAGE_FAULTS[0], "pixel_values"),
        (purity.IMAGE_FAULTS[1], "the embeddings of the prompt"),
    ],
    ids=["right", "pixels", "embeddings"],
)
@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl"])
def test_images_are_watched_when_they_are_read_and_when_they_are_used(
    family: str, fault: purity.Fault | None, words: str | None
) -> None:
    with fault.plant() if fault else contextlib.nullcontext():
        assert set(changes(watched(targets(family, path="images")[0], IMAGES))) == ({words} if words else set())
