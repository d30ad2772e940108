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
_Decoder = Callable[[Any], Any]


class CodecError(ValueError):
    """JSON that does not say what it must; the message is one line and names the place."""

    def inside(self, place: str) -> CodecError:
        """The same error, seen from around it. So that nobody has to build the names of places that are right."""
        return type(self)(f"{place}{self}")


def encode(value: Any) -> Any:
    """What ``json.dumps`` takes, of dataclasses, arrays, tuples and plain values."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is tuple or kind is list:
        return [encode(item) for item in value]
    if isinstance(value, np.ndarray):
        name, dtype = _wired(value.dtype)
        data = np.ascontiguousarray(value, dtype).tobytes()
        return {"dtype": name, "shape": list(value.shape), "data": base64.b64encode(data).decode("ascii")}
    if isinstance(value, np.generic):
        return value.item()
    body = {}
    for name, default in _fields(cast(Any, kind)):
        item = getattr(value, name)
        if item is not default and not (type(item) in _EQUAL and item == default):  # 0.0 is also -0.0, so no floats
            body[name] = encode(item)
    return body


_PLAIN = frozenset({int, float, str, bool, type(None)})
_EQUAL = frozenset({int, str, tuple})


@functools.cache
def _wired(dtype: np.dtype[Any]) -> tuple[str, np.dtype[Any]]:
    """Its name, and itself in the byte order of the wire."""
    return dtype.name, dtype.newbyteorder("<")


@functools.cache
def _fields(kind: type) -> tuple[tuple[str, Any], ...]:
    """(name, default) of every field of a dataclass. TypeError for any other type."""
    return tuple((field.name, field.default) for field in dataclasses.fields(kind))


def decode(kind: type[_T], data: object, where: str) -> _T:
    """``data`` as a ``kind``: a dataclass, or a type that its fields may have. Raises CodecError."""
    try:
        return cast(_T, _decoder(cast(Any, kind))(data))
    except CodecError as error:
        raise error.inside(where) from None


@functools.cache
def _decoder(kind: Any) -> _Decoder:
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if kind is np.ndarray or origin is np.ndarray:
        return _array
    if dataclasses.is_dataclass(kind):
        return _dataclass(kind)
    if origin is Literal:
        names = ", ".join(map(str, inner))
        return lambda data: data if data in inner else _refuse(f"one of {names}", data)
    if origin in (types.UnionType, typing.Union):
        (only,) = (each for each in inner if each is not type(None))
        one = _decoder(only)
        return lambda data: None if data is None else one(data)
    if origin is tuple:
        return _tuple(_decoder(inner[0]))
    if kind is float:
        return _number
    if kind is int:
        return _whole
    words = {str: "text", bool: "true or false"}
    return lambda data: data if type(data) is kind else _refuse(words[kind], data)


def _whole(data: Any) -> int:
    """Of 64 bits, as NumPy will have it."""
    if type(data) is not int:
        _refuse("a whole number", data)
    if not -(2**63) <= data < 2**63:
        raise CodecError(" must be a whole number of 64 bits, it is larger")  # Python refuses to write out long ones
    return int(data)


def _number(data: Any) -> float:
    if type(data) is int:
        data = _whole(data)
    if type(data) not in (int, float) or not math.isfinite(data):  # json reads NaN, which no JSON has
        _refuse("a number", data)
    return float(data)


def _tuple(each: _Decoder) -> _Decoder:
    def read(data: Any) -> Any:
        if not isinstance(data, list):
            _refuse("a list", data)
        found: list[Any] = []
        try:
            for item in data:
                found.append(each(item))  # noqa: PERF401 - how far it came is the place of an error
        except CodecError as error:
            raise error.inside(f"[{len(found)}]") from None
        return tuple(found)

    return read


def _dataclass(kind: Any) -> _Decoder:
    hints = typing.get_type_hints(kind)
    fields = {field.name: _decoder(hints[field.name]) for field in dataclasses.fields(kind)}
    needed = {
        field.name
        for field in dataclasses.fields(kind)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }

    def read(data: Any) -> Any:
        if not isinstance(data, dict):
            _refuse("an object", data)
        if not needed <= data.keys() <= fields.keys():
            odd = sorted(set(data) - set(fields)) or sorted(needed - set(data))
            raise CodecError(f" {'lacks' if odd[0] in needed else 'has the unknown field'} {odd[0]!r:.60}")
        found = {}
        for name, item in data.items():
            try:
                found[name] = fields[name](item)
            except CodecError as error:
                raise error.inside(f".{name}") from None
        return kind(**found)

    return read


_DTYPES = {name: np.dtype(name).newbyteorder("<") for name in DTYPES}


def _array(data: Any) -> np.ndarray[Any, Any]:
    if not isinstance(data, dict) or data.keys() != {"dtype", "shape", "data"}:
        raise CodecError(" must be an array: an object with dtype, shape and data")
    name, shape, text = data["dtype"], data["shape"], data["data"]
    if not isinstance(name, str) or name not in _DTYPES:
        raise CodecError(f".dtype must be one of {', '.join(DTYPES)}, got {name!r:.60}")
    if not isinstance(shape, list) or len(shape) > MOST_AXES or any(type(n) is not int or n < 0 for n in shape):
        raise CodecError(f".shape must be a list of whole numbers, none negative, got {shape!r:.60}")
    if not isinstance(text, str):
        raise CodecError(f".data must be text, got {text!r:.60}")
    try:
        held = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise CodecError(f".data is not base64: {error}") from error
    dtype = _DTYPES[name]
    if math.prod(filter(None, shape)) >= 2**59:  # beside an axis of 0 no byte is missing, but no array is that large
        raise CodecError(f" has {len(held)} bytes, {name} of the shape {shape!r:.80} is too large")
    if len(held) != (size := math.prod(shape) * dtype.itemsize):
        raise CodecError(f" has {len(held)} bytes, {name} of the shape {shape!r:.80} has {size}")
    if name == "bool":
        return np.asarray(np.frombuffer(held, np.uint8).reshape(shape) != 0)
    return np.frombuffer(held, dtype).reshape(shape)


def _refuse(what: str, data: object) -> Any:
    raise CodecError(f" must be {what}, got {data!r:.60}")
