"""Images in prompts as values: what is refused, where their tokens stand, which ids follow, what a target is given."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.images import placed_for, prompt_input, token_ids
from harness.ledger import SequenceLedger
from harness.media import MAX_MEDIA, MAX_SIDE, Media, MediaError, check_media, media_from_json, places, runs
from harness.operations import MAX_TOKENS, Chunk, OperationError, Prefill, Program, operation_from_json
from harness.strategies import image_prefills
from harness.target import ImageFormat
from reference_models import mrope_ids

FORMAT = ImageFormat(image_token=3, video_token=7, merge=2, patch_pixels=5, frames_apart=True)
IN_ONE_RUN = ImageFormat(image_token=3, video_token=7, merge=2, patch_pixels=5, frames_apart=False)


def test_it_reads_as_one_would_say_it() -> None:
    prefill = Prefill(12, media=(Media(1, 2, 3), Media(9, 1, 2, frames=2)))
    assert prefill.text() == "Prefill(12, image 2x3@1, video 2x1x2@9)"
    assert str(Program((prefill, Chunk(2)))) == "Prefill(12, image 2x3@1, video 2x1x2@9) ; Chunk(2)"
    assert Prefill(12).to_json() == {"op": "prefill", "tokens": 12, "sequence": 0}
    media = [{"at": 1, "rows": 2, "columns": 3, "frames": 0}, {"at": 9, "rows": 1, "columns": 2, "frames": 2}]
    assert prefill.to_json()["media"] == media


@settings(max_examples=60, deadline=None)
@given(image_prefills(sequence=1))
def test_json_gives_the_same_prompt_back(prefill: Prefill) -> None:
    text = json.dumps(prefill.to_json())
    again = operation_from_json(json.loads(text))
    assert again == prefill and hash(again) == hash(prefill) and json.dumps(again.to_json()) == text


@pytest.mark.parametrize("name", ["at", "rows", "columns", "frames"])
@pytest.mark.parametrize("value", [True, 1.0, "1", None, [], -1, MAX_SIDE + 1, 10**4000])
def test_a_size_that_is_none_is_refused(name: str, value: object) -> None:
    data = {"at": 1, "rows": 1, "columns": 1, "frames": 0, name: value}
    with pytest.raises(OperationError) as caught:
        operation_from_json({"op": "prefill", "tokens": 4, "media": [data]})
    message = str(caught.value)
    assert message.startswith("Prefill: ") and f"{name} must" in message and "\n" not in message and len(message) < 200


@pytest.mark.parametrize(
    "data",
    [None, {}, "x", 3, [None], [[]], [{}], [{"at": 1}], [{"at": 1, "rows": 1, "columns": 1, "frames": 0, "x": 1}]],
)
def test_what_is_no_list_of_images_is_refused(data: object) -> None:
    with pytest.raises(OperationError, match="Prefill: media must") as caught:
        operation_from_json({"op": "prefill", "tokens": 4, "media": data})
    assert "\n" not in str(caught.value)


def test_images_follow_one_another_with_a_token_between() -> None:
    check_media((Media(0, 1, 2), Media(3, 1, 1)), MAX_TOKENS)
    with pytest.raises(MediaError, match="starts before position 3"):
        check_media((Media(0, 1, 2), Media(2, 1, 1)), MAX_TOKENS)
    with pytest.raises(OperationError, match="starts before position 4"):  # two frames, a token behind each
        Prefill(9, media=(Media(0, 1, 1, frames=2), Media(3, 1, 1), Media(4, 1, 1)))
    with pytest.raises(MediaError, match=f"ends at position {MAX_TOKENS} at the latest"):
        check_media((Media(0, 1000, 1000),), MAX_TOKENS)  # a million tokens: refused before anything is laid out
    with pytest.raises(MediaError, match=f"at most {MAX_MEDIA}"):
        check_media([Media(2 * n, 1, 1) for n in range(MAX_MEDIA + 1)], MAX_TOKENS)
    with pytest.raises(MediaError, match=f"at most {MAX_MEDIA}"):
        media_from_json([{}] * (MAX_MEDIA + 1))


def test_images_that_need_absurd_memory_are_refused_before_anything_is_made() -> None:
    wide = dataclasses.replace(FORMAT, merge=8, patch_pixels=1 << 14)
    with pytest.raises(MediaError, match=r"2,123,366,400 numbers and 129,600 patches in the largest"):
        prompt_input(0, (Media(0, 45, 45),), 1, 64, wide)
    with pytest.raises(MediaError, match="2,304 patches in the largest; at most 4,194,304 and 2,048"):
        prompt_input(0, (Media(0, 24, 24),), 1, 64, FORMAT)  # every patch would see every other one
    many = tuple(Prefill(1, index, media=(Media(0, 40, 45),)) for index in range(5))
    with pytest.raises(OperationError, match="processes at most 8192 tokens, this one 9005"):
        Program(many, ("pool",) * 5)


def test_only_the_first_forward_of_a_sequence_reads_images() -> None:
    images = Prefill(4, media=(Media(0, 1, 1),))
    assert Program((images, Prefill(2, 1), Chunk(1)), ("pool", "pool")).has_media
    assert not Program((Prefill(3),)).has_media
    for first in (Prefill(2), images, Chunk(1)):
        with pytest.raises(OperationError, match="not the first forward of its sequence"):
            Program((first, images))


@settings(max_examples=150, deadline=None)
@given(image_prefills(), st.booleans())
def test_two_halves_find_the_same_ids(prefill: Prefill, apart: bool) -> None:
    """The harness's own arithmetic against that of the reference models, from the tokens and grids of the prompt."""
    images = FORMAT if apart else IN_ONE_RUN
    prompt = prompt_input(0, prefill.media, prefill.tokens, 64, images)
    grids = [
        [] if g is None else [tuple(map(int, row)) for row in g] for g in (prompt.image_grid_thw, prompt.video_grid_thw)
    ]
    ids, delta = mrope_ids.position_ids(
        prompt.tokens, grids[0], grids[1], mrope_ids.Placeholders(3, 7, images.merge, apart)
    )
    mine = places(prefill.media, apart, len(prompt.tokens))
    assert mine == list(map(tuple, np.array(ids)[:, 0].T.tolist()))
    ledger = SequenceLedger(prompt=list(mine))
    ledger.append(len(mine))
    assert ledger.append(1).places == ((len(mine) + delta,) * 3,)


def test_ids_by_hand() -> None:
    """Two tokens, a 2x2 image, text; the image uses two ids for four tokens."""
    image = [(2, 2, 2), (2, 2, 3), (2, 3, 2), (2, 3, 3)]
    assert places((Media(2, 2, 2),), True, 8) == [(0, 0, 0), (1, 1, 1), *image, (4, 4, 4), (5, 5, 5)]
    two_frames = (Media(0, 1, 2, frames=2),)
    assert places(two_frames, False, 5) == [(0, 0, 0), (0, 0, 1), (1, 0, 0), (1, 0, 1), (2, 2, 2)]
    apart = [(0, 0, 0), (0, 0, 1), (2, 2, 2), (3, 3, 3), (3, 3, 4), (5, 5, 5)]
    assert places(two_frames, True, 6) == apart
    assert places(two_frames, True, 4) == apart[:4]


def test_a_rollback_into_an_image_lets_text_go_on_behind_what_is_left() -> None:
    ledger = SequenceLedger(prompt=places((Media(1, 2, 2),), True, 7))
    ledger.append(6)  # one token, the image, one token
    assert ledger.append(1).places == ((4, 4, 4),)
    ledger.trim_front(3)
    assert ledger.append(1).places == ((5, 5, 5),)  # a front trim moves no id
    ledger.rollback(5)  # of eight tokens three are left: one of text and two of the image
    assert ledger.append(2).places == ((3, 3, 3), (4, 4, 4))
    emptied = SequenceLedger(prompt=places((Media(0, 2, 2),), True, 4))
    emptied.append(3)
    emptied.rollback(3)
    assert emptied.prompt == [] and emptied.append(2).places == ((0, 0, 0), (1, 1, 1))


@settings(max_examples=60, deadline=None)
@given(image_prefills(sequence=1), st.booleans())
def test_a_target_is_given_what_the_operation_says(prefill: Prefill, apart: bool) -> None:
    images = FORMAT if apart else IN_ONE_RUN
    prompt = prompt_input(1, prefill.media, prefill.tokens, 11, images)
    placed = runs(prefill.media, apart)
    assert len(prompt.tokens) == max(prefill.tokens, placed[-1].positions.stop)
    for video, token in ((False, 3), (True, 7)):
        stand = [p for run in placed if run.video is video for p in run.positions]
        assert [p for p, each in enumerate(prompt.tokens) if each == token] == stand
    for pixels, grids, video in (
        (prompt.pixel_values, prompt.image_grid_thw, False),
        (prompt.pixel_values_videos, prompt.video_grid_thw, True),
    ):
        media = [each for each in prefill.media if bool(each.frames) is video]
        if not media:
            assert pixels is None and grids is None
            continue
        assert pixels is not None and grids is not None and pixels.dtype == np.float32
        assert grids.tolist() == [[max(m.frames, 1), 2 * m.rows, 2 * m.columns] for m in media]
        assert pixels.shape == (int(grids.prod(axis=1).sum()), 5)
        assert np.abs(pixels).max() <= 1


def test_pixels_are_the_same_everywhere_and_differ_between_images() -> None:
    """Pinned values: a trace replays with the same pixels on every machine and release."""

    def pixels(sequence: int, *media: Media) -> Any:
        return prompt_input(sequence, media, 1, 11, FORMAT).pixel_values

    first = pixels(0, Media(1, 1, 1))
    assert [round(float(value), 6) for value in first[0]] == PINNED
    assert np.array_equal(first, pixels(0, Media(1, 1, 1)))
    assert not np.array_equal(first, pixels(0, Media(2, 1, 1))) and not np.array_equal(first, pixels(1, Media(1, 1, 1)))
    many = pixels(0, Media(0, 20, 20))
    assert abs(many.mean()) < 0.02 and abs(many.std() - 3**-0.5) < 0.02


PINNED = [-0.384756, -0.742001, -0.330029, -0.252619, -0.403539]


@given(st.integers(0, 3), st.integers(0, 500), st.integers(1, 40), st.integers(3, 70))
def test_text_never_stands_for_an_image(sequence: int, start: int, count: int, vocab: int) -> None:
    images = ImageFormat(vocab - 1, 1, 2, 5, True)
    ids = token_ids(sequence, count, start, vocab, images)
    assert all(0 <= each < vocab and each not in (vocab - 1, 1) for each in ids)


@pytest.mark.parametrize("apart", [False, True])
def test_a_target_may_want_a_token_in_front_of_every_grid(apart: bool) -> None:
    images = ImageFormat(3, 7, 2, 5, apart, start_token=5)
    assert placed_for((Media(0, 1, 2), Media(3, 1, 1)), images) == (Media(1, 1, 2), Media(4, 1, 1))
    assert placed_for((Media(1, 1, 2),), images) == (Media(1, 1, 2),) and placed_for((), images) == ()
    assert placed_for((Media(0, 1, 2),), FORMAT) == (Media(0, 1, 2),)
    media = placed_for((Media(0, 1, 2), Media(3, 2, 1, 2)), images)
    tokens = prompt_input(0, media, 30, 40, images).tokens
    starts = {run.start - 1 for run in runs(media, apart)}
    assert {at for at, token in enumerate(tokens) if token == 5} == starts and len(starts) == (3 if apart else 2)
