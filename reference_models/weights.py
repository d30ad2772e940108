"""Random weights that make context matter.

A library's default initialisation is small: attention is then nearly uniform, the residual stream is the
token itself, and a wrong mask hardly moves a logit. Here every matrix keeps the variance of its input, so
scores have unit scale.
"""

import hashlib
import math
from typing import cast

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten

POOL = 1 << 22  # a parameter with more numbers takes its rows, at random offsets, from this many


def randomise(model: nn.Module, seed: int) -> None:
    """Replace every parameter by float32 random numbers that depend on its name, its shape and ``seed``.

    Matrices (last axis = fan-in; of a convolution all axes but the first): normal with deviation
    ``1 / sqrt(fan_in)``; embeddings, of tokens and of positions: standard normal;
    biases: ``0.1 * normal``; norm weights: ``1 + 0.1 * normal``. Building order and other parameters play
    no part.
    """
    parameters = cast(list[tuple[str, mx.array]], tree_flatten(model.parameters()))
    drawn = [(name, draw(name, tuple(old.shape), seed)) for name, old in parameters]
    model.update(tree_unflatten(drawn))
    mx.eval(model.parameters())


def draw(name: str, shape: tuple[int, ...], seed: int) -> mx.array:
    """The random float32 parameter of that name and shape, not yet evaluated; see ``randomise``."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    normal = _normal(shape, mx.random.key(int.from_bytes(digest, "big")))
    if name.endswith("bias"):
        return 0.1 * normal
    if len(shape) == 1:  # the only other vectors are the weights of norms
        return 1 + 0.1 * normal
    if name.endswith(("embed_tokens.weight", "pos_embed.weight")):
        return normal
    fan_in = math.prod(shape[1:]) if len(shape) > 3 else shape[-1]  # with three axes: the matrices of all experts
    return normal * fan_in**-0.5


def _normal(shape: tuple[int, ...], key: mx.array) -> mx.array:
    """Standard normal numbers. Drawing them is slow on a CPU (10 million a second), so large shapes share a pool."""
    count, columns = math.prod(shape), shape[-1]
    if count <= POOL:
        return mx.random.normal(shape, dtype=mx.float32, key=key)
    pool_key, offset_key = mx.random.split(key)
    pool = mx.random.normal((POOL + columns,), dtype=mx.float32, key=pool_key)
    windows = mx.as_strided(pool, (POOL, columns), (1, 1))
    offsets = mx.random.randint(0, POOL, (count // columns,), key=offset_key)
    return mx.take(windows, offsets, axis=0).reshape(shape)
