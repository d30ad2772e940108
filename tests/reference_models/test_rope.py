"""Rotations against plain loops, scalings against the published formulas."""

import math

import mlx.core as mx
import numpy as np
import pytest

from reference_models import rope

RNG = np.random.default_rng(1)


def turned(x: np.ndarray, position: int, freqs: np.ndarray, interleaved: bool) -> np.ndarray:
    """One head ``[D]`` turned pair by pair."""
    out, half = x.copy(), len(x) // 2
    for i, freq in enumerate(freqs):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        angle = position / freq
        out[a] = x[a] * math.cos(angle) - x[b] * math.sin(angle)
        out[b] = x[b] * math.cos(angle) + x[a] * math.sin(angle)
    return out


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotate_turns_every_pair_by_the_absolute_position(interleaved: bool) -> None:
    x = RNG.standard_normal((2, 3, 4, 8)).astype(np.float32)
    freqs = rope.standard_freqs(8, 100.0)
    out = np.array(rope.rotate(mx.array(x), 5, freqs, interleaved))
    for b, h, j in np.ndindex(2, 3, 4):
        expected = turned(x[b, h, j].astype(float), 5 + j, np.array(freqs), interleaved)
        np.testing.assert_allclose(out[b, h, j], expected, atol=1e-5)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("batch", [1, 2, 4])  # also as many sequences as tokens or heads
def test_every_sequence_of_a_batch_turns_from_its_own_offset(interleaved: bool, batch: int) -> None:
    x = mx.array(RNG.standard_normal((batch, 2, 4, 8)).astype(np.float32))
    freqs, offsets = rope.standard_freqs(8, 100.0), [5, 0, 1000, 7][:batch]
    column = mx.array([[offset] for offset in offsets], dtype=mx.int32)
    together = rope.rotate(x, column, freqs, interleaved)
    alone = [rope.rotate(x[row : row + 1], offset, freqs, interleaved) for row, offset in enumerate(offsets)]
    assert mx.array_equal(together, mx.concatenate(alone)).item()
    assert rope.positions_from(column, 3).tolist() == [[offset, offset + 1, offset + 2] for offset in offsets]


def test_positions_given_token_by_token_stay_what_they_are() -> None:
    given = mx.array([4, 9, 9], dtype=mx.int32)
    assert rope.positions_from(given, 3).tolist() == [4, 9, 9] and rope.positions_from(4, 3).tolist() == [4, 5, 6]


def test_text_ids_of_a_batch_run_from_the_offset_and_delta_of_every_row() -> None:
    ids = rope.text_position_ids(mx.array([[3], [0]], dtype=mx.int32), mx.array([[-1], [2]], dtype=mx.int32), 2, 3)
    assert ids.dtype == mx.int32 and ids.tolist() == [[[2, 3, 4], [2, 3, 4]]] * 3
    ids = rope.text_position_ids(mx.array([[3], [0]], dtype=mx.int32), 0, 2, 2)
    assert ids.tolist() == [[[3, 4], [0, 1]]] * 3


def test_llama3_keeps_short_waves_slows_long_ones_and_blends_between() -> None:
    scaling = rope.Llama3Scaling(factor=4.0, original_max_position_embeddings=32)
    plain = np.array(rope.standard_freqs(8, 100.0))
    ratio = np.array(rope.llama3_freqs(8, 100.0, scaling)) / plain
    turns = 32 / (2 * math.pi * plain)
    assert turns[0] > 4 and 1 < turns[1] < 4 and (turns[2:] < 1).all()
    smooth = (turns[1] - 1) / 3
    np.testing.assert_allclose(ratio, [1, 1 / ((1 - smooth) / 4 + smooth), 4, 4], rtol=1e-6)


def test_yarn_leads_from_unscaled_to_slowed() -> None:
    published = rope.YarnScaling(factor=128.0, original_max_position_embeddings=8192)
    ratio = np.array(rope.yarn_freqs(64, published)) / np.array(rope.standard_freqs(64, 10000.0))
    assert ratio[0] == pytest.approx(1) and ratio[-1] == pytest.approx(128)
    assert (np.diff(ratio) >= -1e-3).all() and len(np.unique(ratio.round(3))) > 8
    none = rope.YarnScaling(factor=1.0, original_max_position_embeddings=8192)
    np.testing.assert_allclose(rope.yarn_freqs(8, none), rope.standard_freqs(8, 10000.0), rtol=1e-6)


def test_yarn_factors_follow_mscale() -> None:
    def scaling(mscale: float, all_dim: float, factor: float = math.e) -> rope.YarnScaling:
        return rope.YarnScaling(factor, 8, mscale=mscale, mscale_all_dim=all_dim)

    assert rope.yarn_attention_factor(scaling(1, 1)) == 1
    assert rope.yarn_attention_factor(scaling(2, 1)) == pytest.approx(1.2 / 1.1)
    assert rope.yarn_attention_factor(scaling(2, 0)) == pytest.approx(1.1)
    assert rope.yarn_softmax_factor(scaling(1, 1)) == pytest.approx(1.21)
    assert rope.yarn_softmax_factor(scaling(1, 0)) == 1
    assert rope.yarn_softmax_factor(scaling(1, 1, factor=1.0)) == 1


def test_query_scale_steps_at_every_multiple_of_the_original_length() -> None:
    scale = np.array(rope.absolute_query_scale(mx.array([0, 7, 8, 15, 16]), 0.1, 8))
    np.testing.assert_allclose(scale, 1 + 0.1 * np.log([1, 1, 2, 2, 3]), rtol=1e-6)
    assert rope.absolute_query_scale(mx.zeros((2, 3), dtype=mx.int32), 0.1, 8).shape == (2, 3)


def test_text_ids_run_from_offset_plus_delta_on_all_axes() -> None:
    ids = rope.text_position_ids(7, -2, batch=2, length=3)
    np.testing.assert_array_equal(ids, np.broadcast_to([5, 6, 7], (3, 2, 3)))


@pytest.mark.parametrize(
    ("sections", "interleaved", "axes"),
    [
        ((2, 1, 1), False, "TTHW"),
        ((2, 3, 3), False, "TTHHHWWW"),
        ((2, 1, 1), True, "THWT"),
        ((4, 2, 2), True, "THWTHWTT"),
        ((24, 20, 20), True, "THW" * 20 + "TTTT"),
    ],
)
def test_each_pair_turns_by_the_axis_of_its_section(
    sections: tuple[int, int, int], interleaved: bool, axes: str
) -> None:
    pairs = len(axes)
    assert "".join("THW"[axis] for axis in rope.mrope_axes(sections, interleaved)) == axes
    ids = RNG.integers(0, 50, (3, 2, 4))
    inv_freq = 1 / np.array(rope.standard_freqs(2 * pairs, 100.0))
    cos, sin = rope.mrope_angles(mx.array(ids), mx.array(inv_freq), sections, interleaved)
    angles = np.stack([ids["THW".index(axis)] * inv_freq[i] for i, axis in enumerate(axes)], axis=-1)
    np.testing.assert_allclose(cos, np.cos(angles), atol=1e-5)
    np.testing.assert_allclose(sin, np.sin(angles), atol=1e-5)


def test_mrope_of_equal_ids_is_plain_rope() -> None:
    q, k = (mx.array(RNG.standard_normal((2, heads, 3, 8)).astype(np.float32)) for heads in (4, 2))
    freqs = rope.standard_freqs(8, 100.0)
    angles = rope.mrope_angles(rope.text_position_ids(9, 0, 2, 3), 1 / freqs, (2, 1, 1), True)
    for out, x in zip(rope.apply_mrope(q, k, *angles), (q, k), strict=True):
        np.testing.assert_allclose(out, rope.rotate(x, 9, freqs, False), atol=1e-5)


def test_mrope_needs_three_axes_of_ids() -> None:
    with pytest.raises(ValueError, match=r"\[3, B, L\]"):
        rope.mrope_angles(mx.zeros((2, 5)), mx.ones((4,)), (2, 1, 1), True)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: rope.MRopeScaling((1, 1, 2), mrope_interleaved=True), "cannot be interleaved"),
        (lambda: rope.MRopeScaling((1, -1, 2)), "three counts"),
        (lambda: rope.MRopeScaling((1, 1)), "three counts"),  # type: ignore[arg-type]
        (lambda: rope.Llama3Scaling(0.5, 8), "factor must be at least 1"),
        (
            lambda: rope.Llama3Scaling(2, 8, low_freq_factor=4, high_freq_factor=4),
            "must be positive and below high_freq_factor",
        ),
        (lambda: rope.Llama3Scaling(2, 8, rope_type="yarn"), "rope_type must be"),
        (lambda: rope.YarnScaling(4, 0), "must be positive"),
        (lambda: rope.YarnScaling(4, 8, beta_fast=1, beta_slow=2), "beta_fast >= beta_slow"),
        (lambda: rope.YarnScaling(4, 8, rope_theta=1), "rope_theta must exceed 1"),
        (lambda: rope.YarnScaling(float("inf"), 8), "factor must be above 0 and fit float32"),
        (lambda: rope.YarnScaling(4, 8, rope_theta=float("inf")), "rope_theta must be above 0 and fit float32"),
        (lambda: rope.YarnScaling(4, 8, beta_fast=float("inf")), "beta_fast must be above 0 and fit float32"),
        (lambda: rope.YarnScaling(4, 8, beta_slow=1e-300), "beta_slow must be above 0 and fit float32"),
        (lambda: rope.YarnScaling(math.e**10, 8, mscale_all_dim=-1.0), "mscale_all_dim must be at least 0"),
        (lambda: rope.YarnScaling(4, 8, mscale=float("nan")), "mscale must be at least 0"),
        (lambda: rope.Llama3Scaling(float("nan"), 8), "factor must be above 0 and fit float32"),
        (lambda: rope.Llama3Scaling(2, 8, high_freq_factor=float("inf")), "high_freq_factor must be above 0"),
    ],
)
def test_scalings_that_do_not_fit_are_refused(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]
