"""Whatever shape an array of an answer has: never a traceback, and never a PASS."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import properties
from harness.calls import AttentionCall, AttentionValues
from harness.campaign import run_campaign
from harness.findings import Verdict
from harness.profiles import PROFILES
from harness.targets.naming import Asked, resolve
from harness.wire import engine
from harness.wire.axes import AXES, check_answer
from harness.wire.codec import CodecError
from harness.wire.protocol import ForwardAnswer
from harness.wire.serve import Server

NAME = "reference:nemotron_nas:plain:rows"
BENT = {
    "no-axis": lambda array: {"shape": []},
    "an-axis-more": lambda array: {"shape": [*array["shape"], 1]},
    "an-axis-of-nothing": lambda array: {"shape": [0, *array["shape"][1:]], "data": ""},
    "a-huge-axis": lambda array: {"shape": [0, 10**30], "data": ""},
    "huge-axes": lambda array: {"shape": [0, *[2**31 - 1] * 7], "data": ""},
    "other-numbers": lambda array: {"dtype": "int8", "shape": array["shape"], "data": array["data"]},
}
FIELDS = (
    *("logits", "positions", "shown", "queries", "keys", "values", "out", "added", "row_keys", "row_values"),
    *("choice_gap", "free_logits"),
)
QUIETLY = ("no-axis", "an-axis-more", "other-numbers")
"""Positions so are not what PROTOCOL.md has, but read: a table of angles of another engine is no finding."""


def arrays(said: Any, name: str = "", inside: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every array of an answer with the name that it has in AXES."""
    if isinstance(said, list):
        for item in said:
            yield from arrays(item, name, inside)
    elif isinstance(said, dict) and "dtype" in said and "data" in said:
        yield (f"row_{name}" if inside == "rows" else name), said
    elif isinstance(said, dict):
        for key, item in said.items():
            yield from arrays(item, key, name)


class InThisProcess:
    """A worker that answers in the place of a process, with every array of one name bent."""

    field, how = "", "no-axis"
    bent = 0
    pid = None

    def __init__(self, command: str, limit: float) -> None:
        self._server = Server(resolve(NAME, Asked()).targets[0])

    def exchange(self, line: bytes) -> bytes:
        said = json.loads(self._server.answer(line))
        free = json.loads(line)["do"].startswith("cache_free")
        for name, array in arrays(said):
            if (f"free_{name}" if free and name == "logits" else name) != self.field:
                continue
            change = BENT[self.how](dict(array))
            if change.get("shape") == []:
                size = {"bool": 1, "int64": 8, "int32": 4, "float32": 4, "float64": 8}[array["dtype"]]
                change["data"] = {1: "AA==", 4: "AAAAAA==", 8: "AAAAAAAAAAA="}[size]
            array.update(change)
            type(self).bent += 1
        return json.dumps(said).encode()

    def stop(self, grace: float = 0.0) -> None:
        """There is nothing to end."""


def judged(monkeypatch: pytest.MonkeyPatch, field: str, how: str) -> Any:
    monkeypatch.setattr(engine, "WorkerProcess", InThisProcess)
    monkeypatch.setattr(InThisProcess, "field", field)
    monkeypatch.setattr(InThisProcess, "how", how)
    monkeypatch.setattr(InThisProcess, "bent", 0)
    (target,) = resolve("wire:in this process", Asked()).targets
    profile = replace(PROFILES["smoke"], programs=6, patience=0, every=1)
    return run_campaign("axes", [target], properties.ALL, profile, 0, first_only=True, attempts=4)


@pytest.mark.parametrize("how", BENT)
@pytest.mark.parametrize("field", FIELDS)
def test_of_another_shape(field: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    result = judged(monkeypatch, field, how)
    assert InThisProcess.bent, "nothing was bent"
    if field == "positions" and how in QUIETLY:
        (positions,) = [each for each in result.properties if each.id == "positions_are_absolute"]
        assert (
            positions.verdict is not Verdict.PASS or how == "an-axis-more"
        )  # of one token it is [..., tokens] as well
        return
    assert result.verdict is Verdict.FAIL
    message = result.found[0].finding.message
    assert "BadAnswer" in message and "\n" not in message, message


def test_as_they_are_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert judged(monkeypatch, "", "no-axis").found == []
    assert InThisProcess.bent == 0


def test_every_array_of_the_protocol_is_bent() -> None:
    """But two, which stand here for others: no engine of ours gives sinks, and no other gap than of a choice."""
    assert set(FIELDS) | {"sinks", "rounding_gap"} == set(AXES) | {"free_logits"}


def test_slots_of_a_batch_that_are_nobodys_are_values_all_the_same() -> None:
    """mlx-lm's rotating caches in a batch: they lie among the keys, and are left out of their number."""
    of = [np.zeros((1, heads, length, 8)) for heads, length in ((4, 1), (2, 5), (2, 5), (4, 1))]
    call = AttentionCall("fast", 1, 3, 3, 4, 2, "none", values=AttentionValues(*of, 1.0))
    check_answer({"tokens": (1,)}, ForwardAnswer(np.zeros((1, 7)), (call,)), None, None)
    of[2] = of[2][:, :, :4]
    call = replace(call, values=AttentionValues(*of, 1.0))
    with pytest.raises(CodecError, match=r"values.values has the shape \[1, 2, 4, 8\], expected .*: keys are 5"):
        check_answer({"tokens": (1,)}, ForwardAnswer(np.zeros((1, 7)), (call,)), None, None)
