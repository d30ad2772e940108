"""The axes of every array of an answer, and what the numbers beside it promise of them: PROTOCOL.md, checked.

The codec knows types and counts bytes. What stands behind it takes an array apart by its axes, so an answer in which
one is missing, empty or of another length than its neighbours is no answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from harness.calls import AttentionCall
from harness.comparison import TOLERANCES
from harness.target import CacheRows, CopyObservation, RemovalObservation
from harness.wire.codec import CodecError
from harness.wire.protocol import BatchAnswer, CacheFreeAnswer, Description, ForwardAnswer, TellingAnswer

AXES: dict[str, tuple[str, str]] = {
    "logits": ("f", "tokens vocabulary"),
    "choice_gap": ("f", "tokens"),
    "rounding_gap": ("f", "tokens"),
    "positions": ("iuf", "*"),
    "shown": ("b", "sequences? heads? queries? width"),
    "queries": ("f", "sequences heads queries depth"),
    "keys": ("f", "sequences kv_heads keys depth"),
    "values": ("f", "sequences kv_heads keys out_depth"),
    "out": ("f", "sequences heads queries out_depth"),
    "added": ("f", "sequences? heads? queries? keys?"),
    "sinks": ("f", "heads"),
    "row_keys": ("f", "sequences kv_heads slots depth"),
    "row_values": ("f", "sequences value_heads slots out_depth"),
}
"""Name -> (kinds of dtype, as ``numpy.dtype.kind``; axes). An axis has one length wherever its name stands in an
object, with ``?`` that or 1; ``*``: any axes."""
MAY_BE_EMPTY = frozenset({"keys", "slots", "width", "out_depth"})
MOST = 2**31 - 1
"""Of a length, a number of heads, a count: nothing real comes near."""
_WORDS = {"f": "floats", "b": "bool", "iuf": "numbers"}


def check_answer(
    fields: Mapping[str, Any], answer: Any, told: tuple[TellingAnswer, ...] | None, said: Description | None
) -> None:
    """``fields``: of the request; ``said``: of the engine, None while it says hello. Raises CodecError, which names
    the array."""
    if isinstance(answer, ForwardAnswer):
        _forward(answer, fields["tokens"], said, "answer")
    elif isinstance(answer, BatchAnswer):
        if len(answer.rows) != len(fields["tokens"]):
            raise CodecError(f"it tells of {len(answer.rows)} rows in a batch of {len(fields['tokens'])}")
        for number, (row, tokens) in enumerate(zip(answer.rows, fields["tokens"], strict=True)):
            _forward(row, tokens, said, f"answer.rows[{number}]")
    elif isinstance(answer, CacheFreeAnswer):
        _cache_free(answer, len(fields["tokens"]), said)
    elif isinstance(answer, RemovalObservation):
        for number, count in enumerate(answer.removed):
            _count(count, f"answer.removed[{number}]")
    elif isinstance(answer, CopyObservation):
        _count(answer.caches, "answer.caches")
    for number, each in enumerate(told or ()):
        _told(each, said, f"told[{number}]")


def _forward(answer: ForwardAnswer, tokens: Any, said: Description | None, where: str) -> None:
    if answer.logits is None and answer.error is None:
        raise CodecError(f"{where} has no logits and no error")
    known = {"tokens": len(tokens)} | ({} if said is None else {"vocabulary": said.vocab_size})
    if answer.logits is not None:
        _axes("logits", answer.logits, known, f"{where}.logits")
    for number, call in enumerate(answer.attention):
        _call(call, answer.error is not None, f"{where}.attention[{number}]")
    for number, position in enumerate(answer.positions):
        _axes("positions", position.positions, {}, f"{where}.positions[{number}].positions")


def _call(call: AttentionCall, broke: bool, where: str) -> None:
    """``broke``: the forward raised, perhaps at this call, so that its mask need not fit."""
    for name in ("query_len", "heads", "kv_heads", "key_len", "value_len"):
        _count(getattr(call, name), f"{where}.{name}", least=0 if name in ("key_len", "value_len") else 1)
    if call.mask_shape is not None:
        if not call.mask_shape:
            raise CodecError(f"{where}.mask_shape has no key axis")
        for number, length in enumerate(call.mask_shape):
            _count(length, f"{where}.mask_shape[{number}]")
    # Of keys there may be more than key_len counts: slots of a batch that are nobody's are not counted.
    known = {"heads": call.heads, "kv_heads": call.kv_heads, "queries": call.query_len}
    if call.shown is not None:
        _axes("shown", call.shown, {} if broke else dict(known), f"{where}.shown")
        width, shape = call.shown.shape[-1], call.mask_shape
        if shape is not None and width != shape[-1] and (shape[-1], width) != (1, call.key_len):
            raise CodecError(f"{where}.shown has {width} keys, the mask of the shape {list(shape)!s:.80} {shape[-1]}")
    if call.values is not None:
        for name in ("queries", "keys", "values", "out", "added", "sinks"):
            array = getattr(call.values, name)
            if array is not None:
                _axes(name, array, known, f"{where}.values.{name}")
        if call.heads % call.kv_heads:
            raise CodecError(f"{where} has {call.heads} heads for {call.kv_heads} of keys and values")


def _cache_free(answer: CacheFreeAnswer, tokens: int, said: Description | None) -> None:
    known = {"tokens": tokens} | ({} if said is None else {"vocabulary": said.vocab_size})
    for name in ("logits", "choice_gap", "rounding_gap"):
        array = getattr(answer, name)
        if array is not None:
            _axes(name, array, known, f"answer.{name}")
    if answer.dtype not in TOLERANCES:
        raise CodecError(f"answer.dtype must be one of {', '.join(TOLERANCES)}, got {answer.dtype!r:.60}")


def _told(told: TellingAnswer, said: Description | None, where: str) -> None:
    layers = 0 if said is None else len(said.attention_layers)
    for name in ("lengths", "rows", "memory"):
        if (count := len(getattr(told, name))) not in (0, layers):
            raise CodecError(f"{where}.{name} is of {count} caches, the engine has {layers}")
    tells_rows = said is not None and "rows" in said.capabilities
    if tells_rows and not told.rows and any(cache.live_len for cache in told.lengths):
        raise CodecError(f"{where} has keys, and no rows of them")
    for number, rows in enumerate(told.rows):
        _rows(rows, f"{where}.rows[{number}]")
    for number, cache in enumerate(told.memory):
        _count(cache.held, f"{where}.memory[{number}].held", most=2**62)
        _count(cache.per_slot, f"{where}.memory[{number}].per_slot", most=2**62)


def _rows(rows: CacheRows, where: str) -> None:
    if rows.keys.ndim == rows.values.ndim == 4 and rows.keys.shape[2] == rows.values.shape[2] == 0:
        known = dict.fromkeys(("sequences", "kv_heads", "value_heads", "depth", "out_depth"), -1)  # they say nothing
    else:
        known = {}
    _axes("row_keys", rows.keys, known, f"{where}.keys")
    _axes("row_values", rows.values, known, f"{where}.values")


def _axes(name: str, array: np.ndarray[Any, Any], known: dict[str, int], where: str) -> None:
    """``known``: lengths of axes by their names, -1 of those that may have any; new ones are added."""
    kinds, names = AXES[name]
    if array.dtype.kind not in kinds:
        raise CodecError(f"{where} must hold {_WORDS[kinds]}, it holds {array.dtype}")
    if names == "*":
        if not array.size:
            raise CodecError(f"{where} of the shape {list(array.shape)!s:.80} holds nothing")
        return
    axes = names.split()
    shape = f"{where} has the shape {list(array.shape)!s:.80}"
    if array.ndim != len(axes):
        raise CodecError(f"{shape}, expected [{', '.join(axes)}]")
    for axis, length in zip(axes, array.shape, strict=True):
        plain = axis.rstrip("?")
        wanted = known.setdefault(plain, length) if plain == axis else known.get(plain, length)
        if wanted not in (-1, length) and not (plain != axis and length == 1):
            raise CodecError(f"{shape}, expected [{', '.join(axes)}]: {plain} are {wanted}")
        if not length and plain not in MAY_BE_EMPTY and wanted != -1:
            raise CodecError(f"{shape}: no {plain}")


def _count(number: int, where: str, least: int = 0, most: int = MOST) -> None:
    if not least <= number <= most:
        raise CodecError(f"{where} must lie in {least} to {most}, got {number!s:.40}")
