"""Position ids of prompts with images and videos, worked out by hand."""

import numpy as np
import pytest

from reference_models import mrope_ids
from reference_models.mrope_ids import Placeholders, position_ids

TEXT, IMAGE, VIDEO = 1, 61, 62
RUN = Placeholders(IMAGE, VIDEO, merge=2, frames_apart=False)
APART = Placeholders(IMAGE, VIDEO, merge=2, frames_apart=True)


def ids(tokens: list[int], images=(), videos=(), placeholders: Placeholders = RUN) -> tuple[list[list[int]], int]:  # type: ignore[no-untyped-def]
    array, delta = position_ids(tokens, images, videos, placeholders)
    assert array.shape == (3, 1, len(tokens)) and np.array(array).dtype == np.int32
    return array[:, 0].tolist(), delta  # type: ignore[return-value]


def test_text_counts_up_all_three_ids() -> None:
    assert ids([TEXT] * 4) == ([[0, 1, 2, 3]] * 3, 0)


def test_an_image_takes_rows_and_columns_and_saves_ids() -> None:
    assert ids([TEXT, *[IMAGE] * 6, TEXT, TEXT], [(1, 4, 6)]) == (
        [[0, 1, 1, 1, 1, 1, 1, 4, 5], [0, 1, 1, 1, 2, 2, 2, 4, 5], [0, 1, 2, 3, 1, 2, 3, 4, 5]],
        -3,
    )


def test_a_prompt_may_start_and_end_in_an_image() -> None:
    assert ids([IMAGE, IMAGE, TEXT, IMAGE], [(1, 2, 4), (1, 2, 2)]) == ([[0, 0, 2, 3], [0, 0, 2, 3], [0, 1, 2, 3]], 0)


def test_images_and_videos_take_their_grids_in_their_own_order() -> None:
    tokens = [IMAGE, VIDEO, VIDEO, TEXT, IMAGE, IMAGE]
    assert ids(tokens, [(1, 2, 2), (1, 4, 2)], [(2, 2, 2)])[0] == [
        [0, 1, 2, 3, 4, 4],
        [0, 1, 1, 3, 4, 5],
        [0, 1, 1, 3, 4, 4],
    ]


def test_the_frames_of_one_run_count_up_t_and_text_follows_above_them() -> None:
    """Three frames of one token each: the text behind stands above the last frame, though each is but one row high."""
    assert ids([TEXT, *[VIDEO] * 3, TEXT], videos=[(3, 2, 2)]) == (
        [[0, 1, 2, 3, 4], [0, 1, 1, 1, 4], [0, 1, 1, 1, 4]],
        0,
    )


def test_frames_apart_are_images_between_timestamps() -> None:
    tokens = [TEXT, VIDEO, VIDEO, TEXT, TEXT, VIDEO, VIDEO]
    assert ids(tokens, videos=[(2, 2, 4)], placeholders=APART) == (
        [[0, 1, 1, 3, 4, 5, 5], [0, 1, 1, 3, 4, 5, 5], [0, 1, 2, 3, 4, 5, 6]],
        0,
    )


def test_without_merging_every_patch_is_a_token() -> None:
    unmerged = Placeholders(IMAGE, VIDEO, merge=1, frames_apart=False)
    assert ids([IMAGE] * 6, [(1, 3, 2)], placeholders=unmerged) == (
        [[0] * 6, [0, 0, 1, 1, 2, 2], [0, 1, 0, 1, 0, 1]],
        -3,
    )


@pytest.mark.parametrize(
    ("tokens", "images", "videos", "placeholders", "says"),
    [
        ([], [], [], RUN, "at least one token"),
        ([TEXT], [(1, 2, 2)], [], RUN, r"0 runs of image tokens \(id 61\).* 1 image grids"),
        ([TEXT, IMAGE], [], [], RUN, "1 runs of image tokens .* 0 image grids"),
        ([IMAGE, IMAGE], [(1, 2, 2), (1, 2, 2)], [], RUN, "1 runs of image .* 2 image grids; two runs need a token"),
        ([TEXT, IMAGE, IMAGE], [(1, 4, 4)], [], RUN, "image 0 has grid .* makes 4 tokens, .* position 1 has 2"),
        ([IMAGE, TEXT, IMAGE], [(1, 2, 2), (1, 2, 4)], [], RUN, "image 1 .* makes 2 tokens, .* position 2 has 1"),
        ([VIDEO, VIDEO], [], [(2, 2, 2)], APART, r"1 runs of video frame tokens \(id 62\).* 2 video frame grids"),
        ([VIDEO, TEXT, VIDEO], [], [(2, 2, 2)], RUN, "2 runs of video tokens .* 1 video grids"),
    ],
)
def test_tokens_and_grids_that_do_not_fit_are_refused(tokens, images, videos, placeholders, says) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=says):
        position_ids(tokens, images, videos, placeholders)


def test_places_go_frame_by_frame_row_by_row() -> None:
    assert mrope_ids.grid_places((2, 2, 4), 2, 5) == [(5, 5, 5), (5, 5, 6), (6, 5, 5), (6, 5, 6)]
