"""A run as one list of tokens: who sees whom, against a model that keeps tokens instead of numbers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_harness_fake_target import FakeTarget

from harness.execution import execute
from harness.media import Media
from harness.operations import Chunk, Decode, EnforceMaxKvSize, Operation, Prefill, Program, Rollback, TrimFront
from harness.oracle import visible_set
from harness.target import Capability, ImageFormat
from harness.witnessing import history

operations = st.lists(
    st.one_of(
        st.builds(Chunk, st.integers(1, 6), st.integers(0, 1)),
        st.builds(Decode, st.integers(1, 3), st.integers(0, 1)),
        st.builds(TrimFront, st.integers(0, 9), st.integers(0, 3), st.integers(0, 1)),
        st.builds(Rollback, st.integers(0, 9), st.integers(0, 1)),
        st.builds(EnforceMaxKvSize, st.integers(1, 9), st.just("sinks"), sequence=st.integers(0, 1)),
    ),
    max_size=12,
)
TARGET = FakeTarget(lacks=frozenset({Capability.WITNESS}))
IMAGES = ImageFormat(9, 10, 2, 12, False)


@settings(max_examples=150, deadline=None, database=None)
@given(operations)
def test_everybody_sees_what_was_held_when_they_came(drawn: list[Operation]) -> None:
    run = execute(TARGET, Program((Prefill(3), Prefill(2, 1), *drawn), ("pool", "pool")))
    told = history(run)
    assert told is not None
    # The same once more, with the tokens themselves in the caches: a token is the pair (sequence, how-manieth of it).
    caches: list[list[tuple[int, int]]] = [[], []]
    seen: dict[tuple[int, int], set[tuple[int, int]]] = {}
    order: list[tuple[int, int]] = []
    for step in run.steps:
        index = step.operation.index
        cache = caches[index]
        for forward in step.forwards:
            for _ in forward.append.positions:
                token = (index, sum(one[0] == index for one in order))
                cache.append(token)
                order.append(token)
                seen[token] = set(cache)
        if step.expected_removed:
            before, after = len(cache), step.after.live_len
            gone = before - after
            if isinstance(step.operation, Rollback):
                del cache[after:]
            else:
                keep = min(getattr(step.operation, "keep", 0), after)
                if isinstance(step.operation, EnforceMaxKvSize):
                    keep = min(4, step.operation.limit - 1)
                del cache[keep : keep + gone]
    assert len(order) == len(told.tokens)
    for row, token in enumerate(order):
        assert {order[column] for column in np.flatnonzero(told.visible[row])} == seen[token]


@settings(max_examples=60, deadline=None, database=None)
@given(operations, st.none() | st.integers(1, 8))
def test_a_row_is_the_visible_set_of_its_forward(drawn: list[Operation], window: int | None) -> None:
    """The same rows as the masks are judged by, and with the same windows."""
    run = execute(TARGET, Program((Prefill(3), *drawn), ("pool", "pool")))
    told = history(run)
    assert told is not None
    shown = told.shown(window)
    for step in run.steps:
        for forward in step.forwards:
            append = forward.append
            columns = [*append.held_numbers, *append.numbers]
            rows = shown[append.numbers.start : append.numbers.stop]
            assert (rows[:, columns] == visible_set(append, window)).all()
            assert rows.sum() == visible_set(append, window).sum()
            assert told.positions[columns].tolist() == [*append.held, *append.positions]
            assert tuple(told.tokens[list(append.numbers)]) == forward.seen.tokens


def test_a_position_that_is_written_again_is_another_token() -> None:
    """Behind kept sinks a rollback even goes back below positions that were trimmed, and these come again."""
    operations = (Prefill(6), TrimFront(3, 2), Rollback(2), Chunk(2))  # held 0 1 5, then 0; offset 4
    told = history(execute(TARGET, Program(operations)))
    assert told is not None
    assert told.positions.tolist() == [0, 1, 2, 3, 4, 5, 4, 5]
    assert np.flatnonzero(told.visible[7]).tolist() == [0, 6, 7]
    assert np.flatnonzero(told.visible[5]).tolist() == [0, 1, 2, 3, 4, 5]
    assert np.flatnonzero(told.shown(2)[7]).tolist() == [6, 7]


def test_an_error_ends_it_and_nothing_is_nothing() -> None:
    told = history(execute(FakeTarget(fails_at=2), Program((Prefill(3), Chunk(2)))))
    assert told is not None and len(told.tokens) == 3
    assert history(execute(TARGET, Program((TrimFront(1),)))) is None
    assert history(execute(FakeTarget(fails_at=1), Program((Prefill(3),)))) is None


def test_tokens_of_a_prompt_with_images_are_known_by_their_prompt() -> None:
    target = FakeTarget(images=IMAGES)
    first, second = Prefill(2, media=(Media(1, 1, 2),)), Prefill(9, 1, media=(Media(0, 2, 2),))
    operations = (first, Chunk(3), second, Rollback(4), Chunk(3), Decode(1, 1))
    run = execute(target, Program(operations, ("pool", "pool")))
    told = history(run)
    assert told is not None
    assert [len(prompt.tokens) for prompt in told.prompts] == [3, 9]
    # The first prompt has 3 tokens: 2, then 1 and two of text; rolled back to 1, where text follows.
    assert told.prompt_of.tolist() == [0, 0, 0, -1, -1, *[1] * 9, -1, -1, -1, -1]
    for number, prompt in enumerate(told.prompts):
        rows = np.flatnonzero(told.prompt_of == number)
        assert told.tokens[rows].tolist() == [prompt.tokens[at] for at in told.positions[rows]]
    assert told.places.shape == (3, len(told.tokens))
    assert told.places[:, 0].tolist() == [0, 0, 0] and told.places[:, 2].tolist() == [1, 1, 2]


@pytest.mark.parametrize("capability", [Capability.WITNESS, Capability.CACHE_FREE])
def test_a_target_without_a_witness_is_not_asked(capability: Capability) -> None:
    from harness.judging import Evidence

    run = execute(FakeTarget(lacks=frozenset({capability})), Program((Prefill(3),)))
    evidence = Evidence(run)
    said = {Capability.WITNESS: evidence.witness, Capability.CACHE_FREE: evidence.cache_free}
    assert said.pop(capability) is None
    assert all(other is not None for other in said.values())
    assert len(evidence.witness_seconds) == 1
