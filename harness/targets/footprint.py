"""How many bytes of arrays an object keeps alive, by following what it refers to: not by the books that it keeps."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import mlx.core as mx
import numpy as np

from reference_models.engine import BlockPool


def footprint(root: object) -> int:
    """Bytes of all arrays with two axes or more that can be reached from ``root``, each array counted once: keys and
    values have four, what is kept of images two; an offset or a length that is kept as an array has none or one.

    The arrays of a ``BlockPool`` stay when its blocks are free, and are counted by the blocks that are in use. Classes
    and modules are not followed. A view counts with its own size, not with that of the buffer that it keeps alive.
    """
    total, seen, ahead = 0, {id(root)}, [root]
    while ahead:
        thing = ahead.pop()
        if isinstance(thing, (mx.array, np.ndarray)):
            total += thing.nbytes if thing.ndim > 1 else 0
            continue
        if isinstance(thing, BlockPool):
            total += thing.in_use * thing.block * thing.bytes_per_slot
        for each in _referred(thing):
            if id(each) not in seen:
                seen.add(id(each))
                ahead.append(each)
    return total


_NOTHING_INSIDE = (str, bytes, int, float, range, type(None), type, ModuleType)


def _referred(thing: Any) -> Iterator[Any]:
    if isinstance(thing, _NOTHING_INSIDE):
        return
    if isinstance(thing, dict):
        yield from thing
        yield from thing.values()
    elif isinstance(thing, (list, tuple, set, frozenset, deque)):
        yield from thing
    elif isinstance(thing, FunctionType):
        yield from thing.__closure__ or ()
        yield from thing.__defaults__ or ()
        yield from (thing.__kwdefaults__ or {}).values()
    elif isinstance(thing, CellType):
        with suppress(ValueError):  # of a cell that is empty
            yield thing.cell_contents
    elif isinstance(thing, MethodType):
        yield thing.__self__
        yield thing.__func__
    elif isinstance(thing, partial):
        yield from (thing.func, *thing.args, *thing.keywords.values())
    for name, value in getattr(thing, "__dict__", {}).items():
        if not (isinstance(thing, BlockPool) and name == "_sides"):
            yield value
    for kind in type(thing).__mro__:
        names = vars(kind).get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if hasattr(thing, name):
                yield getattr(thing, name)
