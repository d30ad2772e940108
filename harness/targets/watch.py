"""Watches arrays that operations are given, and that caches give out: who writes into one changes it for everybody.

An ``mx.array`` is a handle. ``a += 1``, ``a[0] = 1`` and their like compute another array and put it behind the same
handle: whoever else holds the handle sees the new values, while views, and results computed from it, keep the old ones.
So an array has been changed if and only if its handle no longer leads to the data that a second handle, made when the
array was seen, still leads to. What is written past MLX, through the memory of a NumPy view, is not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import mlx.core as mx
import numpy as np

from harness.target import ArgumentChange, ArgumentsObservation
from reference_models import rope
from reference_models.engine import masks
from reference_models.prompt import Images, Prompt


@dataclass(frozen=True)
class _Function:
    """``owner.name``: ``given`` names those of its first arguments that are watched ("" for one that is not), ``made``
    what it returns, "" for what nobody else gets."""

    owner: Any
    name: str
    given: tuple[str, ...] = ()
    made: str = ""


#: Where our models make or take what several layers share: positions, their tables, masks.
FUNCTIONS = (
    _Function(masks, "mask_for", made="the mask"),
    _Function(rope, "rotate", ("", "the offset given to RoPE")),
    _Function(rope, "positions_from", ("the offset of the positions",), "the positions"),
    _Function(rope, "text_position_ids", ("the offset of the position ids", "the delta of the position ids")),
    _Function(rope, "absolute_query_scale", ("the positions of the query scale",), "the query scale"),
    _Function(rope, "mrope_angles", ("the position ids",), "the table of angles"),
)


@dataclass
class _Watched:
    """``was``: a second handle to the data that ``array`` had."""

    what: str
    call: int | None
    array: mx.array
    was: mx.array


class Watch:
    """What the last forward was given and gave out is held up to the end of the next one."""

    def __init__(self) -> None:
        self._before: dict[int, _Watched] = {}  # by id of the array, which is held
        self._now: dict[int, _Watched] = {}
        self._given = self._held = 0
        self._changed: list[ArgumentChange] = []
        self._settled = True  # no forward, which looks at its end, since ``told``

    @contextmanager
    def over(self, tokens: mx.array, caches: Sequence[Any], given: Mapping[str, Any]) -> Iterator[None]:
        """Watch a forward over ``tokens``, which appends to ``caches`` and gets ``given`` beside them."""
        self._before, self._now = self._now, {}
        self._see("the tokens", tokens)
        for prompt in _prompts(given):
            self.see_prompt(prompt)
        with ExitStack() as stack:
            for function in FUNCTIONS:
                made = partial(self._called, function, getattr(function.owner, function.name))
                stack.callback(setattr, function.owner, function.name, getattr(function.owner, function.name))
                setattr(function.owner, function.name, made)
            for number, cache in enumerate(caches):
                if "update_and_fetch" not in vars(cache):  # listed twice, it is watched once
                    cache.update_and_fetch = partial(self._fetched, number, cache.update_and_fetch)
                    stack.callback(delattr, cache, "update_and_fetch")
            yield
        self._check()

    def see_prompt(self, prompt: Prompt) -> None:
        """What was read of a prompt."""
        for what in ("tokens", "embeddings", "position_ids"):
            self._see(f"the {what.replace('_', ' ')} of the prompt", getattr(prompt, what))
        for rows in prompt.deepstack:
            self._see("the image features that DeepStack adds", rows)

    @contextmanager
    def over_images(self, tokens: mx.array, images: Images) -> Iterator[None]:
        """Watch the reading of a prompt."""
        self._before, self._now = self._now, {}
        self._see("the tokens of the prompt", tokens)
        for what in ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw"):
            self._see(what, getattr(images, what))
        yield
        self._check()

    def told(self) -> ArgumentsObservation:
        """What was watched since this was asked last, and what of it changed."""
        if self._settled:
            self._check()
        seen = ArgumentsObservation(self._given, self._held, tuple(self._changed))
        self._given, self._held, self._changed, self._settled = 0, len(self._now), [], True
        return seen

    def _called(self, function: _Function, original: Callable[..., Any], *args: Any, **named: Any) -> Any:
        for what, value in zip(function.given, args, strict=False):
            if what:
                self._see(what, value)
        made = original(*args, **named)
        if function.made:
            for each in made if isinstance(made, tuple) else (made,):
                self._see(function.made, each)
        return made

    def _fetched(self, number: int, original: Callable[..., Any], *args: Any, **named: Any) -> Any:
        keys, values = original(*args, **named)
        self._see("the keys that the cache gave out", keys, number)
        self._see("the values that the cache gave out", values, number)
        return keys, values

    def _see(self, what: str, array: Any, call: int | None = None) -> None:
        if not isinstance(array, mx.array) or id(array) in self._now or not array.size:
            return
        self._now[id(array)] = _Watched(what, call, array, copy(array))
        self._given += 1

    def _check(self) -> None:
        # What is given out again was another array before, behind the same handle.
        everything = [*self._before.values(), *self._now.values()]
        mx.eval([each.array for each in everything])
        for each in everything:
            if not _same_data(each.array, each.was):
                self._changed += _change(each)
                each.was = copy(each.array)  # told once
        self._settled = False


def _prompts(given: Mapping[str, Any]) -> list[Prompt]:
    prompt = given.get("prompt")
    return [each for each in (prompt if isinstance(prompt, Sequence) else [prompt]) if each is not None]


def _same_data(array: mx.array, was: mx.array) -> bool:
    return array.shape == was.shape and _address(array) == _address(was)


def _address(array: mx.array) -> int:
    """Of its first byte. NumPy has no bfloat16: the same bytes are looked at as whole numbers, which copies nothing."""
    seen = array if array.dtype != mx.bfloat16 else array.view(mx.uint16)
    return int(np.asarray(memoryview(cast(Any, seen))).ctypes.data)


def _numbers(array: mx.array) -> np.ndarray[Any, Any]:
    return np.array(array.astype(mx.float32) if array.dtype == mx.bfloat16 else array)


def _change(each: _Watched) -> list[ArgumentChange]:
    """Nothing where other data say the same."""
    was, now = _numbers(each.was), _numbers(each.array)
    if was.shape != now.shape:
        return [ArgumentChange(each.what, each.call, (), f"of shape {list(was.shape)}", f"of shape {list(now.shape)}")]
    differ = (was != now) & ((was == was) | (now == now))  # a NaN that stays one is no change
    if not differ.any():
        return []
    at = tuple(int(i) for i in np.argwhere(differ)[0])
    return [ArgumentChange(each.what, each.call, at, f"{was[at]:g}", f"{now[at]:g}")]
