"""Angles of rotary position embeddings in float64, and the turn itself.

Sources: RoPE (arXiv 2104.09864), YaRN (arXiv 2309.00071) with the two mscale factors of the DeepSeek-V2 code, the
llama3 scaling of the Llama 3.1 release, M-RoPE (arXiv 2409.12191) and its interleaved form (arXiv 2511.21631).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from reference_models.witness.parts import Array


def frequencies(dims: int, theta: float) -> Array:
    """``theta ** (-2 i / dims)`` of every pair i, ``[dims / 2]``, in radians a position."""
    return np.asarray(theta ** (-np.arange(0, dims, 2) / dims))


def llama3(dims: int, theta: float, scaling: Any) -> Array:
    """Waves longer than the trained context slowed by ``factor``, short ones kept, those between blended."""
    plain = frequencies(dims, theta)
    waves = 2 * math.pi / plain
    context, low, high = (
        scaling.original_max_position_embeddings,
        scaling.low_freq_factor,
        scaling.high_freq_factor,
    )
    blend = (context / waves - low) / (high - low)
    between = (1 - blend) * plain / scaling.factor + blend * plain
    return np.where(waves > context / low, plain / scaling.factor, np.where(waves < context / high, plain, between))


def yarn(dims: int, scaling: Any) -> Array:
    """NTK by parts: a ramp from pairs that turn often (kept) to pairs that turn seldom (slowed by ``factor``)."""
    ramp = scaling.beta_fast, scaling.beta_slow
    return yarn_ramp(dims, scaling.rope_theta, scaling.factor, scaling.original_max_position_embeddings, ramp)


def yarn_ramp(dims: int, theta: float, factor: float, context: float, ramp: tuple[float, float]) -> Array:
    """The same, said in numbers; ``ramp``: the turns over the original ``context`` at which it starts and ends."""
    plain = frequencies(dims, theta)

    def pair_turning(times: float) -> float:
        return dims * math.log(context / (2 * math.pi * times)) / (2 * math.log(theta))

    start = max(math.floor(pair_turning(ramp[0])), 0)
    end = min(math.ceil(pair_turning(ramp[1])), dims - 1)
    width = end - start if end != start else 0.001
    slowed = np.clip((np.arange(dims // 2) - start) / width, 0, 1)
    return np.asarray(plain / factor * slowed + plain * (1 - slowed))


def mscale(factor: float, weight: float) -> float:
    """YaRN's temperature: ``0.1 * weight * ln(factor) + 1``, 1 when nothing is stretched."""
    return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0


def yarn_amplitude(scaling: Any) -> float:
    """What cosine and sine are multiplied by."""
    both = scaling.mscale and scaling.mscale_all_dim
    if not both:
        return mscale(scaling.factor, 1)
    return mscale(scaling.factor, scaling.mscale) / mscale(scaling.factor, scaling.mscale_all_dim)


def mrope_angles(places: Array, plain: Array, sections: tuple[int, int, int], interleaved: bool) -> Array:
    """Angles ``[S, pairs]`` for ids ``places [3, S]``: each pair turns by the T, the H or the W id.

    Chunked, the first section of pairs takes T, the next H, the last W. Interleaved, everything takes T but the pairs
    1, 4, 7, ... (H) and 2, 5, 8, ... (W), as many as their sections say.
    """
    angles = places[:, :, None] * plain  # [3, S, pairs]
    if not interleaved:
        ends = np.cumsum(sections)
        parts = zip(angles, (0, *ends[:2]), ends, strict=True)
        return np.concatenate([axis[:, first:last] for axis, first, last in parts], axis=-1)
    out = angles[0].copy()
    for axis in (1, 2):
        pairs = slice(axis, 3 * sections[axis], 3)
        out[:, pairs] = angles[axis][:, pairs]
    return np.asarray(out)


def turn(x: Array, angles: Array, adjacent: bool = False, amplitude: float = 1.0) -> Array:
    """Rotate ``x [H, S, D]`` by ``angles [S, D / 2]``; pairs are ``(i, i + D / 2)``, or neighbours if ``adjacent``."""
    cos, sin = np.cos(angles) * amplitude, np.sin(angles) * amplitude
    half = x.shape[-1] // 2
    first, second = (x[..., 0::2], x[..., 1::2]) if adjacent else (x[..., :half], x[..., half:])
    turned = first * cos - second * sin, second * cos + first * sin
    return np.stack(turned, axis=-1).reshape(x.shape) if adjacent else np.concatenate(turned, axis=-1)
