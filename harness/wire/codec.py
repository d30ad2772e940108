"""Dataclasses and arrays as JSON, and back, with every type checked: what comes from a worker is untrusted.

An array is ``{"dtype": "float32", "shape": [2, 3], "data": base64 of its bytes, little-endian, last axis fastest}``; a
dataclass an object with its fields, those left out that have their default; a tuple a list.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import functools
import math
import types
import typing
from collections.abc import Callable
from typing import Any, Literal, TypeVar, cast

import numpy as np

DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64"),
)
MOST_AXES = 8
_T = TypeVar("_T")
_Decoder = Callable[[Any, str], Any]


class CodecError(ValueError):
    """JSON that does not say what it must; the message is one line and names the place."""


def encode(value: Any) -> Any:
    """What ``json.dumps`` takes, of dataclasses, arrays, tuples and plain values."""
    if isinstance(value, np.ndarray):
        data = np.ascontiguousarray(value, value.dtype.newbyteorder("<")).tobytes()
        return {"dtype": value.dtype.name, "shape": list(value.shape), "data": base64.b64encode(data).decode("ascii")}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        found = ((field, getattr(value, field.name)) for field in dataclasses.fields(value))
        return {field.name: encode(item) for field, item in found if not _is_default(field, item)}
    if isinstance(value, (tuple, list)):
        return [encode(item) for item in value]
    return value.item() if isinstance(value, np.generic) else value


def _is_default(field: dataclasses.Field[Any], item: Any) -> bool:
    return type(item) is type(field.default) and not isinstance(item, np.ndarray) and bool(item == field.default)


def decode(kind: type[_T], data: object, where: str) -> _T:
    """``data`` as a ``kind``: a dataclass, or a type that its fields may have. Raises CodecError."""
    return cast(_T, _decoder(cast(Any, kind))(data, where))


@functools.cache
def _decoder(kind: Any) -> _Decoder:
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if kind is np.ndarray or origin is np.ndarray:
        return _array
    if dataclasses.is_dataclass(kind):
        return _dataclass(kind)
    if origin is Literal:
        return lambda data, where: (
            data if data in inner else _refuse(where, f"one of {', '.join(map(str, inner))}", data)
        )
    if origin in (types.UnionType, typing.Union):
        (only,) = (each for each in inner if each is not type(None))
        one = _decoder(only)
        return lambda data, where: None if data is None else one(data, where)
    if origin is tuple:
        each = _decoder(inner[0])
        return lambda data, where: (
            tuple([each(item, f"{where}[{at}]") for at, item in enumerate(data)])
            if isinstance(data, list)
            else _refuse(where, "a list", data)
        )
    if kind is float:
        return lambda data, where: float(data) if type(data) in (int, float) else _refuse(where, "a number", data)
    words = {int: "a whole number", str: "text", bool: "true or false"}
    return lambda data, where: data if type(data) is kind else _refuse(where, words[kind], data)


def _dataclass(kind: Any) -> _Decoder:
    hints = typing.get_type_hints(kind)
    fields = {field.name: _decoder(hints[field.name]) for field in dataclasses.fields(kind)}
    needed = {
        field.name
        for field in dataclasses.fields(kind)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }

    def read(data: Any, where: str) -> Any:
        if not isinstance(data, dict):
            _refuse(where, "an object", data)
        if odd := sorted(set(data) - set(fields)) or sorted(needed - set(data)):
            raise CodecError(f"{where} {'lacks' if odd[0] in needed else 'has the unknown field'} {odd[0]!r:.60}")
        return kind(**{name: fields[name](item, f"{where}.{name}") for name, item in data.items()})

    return read


def _array(data: Any, where: str) -> np.ndarray[Any, Any]:
    if not isinstance(data, dict) or set(data) != {"dtype", "shape", "data"}:
        raise CodecError(f"{where} must be an array: an object with dtype, shape and data")
    name, shape, text = data["dtype"], data["shape"], data["data"]
    if not isinstance(name, str) or name not in DTYPES:
        _refuse(f"{where}.dtype", f"one of {', '.join(DTYPES)}", name)
    if not isinstance(shape, list) or len(shape) > MOST_AXES or any(type(n) is not int or n < 0 for n in shape):
        _refuse(f"{where}.shape", "a list of whole numbers, none negative", shape)
    if not isinstance(text, str):
        _refuse(f"{where}.data", "text", text)
    try:
        held = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise CodecError(f"{where}.data is not base64: {error}") from error
    dtype = np.dtype(name).newbyteorder("<")
    if len(held) != math.prod(shape) * dtype.itemsize:
        raise CodecError(
            f"{where} has {len(held)} bytes, {name} of the shape {shape!r:.80} has {math.prod(shape) * dtype.itemsize}"
        )
    if name == "bool":
        return np.asarray(np.frombuffer(held, np.uint8).reshape(shape) != 0)
    return np.frombuffer(held, dtype).reshape(shape)


def _refuse(where: str, what: str, data: object) -> Any:
    raise CodecError(f"{where} must be {what}, got {data!r:.60}")
