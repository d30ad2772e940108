"""The towers: order of patches, rotary angles, position table, mergers, frames that do not see each other."""

import dataclasses
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from reference_models import qwen2_vision, qwen2_vl, qwen3_vision, qwen3_vl, vision
from reference_models.weights import randomise

TOWERS = {"qwen2": (qwen2_vision, qwen2_vision.tiny()), "qwen3": (qwen3_vision, qwen3_vision.tiny())}


@pytest.fixture(params=TOWERS)
def tower(request: pytest.FixtureRequest) -> Any:
    module, config = TOWERS[request.param]
    built = module.Tower(config)
    randomise(built, 2)
    return built


def pixels(tower: Any, grids: list[vision.Grid], seed: int = 0) -> mx.array:
    count = sum(t * h * w for t, h, w in grids)
    return mx.random.normal((count, tower.config.patch_pixels), key=mx.random.key(seed))


def rows(features: vision.Features) -> list[np.ndarray]:
    return [np.array(each) for each in (features.merged, *features.deepstack)]


def test_patches_come_in_merge_blocks() -> None:
    assert vision.patch_coordinates((3, 2, 4), 2) == [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3), (1, 2), (1, 3)]
    assert vision.patch_coordinates((1, 2, 2), 1) == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_half_of_the_pairs_turn_by_the_row_and_half_by_the_column() -> None:
    cos, sin = vision.rotary_angles([(2, 2, 4)], merge=2, head_dim=8)
    angles = np.arctan2(np.array(sin), np.array(cos))[0]
    speeds = np.array([1.0, 0.01])  # 10000 ** -(0 / 4) and 10000 ** -(2 / 4)
    frame = [[*(row * speeds), *(column * speeds)] for row, column in vision.patch_coordinates((2, 2, 4), 2)]
    np.testing.assert_allclose(angles, frame * 2, atol=1e-6)


def test_the_projection_is_the_convolution() -> None:
    patch = vision.PatchProjection(3, channels=2, temporal=2, patch=2, bias=True)
    randomise(patch, 1)
    x = mx.random.normal((5, 2 * 2 * 2 * 2), key=mx.random.key(4))
    volumes = x.reshape(5, 2, 2, 2, 2).transpose(0, 2, 3, 4, 1)  # MLX convolves with the channels last
    expected = mx.conv3d(volumes, patch.weight.transpose(0, 2, 3, 4, 1), stride=2).reshape(5, 3) + patch.bias
    np.testing.assert_allclose(np.array(patch(x)), np.array(expected), atol=1e-5)


@pytest.mark.parametrize(
    ("size", "side", "taps"),
    [
        (4, 4, [(0, 1, 0), (1, 2, 0), (2, 3, 0), (3, 3, 0)]),
        (3, 2, [(0, 1, 0), (0, 1, 0.5), (1, 1, 0)]),
        (2, 5, [(0, 1, 0), (4, 4, 0)]),
        (1, 5, [(0, 1, 0)]),
        (3, 1, [(0, 0, 0)] * 3),
    ],
)
def test_a_grid_is_stretched_over_the_table_corner_on_corner(size: int, side: int, taps: list[Any]) -> None:
    assert qwen3_vision.axis_taps(size, side) == taps


def test_a_plane_survives_interpolation_and_comes_out_in_merge_blocks() -> None:
    """Bilinear weights are exact on a plane, so value = row + 10 * column tells where a patch stands on the table."""
    side, grid = 5, (2, 4, 6)
    table = np.array([[row + 10 * column for column in range(side)] for row in range(side)]).reshape(-1)
    indexes, weights = (np.array(each) for each in qwen3_vision.table_taps([grid], side, merge=2))
    assert indexes.shape == weights.shape == (48, 4)
    np.testing.assert_allclose(weights.sum(axis=1), 1, atol=1e-6)
    expected = [row * 4 / 3 + 10 * column * 4 / 5 for row, column in vision.patch_coordinates(grid, 2)] * 2
    np.testing.assert_allclose((table[indexes] * weights).sum(axis=1), expected, atol=1e-4)


def test_each_token_comes_from_its_own_merge_block(tower: Any) -> None:
    """With attention silenced, pixels of one block move that token alone."""
    for block in tower.blocks:
        block.attn.proj.weight = mx.zeros_like(block.attn.proj.weight)
    grid = (1, 4, 6)
    x = pixels(tower, [grid])
    changed = mx.array(x)
    changed[9] = changed[9] + 1  # third block of four patches
    for before, after in zip(rows(tower(x, (grid,))), rows(tower(changed, (grid,))), strict=True):
        assert before.shape == (6, 32)
        assert np.flatnonzero((before != after).any(axis=1)).tolist() == [2]


def test_no_frame_sees_another(tower: Any) -> None:
    grids = ((1, 2, 4), (3, 4, 2), (1, 2, 2))
    x = pixels(tower, list(grids))
    whole = rows(tower(x, grids))
    alone, start = [], 0
    for t, h, w in grids:
        for _ in range(t):
            alone.append(rows(tower(x[start : start + h * w], ((1, h, w),))))
            start += h * w
    for joined, pieces in zip(whole, zip(*alone, strict=True), strict=True):
        np.testing.assert_allclose(joined, np.concatenate(pieces), atol=2e-5)


def test_patches_of_a_frame_do_see_each_other(tower: Any) -> None:
    x = pixels(tower, [(1, 4, 4)])
    changed = mx.array(x)
    changed[0] = changed[0] + 1
    before, after = (rows(tower(each, ((1, 4, 4),)))[0] for each in (x, changed))
    assert (np.abs(before - after).max(axis=1) > 1e-3).all()


def test_deepstack_has_one_feature_for_each_index_in_the_order_of_the_blocks() -> None:
    """The n-th merger belongs to the n-th index; the features come in block order also when the indexes do not."""
    features = []
    for indexes, mergers in (((0, 2), (0, 1)), ((2, 0), (1, 0))):
        tower = qwen3_vision.Tower(qwen3_vision.tiny(deepstack_visual_indexes=indexes))
        randomise(tower, 2)
        tower.deepstack_merger_list = [tower.deepstack_merger_list[number] for number in mergers]
        features.append(rows(tower(pixels(tower, [(1, 2, 4)]), ((1, 2, 4),))))
    assert [each.shape for each in features[0]] == [(2, 32)] * 3
    for one, other in zip(*features, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("value", [mx.array([[1, 4, 2]]), np.array([[1, 4, 2]]), [[1, 4, 2]], ((1, 4, 2),)])
def test_grids_come_as_arrays_or_lists(value: Any) -> None:
    assert vision.as_grids(value, 2) == ((1, 4, 2),)


@pytest.mark.parametrize("value", [[[1, 4]], [1, 4, 2], mx.array(3), [[0, 4, 2]], [[1, 3, 2]], [[1, 2, 5]]])
def test_grids_that_cannot_be_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="grid"):
        vision.as_grids(value, 2)


@pytest.mark.parametrize("shape", [(7, 96), (8, 95), (8, 96, 1)])
def test_pixels_that_do_not_fit_the_grids_are_refused(tower: Any, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"pixel_values must be \[8, 96\] for the grids \[\(1, 2, 4\)\], not"):
        tower(mx.zeros(shape), ((1, 2, 4),))


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (qwen2_vision, {"embed_dim": 20}, "multiple of 4"),
    (qwen2_vision, {"num_heads": 0}, "num_heads"),
    (qwen2_vision, {"hidden_act": "relu"}, "relu"),
    (qwen2_vision, {"depth": 0}, "depth"),
    (qwen3_vision, {"num_position_embeddings": 15}, "square"),
    (qwen3_vision, {"deepstack_visual_indexes": (3,)}, "3 blocks|tower with 3"),
    (qwen3_vision, {"deepstack_visual_indexes": (0, 0)}, "different blocks"),
    (qwen3_vision, {"hidden_size": 4}, "multiple of 4"),
]


@pytest.mark.parametrize(("module", "change", "named"), REFUSED)
def test_a_tower_that_does_not_fit_is_refused(module: Any, change: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        module.tiny(**change)


@pytest.mark.parametrize(
    ("family", "change", "named"),
    [
        (qwen2_vl, {"vision": qwen2_vision.tiny(hidden_size=16)}, r"vision hidden_size \(16\)"),
        (qwen2_vl, {"image_token_id": 64}, "image_token_id"),
        (qwen3_vl, {"vision": qwen3_vision.tiny(out_hidden_size=16)}, r"vision out_hidden_size \(16\)"),
        (qwen3_vl, {"num_hidden_layers": 1}, "2 features, the text has 1 layers"),
        (qwen3_vl, {"video_token_id": 61}, "both 61"),
    ],
)
def test_a_tower_that_does_not_fit_the_text_is_refused(family: Any, change: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        dataclasses.replace(family.TINY["vision"], **change)
