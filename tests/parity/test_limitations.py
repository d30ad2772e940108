"""The record of what peers refuse or get wrong: every entry is still true, and an entry that is not is told."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.parity import running
from tests.parity.cases import Case, modalities
from tests.parity.comparing import Refusal
from tests.parity.limitations import LIMITATIONS, Limitation, limitations_of
from tests.parity.peers import PEERS, Peer, missing, version

BY_NAME = {peer.name: peer for peer in PEERS}
DRAWS = 400


def covered(entry: Limitation, installed: str) -> Case | None:
    """A drawn case that the entry covers, with as few other entries as there are."""
    peer = BY_NAME[entry.peer]
    best: tuple[int, Case] | None = None
    for family in entry.families:
        for modality in modalities(family):
            if modality not in peer.modalities(family):
                continue
            for number in range(DRAWS):
                case = peer.adapt(running.seeded_case(family, modality, 9, number))
                held = limitations_of(peer, installed, case)
                if entry in held and entry.seen(case) and (best is None or len(held) < best[0]):
                    best = len(held), case
                if best and best[0] == 1:
                    return best[1]
    return best and best[1]


@pytest.mark.parametrize("entry", LIMITATIONS, ids=[entry.id for entry in LIMITATIONS])
def test_what_is_recorded_still_fails(entry: Limitation) -> None:
    peer = BY_NAME[entry.peer]
    if absent := missing(peer):
        pytest.skip(f"not installed: {', '.join(absent)} (pip install 'mlx-kv-harness[peers]')")
    installed = version(peer.needs[0])
    assert installed is not None
    case = covered(entry, installed)
    if case is None:
        pytest.skip(f"recorded for {entry.versions}, installed is {installed}")
    wrong, _ = running.try_known(peer, case, (entry, *limitations_of(peer, installed, case)))
    assert wrong is None, wrong


def test_every_entry_is_complete() -> None:
    assert len({entry.id for entry in LIMITATIONS}) == len(LIMITATIONS)
    for entry in LIMITATIONS:
        assert entry.peer in BY_NAME and entry.measured and entry.why and entry.condition, entry.id
        assert bool(entry.says) == (entry.kind == "limitation"), entry.id
        assert not entry.applies(BY_NAME[entry.peer], "0.0.1", running.seeded_case(entry.families[0], "text", 0, 0)), (
            entry.id
        )


class Fake:
    """A peer that says what it is told to say: our own logits, others, or no."""

    name, needs, mended = "fake", ("numpy",), frozenset[str]()

    def __init__(self, answer: str):
        self.answer = answer

    def modalities(self, family: str) -> tuple[str, ...]:
        return ("text",)

    def adapt(self, case: Case) -> Case:
        return case

    def open(self, case: Case, folder: Path) -> Any:
        from tests.parity import checkpoints
        from tests.parity.comparing import Ours

        if self.answer == "refuse":
            raise KeyError("lm_head")
        checkpoints.write(case, folder)
        ours = Ours(case, checkpoints.load(case, folder))
        fake, wrong = self, self.answer == "wrong"

        class Engine:
            routed: list[np.ndarray] = []  # noqa: RUF012

            def prefill(self) -> np.ndarray:
                return ours.run([len(case.tokens)]) * (-1 if wrong else 1)

            def step(self, token: int) -> np.ndarray:
                if fake.answer == "refuse later":
                    raise RuntimeError("no second token")
                return ours.step(token)

        return Engine()


def an_entry(kind: Any, **changes: Any) -> Limitation:
    fields: dict[str, Any] = {"says": "lm_head" if kind == "limitation" else ""}
    return dataclasses.replace(LIMITATIONS[0], kind=kind, **fields | changes)


@pytest.fixture
def case() -> Case:
    return running.seeded_case("qwen2_vl", "text", 0, 1)


def test_a_record_that_no_longer_fails_is_told(case: Case) -> None:
    peer: Peer = Fake("agree")
    for kind in ("limitation", "known failure"):
        wrong, off = running.try_known(peer, case, (an_entry(kind),))
        assert wrong is not None and wrong.startswith("FIXED? ") and off is None


def test_a_record_must_tell_what_happens(case: Case) -> None:
    assert running.try_known(Fake("refuse"), case, (an_entry("limitation"),)) == (None, None)
    wrong, off = running.try_known(Fake("wrong"), case, (an_entry("known failure"),))
    assert wrong is None and off is not None and off > 0.1
    for answer, entry in (
        ("refuse", an_entry("known failure")),
        ("refuse", an_entry("limitation", says="something else")),
        ("wrong", an_entry("limitation")),
    ):
        wrong, _ = running.try_known(Fake(answer), case, (entry,))
        assert wrong is not None and "should tell" in wrong


def test_what_no_record_covers_fails_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    for answer, told in (("agree", ""), ("wrong", "Disagreement"), ("refuse", "Refusal"), ("refuse later", "Refusal")):
        row = running.run_row(Fake(answer), "qwen2_vl", "text", 2, 0)
        assert row.compared == 2 and len(row.failures) == (2 if told else 0)
        assert all(line.startswith(told) for line in row.failures)
    entry = an_entry("limitation", holds=lambda case: True, says="lm_head")
    monkeypatch.setattr(running, "limitations_of", lambda *_: (entry,))
    row = running.run_row(Fake("refuse"), "qwen2_vl", "text", 2, 0)
    assert (row.compared, row.failures) == (0, []) and row.tried[entry.id] == running.KNOWN_TRIES
    assert row.known[entry.id] == row.drawn > running.KNOWN_TRIES
    row = running.run_row(Fake("agree"), "qwen2_vl", "text", 2, 0)
    assert len(row.failures) == running.KNOWN_TRIES and "FIXED?" in row.failures[0]


def test_a_broken_side_of_ours_is_not_taken_for_a_refusal(monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    from tests.parity import checkpoints, comparing

    peer = Fake("agree")
    monkeypatch.setattr(comparing.Ours, "run", lambda self, lengths: 1 / 0)
    monkeypatch.setattr(peer, "open", lambda case, folder: _silent(checkpoints, case, folder))
    with pytest.raises(ZeroDivisionError):
        comparing.compare(peer, case)
    row = running.run_row(peer, "qwen2_vl", "text", 2, 0)
    assert [line.split(";")[0] for line in row.failures] == ["ours raised ZeroDivisionError: division by zero"] * 2


def _silent(checkpoints: Any, case: Case, folder: Path) -> Any:
    checkpoints.write(case, folder)

    class Engine:
        routed: list[np.ndarray] = []  # noqa: RUF012

        def prefill(self) -> np.ndarray:
            return np.zeros((len(case.tokens), case.config.vocab_size), dtype=np.float32)

    return Engine()


def test_a_refusal_keeps_what_was_said(case: Case) -> None:
    from tests.parity.comparing import compare

    with pytest.raises(Refusal, match="KeyError: 'lm_head'"):
        compare(Fake("refuse"), case)
