"""Programs with images on a fake target: what it is given and when, what is counted, drawn and made smaller."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from kv_harness_fake_target import FakeSession, FakeTarget

import properties
from harness.campaign import run_campaign
from harness.execution import Execution, execute
from harness.findings import FindingError, Verdict
from harness.judge import judge_program
from harness.ledger import Append
from harness.media import Media
from harness.operations import (
    Chunk,
    Decode,
    Fork,
    Prefill,
    Program,
    Reset,
    Restore,
    Rollback,
    Snapshot,
    TrimFront,
    Verify,
)
from harness.profiles import Profile
from harness.recording import record
from harness.reduction import reduce_finding
from harness.replay import replay
from harness.tally import Tally
from harness.target import ImageFormat, PositionCall
from harness.trace import TraceError

FORMAT = ImageFormat(image_token=3, video_token=7, merge=2, patch_pixels=5, frames_apart=True)
TARGET = FakeTarget(images=FORMAT)
PROMPT = Prefill(3, media=(Media(2, 2, 2),))  # the image stands at 2..5, and three of its tokens are still to come

WHOLE = (PROMPT, Chunk(3))


def tokens(run: Execution) -> list[tuple[int, ...]]:
    return [forward.seen.tokens for step in run.steps for forward in step.forwards]


def test_the_rest_of_a_prompt_comes_with_the_next_forwards() -> None:
    run = execute(TARGET, Program((PROMPT, TrimFront(1), Decode(1), Chunk(4))))
    session = run._session
    assert isinstance(session, FakeSession)
    whole = session.prompts[0].tokens
    assert len(whole) == 6 and whole[2:] == (3, 3, 3, 3)
    given = tokens(run)
    assert given[0] == whole[:3] and given[1] == whole[3:4] and given[2][:2] == whole[4:]
    assert not {3, 7} & set(given[2][2:])
    assert run.steps[3].forwards[0].append.places == ((2, 3, 2), (2, 3, 3), (4, 4, 4), (5, 5, 5))


def test_after_a_rollback_text_stands_where_the_image_stood() -> None:
    run = execute(TARGET, Program((PROMPT, Rollback(0), Decode(1), Rollback(1), Chunk(3))))
    assert tokens(run)[1] == (3,)  # a rollback of nothing changes nothing
    assert not {3, 7} & set(tokens(run)[2])
    assert run.steps[4].forwards[0].append.places == ((3, 3, 3), (4, 4, 4), (5, 5, 5))


def test_a_target_without_images_says_so() -> None:
    with pytest.raises(ValueError, match="takes no images"):
        execute(FakeTarget(), Program((PROMPT,)))
    run = Execution(TARGET)
    run.apply(Prefill(2))
    with pytest.raises(ValueError, match="not the first forward"):
        run.apply(PROMPT)
    trace = record(execute(TARGET, Program((PROMPT,))), None, {})
    with pytest.raises(TraceError, match=r"its program has images, but fake/fake.* takes none"):
        replay(trace, FakeTarget(), properties.ALL)


def test_a_trace_with_absurd_images_is_refused() -> None:
    trace = record(execute(TARGET, Program((PROMPT,))), None, {})
    absurd = replace(trace, program=Program((Prefill(1, media=(Media(0, 24, 24),)),)))
    with pytest.raises(TraceError, match=r"Prefill\(1, image 24x24@0\): its images have 11,520 numbers and 2,304"):
        replay(absurd, TARGET, properties.ALL)


def test_one_position_for_a_whole_chunk_is_no_table() -> None:
    """Angles of one token broadcast over all of them without a word."""

    class OnePosition(FakeTarget):
        def open(self, owners: Any) -> Any:
            session = super().open(owners)
            forward = session.forward

            def first_alone(sequence: int, tokens: Any, prompt: Any = None) -> Any:
                seen = forward(sequence, tokens, prompt)
                calls = tuple(PositionCall("mrope", call.positions[..., :1]) for call in seen.positions)
                return replace(seen, positions=calls)

            session.forward = first_alone  # type: ignore[method-assign]
            return session

    with pytest.raises(FindingError, match="mrope call 0: token 1 of the chunk stands at position 1, it was given 0"):
        judge_program(OnePosition(), Program((Prefill(2),)), [properties.BY_ID["positions_are_absolute"]])
    judge_program(OnePosition(), Program((Prefill(1), Decode(2))), properties.ALL)


def test_a_campaign_draws_images_where_they_are_taken_and_only_there() -> None:
    profile = Profile("p", programs=60, operations=6, shrink=False)
    with_images = run_campaign("fake", [TARGET], properties.ALL, profile, 1)
    cover = with_images.tally.coverage
    assert with_images.verdict is Verdict.PASS and cover.with_images == cover.programs
    assert min(cover.trim_cut_image, cover.chunk_cut_image, cover.chunk_behind_image, cover.rolled_back_into_image) > 0
    text = run_campaign("fake", [FakeTarget()], properties.ALL, profile, 1).tally.coverage
    assert text.with_images == text.trim_cut_image == text.chunk_behind_image == 0


@pytest.mark.parametrize(
    ("state", "reached", "missed"),
    [
        ("with_images", (PROMPT,), (Prefill(3),)),
        ("trim_cut_image", (PROMPT, Decode(1), TrimFront(3)), (PROMPT, Decode(1), TrimFront(2))),
        ("trim_cut_image", (PROMPT, Chunk(3), TrimFront(1, keep=3)), (PROMPT, Chunk(3), TrimFront(4, keep=2))),
        (
            "chunk_after_cut_image",
            (PROMPT, Chunk(3), TrimFront(3), Chunk(2)),
            (PROMPT, Chunk(3), TrimFront(3), Decode(1)),
        ),
        (
            "chunk_after_cut_image",
            (PROMPT, Decode(1), TrimFront(3), Chunk(2)),
            (PROMPT, Chunk(3), TrimFront(6), Chunk(2)),
        ),
        ("with_videos", (Prefill(3, media=(Media(0, 1, 1, 2),)),), (PROMPT,)),
        ("chunk_cut_image", (PROMPT, Decode(1)), (replace(PROMPT, tokens=6), Decode(1))),
        ("chunk_behind_image", (PROMPT, Chunk(3), Chunk(2)), (PROMPT, Chunk(3), Decode(1))),
        ("chunk_behind_image", (PROMPT, Chunk(3), Chunk(2)), (PROMPT, Chunk(3), TrimFront(6), Chunk(2))),
        ("rolled_back_into_image", (PROMPT, Chunk(3), Rollback(2)), (PROMPT, Chunk(3), Rollback(4))),
        ("rolled_back_into_image", (PROMPT, Chunk(5), Rollback(5)), (PROMPT, Chunk(5), Rollback(2))),
    ],
)
def test_states_are_counted(state: str, reached: tuple[Any, ...], missed: tuple[Any, ...]) -> None:
    for operations, expected in ((reached, 1), (missed, 0)):
        tally = Tally()
        judge_program(TARGET, Program(operations), properties.ALL, tally).end()
        assert getattr(tally.coverage, state) == expected, operations


class Blind(FakeTarget):
    """Fails on a prompt that holds a video of at least two columns."""

    def open(self, owners: Any) -> Any:
        session = super().open(owners)
        forward = session.forward

        def failing(sequence: int, tokens: Any, prompt: Any = None) -> Any:
            seen = forward(sequence, tokens, prompt)
            wide = prompt is not None and prompt.video_grid_thw is not None and prompt.video_grid_thw[:, 2].max() >= 4
            return replace(seen, logits=None, error="E: too wide") if wide else seen

        session.forward = failing  # type: ignore[method-assign]
        return session


def test_images_are_made_fewer_smaller_and_earlier() -> None:
    target = Blind(images=FORMAT)
    media = (Media(1, 2, 2), Media(7, 2, 3, frames=3), Media(40, 1, 2))
    program = Program((Prefill(50, media=media), Chunk(3), TrimFront(3), Chunk(2)))
    complete = tuple(prop for prop in properties.ALL if prop.id == "every_operation_completes")
    with pytest.raises(Exception, match="too wide") as caught:
        judge_program(target, program, complete)
    smaller, again = reduce_finding(target, caught.value.finding, complete)  # type: ignore[attr-defined]
    assert again and str(smaller.program) == "Prefill(1, video 1x1x2@0)"


def test_an_image_that_does_not_matter_goes() -> None:
    target = FakeTarget(images=FORMAT, bugs=frozenset({"mask leaks"}))
    complete = tuple(prop for prop in properties.ALL if prop.id == "mask_shows_exactly_the_visible_set")
    with pytest.raises(Exception, match="shows the key") as caught:
        judge_program(target, Program((PROMPT, Chunk(4))), complete)
    smaller, _ = reduce_finding(target, caught.value.finding, complete)  # type: ignore[attr-defined]
    assert str(smaller.program) == "Prefill(2)"


def _unnumbered(append: Append) -> Append:
    """Numbers go on over the whole program."""
    return replace(append, numbers=range(0), held_numbers=())


def test_copies_take_the_rest_of_a_prompt_with_them() -> None:
    """Behind a Restore or a Fork the tokens of the prompt that are left come first, as in the sequence itself."""
    program = Program(
        (PROMPT, Snapshot(0), Chunk(4), Reset(), Prefill(2), Restore(0), Chunk(4), Restore(0), Fork(1), Chunk(4, 1)),
        ("pool", "pool"),
    )
    run = execute(TARGET, program)
    assert not run.stopped
    here, again, there = (run.steps[i].forwards[0] for i in (2, 6, 9))
    assert here.seen.tokens[:3] == again.seen.tokens[:3] == there.seen.tokens[:3] == (3, 3, 3)
    assert len({here.seen.tokens[3], again.seen.tokens[3], there.seen.tokens[3]}) > 1
    here, again, there = (_unnumbered(forward.append) for forward in (here, again, there))
    assert here == again == there  # the M-RoPE ids too
    assert run.steps[4].forwards[0].append.places == ((0, 0, 0), (1, 1, 1))  # text, and no image left of it
    assert run.steps[1].after.images == run.steps[5].after.images == (range(2, 6),)
    assert run.steps[3].after.images == ()


def test_a_second_prompt_with_images_is_another() -> None:
    run = execute(TARGET, Program((PROMPT, Reset(), PROMPT)))
    one, two = (run.steps[i].forwards[0] for i in (0, 2))
    assert one.prompt is not None and two.prompt is not None
    assert _unnumbered(one.append) == _unnumbered(two.append)
    assert one.prompt.tokens[2:] == two.prompt.tokens[2:] and one.prompt.tokens[:2] != two.prompt.tokens[:2]
    assert one.prompt.pixel_values is not None and two.prompt.pixel_values is not None
    assert (one.prompt.pixel_values != two.prompt.pixel_values).mean() > 0.9
    with pytest.raises(ValueError, match="not the first forward"):
        run.apply(PROMPT)


def test_a_life_with_images_is_lived_again_and_one_rolled_back_into_them_is_not() -> None:
    def decisive(*operations: Any) -> int:
        tally = Tally()
        judge_program(TARGET, Program((PROMPT, *operations)), [properties.BY_ID["chunks_equal_one_shot"]], tally)
        return tally.properties["chunks_equal_one_shot"].decisive_steps

    assert decisive(Chunk(5)) == 10  # five tokens behind keys, all at once and one by one
    assert decisive(Chunk(5), Rollback(1), Chunk(2)) == 12
    assert decisive(Chunk(1), Rollback(2), Chunk(2)) == 2  # of the life in front of the rollback


def test_rejected_drafts_behind_an_image_are_left_out_and_those_in_it_are_not() -> None:
    def decisive(*operations: Any) -> int:
        name, tally = "rollback_equals_never_speculated", Tally()
        judge_program(TARGET, Program((PROMPT, *operations)), [properties.BY_ID[name]], tally)
        return tally.properties[name].decisive_steps if name in tally.properties else 0

    assert decisive(Chunk(3), Verify(3, 1), Decode(2)) == 2
    assert decisive(Verify(3, 1), Decode(2)) == 0
