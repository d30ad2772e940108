"""Comparison as bytes, and what logits may differ by."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from harness.comparison import allowed, bytes_of, compare_bytes, distance, recut_tolerance

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.int32, np.bool_])
def test_equal_arrays_are_equal_in_every_layout(dtype: type) -> None:
    left = np.arange(12).reshape(3, 4).astype(dtype)
    for right in (left.copy(), np.asfortranarray(left), np.repeat(left, 2, 1)[:, ::2]):
        found = compare_bytes(left, right)
        assert found.same_bytes and found.largest == 0.0 and found.index is None
        assert bytes_of(right) == left.tobytes()


def test_the_first_difference_and_the_largest() -> None:
    left = np.zeros((2, 3), np.float32)
    right = left.copy()
    right[0, 2], right[1, 1] = 1.5, -4.0
    found = compare_bytes(left, right)
    assert (found.same_bytes, found.index, found.left, found.right, found.largest) == (False, (0, 2), 0.0, 1.5, 4.0)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_one_flipped_bit_is_found_where_it_is(data: st.DataObject) -> None:
    shape = data.draw(array_shapes(min_dims=1, max_dims=3, max_side=4))
    left = data.draw(arrays(np.float32, shape, elements=st.floats(width=32)))
    flat = left.copy().reshape(-1)
    at, bit = data.draw(st.integers(0, flat.size - 1)), data.draw(st.integers(0, 31))
    flat.view(np.uint32)[at] ^= np.uint32(1 << bit)
    found = compare_bytes(left, flat.reshape(shape))
    assert not found.same_bytes
    assert found.index == tuple(int(i) for i in np.unravel_index(at, shape))


def test_negative_zero_differs_and_a_nan_equals_itself() -> None:
    zero = np.array([0.0], np.float32)
    found = compare_bytes(zero, -zero)
    assert not found.same_bytes and found.largest == 0.0 and found.index == (0,)
    nan = np.array([NAN, 1.0], np.float32)
    assert compare_bytes(nan, nan.copy()).same_bytes


def test_a_nan_against_a_number_has_no_largest_difference() -> None:
    found = compare_bytes(np.array([1.0, NAN]), np.array([1.0, 2.0]))
    assert found.index == (1,) and math.isnan(found.largest)


def test_infinities_on_both_sides_do_not_hide_the_difference() -> None:
    """A masked vocabulary has -inf in both; the difference elsewhere is what a reader needs."""
    found = compare_bytes(np.array([-INF, 1.0]), np.array([-INF, 3.0]))
    assert found.index == (1,) and found.largest == 2.0
    assert compare_bytes(np.array([INF]), np.array([1.0])).largest == INF


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (np.zeros(3), np.zeros(4)),
        (np.zeros((1, 3)), np.zeros(3)),
        (np.zeros(3, np.float32), np.zeros(3, np.float64)),
        (np.zeros(0), np.zeros((0, 2))),
    ],
)
def test_what_cannot_be_compared_is_a_misuse(left: np.ndarray, right: np.ndarray) -> None:
    with pytest.raises(ValueError, match="cannot compare"):
        compare_bytes(left, right)


def test_scalars_and_empty_arrays() -> None:
    found = compare_bytes(np.array(1.0), np.array(2.5))
    assert (found.index, found.largest) == ((), 1.5)
    assert compare_bytes(np.zeros((0, 4)), np.ones((0, 4))).same_bytes


def test_what_a_token_may_differ_by() -> None:
    positions = np.array([0, 3000, 0, 0, 0, 0])
    choice = np.array([1, 1, 1e-5, 1e-3, 1e-3, np.inf])
    rounding = np.array([1, np.inf, 1, 1e-4, 1, 1e-4])
    limit, strict = allowed("float32", positions, choice, rounding)
    assert limit == pytest.approx([5e-5, 1.25e-3, INF, INF, 5e-5, 5e-2])
    assert strict.tolist() == [True, True, False, False, True, False]
    limit, strict = allowed("float32", positions)
    assert limit == pytest.approx([5e-5, 1.25e-3, *[5e-5] * 4]) and strict.all()
    far = np.array([0, 450])  # where angles are rounded more, more may be stored, or chosen, otherwise
    assert allowed("float32", far, None, np.array([2e-3, 2e-3]))[1].tolist() == [True, False]
    assert allowed("float32", far, np.array([4e-5, 4e-5]))[1].tolist() == [True, False]
    with pytest.raises(ValueError, match="no tolerance is known for float8"):
        allowed("float8", positions)


def test_a_distance_is_in_deviations_of_the_right_side() -> None:
    right = np.array([0.0, 10.0, 20.0, 30.0], np.float32)
    assert distance(right + np.float32(1), right) == pytest.approx(1 / right.std())
    assert distance(right, right) == 0.0
    flat = np.array([1.0, 1.0], np.float32)
    assert distance(np.array([1.5, 1.0], np.float32), flat) == 0.5  # a deviation below 1 counts as 1


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_on_one_side_is_infinitely_far(odd: float) -> None:
    left, right = np.array([odd, 1.0], np.float32), np.array([0.0, 1.0], np.float32)
    assert distance(left, right) == distance(right, left) == float("inf")
    assert distance(left, left) == 0.0
    assert distance(left, np.array([odd, 1.5], np.float32)) == 0.5


def test_shapes_must_agree_for_a_distance() -> None:
    with pytest.raises(ValueError, match=r"\[2\] with \[3\]"):
        distance(np.zeros(2), np.zeros(3))


def test_an_unknown_storage_gets_the_widest_tolerance() -> None:
    assert recut_tolerance("rows") == recut_tolerance("rotating-6") < recut_tolerance("int8") < recut_tolerance("new")
    assert recut_tolerance("new") == recut_tolerance("rows", "affine4", "int8") == recut_tolerance("affine4")
