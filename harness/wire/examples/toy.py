"""A worker in plain Python, to be read and copied: an engine with one attention layer and a cache that can be trimmed.

    kv-harness wire-check "python -m harness.wire.examples.toy"
    kv-harness run --target "wire:python -m harness.wire.examples.toy"

It imports nothing of the harness. What an engine of your own has to do is in ``Toy``; ``main`` is the protocol.
"""

from __future__ import annotations

import base64
import json
import math
import struct
import sys
from typing import Any

VOCAB, WIDTH = 17, 4


def array(kind: str, code: str, shape: list[int], numbers: Any) -> dict[str, Any]:
    """An array of the protocol: its shape, and its bytes in base64, little-endian."""
    data = struct.pack(f"<{len(numbers)}{code}", *numbers)
    return {"dtype": kind, "shape": shape, "data": base64.b64encode(data).decode("ascii")}


def embedding(token: int, position: int) -> list[float]:
    """What stands for a token: a function of its id and its absolute position, as RoPE would have it."""
    return [math.sin((token + 1) * (d + 1)) + 0.5 * math.cos(position / (d + 1)) for d in range(WIDTH)]


class Toy:
    """One session. A cache is the list of rows that it holds, oldest first; the offset only a rollback lowers."""

    def __init__(self, owners: list[str]) -> None:
        self.held: list[list[list[float]]] = [[] for _ in owners]
        self.offset = [0 for _ in owners]

    def forward(self, sequence: int, tokens: list[int]) -> dict[str, Any]:
        held, start = self.held[sequence], self.offset[sequence]
        before = len(held)
        held += [embedding(token, start + i) for i, token in enumerate(tokens)]
        self.offset[sequence] += len(tokens)
        width = before + len(tokens)  # the bug that the harness was made for: start + len(tokens)
        mask = [[key <= before + query for key in range(width)] for query in range(len(tokens))]
        shown = [int(seen) for row in mask for seen in row]
        call: dict[str, Any] = {"kind": "fast", "query_len": len(tokens), "key_len": len(held), "value_len": len(held)}
        call |= {"heads": 1, "kv_heads": 1, "mask": "bool", "mask_shape": [len(tokens), width]}
        call["shown"] = array("bool", "B", [1, 1, len(tokens), width], shown)
        given = array("int64", "q", [len(tokens)], range(start, start + len(tokens)))
        seen = {"attention": [call], "positions": [{"kind": "rope", "positions": given}]}
        try:
            logits = [self.attend(held, before + query, row) for query, row in enumerate(mask)]
        except Exception as error:  # of the engine itself: an answer, and what was seen until then is told with it
            return {"error": f"{type(error).__name__}: {error}", **seen}
        flat = [number for row in logits for number in row]
        return {"logits": array("float32", "f", [len(tokens), VOCAB], flat), **seen}

    def attend(self, held: list[list[float]], query: int, mask: list[bool]) -> list[float]:
        keys = [key for key, seen in zip(held, mask, strict=True) if seen]
        scores = [math.exp(sum(a * b for a, b in zip(held[query], key, strict=True))) for key in keys]
        out = [sum(score * key[d] for score, key in zip(scores, keys, strict=True)) / sum(scores) for d in range(WIDTH)]
        return [sum(a * b for a, b in zip(out, embedding(token, 0), strict=True)) for token in range(VOCAB)]

    def trim_front(self, sequence: int, n: int, keep: int) -> dict[str, Any]:
        held = self.held[sequence]
        n = min(n, len(held))
        keep = min(keep, len(held) - n)
        del held[keep : keep + n]
        return {"removed": [n]}

    def rollback(self, sequence: int, n: int) -> dict[str, Any]:
        held = self.held[sequence]
        n = min(n, len(held))
        del held[len(held) - n :]
        self.offset[sequence] -= n
        return {"removed": [n]}

    def told(self) -> list[Any]:
        """Of every sequence, what each of its caches (here one) says of itself: offset, live_start, live_len."""
        both = zip(self.offset, self.held, strict=True)
        caches = [{"offset": o, "live_start": o - len(held), "live_len": len(held)} for o, held in both]
        return [{"lengths": [cache]} for cache in caches]


HELLO = {
    "protocol": 1,
    "family": "toy",
    "vocab_size": VOCAB,
    "attention_layers": [0],
    "capabilities": ["front_trim", "rollback", "sequences", "attention", "positions", "lengths"],
}


def answer(toy: Toy | None, request: dict[str, Any]) -> tuple[Toy | None, dict[str, Any]]:
    """(the session, the answer without its id). Raises what is wrong with the request."""
    do = request["do"]
    if do == "hello":
        if request["protocol"] != HELLO["protocol"]:
            raise ValueError(f"this worker speaks version {HELLO['protocol']}")
        return toy, dict(HELLO)
    if do == "open":
        return Toy(request["owners"]), {}
    if toy is None:
        raise ValueError("no session is open")
    if do == "forward":
        if not all(0 <= token < VOCAB for token in request["tokens"]):
            raise ValueError("no such token")
        said = toy.forward(request["sequence"], request["tokens"])
    elif do == "trim_front":
        said = toy.trim_front(request["sequence"], request["n"], request["keep"])
    elif do == "rollback":
        said = toy.rollback(request["sequence"], request["n"])
    elif do == "tell":
        said = {}
    else:
        raise ValueError(f"there is no message {do!r}")
    return toy, said | ({"told": toy.told()} if do == "tell" or request.get("tell") else {})


def main() -> None:
    toy: Toy | None = None
    for line in sys.stdin:  # until the harness closes it, or is gone
        number = -1
        try:
            request = json.loads(line)
            number = request["id"]
            toy, said = answer(toy, request)
        except (ValueError, KeyError, IndexError, TypeError) as error:
            said = {"bad_request": f"{type(error).__name__}: {error}"}
        print(json.dumps({"id": number, **said}), flush=True)


if __name__ == "__main__":
    main()
