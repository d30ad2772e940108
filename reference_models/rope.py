"""Rotary position embeddings: where every family takes its positions from.

Conventions. A head of ``D`` dimensions has ``D / 2`` pairs; pair ``i`` turns by ``position * inv_freq[i]``.
The functions ``*_freqs`` return ``1 / inv_freq`` (``theta ** (2 i / D)`` when nothing is scaled), because
that is what ``mx.fast.rope(freqs=...)`` expects. Interleaved pairs are the dimensions ``(2 i, 2 i + 1)``;
otherwise a pair is ``(i, i + D / 2)``.

Sources: RoPE (Su et al. 2021, arXiv 2104.09864), YaRN (Peng et al. 2023, arXiv 2309.00071), the Llama 3.1
model card (``rope_type: llama3``), M-RoPE (Qwen2-VL, arXiv 2409.12191; interleaved in Qwen3-VL, arXiv
2511.21631).
"""

import math
from dataclasses import dataclass

import mlx.core as mx

from reference_models.layers import LARGEST, check_divisors


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


@dataclass(frozen=True)
class Llama3Scaling:
    """``rope_scaling`` of the llama3 type. Raises ValueError when the two limits make no band."""

    factor: float
    original_max_position_embeddings: int
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    rope_type: str = "llama3"

    def __post_init__(self) -> None:
        check_divisors(factor=self.factor, low_freq_factor=self.low_freq_factor, high_freq_factor=self.high_freq_factor)
        _require(self.rope_type == "llama3", f"rope_type must be 'llama3', not {self.rope_type!r}")
        _require(self.factor >= 1, f"factor must be at least 1, not {self.factor}")
        _require(
            self.low_freq_factor < self.high_freq_factor,
            f"low_freq_factor ({self.low_freq_factor}) must be positive and below high_freq_factor "
            f"({self.high_freq_factor})",
        )
        _require(self.original_max_position_embeddings > 0, "original_max_position_embeddings must be positive")


@dataclass(frozen=True)
class YarnScaling:
    """``rope_parameters`` of the yarn type, with Mistral's ``llama_4_scaling_beta``. Raises ValueError."""

    factor: float
    original_max_position_embeddings: int
    rope_theta: float = 10000.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 1.0
    llama_4_scaling_beta: float = 0.1
    rope_type: str = "yarn"

    def __post_init__(self) -> None:
        check_divisors(
            factor=self.factor, rope_theta=self.rope_theta, beta_fast=self.beta_fast, beta_slow=self.beta_slow
        )
        # Each makes a factor 1 + weight * ln(factor) / 10, by which the other is divided.
        for name in ("mscale", "mscale_all_dim"):
            weight = getattr(self, name)
            _require(0 <= weight <= LARGEST, f"{name} must be at least 0 and fit float32, not {weight}")
        _require(self.rope_type == "yarn", f"rope_type must be 'yarn', not {self.rope_type!r}")
        _require(self.factor >= 1, f"factor must be at least 1, not {self.factor}")
        _require(self.rope_theta > 1, f"rope_theta must exceed 1, not {self.rope_theta}")
        _require(self.original_max_position_embeddings > 0, "original_max_position_embeddings must be positive")
        _require(self.beta_fast >= self.beta_slow, "need beta_fast >= beta_slow > 0")


@dataclass(frozen=True)
class MRopeScaling:
    """``rope_scaling`` of M-RoPE: how many pairs turn by the T, H and W position. Raises ValueError."""

    mrope_section: tuple[int, int, int]
    mrope_interleaved: bool = False

    def __post_init__(self) -> None:
        _require(
            len(self.mrope_section) == 3 and all(n >= 0 for n in self.mrope_section),
            f"mrope_section must be three counts (T, H, W), not {self.mrope_section}",
        )
        pairs, (_, height, width) = sum(self.mrope_section), self.mrope_section
        fits = 3 * height - 2 < pairs and 3 * width - 1 < pairs
        _require(
            not self.mrope_interleaved or fits,
            f"mrope_section {self.mrope_section} cannot be interleaved: H or W would run past the last pair",
        )

    def check(self, head_dim: int) -> None:
        """Raise ValueError unless the sections cover the ``head_dim / 2`` pairs of a head exactly."""
        _require(
            2 * sum(self.mrope_section) == head_dim,
            f"mrope_section {self.mrope_section} covers {sum(self.mrope_section)} pairs, "
            f"head_dim {head_dim} has {head_dim / 2:g}",
        )


def standard_freqs(dims: int, theta: float) -> mx.array:
    """Unscaled ``theta ** (2 i / dims)``, float32 ``[dims / 2]``."""
    return mx.array([theta ** (2 * i / dims) for i in range(dims // 2)], dtype=mx.float32)


def llama3_freqs(dims: int, theta: float, scaling: Llama3Scaling) -> mx.array:
    """Llama 3.1, ``[dims / 2]``: long waves slowed by ``factor``, short waves kept, a band blended."""
    context = scaling.original_max_position_embeddings
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    freqs = []
    for i in range(dims // 2):
        freq = theta ** (2 * i / dims)
        turns = context / (2 * math.pi * freq)  # full turns of this pair over the original context
        keep = min(max((turns - low) / (high - low), 0.0), 1.0)
        freqs.append(freq / ((1 - keep) / scaling.factor + keep))
    return mx.array(freqs, dtype=mx.float32)


def yarn_freqs(dims: int, scaling: YarnScaling) -> mx.array:
    """YaRN "NTK by parts", ``[dims / 2]``: a ramp over the pairs from unscaled to slowed by ``factor``."""
    theta, context = scaling.rope_theta, scaling.original_max_position_embeddings

    def pair_with(turns: float) -> float:
        """Index (a real number) of the pair that makes ``turns`` full turns over the original context."""
        return dims * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = float(max(math.floor(pair_with(scaling.beta_fast)), 0))
    high = float(min(math.ceil(pair_with(scaling.beta_slow)), dims - 1))
    if low == high:
        high += 0.001  # a step instead of a ramp, without dividing by zero
    freqs = []
    for i in range(dims // 2):
        slowed = min(max((i - low) / (high - low), 0.0), 1.0)
        inv_freq = theta ** (-2 * i / dims)
        freqs.append(1 / (inv_freq * (1 - slowed) + inv_freq / scaling.factor * slowed))
    return mx.array(freqs, dtype=mx.float32)


def yarn_mscale(factor: float, weight: float) -> float:
    """YaRN's ``0.1 * weight * ln(factor) + 1``; 1 when nothing is stretched."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def yarn_attention_factor(scaling: YarnScaling) -> float:
    """Factor on the rotated part of q and of k: 1 when ``mscale == mscale_all_dim``, as published."""
    if scaling.mscale and scaling.mscale_all_dim:
        numerator = yarn_mscale(scaling.factor, scaling.mscale)
        return numerator / yarn_mscale(scaling.factor, scaling.mscale_all_dim)
    return yarn_mscale(scaling.factor, 1.0)


def yarn_softmax_factor(scaling: YarnScaling) -> float:
    """Factor on ``1 / sqrt(head_dim)``: the square of the ``mscale_all_dim`` correction, 1 when that is 0."""
    return yarn_mscale(scaling.factor, scaling.mscale_all_dim) ** 2 if scaling.mscale_all_dim else 1.0


def positions_from(offset: int | mx.array, length: int) -> mx.array:
    """Absolute positions ``[L]``: from ``offset`` on, or those given. From offsets ``[B, 1]`` of rows: ``[B, L]``."""
    if not isinstance(offset, mx.array):
        return mx.arange(offset, offset + length)
    return offset + mx.arange(length, dtype=mx.int32) if offset.ndim == 2 else offset


def rotate(x: mx.array, offset: int | mx.array, freqs: mx.array, interleaved: bool) -> mx.array:
    """Rotate ``x [B, H, L, D]``; row ``j`` stands at absolute position ``offset + j``, or ``offset[j]`` (then B is 1).
    With the offset of every sequence of a batch, ``[B, 1]``, it stands at ``offset[b] + j``.

    Called as the attribute ``mx.fast.rope`` so that an observer may replace it.
    """
    each_row = isinstance(offset, mx.array) and offset.ndim == 1
    if each_row:  # the function takes one offset per sequence: let every row be one
        x = x.swapaxes(0, 2)
    elif isinstance(offset, mx.array):
        offset = offset[:, 0]
    turned = mx.fast.rope(x, x.shape[-1], traditional=interleaved, base=None, scale=1.0, offset=offset, freqs=freqs)
    return turned.swapaxes(0, 2) if each_row else turned


def absolute_query_scale(positions: mx.array, beta: float, original_max: int) -> mx.array:
    """Llama 4 / Mistral 4 query scale, float32, same shape as ``positions`` (``[L]`` or ``[B, L]``).

    ``1 + beta * ln(1 + floor(position / original_max))``. The positions must be absolute: a scale taken
    from the number of retained keys is wrong after a front trim although every shape fits.
    """
    return 1 + beta * mx.log(1 + mx.floor(positions.astype(mx.float32) / original_max))


def text_position_ids(offset: int | mx.array, delta: int | mx.array, batch: int, length: int) -> mx.array:
    """M-RoPE ids of text, int32 ``[3, B, L]``: T, H and W all run ``offset + delta ..``.

    ``delta`` is how far images earlier in the sequence pushed the ids away from the offset; 0 for plain text. In a
    ragged batch each is one number per row, int32 ``[B, 1]``.
    """
    start = offset + delta
    if isinstance(start, mx.array):
        return mx.broadcast_to(start + mx.arange(length, dtype=mx.int32), (3, batch, length))
    return mx.broadcast_to(mx.arange(start, start + length, dtype=mx.int32), (3, batch, length))


def mrope_axes(sections: tuple[int, int, int], interleaved: bool) -> list[int]:
    """Axis (0 = T, 1 = H, 2 = W) of the id that turns each pair.

    Chunked (qwen2): T.. then H.. then W... Interleaved (qwen3): T, H, W, T, H, W, .. until H and W are used
    up.
    """
    if not interleaved:
        return [axis for axis, count in enumerate(sections) for _ in range(count)]
    return [i % 3 if i < 3 * sections[i % 3] else 0 for i in range(sum(sections))]


def mrope_angles(
    position_ids: mx.array, inv_freq: mx.array, sections: tuple[int, int, int], interleaved: bool
) -> tuple[mx.array, mx.array]:
    """Cosine and sine ``[B, L, D / 2]`` (float32) for ids ``[3, B, L]`` and ``inv_freq [D / 2]``.

    Raises ValueError when the ids have no leading axis of 3.
    """
    _require(
        position_ids.ndim == 3 and position_ids.shape[0] == 3,
        f"position_ids must be [3, B, L], not {list(position_ids.shape)}",
    )
    per_pair = position_ids[mx.array(mrope_axes(sections, interleaved))]  # [D / 2, B, L]
    angles = mx.moveaxis(per_pair, 0, -1).astype(mx.float32) * inv_freq
    return mx.cos(angles), mx.sin(angles)


def apply_mrope(q: mx.array, k: mx.array, cos: mx.array, sin: mx.array) -> tuple[mx.array, mx.array]:
    """Rotate the pairs ``(i, i + D / 2)`` of ``q [B, H, L, D]`` and ``k [B, Hk, L, D]``."""

    def turn(x: mx.array) -> mx.array:
        c, s = (a[:, None].astype(x.dtype) for a in (cos, sin))
        first, second = mx.split(x, 2, axis=-1)
        return mx.concatenate([first * c - second * s, second * c + first * s], axis=-1)

    return turn(q), turn(k)
