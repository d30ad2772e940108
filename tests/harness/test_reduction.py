"""Reduction: long failing programs become short ones, and what comes out really fails."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
from kv_harness_fake_target import FakeTarget
from kv_harness_on_fakes import fake

import properties
from harness.findings import Finding, FindingError, Violation
from harness.judge import judge_program
from harness.operations import (
    MAX_TOKENS,
    Chunk,
    Decode,
    EnforceMaxKvSize,
    Operation,
    Prefill,
    Program,
    Rollback,
    TrimFront,
)
from harness.reduction import ATTEMPTS, reduce_finding
from harness.target import ForwardObservation, RemovalObservation

WIDTH = "mask_key_axis_equals_live_keys"
OWNERS = [("pool",), ("pool", "model"), ("model", "pool"), ("pool", "pool", "pool")]


def found(target: FakeTarget, program: Program, property_id: str) -> Finding | None:
    try:
        judge_program(target, program, [properties.BY_ID[property_id]])
    except FindingError as error:
        return error.finding
    return None


def long_program(seed: int, length: int) -> Program:
    draw = random.Random(seed)
    owners: Any = draw.choice(OWNERS)

    def operation() -> Operation:
        s = draw.randrange(len(owners))
        return draw.choice(
            [
                Prefill(draw.randint(1, 30), s),
                Chunk(draw.randint(1, 30), s),
                Decode(draw.randint(1, 6), s),
                TrimFront(draw.randint(0, 9), draw.randint(0, 3), s),
                Rollback(draw.randint(0, 6), s),
                EnforceMaxKvSize(
                    draw.randint(5, 60), draw.choice(["trim", "sinks", "shift"]), draw.randint(0, 6), 0, s
                ),
            ]
        )

    # a rollback that undoes the whole difference cannot hide it for ever: the last words are a trim and a chunk
    s = owners.index("pool")
    tail = (Prefill(9, s), TrimFront(2, 0, s), Chunk(4, s))
    return Program((*(operation() for _ in range(length)), *tail), owners)


@pytest.mark.parametrize("seed", range(12))
def test_long_programs_become_short(seed: int) -> None:
    target = fake(policy="offset")
    finding = found(target, long_program(seed, 40), WIDTH)
    assert finding is not None
    smaller, again = reduce_finding(target, finding, properties.ALL)
    assert again and smaller.property_id == WIDTH
    assert len(smaller.program.operations) <= 3 and smaller.program.owners == ("pool",)
    confirmed = found(target, smaller.program, WIDTH)
    assert confirmed is not None and confirmed.message == smaller.message
    kinds = [type(operation) for operation in smaller.program.operations]
    assert kinds == [Prefill, TrimFront, Chunk]
    assert str(smaller.program) == "Prefill(1) ; TrimFront(1) ; Chunk(2)"
    assert len(target.renewed) == 1


@pytest.mark.parametrize(
    ("target", "property_id", "program", "shortest"),
    [
        (fake("mask leaks"), "mask_shows_exactly_the_visible_set", [Prefill(9), Decode(2), Chunk(7)], "Prefill(2)"),
        (
            fake("positions from live_len"),
            "positions_are_absolute",
            [Prefill(9), EnforceMaxKvSize(5, "shift"), Decode(3)],
            "Prefill(1) ; TrimFront(1) ; Decode(1)",
        ),
        (
            fake("nan logits after a trim"),
            "every_forward_gives_finite_logits",
            [Prefill(9), EnforceMaxKvSize(5, "sinks"), Decode(3)],
            "Prefill(1) ; TrimFront(1) ; Decode(1)",
        ),
        (
            fake("rows change in a trim"),
            "cached_rows_stay_what_they_were",
            [Prefill(9), Chunk(4), EnforceMaxKvSize(5, "shift", 3, 0), Decode(3)],
            "Prefill(2) ; TrimFront(1)",
        ),
        (fake("reports zero removed"), "trim_reports_what_it_removed", [Prefill(9), TrimFront(5, 2)], None),
        (fake("bias under the live policy"), "untrimmed_outputs_are_byte_identical", [Prefill(4), Chunk(9)], None),
        (fake("raises after a trim to zero"), "every_operation_completes", [Prefill(9), TrimFront(99), Chunk(9)], None),
    ],
)
def test_every_property_can_be_reduced(
    target: FakeTarget, property_id: str, program: list[Operation], shortest: str | None
) -> None:
    given = Program(tuple(program))
    finding = found(target, given, property_id)
    assert finding is not None
    smaller, again = reduce_finding(target, finding, properties.ALL)
    assert again and found(target, smaller.program, property_id) is not None
    assert len(smaller.program.operations) <= len(given.operations)
    if shortest is not None:
        assert str(smaller.program) == shortest


def test_a_finding_of_the_second_sequence_loses_the_first() -> None:
    program = Program((Prefill(5), Prefill(9, 1), TrimFront(2, 0, 1), Decode(1), Chunk(4, 1)), ("model", "pool"))
    target = fake(policy="offset")
    finding = found(target, program, WIDTH)
    assert finding is not None
    smaller, _ = reduce_finding(target, finding, properties.ALL)
    assert smaller.program.owners == ("pool",) and len(smaller.program.operations) == 3


def test_a_finding_that_needs_two_sequences_keeps_them() -> None:
    program = Program((Prefill(5), Prefill(5, 1), Decode(3), TrimFront(3), Decode(1, 1)), ("pool", "pool"))
    target = fake("neighbour trimmed too")
    finding = found(target, program, "keys_equal_ledger_live_length")
    assert finding is not None
    smaller, again = reduce_finding(target, finding, properties.ALL)
    assert again and len(smaller.program.owners) == 2
    assert sorted(op.text() for op in smaller.program.operations) == ["Prefill(1)", "Prefill(1)", "TrimFront(1)"]


def test_a_finding_that_does_not_come_back_is_returned_as_it_is() -> None:
    finding = Finding(WIDTH, "fake/fake@live-mask", Violation(0, "seen once"), Program((Prefill(5), Chunk(2))))
    assert reduce_finding(fake(), finding, properties.ALL) == (finding, False)


class Remembering(FakeTarget):
    """Its bug is in what earlier sessions left behind, and gone from a target made new."""

    def open(self, owners: Any) -> Any:
        return (fake() if self.renewed else fake(policy="offset")).open(owners)


def test_a_finding_that_a_target_made_new_does_not_show_is_not_reproducible() -> None:
    target = Remembering(policy="offset")
    finding = found(target, Program((Prefill(5), TrimFront(2), Chunk(4))), WIDTH)
    assert finding is not None and target.renewed == []
    assert reduce_finding(target, finding, properties.ALL) == (finding, False)
    assert len(target.renewed) == 2  # the smallest that failed, and the program that was found


class Worn(FakeTarget):
    """Its bug needs four tokens in a target made new, and nothing where a session has shown it before."""

    worn = False

    def open(self, owners: Any) -> Any:
        session = fake().open(owners)
        forward = session.forward

        def failing(sequence: int, tokens: Any, prompt: Any = None) -> Any:
            seen = forward(sequence, tokens, prompt)
            self.worn |= len(tokens) >= 4
            return dataclasses.replace(seen, logits=None, error="E: worn") if self.worn else seen

        session.forward = failing
        return session

    def renew(self) -> None:
        super().renew()
        self.worn = False


def test_what_fails_only_in_a_used_target_does_not_take_the_place_of_what_was_found() -> None:
    target = Worn()
    finding = found(target, Program((Prefill(5), Chunk(2))), "every_operation_completes")
    assert finding is not None
    smaller, again = reduce_finding(target, finding, properties.ALL)
    assert again and smaller.program == finding.program


class Restarted(FakeTarget):
    """A right or wrong target; of its sessions those whose numbers are given end with their first forward."""

    ends: tuple[int, ...] = ()
    opened = 0

    def open(self, owners: Any) -> Any:
        session = super().open(owners)
        self.opened += 1
        if self.opened in self.ends:

            def gone(sequence: int, tokens: Any, prompt: Any = None) -> ForwardObservation:
                return ForwardObservation(tuple(tokens), None, error="EngineHung: no\nanswer")

            session.forward = gone
        return session


@pytest.mark.parametrize(
    ("ends", "comes_back"),
    [
        pytest.param((), True, id="none"),
        pytest.param((2,), True, id="the-first-that-is-made-new"),
        pytest.param((2, 3), False, id="both"),
    ],
)
def test_an_engine_that_hangs_when_it_is_asked_again_is_asked_once_more(
    ends: tuple[int, ...], comes_back: bool
) -> None:
    """A busy machine, not a finding that is gone; where it goes on, the message says what there was instead."""
    target = Restarted(policy="offset")
    finding = found(target, Program((Prefill(1), TrimFront(1), Chunk(2))), WIDTH)
    assert finding is not None
    target.opened, target.ends = 0, ends
    told, again = reduce_finding(target, finding, properties.ALL, most=0)
    assert again is comes_back and told.program == finding.program
    said = " (run again, it ended before that: EngineHung: no answer)"
    assert told.message == finding.message + ("" if comes_back else said)


class Late(FakeTarget):
    """A forward of two tokens raises."""

    def open(self, owners: Any) -> Any:
        session = super().open(owners)
        forward = session.forward

        def late(sequence: int, tokens: Any, prompt: Any = None) -> Any:
            seen = forward(sequence, tokens, prompt)
            return dataclasses.replace(seen, logits=None, error="E: late") if len(tokens) == 2 else seen

        session.forward = late
        return session


def test_an_error_behind_what_was_found_is_no_excuse() -> None:
    """The target was right where it had been wrong."""
    target = Late()
    finding = Finding(WIDTH, "fake/fake@live-mask", Violation(0, "seen once"), Program((Prefill(5), Chunk(2))))
    assert reduce_finding(target, finding, properties.ALL) == (finding, False)
    assert len(target.renewed) == 1


@pytest.mark.parametrize("owner", ["pool", "model"])
def test_the_owner_is_kept_only_where_the_finding_needs_it(owner: Any) -> None:
    """A wrong mask is wrong whoever owns the sequence; a visit to what the model owns needs the model as owner."""
    target = fake("mask leaks")
    finding = found(target, Program((Prefill(4), Chunk(3)), (owner,)), "mask_shows_exactly_the_visible_set")
    assert finding is not None
    assert reduce_finding(target, finding, properties.ALL)[0].program == Program((Prefill(2),))
    needed = fake("trims what the model owns")
    finding = found(needed, Program((Prefill(4), Chunk(3), TrimFront(2)), ("model",)), "trim_reports_what_it_removed")
    assert finding is not None
    smaller, again = reduce_finding(needed, finding, properties.ALL)
    assert again and smaller.program == Program((TrimFront(1),), ("model",))


class Threshold(FakeTarget):
    """A forward of ``LEAST`` tokens or more raises."""

    LEAST = 37

    def open(self, owners: Any) -> Any:
        session = super().open(owners)
        forward = session.forward

        def failing(sequence: int, tokens: Any, prompt: Any = None) -> Any:
            seen = forward(sequence, tokens, prompt)
            return seen if len(tokens) < self.LEAST else dataclasses.replace(seen, logits=None, error="E: too many")

        session.forward = failing
        return session


@pytest.mark.parametrize("tokens", [37, 38, 64, 300])
def test_a_number_is_cut_down_to_the_least_that_fails(tokens: int) -> None:
    target = Threshold()
    finding = found(target, Program((Prefill(tokens),)), "every_operation_completes")
    assert finding is not None
    smaller, again = reduce_finding(target, finding, properties.ALL)
    assert again and str(smaller.program) == "Prefill(37)"


class Quick(FakeTarget):
    """Without logits, for many or long forwards."""

    def open(self, owners: Any) -> Any:
        session = super().open(owners)
        session._logits = lambda *_: None  # type: ignore[method-assign,assignment,return-value]
        return session


class Long(Quick):
    """A trim is reported wrongly where more tokens are held than one operation can process."""

    def open(self, owners: Any) -> Any:
        session = super().open(owners)
        trim = session.trim_front

        def wrong(sequence: int, n: int, keep: int) -> RemovalObservation:
            held = session.lengths(sequence)[0].live_len
            return RemovalObservation((n + 1,) * 2) if held > MAX_TOKENS else trim(sequence, n, keep)

        session.trim_front = wrong  # type: ignore[method-assign]
        return session


def test_merged_forwards_stay_within_the_bounds_of_an_operation() -> None:
    target = Long(mask="none")
    program = Program((Prefill(MAX_TOKENS), Chunk(9), TrimFront(1)))
    finding = found(target, program, "trim_reports_what_it_removed")
    assert finding is not None
    smaller, again = reduce_finding(target, finding, properties.ALL)
    assert again and [type(operation) for operation in smaller.program.operations] == [Prefill, Chunk, TrimFront]
    assert sum(getattr(operation, "tokens", 0) for operation in smaller.program.operations) == MAX_TOKENS + 1


class Counting(Quick):
    """Counts its sessions."""

    opened = 0

    def open(self, owners: Any) -> Any:
        Counting.opened += 1
        return super().open(owners)


def test_it_ends_after_a_bounded_number_of_attempts() -> None:
    Counting.opened = 0
    target = Counting(bugs=frozenset({"mask leaks"}))
    program = Program((*[Decode(1)] * 300, Chunk(50)))
    finding = found(target, program, "mask_shows_exactly_the_visible_set")
    assert finding is not None
    smaller, again = reduce_finding(target, finding, properties.ALL)
    assert again and found(target, smaller.program, "mask_shows_exactly_the_visible_set") is not None
    assert Counting.opened <= 2 * ATTEMPTS + 5
    assert str(smaller.program) == "Prefill(2)"
