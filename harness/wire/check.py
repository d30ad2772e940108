"""Does a worker speak the protocol? One check after the other, each with a line that says what was found.

It asks little of what the engine computes: that is what ``kv-harness run`` is for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from harness.capability import Capability
from harness.target import PromptInput
from harness.wire.engine import Engine
from harness.wire.process import WorkerError
from harness.wire.prompts import an_image, another_picture, places_of
from harness.wire.protocol import CAPABILITIES, MESSAGES
from harness.wire.refusals import refusals

TOKENS = (1, 0, 1, 1, 0)


@dataclass(frozen=True)
class Check:
    """``verdict``: ok, FAIL, or -- for what the worker does not declare."""

    name: str
    verdict: str
    detail: str = ""


class _Wrong(Exception):
    """What a check found."""


def checks(command: str, limit: float) -> Iterator[Check]:
    """Check the worker that a command starts. Raises WorkerError where it cannot even say hello."""
    engine = Engine(command, limit)
    try:
        said = engine.description
        yield Check("hello", "ok", f"{said.family}, {len(said.attention_layers)} attention layers")
        able = frozenset(CAPABILITIES[name] for name in said.capabilities)
        asker = _Asker(engine, able, said.vocab_size)
        for name, needed, act in asker.all():
            if needed is not None and needed not in able:
                yield Check(name, "--", f"{needed.name.lower()!r} is not declared")
                continue
            try:
                act()
            except (_Wrong, WorkerError) as error:
                yield Check(name, "FAIL", f"{error}")
            else:
                yield Check(name, "ok")
    finally:
        engine.stop()
    for name, wrong in refusals(command, limit, said.policies[0]):
        yield Check(name, "FAIL" if wrong else "ok", wrong)


class _Asker:
    """The checks of one engine, each in a session of its own."""

    def __init__(self, engine: Engine, able: frozenset[Capability], vocab: int) -> None:
        self._engine, self._able, self._vocab = engine, able, vocab

    def all(self) -> Iterator[tuple[str, Capability | None, Callable[[], None]]]:
        """(name, the capability that it needs, the check)."""
        can = Capability
        yield "forward: logits [tokens, vocabulary], finite", None, self.logits
        yield "forward: the same tokens give the same bytes", None, self.repeats
        yield "forward: attention calls, one for every attention layer", can.ATTENTION, self.attention
        yield "forward: position calls", can.POSITIONS, self.positions
        yield "tell: lengths of every cache", can.LENGTHS, self.lengths
        yield "tell: rows of every cache", can.ROWS, self.rows
        yield "tell: bytes of every cache", can.BYTES, self.memory
        yield "tell: with the answer of an operation, the same as asked by itself", can.LENGTHS, self.told_with
        yield "open: several sequences", can.SEQUENCES, self.sequences
        yield "open: a model-owned sequence", can.OWNERSHIP, self.ownership
        yield "open: the offset policy", can.COUNTERPART, self.counterpart
        yield "open: attention with its values", can.ATTENTION_VALUES, self.values
        for do, fields, told in (
            ("trim_front", {"sequence": 0, "n": 2, "keep": 0}, "removed"),
            ("rollback", {"sequence": 0, "n": 2}, "removed"),
            ("enforce", {"sequence": 0, "limit": 3, "generation": "trim", "keep": 4, "n_discard": 0}, "removed"),
            ("snapshot", {"sequence": 0, "slot": 1}, "caches"),
            ("save_and_load", {"sequence": 0}, "caches"),
            ("reset", {"sequence": 0}, "caches"),
        ):
            yield f"{do}: tells what it did", MESSAGES[do][2], self._acts(do, fields, told)
        yield "restore: behind a snapshot, the same logits again", can.SNAPSHOT, self.restore
        yield "fork: the other sequence goes on as the first", can.FORK, self.fork
        yield "batch, forward_batch: logits for every row", can.BATCH, self.batch
        yield "arguments", can.ARGUMENTS, self.arguments
        yield "cache_free: logits [tokens, vocabulary]", can.CACHE_FREE, self.cache_free
        yield "prompt: an image, cut in two, gives logits", can.IMAGES, self.prompt
        yield "prompt: another image gives other logits behind it", can.IMAGES, self.pictures
        both = can.IMAGES if can.CACHE_FREE in self._able else can.CACHE_FREE
        yield "cache_free_of_prompts: logits [tokens, vocabulary]", both, self.cache_free_of_prompts

    def _open(self, owners: tuple[str, ...] = ("pool",), policy: str | None = None, **options: bool) -> None:
        given = {"attention": False, "arguments": False, **options}
        self._engine.ask("open", owners=owners, policy=policy or self._engine.description.policies[0], **given)

    def _forward(self, tokens: tuple[int, ...] = TOKENS, sequence: int = 0) -> Any:
        said = self._engine.ask("forward", sequence=sequence, tokens=tokens)[0]
        self._whole(said, len(tokens))
        return said

    def _whole(self, said: Any, count: int) -> None:
        if said.error is not None:
            raise _Wrong(f"a forward of {count} tokens raised {said.error}")
        shape = None if said.logits is None else said.logits.shape
        if shape != (count, self._vocab):
            raise _Wrong(f"logits of the shape {shape}, expected {(count, self._vocab)}")
        if not np.isfinite(said.logits).all():
            raise _Wrong("logits that are not finite")

    def _do(self, do: str, **fields: Any) -> Any:
        said = self._engine.ask(do, **fields)[0]
        if getattr(said, "error", None) is not None:
            raise _Wrong(f"{do} raised {said.error}")
        return said

    def _tell(self) -> Any:
        told = self._engine.ask("tell", tell=True)[1]
        if told is None or len(told) != 1:
            raise _Wrong(f"told of {0 if told is None else len(told)} sequences, 1 is open")
        return told[0]

    def logits(self) -> None:
        self._open()
        self._forward()
        self._forward((1,))

    def repeats(self) -> None:
        found = []
        for _ in range(2):
            self._open()
            found.append(self._forward().logits.tobytes())
        if found[0] != found[1]:
            raise _Wrong("they differ")

    def _layers(self, what: str, found: int) -> None:
        if found != (layers := len(self._engine.description.attention_layers)):
            raise _Wrong(f"{found} {what} for {layers} attention layers")

    def attention(self) -> None:
        self._open()
        calls = self._forward().attention
        self._layers("calls", len(calls))
        if (calls[0].query_len, calls[0].key_len) != (len(TOKENS), len(TOKENS)):
            raise _Wrong(f"{calls[0].query_len} queries and {calls[0].key_len} keys of {len(TOKENS)} tokens")

    def values(self) -> None:
        self._open(attention=True)
        if any(call.values is None for call in self._forward().attention):
            raise _Wrong("a call without values")

    def positions(self) -> None:
        self._open()
        if not self._forward().positions:
            raise _Wrong("no call")

    def lengths(self) -> None:
        self._open()
        self._forward()
        told = self._tell().lengths
        self._layers("lengths", len(told))
        if (said := (told[0].offset, told[0].live_start, told[0].live_len)) != (len(TOKENS), 0, len(TOKENS)):
            raise _Wrong(f"offset, live_start, live_len are {said} behind {len(TOKENS)} tokens")

    def rows(self) -> None:
        self._open()
        self._forward()
        told = self._tell().rows
        self._layers("rows", len(told))
        if told[0].keys.ndim != 4 or told[0].keys.shape[2] != len(TOKENS):
            raise _Wrong(f"keys of the shape {told[0].keys.shape}, expected [B, H, {len(TOKENS)}, D]")

    def memory(self) -> None:
        self._open()
        self._forward()
        self._layers("memories", len(self._tell().memory))

    def told_with(self) -> None:
        self._open()
        told = self._engine.ask("forward", sequence=0, tokens=TOKENS, tell=True)[1]
        if told is None or len(told) != 1 or told[0].lengths != self._tell().lengths:
            raise _Wrong("it is another")

    def sequences(self) -> None:
        self._open(("pool", "pool"))
        if not np.array_equal(self._forward().logits, self._forward(sequence=1).logits):
            raise _Wrong("the same tokens give other logits in the second sequence")

    def ownership(self) -> None:
        self._open(("model",))
        self._forward()

    def counterpart(self) -> None:
        self._open(policy="offset")
        self._forward()

    def _acts(self, do: str, fields: dict[str, Any], told: str) -> Callable[[], None]:
        def act() -> None:
            self._open()
            self._forward()
            said = self._do(do, **fields)
            if getattr(said, "refused", None) is None and not getattr(said, told):
                raise _Wrong(f"no {told!r} and no refusal")
            self._forward()

        return act

    def restore(self) -> None:
        self._open()
        self._forward()
        self._do("snapshot", sequence=0, slot=0)
        first = self._forward((1,)).logits
        self._do("restore", sequence=0, slot=0)
        if not np.array_equal(first, self._forward((1,)).logits):
            raise _Wrong("they differ")

    def fork(self) -> None:
        self._open(("pool", "pool"))
        self._forward()
        self._do("fork", sequence=0, into=1)
        if not np.array_equal(self._forward((1,)).logits, self._forward((1,), 1).logits):
            raise _Wrong("it does not")

    def batch(self) -> None:
        self._open(("pool", "pool"))
        self._forward()
        self._do("batch", rows=(0, 1))
        rows = self._do("forward_batch", tokens=((1, 0), (1,))).rows
        if len(rows) != 2:
            raise _Wrong(f"{len(rows)} rows")
        self._whole(rows[0], 2)
        self._whole(rows[1], 1)
        self._do("batch", rows=())

    def arguments(self) -> None:
        self._open(arguments=True)
        self._forward()
        if not self._engine.ask("arguments")[0].given:
            raise _Wrong("nothing that was given to a forward is watched")

    @property
    def _image(self) -> PromptInput:
        images = self._engine.description.images
        assert images is not None
        return an_image(images, self._vocab)

    def _read(self, prompt: PromptInput, cut: int) -> Any:
        """The logits of a prompt in two forwards."""
        self._open()
        self._engine.ask("prompt", sequence=0, prompt=prompt)
        both = self._forward(prompt.tokens[:cut]), self._forward(prompt.tokens[cut:])
        return np.concatenate([said.logits for said in both])

    def prompt(self) -> None:
        prompt = self._image
        self._read(prompt, len(prompt.tokens) - 3)
        self._forward((1,))

    def pictures(self) -> None:
        prompt = self._image
        one, other = (self._read(each, 1)[-1] for each in (prompt, another_picture(prompt)))
        if np.array_equal(one, other):
            raise _Wrong("they are the same: it does not look")

    def cache_free_of_prompts(self) -> None:
        prompt = self._image
        tokens = np.array(prompt.tokens)
        count = len(tokens)
        ask: dict[str, Any] = {"tokens": tokens, "positions": np.arange(count), "visible": np.tri(count, dtype=bool)}
        images = self._engine.description.images
        assert images is not None
        ask |= {"places": places_of(images, count), "prompt_of": np.zeros(count, int), "prompts": (prompt,)}
        said = self._engine.ask("cache_free_of_prompts", **ask)[0]
        self._whole(said, count)
        if np.abs(said.logits - self._read(prompt, 1)).max() > 1e-2 * (float(said.logits.std()) or 1.0):
            raise _Wrong("far from those of forwards with a fresh cache")

    def cache_free(self) -> None:
        count = len(TOKENS)
        ask = {"tokens": np.array(TOKENS), "positions": np.arange(count), "visible": np.tri(count, dtype=bool)}
        said = self._engine.ask("cache_free", **ask)[0]
        self._whole(said, count)
        self._open()
        if np.abs(said.logits - self._forward().logits).max() > 1e-2 * (float(said.logits.std()) or 1.0):
            raise _Wrong("far from those of a forward with a fresh cache")
