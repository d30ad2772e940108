"""A trace in plain words, step by step: what was asked, what the sequence must hold then, what was seen."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from harness.cells import BAD, BEYOND, HIDDEN, LACK, SHOWN
from harness.operations import (
    BATCHES,
    Batch,
    BatchDecode,
    BatchForward,
    Chunk,
    Decode,
    EnforceMaxKvSize,
    Fork,
    Operation,
    Prefill,
    QuantizeCache,
    Reset,
    Restore,
    Rollback,
    SaveLoad,
    Snapshot,
    TrimFront,
    Verify,
)
from harness.reporting.masks import WORDS, first_mask
from harness.reporting.text import count
from harness.trace import Trace, TraceError
from harness.words import plain

_NOT_KEPT = "what was seen is not in this file; a replay shows it"
_MOST = 32
"""Keys that are drawn one by one; of more, the numbers say enough."""
_LETTERS = {SHOWN: "#", HIDDEN: ".", BAD: "X", LACK: "o", BEYOND: "!"}


def explanation(trace: Trace, sentences: dict[str, str], replay: str) -> str:
    """The whole text. ``sentences``: what each property says, by its id; ``replay``: the command that runs it again.

    TraceError where the steps are none that this version writes.
    """
    try:
        lines = [*_found(trace, sentences), "", *_walk(trace), *_wrong_mask(trace), "", f"Run it again: {replay}"]
        return "\n".join(map(plain, lines))
    except (KeyError, TypeError, AttributeError, IndexError, ValueError, ArithmeticError) as error:
        raise TraceError(f"its steps cannot be read ({type(error).__name__}: {error})") from error


def _found(trace: Trace, sentences: dict[str, str]) -> Iterator[str]:
    target = trace.target
    named = f"{target['kind']}:{target['family']}, variant {target['variant']}, {target['storage']} caches"
    yield f"Target: {named}, mask policy {target['policy']}"
    yield f"Program: {trace.program}"
    if trace.finding is None:
        yield "No finding was recorded: the program was right when this was written."
        return
    name = trace.finding["property"]
    yield f"Broken: {name}"
    yield f"    It says: {sentences.get(name, 'this version has no such property')}"
    yield f"    But: {trace.finding['message'] or _NOT_KEPT}"
    if not trace.finding["reproducible"]:
        yield "    It did not come back in a fresh model, so it depends on what ran before this program."


def _walk(trace: Trace) -> Iterator[str]:
    several = len(trace.program.owners) > 1
    if any(owner == "model" for owner in trace.program.owners):
        owners = ", ".join(f"sequence {i} by the {owner}" for i, owner in enumerate(trace.program.owners))
        yield f"Owned: {owners} (the scheduler trims only what the pool owns)"
    broken = trace.finding["step"] if trace.finding is not None else None
    for number, operation in enumerate(trace.program.operations):
        who = f"sequence {operation.index}: " if several and not isinstance(operation, BATCHES) else ""
        yield f"{number + 1}. {operation.text()}: {who}{_asked(operation)}"
        if number >= len(trace.steps):
            yield f"    {'not run: the program had ended before' if trace.steps else _NOT_KEPT}"
            continue
        step = trace.steps[number]
        yield from (f"    {line}" for line in _seen(step, several))
        if isinstance(operation, Fork):
            yield f"    sequence {operation.into} must hold then: the same, {_held(step['after'])}"
        if number == broken:
            yield "    HERE it broke."
    if trace.finding is not None and broken is None:
        yield "It broke at the end, when the whole run was compared."


def _seen(step: dict[str, Any], several: bool) -> Iterator[str]:
    rows: list[int] = step.get("batch", [])
    who = f"sequence {step['sequence']} " if several else ""
    if not rows or not step.get("forwards"):
        yield f"{who}must hold then: {'the same, ' * (step['before'] == step['after'])}{_held(step['after'])}"
    for at, row in enumerate(rows):
        for forward in step.get("forwards", ())[at :: len(rows)][-1:]:
            yield f"sequence {row} must hold then: {_held(forward['after'])}"
    if "removed" in step:
        told = ", ".join(map(str, step["removed"])) or "nothing, no cache was visited"
        yield f"removed from its caches: {told}; expected: {step['expected_removed']} from each"
    if "must_be_refused" in step:
        must = "must be refused" if step["must_be_refused"] else "must be done"
        did = f"was refused ({step['refused']})" if step["refused"] is not None else "was done"
        yield f"it {must}, and {did}"
    forwards = step.get("forwards", ())
    for position, forward in enumerate(forwards):
        which = f"sequence {rows[position % len(rows)]}, " if rows else ""
        round_ = position // max(1, len(rows)) + 1
        yield from _forward(forward, f"{which}forward {round_}, " if len(forwards) > max(1, len(rows)) else which)
    if "error" in step:
        yield f"it raised {step['error']}"


def runs(state: dict[str, Any]) -> list[list[int]]:
    """First and last position of every run of keys that a state of a trace holds."""
    if "held" in state or not state["live_len"]:
        return list(state.get("held", []))
    return [[state["offset"] - state["live_len"], state["offset"] - 1]]


def _held(state: dict[str, Any]) -> str:
    following = f"the next token has position {state['offset']}"
    if not state["live_len"]:
        return f"no key; {following}"
    spans = [_span(first, last).removeprefix("s").strip() for first, last in runs(state)]
    several = "s" if state["live_len"] > 1 else ""
    return f"{count(state['live_len'], 'key')}, position{several} {' and '.join(spans)}; {following}"


def _forward(forward: dict[str, Any], which: str) -> Iterator[str]:
    alike: list[tuple[dict[str, Any], list[Any]]] = []
    for call in forward["attention"]:
        rest = {name: value for name, value in call.items() if name not in ("layer", "head", "cells", "cells_of")}
        if alike and alike[-1][0] == rest:
            alike[-1][1].append(call["layer"])
        else:
            alike.append((rest, [call["layer"]]))
    if not alike:
        yield f"{which}no attention call was seen"
    for call, layers in alike:
        yield f"{which}{_layers(layers)}: {_attention(call)}"
        yield from (f"    {line}" for line in _picture(call))
    told = [each for each in forward["positions"] if each["first"] is not None]
    if told:
        spans = dict.fromkeys(f"{each['kind']}{_span(each['first'], each['last']).removeprefix('s')}" for each in told)
        yield f"{which}positions given: {', '.join(spans)}"


def _layers(layers: Sequence[Any]) -> str:
    if layers[0] is None:
        return "calls of unknown layers"
    return f"layer {layers[0]}" if len(layers) == 1 else f"layers {layers[0]} to {layers[-1]}"


def _attention(call: dict[str, Any]) -> str:
    window = f", sliding window {call['window']}" if "window" in call else ""
    shape = call["mask_shape"]
    mask = f"mask {call['mask']}" if shape is None else f"mask {call['mask']} of shape {shape}"
    return f"{count(call['queries'], 'query', 'queries')} over {count(call['keys'], 'key')}, {mask}{window}"


def _picture(call: dict[str, Any]) -> Iterator[str]:
    """The last axis of the mask under the keys, where they differ in length."""
    shape = call["mask_shape"]
    if not shape or shape[-1] == call["keys"] or max(shape[-1], call["keys"]) > _MOST:
        return
    wide, keys = shape[-1], call["keys"]
    yield f"keys {'#' * keys}"
    yield f"mask {'#' * min(wide, keys)}{'!' * max(0, wide - keys)}   {abs(wide - keys)} too {_more(wide, keys)}"


def _wrong_mask(trace: Trace) -> Iterator[str]:
    """The entries of the mask of the step that broke, where some over the keys are wrong, and they are few enough."""
    found = first_mask(trace)
    if found is None:
        return
    cells, which = found
    if not cells.wrong or cells.block != (1, 1) or max(cells.wide, cells.queries) > _MOST:
        return
    yield from ("", f"The mask of {which}; a row for each query, a column for each key:")
    yield from (f"    {''.join(_LETTERS[letter] for letter in row)}" for row in cells.rows)
    used = {letter for row in cells.rows for letter in row}
    yield "    " + "; ".join(f"{_LETTERS[letter]} {words}" for letter, words in WORDS.items() if letter in used)


def _more(wide: int, keys: int) -> str:
    return "wide" if wide > keys else "narrow"


def _span(first: Any, last: Any) -> str:
    """`` 4``, or ``s 4 to 6``: to be put behind a noun."""

    def plain(value: Any) -> str:
        return f"{value:g}" if isinstance(value, (int, float)) else str(value)

    return f" {plain(first)}" if first == last else f"s {plain(first)} to {plain(last)}"


def _some(number: int, noun: str) -> str:
    """``token``, or ``3 tokens``: to be put behind "the first"."""
    return noun if number == 1 else count(number, noun)


def _asked(operation: Operation) -> str:
    return _WORDS[type(operation)](operation)


def _enforce(op: EnforceMaxKvSize) -> str:
    how = {
        "trim": "the oldest keys above it go",
        "sinks": "the oldest keys above it go, but for the very first",
        "shift": f"keys behind the first {op.keep} go, as a context shift takes them",
    }
    return f"the server bounds the cache to {count(op.limit, 'key')}: {how[op.generation]}"


def _verify(op: Verify) -> str:
    dropped = op.drafts - op.accept
    return f"{count(op.drafts, 'draft')} in one forward, of which the last {dropped} are rolled back"


def _prefill(op: Prefill) -> str:
    told = f"the first {_some(op.tokens, 'token')} of a prompt"
    return told + (f" with {count(len(op.media), 'image or video', 'images or videos')}" if op.media else "")


_WORDS: dict[type[Operation], Callable[[Any], str]] = {
    Prefill: _prefill,
    Chunk: lambda op: f"{count(op.tokens, 'further token')} in one forward",
    Decode: lambda op: f"{count(op.times, 'forward')} of one token",
    Verify: _verify,
    TrimFront: lambda op: (
        f"drop the oldest {_some(op.n, 'key')}" + (f" behind the first {op.keep}" if op.keep else "") + "; "
        "the offset stays"
    ),
    EnforceMaxKvSize: _enforce,
    Rollback: lambda op: f"drop the newest {_some(op.n, 'key')}; the offset goes back",
    Snapshot: lambda op: f"keep a copy of all it holds in slot {op.slot}",
    Restore: lambda op: f"put back what slot {op.slot} holds",
    Fork: lambda op: f"sequence {op.into} takes over its state",
    SaveLoad: lambda _: "its caches go to a file and come back",
    QuantizeCache: lambda op: f"its caches store {op.storage} from now on",
    Reset: lambda _: "it starts again at position 0",
    Batch: lambda op: f"one batch of the sequences {', '.join(map(str, op.rows))}",
    BatchForward: lambda op: f"one forward of the batch, tokens of its rows: {', '.join(map(str, op.tokens))}",
    BatchDecode: lambda op: f"{count(op.times, 'forward')} of one token for every row",
}
