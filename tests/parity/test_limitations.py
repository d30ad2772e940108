"""The record of what peers refuse or get wrong: every entry is still true, and an entry that is not is told."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from packaging.specifiers import SpecifierSet

from tests.parity import comparing, limitations, routing, running, table
from tests.parity.cases import Case
from tests.parity.comparing import TOLERANCE, Disagreement, Outcome, Refusal
from tests.parity.limitations import LIMITATIONS, Limitation, limitations_of
from tests.parity.peers import PEERS, Peer, missing, version
from tests.parity.routing import UnexplainedFlip

BY_NAME = {peer.name: peer for peer in PEERS}
DRAWS = 400


def alone(entry: Limitation) -> tuple[Peer, Case] | None:
    """A peer and a drawn case that must show the entry, and that no other entry covers."""
    for peer in PEERS:
        installed = version(peer.needs[0])
        for family in entry.families if installed is not None and entry.peer == peer.needs[0] else ():
            for modality in peer.modalities(family):
                for number in range(DRAWS):
                    case = peer.adapt(running.seeded_case(family, modality, 9, number))
                    if limitations_of(peer, installed or "", case) == (entry,) and entry.seen(case):
                        return peer, case
    return None


@pytest.mark.parametrize("entry", LIMITATIONS, ids=[entry.id for entry in LIMITATIONS])
def test_what_is_recorded_still_fails(entry: Limitation) -> None:
    if absent := missing(BY_NAME[entry.peer]):
        pytest.skip(f"not installed: {', '.join(absent)} (pip install 'mlx-kv-harness[peers]')")
    if not SpecifierSet(entry.versions).contains(version(entry.peer) or "", prereleases=True):
        pytest.skip(f"recorded for {entry.versions}, installed is {version(entry.peer)}")
    found = alone(entry)
    assert found is not None, f"{entry.id} is never met alone: nothing can prove it"
    trial = running.try_known(*found, (entry,))
    assert trial.wrong is None, trial.wrong
    assert trial != running.Trial()


def test_every_entry_is_complete() -> None:
    assert len({entry.id for entry in LIMITATIONS}) == len(LIMITATIONS)
    for entry in LIMITATIONS:
        assert entry.peer in BY_NAME and entry.why and entry.condition, entry.id
        assert bool(entry.says) == (entry.kind == "limitation") == (entry.span is None), entry.id
        if entry.span is not None:
            least, most = entry.span
            assert TOLERANCE < least < most < 100, entry.id
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
                logits = ours.run([len(case.tokens)]) * (-1 if wrong else 1)
                if fake.answer == "nan":
                    logits[-1, 0] = np.nan
                return logits

            def step(self, token: int) -> np.ndarray:
                if fake.answer == "refuse later":
                    raise RuntimeError("no second token")
                return ours.step(token)

        return Engine()


def an_entry(kind: Any, **changes: Any) -> Limitation:
    fields: dict[str, Any] = {"says": "lm_head"} if kind == "limitation" else {"says": "", "span": (0.1, 50.0)}
    return dataclasses.replace(LIMITATIONS[0], kind=kind, **fields | changes)


@pytest.fixture
def case() -> Case:
    return running.seeded_case("qwen2_vl", "text", 0, 1)


def test_a_record_that_no_longer_fails_is_told(case: Case) -> None:
    peer: Peer = Fake("agree")
    for kind in ("limitation", "known failure"):
        trial = running.try_known(peer, case, (an_entry(kind),))
        assert trial.wrong is not None and trial.wrong.startswith("FIXED? ") and trial.off is None


def test_a_record_must_tell_what_happens(case: Case) -> None:
    trial = running.try_known(Fake("refuse"), case, (an_entry("limitation"),))
    assert trial == running.Trial(said="KeyError: 'lm_head'")
    trial = running.try_known(Fake("wrong"), case, (an_entry("known failure"),))
    assert trial.wrong is None and trial.off is not None and trial.off > 0.1
    for answer, entry in (
        ("refuse", an_entry("known failure")),
        ("refuse", an_entry("limitation", says="something else")),
        ("wrong", an_entry("limitation")),
    ):
        wrong = running.try_known(Fake(answer), case, (entry,)).wrong
        assert wrong is not None and "should tell" in wrong


@pytest.mark.parametrize("span", [(1e-4, 1e-2), (30.0, 50.0)], ids=["more", "less"])
def test_a_difference_out_of_the_recorded_range_is_told(case: Case, span: tuple[float, float]) -> None:
    trial = running.try_known(Fake("wrong"), case, (an_entry("known failure", span=span),))
    assert trial.wrong is not None and "but it gave: a difference of " in trial.wrong
    assert trial.off is not None and 1e-2 < trial.off < 30


def test_no_range_accepts_what_is_no_number(case: Case) -> None:
    trial = running.try_known(Fake("nan"), case, LIMITATIONS)
    assert trial.wrong is not None and "a difference of inf" in trial.wrong and trial.off == np.inf
    for off in (np.inf, np.nan, -np.inf):
        assert not limitations.explained(LIMITATIONS, None, off)


def test_several_known_failures_may_add_up_and_a_refusal_has_no_size() -> None:
    two = an_entry("known failure", span=(0.1, 1.0)), an_entry("known failure", span=(0.5, 2.0))
    for off, fits in ((0.05, False), (0.1, True), (3.0, True), (3.1, False)):
        assert limitations.explained(two, None, off) == fits
    assert not limitations.explained((an_entry("limitation"),), None, 0.5)


def test_other_experts_than_expected_have_a_size(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind an unexplained flip the logits differ by something, which a known failure must tell as well."""

    def flips(*_: Any) -> None:
        raise UnexplainedFlip("other experts")

    monkeypatch.setattr(routing, "first_flip", flips)
    monkeypatch.setattr(routing, "routing_of", lambda config: routing.Routing(1))
    trial = running.try_known(Fake("wrong"), case, (an_entry("known failure"),))
    assert trial.wrong is None and trial.off is not None and 0.1 < trial.off < 50
    trial = running.try_known(Fake("wrong"), case, (an_entry("known failure", span=(30.0, 50.0)),))
    assert trial.wrong is not None


def test_what_no_record_covers_fails_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    for answer, told in (("agree", ""), ("wrong", "Disagreement"), ("refuse", "Refusal"), ("refuse later", "Refusal")):
        row = running.run_row(Fake(answer), "qwen2_vl", "text", 2, 0)
        assert row.compared == (0 if "refuse" in answer else 2) and len(row.failures) == (2 if told else 0)
        assert all(failure.text.startswith(told) for failure in row.failures)
        assert [failure.number for failure in row.failures] == [0, 1][: len(row.failures)]
        assert all((failure.off is not None and failure.off > 0.1) == (answer == "wrong") for failure in row.failures)
    entry = an_entry("limitation", holds=lambda case: True, says="lm_head")
    monkeypatch.setattr(running, "limitations_of", lambda *_: (entry,))
    row = running.run_row(Fake("refuse"), "qwen2_vl", "text", 2, 0)
    assert (row.compared, row.failures) == (0, []) and row.alone[entry.id] == running.KNOWN_TRIES
    assert row.known[entry.id] == row.drawn > running.KNOWN_TRIES and row.said == {entry.id: "KeyError: 'lm_head'"}
    row = running.run_row(Fake("agree"), "qwen2_vl", "text", 2, 0)
    assert len(row.failures) == running.KNOWN_TRIES and "FIXED?" in row.failures[0].text


def answers(monkeypatch: pytest.MonkeyPatch, give: Callable[[Case], Any]) -> None:
    """What the comparison of a case raises, if it is an exception, or returns."""

    def compare(peer: Peer, case: Case) -> Outcome:
        gave = give(case)
        if isinstance(gave, Exception):
            raise gave
        assert isinstance(gave, Outcome)
        return gave

    monkeypatch.setattr(running, "compare", compare)


def covering(monkeypatch: pytest.MonkeyPatch, *entries: Limitation) -> None:
    monkeypatch.setattr(running, "limitations_of", lambda peer, at, case: tuple(e for e in entries if e.holds(case)))


def test_an_entry_mended_in_the_peer_shows_among_runs_that_others_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nearly every case has another entry as well, whose failure must not stand for both."""
    mended = an_entry("known failure", id="mended", holds=lambda case: True)
    other = an_entry("known failure", id="other", holds=lambda case: case.seed % 50 != 1)
    covering(monkeypatch, mended, other)
    answers(monkeypatch, lambda case: Disagreement("", 1.0) if other.holds(case) else Outcome(logits=1))
    row = running.run_row(Fake(""), "qwen2_vl", "text", 5, 0)
    assert row.shared["mended"] == 1 and row.failures
    assert all(failure.text.startswith("FIXED? mended: ") for failure in row.failures)


def test_an_invented_entry_beside_a_true_one_is_not_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    true = an_entry("known failure", id="true", holds=lambda case: case.seed % 2 == 0)
    invented = an_entry("known failure", id="invented", holds=lambda case: case.seed % 4 == 0)
    covering(monkeypatch, true, invented)
    answers(monkeypatch, lambda case: Disagreement("", 1.0) if true.holds(case) else Outcome(logits=1))
    row = running.run_row(Fake(""), "qwen2_vl", "text", 20, 0)
    assert not row.failures and row.compared == 20
    assert row.alone == {"true": running.KNOWN_TRIES} and row.off == {"true": [1.0] * running.KNOWN_TRIES}
    assert row.shared["invented"] == 1 and row.known["invented"] > 1
    monkeypatch.setattr(table, "LIMITATIONS", (true, invented))
    shown, hidden = table.markdown([row], 20, 0).split("that this run does not show:")
    assert "- `true`" in shown and "- `invented`" not in shown
    assert "- `invented`" in hidden and "never met alone, so not tried" in hidden and "- `true`" not in hidden


def test_a_run_that_entries_share_must_be_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    covering(monkeypatch, *(an_entry("known failure", id=name, holds=lambda case: True) for name in "ab"))
    answers(monkeypatch, lambda case: Refusal("KeyError: 'lm_head'"))
    row = running.run_row(Fake(""), "qwen2_vl", "text", 2, 0)
    assert [failure.text.split(" but")[0] for failure in row.failures] == ["a, b should tell what fake does,"]
    assert not row.alone


def test_a_case_tied_at_its_first_token_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    tie = routing.Flip(0, 0, 1e-6)
    count = iter(range(1000))
    answers(monkeypatch, lambda case: Outcome(flips=[tie]) if next(count) % 3 else Outcome(worst=1e-6, logits=64))
    row = running.run_row(Fake(""), "qwen2_vl", "text", 4, 0)
    assert (row.compared, row.tied, row.drawn) == (4, 6, 10) and not row.failures
    answers(monkeypatch, lambda case: Outcome(flips=[tie]))
    row = running.run_row(Fake(""), "qwen2_vl", "text", 4, 0)
    assert (row.compared, row.drawn) == (0, running.HOPELESS)
    assert "none to compare" in table.markdown([row], 4, 0) and "1 compared nothing" in table.summary([row])


def test_a_tie_neither_proves_an_entry_nor_mends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = an_entry("known failure", holds=lambda case: True)
    covering(monkeypatch, entry)
    answers(monkeypatch, lambda case: Outcome(flips=[routing.Flip(0, 0, 1e-6)]))
    row = running.run_row(Fake(""), "qwen2_vl", "text", 2, 0)
    assert not row.failures and not row.alone and row.known[entry.id] == row.drawn


def test_one_draw_is_repeated_alone() -> None:
    whole = running.run_row(Fake("wrong"), "qwen2_vl", "text", 3, 4)
    again = running.run_row(Fake("wrong"), "qwen2_vl", "text", 3, 4, only=2)
    assert again.drawn == 1 and again.failures == whole.failures[2:] and again.failures[0].number == 2


def test_a_broken_side_of_ours_is_not_taken_for_a_refusal(monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    from tests.parity import checkpoints

    peer = Fake("agree")
    monkeypatch.setattr(comparing.Ours, "run", lambda self, lengths: 1 / 0)
    monkeypatch.setattr(peer, "open", lambda case, folder: _silent(checkpoints, case, folder))
    with pytest.raises(ZeroDivisionError):
        comparing.compare(peer, case)
    row = running.run_row(peer, "qwen2_vl", "text", 2, 0)
    assert row.compared == 0
    assert [failure.text.split(";")[0] for failure in row.failures] == [
        "ours raised ZeroDivisionError: division by zero"
    ] * 2


def _silent(checkpoints: Any, case: Case, folder: Path) -> Any:
    checkpoints.write(case, folder)

    class Engine:
        routed: list[np.ndarray] = []  # noqa: RUF012

        def prefill(self) -> np.ndarray:
            return np.zeros((len(case.tokens), case.config.vocab_size), dtype=np.float32)

    return Engine()


def test_a_refusal_keeps_what_was_said(case: Case) -> None:
    with pytest.raises(Refusal, match="KeyError: 'lm_head'"):
        comparing.compare(Fake("refuse"), case)
