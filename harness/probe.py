"""Sees every attention call and every position of a forward, of any MLX model, without editing the model.

What is wrapped while a forward runs:

* ``mx.fast.scaled_dot_product_attention`` and ``mx.fast.rope``, and every module global that holds one of them or
  of the next two (``from mlx.core.fast import rope``) when the probe is made;
* attention by hand: ``mx.softmax`` over scores of at least four axes.  The mask is no longer to be seen there, but
  its effect is: a score that is hidden is hugely negative.  ``mx.quantized_matmul`` with four or more axes in front
  of that softmax marks it as quantised attention and tells the length of the keys;
* hooks that a target names: functions of its own that take positions (M-RoPE builds its angles itself).

A compiled function replays a graph and calls none of these again, so compilation is off while the probe watches.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from harness.target import AttentionCall, AttentionKind, AttentionValues, MaskKind, PositionCall

#: A score or an additive mask value at or below this hides the key. Masks use -inf, finfo.min, -1e9, (fp16) -65504 or
#: -1e4, to which a score may have been added; no score that hides nothing comes near it.
HIDDEN_AT_OR_BELOW = -5e3

_ATTENTION = mx.fast.scaled_dot_product_attention
_ROPE = mx.fast.rope
_SOFTMAX = mx.softmax
_QUANTIZED_MATMUL = mx.quantized_matmul


@dataclass(frozen=True)
class PositionHook:
    """A function that receives absolute positions: ``owner.name`` (owner a module or class), and ``positions``, which
    takes its arguments and returns an MLX array whose last axis is the token. ``kind`` names it in reports."""

    owner: Any
    name: str
    kind: str
    positions: Callable[..., mx.array]


@dataclass
class _RawAttention:
    kind: AttentionKind
    lengths: tuple[int, int, int]  # query, key, value
    heads: tuple[int, int]
    mask: MaskKind
    array: mx.array | None = None
    scores: bool = False  # ``array`` holds masked scores, not a mask
    values: tuple[mx.array, ...] = ()  # queries, keys, values, output
    scale: float = 1.0
    sinks: mx.array | None = None


@dataclass
class Record:
    """What one forward did, still as MLX arrays; ``attention()`` and ``positions()`` turn it into NumPy."""

    raw_attention: list[_RawAttention] = field(default_factory=list)
    raw_positions: list[tuple[str, mx.array | tuple[int, int]]] = field(default_factory=list)
    quantised_keys: int | None = None
    values: bool = False

    @property
    def arrays(self) -> list[mx.array]:
        """All arrays that were recorded: to be evaluated at once, which is cheaper than one by one."""
        kept: list[Any] = [raw.array for raw in self.raw_attention] + [raw for _, raw in self.raw_positions]
        kept += [array for raw in self.raw_attention for array in raw.values]
        return [array for array in kept if isinstance(array, mx.array)]

    def attention(self) -> tuple[AttentionCall, ...]:
        """The attention calls in call order."""
        calls = []
        for raw in self.raw_attention:
            shape, shown, scores = None, None, False
            if raw.array is not None:
                shown, scores = _shown(raw.array, raw.scores)
                shape = tuple(raw.array.shape)
            query, key, value = raw.lengths
            lengths = (query, key, value, *raw.heads)
            calls.append(AttentionCall(raw.kind, *lengths, raw.mask, shape, shown, scores, _values(raw)))
        return tuple(calls)

    def positions(self) -> tuple[PositionCall, ...]:
        """The position calls in call order."""
        calls = []
        for kind, raw in self.raw_positions:
            array = np.arange(raw[0], raw[0] + raw[1]) if isinstance(raw, tuple) else np.array(raw)
            calls.append(PositionCall(kind, array))
        return tuple(calls)


def _values(raw: _RawAttention) -> AttentionValues | None:
    """In float64, exactly; "causal" as what it adds."""
    if not raw.values:
        return None
    arrays = [np.array(array.astype(mx.float32)).astype(np.float64) for array in raw.values]
    added: np.ndarray[Any, Any] | None = None
    if raw.mask == "causal":
        query, key, _ = raw.lengths
        added = np.where(np.tri(query, key, key - query, dtype=bool), 0.0, -np.inf)
    elif raw.array is not None:
        given = raw.array
        added = np.array((mx.where(given, 0.0, -mx.inf) if given.dtype == mx.bool_ else given).astype(mx.float32))
        added = added.astype(np.float64)
    if added is not None:
        added = added.reshape((1,) * (4 - added.ndim) + added.shape)
    queries, keys, values, out = arrays
    sinks = None if raw.sinks is None else np.array(raw.sinks.astype(mx.float32)).astype(np.float64)
    return AttentionValues(queries, keys, values, out, raw.scale, added, sinks)


def _shown(array: mx.array, masked_scores: bool) -> tuple[np.ndarray[Any, Any], bool]:
    """The array as booleans with four axes, and whether it is mere scores (nothing hidden, not all zero)."""
    if array.dtype == mx.bool_:
        values = np.array(array)
        scores = False
    else:
        numbers = np.array(array.astype(mx.float32))
        values = numbers > HIDDEN_AT_OR_BELOW
        scores = bool(values.all()) and (masked_scores or bool(numbers.any()))
    if values.ndim > 4:  # grouped queries: [B, kv heads, repeats, l, K]
        values = values.reshape(values.shape[0], -1, *values.shape[-2:])
    return values.reshape((1,) * (4 - values.ndim) + values.shape), scores


class Probe:
    """Wraps the calls while ``watching()``; nothing stays wrapped afterwards, also when the forward raises."""

    def __init__(self, hooks: Sequence[PositionHook] = ()) -> None:
        self._hooks = tuple(hooks)
        self._attend: Callable[..., mx.array] = _ATTENTION
        self._record: Record | None = None
        wrapped: list[tuple[Any, str, Any]] = [
            (mx.fast, "scaled_dot_product_attention", self._attention),
            (mx.fast, "rope", self._rope),
            (mx, "softmax", self._softmax),
            (mx, "quantized_matmul", self._quantized_matmul),
        ]
        aliases: dict[int, Any] = {
            id(_ATTENTION): self._attention,
            id(_ROPE): self._rope,
            id(_SOFTMAX): self._softmax,
            id(_QUANTIZED_MATMUL): self._quantized_matmul,
        }
        wrapped += [
            (module, name, aliases[id(value)])
            for module in list(sys.modules.values())
            if isinstance(names := getattr(module, "__dict__", None), dict)
            and module not in (mx, mx.fast)
            and not getattr(module, "__name__", "").startswith("harness.probe")
            for name, value in list(names.items())
            if id(value) in aliases
        ]
        self._wrapped = wrapped

    @contextmanager
    def watching(self, values: bool = False) -> Iterator[Record]:
        """Record every call made in the block; ``values``: also what attention is given and gives. Not reentrant
        (RuntimeError)."""
        if self._record is not None:
            raise RuntimeError("this probe is already watching a forward")
        record = self._record = Record(values=values)
        self._attend = mx.fast.scaled_dot_product_attention  # as it is now: somebody may have put another in its place
        put_back: list[Callable[[], None]] = []
        try:
            put_back.extend(_replace(*wrapped) for wrapped in self._wrapped)
            # one after the other: two hooks may watch the same function
            put_back.extend(_replace(hook.owner, hook.name, self._hooked(hook)) for hook in self._hooks)
            mx.disable_compile()
            yield record
        finally:
            for undo in reversed(put_back):
                undo()
            if "MLX_DISABLE_COMPILE" not in os.environ:
                mx.enable_compile()
            self._record = None

    def _attention(self, q: mx.array, k: mx.array, v: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        mask = kwargs.get("mask")
        if self._record is not None:
            kind, array = _classify(mask)
            self._record.raw_attention.append(
                _RawAttention(
                    "fast",
                    (q.shape[-2], k.shape[-2], v.shape[-2]),
                    (q.shape[-3], k.shape[-3]),
                    kind,
                    array,
                )
            )
        out = self._attend(q, k, v, *args, **kwargs)
        if self._record is not None and self._record.values and q.ndim == 4:
            raw = self._record.raw_attention[-1]
            raw.values, raw.scale, raw.sinks = (q, k, v, out), float(kwargs["scale"]), kwargs.get("sinks")
        return out

    def _rope(self, a: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        offset = kwargs.get("offset", 0)
        if self._record is not None:
            length = a.shape[-2]
            if isinstance(offset, int):
                self._record.raw_positions.append(("rope", (offset, length)))
            else:
                start = mx.array(offset).reshape(-1, 1)
                self._record.raw_positions.append(("rope", start + mx.arange(length)))
        return _ROPE(a, *args, **kwargs)

    def _quantized_matmul(self, x: mx.array, w: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        out = _QUANTIZED_MATMUL(x, w, *args, **kwargs)
        transpose = args[2] if len(args) > 2 else kwargs.get("transpose", True)
        if self._record is not None and w.ndim >= 4 and transpose:
            self._record.quantised_keys = int(out.shape[-1])
        return out

    def _softmax(self, a: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        record = self._record
        axis = args[0] if args else kwargs.get("axis")
        if record is not None and a.ndim >= 4 and axis in (-1, a.ndim - 1):
            keys = record.quantised_keys
            quantised = keys is not None and keys == a.shape[-1]
            record.quantised_keys = None
            heads = int(np.prod(a.shape[1:-2]))
            record.raw_attention.append(
                _RawAttention(
                    "quantised" if quantised else "softmax",
                    (a.shape[-2], a.shape[-1], a.shape[-1]),
                    (heads, a.shape[1]),
                    "additive",
                    mx.array(a),
                    scores=True,
                )
            )
        return _SOFTMAX(a, *args, **kwargs)

    def _hooked(self, hook: PositionHook) -> Callable[..., Any]:
        original = getattr(hook.owner, hook.name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            if self._record is not None:
                self._record.raw_positions.append((hook.kind, mx.array(hook.positions(*args, **kwargs))))
            return original(*args, **kwargs)

        return watched


def _replace(owner: Any, name: str, replacement: Any) -> Callable[[], None]:
    """Set ``owner.name``; returns what puts it back exactly (a static method of a class, or nothing if inherited)."""
    own = vars(owner)
    if name in own:
        original = own[name]
        undo = partial(setattr, owner, name, original)
    else:
        getattr(owner, name)  # AttributeError for what does not exist, before anything is set
        undo = partial(delattr, owner, name)
    setattr(owner, name, staticmethod(replacement) if isinstance(own.get(name), staticmethod) else replacement)
    return undo


def _classify(mask: Any) -> tuple[MaskKind, mx.array | None]:
    if mask is None:
        return "none", None
    if isinstance(mask, str):
        return "causal", None
    # A copy: the model may change its array in place after the call, and the call is what counts.
    return ("bool" if mask.dtype == mx.bool_ else "additive"), mx.array(mask)
