"""Int8 rows: the error, the scales, and the rows that could divide by zero."""

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from hypothesis import given, settings
from hypothesis import strategies as st

from reference_models.engine import KVCache
from reference_models.engine.int8 import dequantise_rows, quantise_rows

Floats = npt.NDArray[np.float32]


def tolerance(rows: Floats) -> Floats:
    """Half a quantisation step, plus what the rounding of the fp16 scale (half an ulp) can clip away."""
    exact = np.abs(rows).max(axis=-1, keepdims=True).astype(np.float64) / 127
    stored = exact.astype(np.float16).astype(np.float64)
    bound = np.where(stored > 0, stored / 2 + 127 * np.maximum(exact - stored, 0), exact * 127)
    return np.asarray(bound * 1.001, dtype=np.float32)


@settings(max_examples=100, deadline=None, database=None)
@given(
    row=st.lists(st.floats(-8e6, 8e6, width=32, allow_subnormal=False), min_size=1, max_size=6),
    exponent=st.integers(0, 60),
)
def test_int8_error_is_within_half_a_step(row: list[float], exponent: int) -> None:
    rows = (np.array(row, np.float32) * np.float32(2.0**-exponent)).reshape(1, 1, 1, -1)
    q, scales = quantise_rows(mx.array(rows))
    assert (q.dtype, scales.dtype, scales.shape) == (mx.int8, mx.float16, (1, 1, 1, 1))
    assert mx.all(scales > 0).item()
    got = np.array(dequantise_rows(q, scales, mx.float32))
    assert (np.abs(got - rows) <= tolerance(rows)).all()


def test_int8_scale_is_absmax_over_127_per_row() -> None:
    rows = mx.array([[[[127.0, -1.0], [0.0, 0.0], [1e-8, -1e-8], [-2.0, 254.0]]]])
    q, scales = quantise_rows(rows)
    # Row 2: absmax / 127 is positive in fp32 and 0 in fp16; its scale becomes 1, like that of a zero row.
    assert scales[0, 0, :, 0].tolist() == [1.0, 1.0, 1.0, 2.0]
    assert q[0, 0].tolist() == [[127, -1], [0, 0], [0, 0], [-1, 127]]


def test_int8_quantises_keys_and_values_independently() -> None:
    cache = KVCache("int8")
    keys, values = cache.update_and_fetch(1000 * mx.ones((1, 1, 1, 2)), 0.001 * mx.ones((1, 1, 1, 2)))
    assert np.allclose(np.array(keys), 1000, rtol=1e-3, atol=0)
    assert np.allclose(np.array(values), 0.001, rtol=1e-3, atol=0)
