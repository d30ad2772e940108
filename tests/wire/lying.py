"""The toy worker, which tells right lengths and masks and gives logits that are not of them: ``lying.py LIE``.

``none``: the toy itself. ``constant``: all logits are alike; ``token``: those of a token alone; ``trims``: they rest on
every key that there ever was, and a trim moves counters; ``constant,values,rows``: also what it tells of attention, of
its rows and of a forward without a cache is made up; ``constant,nan``: what it tells of attention is no number.
"""

from __future__ import annotations

import sys
from typing import Any

from harness.wire.examples import toy

V, NAN = toy.VOCAB, float("nan")


def full(number: float, *shape: int) -> dict[str, Any]:
    size = 1
    for length in shape:
        size *= length
    return toy.array("float32", "f", list(shape), [number] * size)


class Liar(toy.Toy):
    lies: frozenset[str] = frozenset()

    def __init__(self, owners: list[str]) -> None:
        super().__init__(owners)
        self.ever: list[list[list[float]]] = [[] for _ in owners]

    def forward(self, sequence: int, tokens: list[int]) -> dict[str, Any]:
        start, before, ever = self.offset[sequence], len(self.ever[sequence]), self.ever[sequence]
        said = super().forward(sequence, tokens)
        ever += [toy.embedding(token, start + i) for i, token in enumerate(tokens)]
        count, keys = len(tokens), said["attention"][0]["key_len"]
        if "constant" in self.lies:
            said["logits"] = full(0.25, count, V)
        if self.lies & {"token", "trims"}:  # that sees itself alone, or all that ever was
            alone = "token" in self.lies
            logits = []
            for query in range(before, before + count):
                seen = [key == query or (key < query and not alone) for key in range(len(ever))]
                logits += self.attend(ever, query, seen)
            said["logits"] = toy.array("float32", "f", [count, V], logits)
        if self.lies & {"values", "nan"}:
            number = NAN if "nan" in self.lies else 0.5
            lengths = {"queries": count, "keys": keys, "values": keys, "out": count}
            values = {name: full(number, 1, 1, length, 4) for name, length in lengths.items()}
            said["attention"][0]["values"] = values | {"scale": 1.0}
        return said

    def rollback(self, sequence: int, n: int) -> dict[str, Any]:
        said = super().rollback(sequence, n)
        del self.ever[sequence][len(self.ever[sequence]) - said["removed"][0] :]
        return said

    def told(self) -> list[Any]:
        told = super().told()
        if "rows" in self.lies:
            for each, held in zip(told, self.held, strict=True):
                zeros = full(0.0, 1, 1, len(held), 4)
                each["rows"] = [{"keys": zeros, "values": zeros}]
        return told


def main(lies: str) -> None:
    Liar.lies = frozenset(lies.split(","))
    able = toy.HELLO["capabilities"]
    assert isinstance(able, list)
    able += ["rows", "cache_free"] if "rows" in Liar.lies else []
    able += ["attention_values"] if Liar.lies & {"values", "nan"} else []
    toy.Toy = Liar  # type: ignore[misc]
    honest = toy.answer

    def answer(session: Any, request: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if request["do"] == "cache_free":
            return session, {"logits": full(0.25, *request["tokens"]["shape"], V)}
        return honest(session, request)

    toy.answer = answer
    toy.main()


if __name__ == "__main__":
    main(sys.argv[1])
