"""The input of the witness: tokens with everything that is said of them from outside."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from reference_models.witness.parts import Array


@dataclass(frozen=True, eq=False)
class Sequence:
    """``tokens [S]``; ``positions``: absolute ``[S]``, or M-RoPE ids ``[3, S]``; ``visible``: per attention layer bool
    ``[S, S]``, may row i see column j?

    Of images: ``is_feature [S]``: which tokens stand for one; ``features [S, hidden]`` and per early layer
    ``deepstack [S, hidden]``: what stands in their place and what is added there (only rows of ``is_feature`` count).
    ``cache_form``: of mistral4, ``latent`` or ``decompressed``. ``itself [S]``: a row that stands for the same token as
    another, with its keys and values stored otherwise, sees that one in the place of itself; None: none does.

    Raises ValueError when the shapes do not fit, when a token sees a later one, or when it does not see itself.
    """

    tokens: Array
    positions: Array
    visible: tuple[Array, ...]
    is_feature: Array | None = None
    features: Array | None = None
    deepstack: tuple[Array, ...] = ()
    cache_form: str = "latent"
    itself: Array | None = None

    def __post_init__(self) -> None:
        count = len(self.tokens)
        if count == 0 or self.tokens.ndim != 1:
            raise ValueError(f"tokens must be [S] with S > 0, not {list(self.tokens.shape)}")
        if self.positions.shape not in ((count,), (3, count)):
            raise ValueError(f"positions of {count} tokens must be [S] or [3, S], not {list(self.positions.shape)}")
        known: set[int] = set()
        rows, itself = np.arange(count), np.arange(count) if self.itself is None else self.itself
        for layer, matrix in enumerate(self.visible):
            if id(matrix) in known:
                continue
            known.add(id(matrix))
            if matrix.shape != (count, count) or matrix.dtype != bool:
                raise ValueError(f"visible[{layer}] must be bool [{count}, {count}], not {matrix.dtype} {matrix.shape}")
            if not matrix[rows, itself].all():
                raise ValueError(f"visible[{layer}]: token {int(matrix[rows, itself].argmin())} does not see itself")
            if np.triu(matrix, 1).any():
                raise ValueError(f"visible[{layer}] shows a token one that comes later")
        if (self.features is not None or self.deepstack) and self.is_feature is None:
            raise ValueError("features need is_feature: which tokens stand for them")

    def line(self) -> Array:
        """Positions ``[S]`` as float64. ValueError for M-RoPE ids: this family has one position per token."""
        if self.positions.ndim != 1:
            raise ValueError("this family takes one position per token, not M-RoPE ids [3, S]")
        return self.positions.astype(np.float64)

    def places(self) -> Array:
        """M-RoPE ids ``[3, S]`` as float64; of text three times the position."""
        return np.broadcast_to(self.positions, (3, len(self.tokens))).astype(np.float64)
