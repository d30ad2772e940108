"""Affine quantisation of MLX inside our models: what stays packed while it runs.

A row of a matrix is cut into groups of ``group_size`` numbers; each is ``scale * q + bias`` with ``bits`` bits for
``q``, packed into uint32 (``mx.quantize``). Linear maps, embeddings and stacked experts stay packed; what our code
reads as a matrix (``DENSE``) is unpacked once.
"""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx import nn

from reference_models import moe

BITS = (2, 3, 4, 5, 6, 8)
GROUP_SIZES = (32, 64, 128)
#: Modules whose weight our code uses as a matrix.
DENSE = ("self_attn.kv_b_proj", "mlp.gate")


@dataclass(frozen=True)
class Packing:
    """Bits per number and numbers per group."""

    bits: int
    group_size: int

    def __str__(self) -> str:
        return f"{self.bits} bits, groups of {self.group_size}"

    def packed(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the packed weight, uint32."""
        return (*shape[:-1], shape[-1] * self.bits // 32)

    def grouped(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of scales and of biases."""
        return (*shape[:-1], shape[-1] // self.group_size)


class PackedExperts(nn.Module):
    """One stacked matrix of all experts, ``[E, out, in]``, packed."""

    def __init__(self, weight: mx.array, scales: mx.array, biases: mx.array, packing: Packing):
        super().__init__()
        self.weight, self.scales, self.biases = weight, scales, biases
        self._packing = packing

    def __call__(self, rows: mx.array, indices: mx.array) -> mx.array:
        """``rows [.., 1, in]`` times the matrix of expert ``indices [.., k]``, transposed."""
        return mx.gather_qmm(
            rows,
            self.weight,
            self.scales,
            self.biases,
            rhs_indices=indices,
            transpose=True,
            group_size=self._packing.group_size,
            bits=self._packing.bits,
        )


def stays_packed(owner: nn.Module, name: str, path: str) -> bool:
    """Whether parameter ``name`` of ``owner`` (a module at ``path``) may stay packed."""
    if isinstance(owner, moe.Experts):
        return True
    return name == "weight" and isinstance(owner, nn.Linear | nn.Embedding) and not path.endswith(DENSE)


def put_packed(
    parent: Any, key: str | int, name: str, weight: mx.array, scales: mx.array, biases: mx.array, packing: Packing
) -> None:
    """Replace parameter ``name`` of the module ``parent[key]`` by a packed one."""
    owner = parent[key]
    if isinstance(owner, moe.Experts):
        owner[name] = PackedExperts(weight, scales, biases, packing)
        return
    packed = _empty(owner, packing)
    packed.weight, packed.scales, packed.biases = weight, scales, biases
    if isinstance(owner, nn.Linear) and "bias" in owner:
        packed.bias = owner.bias
    parent[key] = packed


def _empty(owner: nn.Module, packing: Packing) -> Any:
    """A packed module of the owner's kind; its own arrays are lazy and never made."""
    size: dict[str, Any] = {"group_size": packing.group_size, "bits": packing.bits}
    if isinstance(owner, nn.Linear):
        return nn.QuantizedLinear(packing.group_size, 1, bias=False, **size)
    return nn.QuantizedEmbedding(1, packing.group_size, **size)
