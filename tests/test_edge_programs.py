"""Programs at the edges, written by hand, under every property, on configurations of every family and both caches."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

import properties
from harness.execution import execute
from harness.judge import judge_program
from harness.media import Media
from harness.operations import (
    Chunk,
    Decode,
    EnforceMaxKvSize,
    OperationError,
    Prefill,
    Program,
    Rollback,
    SaveLoad,
    TrimFront,
)
from harness.recording import record
from harness.targets.reference import FAMILIES, ReferenceTarget, paths, targets

EDGES: dict[str, Program] = {
    "trim an empty cache": Program((TrimFront(3), Prefill(4), Chunk(2))),
    "enforce on an empty cache": Program((EnforceMaxKvSize(1, "shift"), Prefill(4))),
    "trim to zero and go on": Program((Prefill(6), TrimFront(6), Chunk(3), Decode(2))),
    "trim to zero twice": Program((Prefill(6), TrimFront(6), Chunk(3), TrimFront(3), TrimFront(3), Chunk(2))),
    "trim twice": Program((Prefill(9), TrimFront(2), TrimFront(3), Chunk(4))),
    "trim beyond the length": Program((Prefill(5), TrimFront(99), Chunk(4))),
    "trim nothing": Program((Prefill(5), TrimFront(0), Chunk(4))),
    "keep more than there is": Program((Prefill(5), TrimFront(2, keep=99), Chunk(4))),
    "trim twice behind sinks": Program((Prefill(12), TrimFront(3, keep=2), TrimFront(3, keep=2), Chunk(4))),
    "limit 1": Program((Prefill(5), EnforceMaxKvSize(1), Chunk(3), EnforceMaxKvSize(1), Decode(2))),
    "limit 1 with sinks": Program((Prefill(5), EnforceMaxKvSize(1, "sinks"), Chunk(3))),
    "limit 1 with a shift": Program((Prefill(5), EnforceMaxKvSize(1, "shift"), Chunk(3))),
    "keep at the limit": Program((Prefill(20), EnforceMaxKvSize(8, "shift", keep=8), Chunk(3))),
    "keep beyond the limit": Program((Prefill(20), EnforceMaxKvSize(8, "shift", keep=99), Chunk(3))),
    "discard more than there is": Program((Prefill(20), EnforceMaxKvSize(8, "shift", 2, 10_000), Chunk(3))),
    "roll back to the trim point": Program((Prefill(9), TrimFront(4), Chunk(3), Rollback(3), Chunk(2))),
    "roll back everything": Program((Prefill(4), Rollback(99), Prefill(3), Chunk(2))),
    "roll back into the sinks": Program((Prefill(9), TrimFront(4, keep=2), Rollback(4), Chunk(3))),
    "roll back after a trim to zero": Program((Prefill(4), TrimFront(4), Rollback(2), Chunk(3))),
    "cross 256 slots by decoding": Program((Prefill(254), Decode(4), TrimFront(10), Chunk(4))),
    "cross 256 slots after a trim": Program((Prefill(250), TrimFront(5), Chunk(20), Decode(1))),
    "two sequences": Program(
        (Prefill(6), Prefill(5, 1), TrimFront(4), Chunk(3, 1), Chunk(2), Rollback(2, 1), Chunk(3, 1)),
        ("pool", "pool"),
    ),
}
IMAGE_EDGES: dict[str, Program] = {
    "cut an image, then go on": Program((Prefill(8, media=(Media(2, 2, 3),)), TrimFront(4), Chunk(3), Decode(2))),
    "keep a part of an image as sinks": Program((Prefill(9, media=(Media(1, 2, 2),)), TrimFront(3, keep=3), Chunk(3))),
    "an image in two forwards": Program((Prefill(4, media=(Media(2, 2, 2),)), Chunk(5), Decode(1))),
    "an image token by token": Program((Prefill(1, media=(Media(0, 2, 2),)), Decode(6), TrimFront(2), Chunk(2))),
    "trim what is there of an image": Program((Prefill(4, media=(Media(1, 2, 3),)), TrimFront(9), Chunk(5), Chunk(2))),
    "roll back into an image": Program((Prefill(8, media=(Media(1, 2, 3),)), Rollback(4), Chunk(3), Decode(1))),
    "roll back nothing inside an image": Program((Prefill(2, media=(Media(0, 2, 2),)), Rollback(0), Chunk(3))),
    "roll back behind a trim": Program(
        (Prefill(8, media=(Media(1, 2, 3),)), TrimFront(3), Rollback(3), Chunk(3), TrimFront(9), Chunk(2))
    ),
    "roll back everything": Program((Prefill(4, media=(Media(0, 1, 2),)), Rollback(9), Prefill(3), Chunk(2))),
    "two images and a video": Program(
        (Prefill(30, media=(Media(0, 1, 1), Media(3, 2, 2), Media(9, 1, 2, frames=3))), TrimFront(4), Chunk(4))
    ),
    "a video of more frames than rows": Program((Prefill(9, media=(Media(1, 1, 1, frames=3),)), Chunk(2), Decode(1))),
    "bounded prefill through an image": Program(
        (
            Prefill(4, media=(Media(1, 3, 3),)),
            EnforceMaxKvSize(4, "sinks"),
            Chunk(4),
            EnforceMaxKvSize(4, "sinks"),
            Chunk(4),
            EnforceMaxKvSize(4, "shift"),
            Chunk(4),
        )
    ),
    "an image beside text": Program(
        (Prefill(6, media=(Media(1, 2, 2),)), Prefill(5, 1), TrimFront(3), Chunk(3, 1), Chunk(2), Rollback(2, 1)),
        ("pool", "model"),
    ),
}
OWNED = Program(
    (Prefill(9), Prefill(9, 1), EnforceMaxKvSize(4, sequence=1), EnforceMaxKvSize(4), Chunk(3, 1), Chunk(3)),
    ("pool", "model"),
)


def some_of(every: Sequence[ReferenceTarget], number: int, step: int) -> Sequence[ReferenceTarget]:
    """One in ``step``, others for every program: all of them meet some."""
    return every[number % min(step, len(every)) :: step]


@pytest.mark.parametrize("name", EDGES)
@pytest.mark.parametrize("family", FAMILIES)
def test_no_property_breaks(family: str, name: str) -> None:
    for target in some_of(targets(family), list(EDGES).index(name), 8 if "256" in name else 4):
        judge = judge_program(target, EDGES[name], properties.ALL)
        assert len(judge.run.steps) == len(EDGES[name].operations)


@pytest.mark.parametrize("name", IMAGE_EDGES)
@pytest.mark.parametrize("family", [family for family in FAMILIES if "images" in paths(family)])
def test_no_property_breaks_with_images(family: str, name: str) -> None:
    for target in some_of(targets(family, path="images"), list(IMAGE_EDGES).index(name), 2):
        judge = judge_program(target, IMAGE_EDGES[name], properties.ALL)
        assert len(judge.run.steps) == len(IMAGE_EDGES[name].operations)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_scheduler_leaves_a_model_owned_sequence_alone(family: str) -> None:
    """It trims zero caches, the trace says so, and the model-owned sequence goes on with all its keys."""
    for target in targets(family):
        if any(target.rules):  # their caches see fewer keys, or refuse
            continue
        run = judge_program(target, OWNED, properties.ALL).run
        trace = record(run, None, {})
        _, _, owned, pooled, chunk, _ = trace.steps
        assert (owned["owner"], owned["caches_trimmed"], owned["removed"]) == ("model", 0, [])
        assert owned["before"] == owned["after"] == {"offset": 9, "live_start": 0, "live_len": 9}
        assert (pooled["owner"], pooled["caches_trimmed"]) == ("pool", len(target.attention_layers))
        assert pooled["removed"] == [5] * len(target.attention_layers)
        assert all(call["keys"] == 12 for call in chunk["forwards"][0]["attention"])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_offset_mask_breaks_wherever_offset_and_live_length_differ(family: str) -> None:
    """An error in exactly those edge programs in which a chunk follows a front trim."""
    for target in targets(family, "offset")[:4]:
        for name, program in EDGES.items():
            expected = any(
                step.before.trimmed and isinstance(step.operation, (Prefill, Chunk))
                for step in execute(targets(family)[0], program).steps
            )
            assert execute(target, program).stopped == expected, name


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TrimFront(-1), "TrimFront: n must lie in"),
        (lambda: TrimFront(1, keep=-1), "TrimFront: keep must lie in"),
        (lambda: Rollback(-1), "Rollback: n must lie in"),
        (lambda: EnforceMaxKvSize(0), "EnforceMaxKvSize: limit must lie in"),
        (lambda: Chunk(0), "Chunk: tokens must lie in"),
    ],
)
def test_what_cannot_mean_anything_is_refused(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(OperationError, match=message):
        make()


def test_a_file_need_not_keep_the_buffers_of_a_cache_that_shows_nothing() -> None:
    """A chunked cache that was rolled back to where its chunk begins: it holds no key, and room for some."""
    (target,) = (t for t in targets("olmo3") if t.storage == "chunked-5")
    program = Program((Prefill(1), Decode(8), Rollback(4), SaveLoad(), Chunk(3)))
    run = judge_program(target, program, properties.ALL).run
    before, after = (run.steps[index].told[0] for index in (2, 3))
    assert [cache.live_len for cache in before.lengths] == [0] * len(before.lengths) and len(before.held) == 5
    assert [cache.per_slot for cache in before.memory] != [cache.per_slot for cache in after.memory]
