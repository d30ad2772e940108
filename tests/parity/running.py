"""Many cases of one family, peer and modality: what was compared, what is known to fail, what is new."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

from tests.parity.cases import Case, draw_case
from tests.parity.comparing import Disagreement, Outcome, Refusal, compare
from tests.parity.limitations import Limitation, explained, limitations_of
from tests.parity.peers import Peer, version
from tests.parity.routing import UnexplainedFlip

KNOWN_TRIES = 3  # of every entry in a row, alone; its other cases are drawn and counted, not run
MOST_DRAWS = 200  # per configuration that is to be compared
HOPELESS = 500  # draws without a single one that no entry covers


@dataclass(frozen=True)
class Failure:
    """What makes a run fail: in words, at which draw of the row, and the difference, if that is what failed."""

    text: str
    number: int
    off: float | None = None


@dataclass(frozen=True)
class Trial:
    """A case that entries cover, as it came out: ``wrong`` with the record, None if it fails as recorded; ``off``: the
    difference; ``said``: the refusal. Neither of these when a routing tie left nothing to judge."""

    wrong: str | None = None
    off: float | None = None
    said: str | None = None


@dataclass
class Row:
    """One line of the table. ``compared``: cases of which logits were compared; ``tied``: those of which none were,
    because of a routing tie at the first token; ``known``: entry -> how many drawn cases it covers; ``alone``: how many
    cases that no other entry covers were run, the only ones that prove an entry; ``shared``: how many of the others;
    ``off`` and ``said``: the differences, and the last refusal, that an entry gave alone."""

    family: str
    peer: str
    version: str | None
    modality: str
    compared: int = 0
    tied: int = 0
    drawn: int = 0
    outcome: Outcome = field(default_factory=Outcome)
    known: Counter[str] = field(default_factory=Counter)
    alone: Counter[str] = field(default_factory=Counter)
    shared: Counter[str] = field(default_factory=Counter)
    off: dict[str, list[float]] = field(default_factory=dict)
    said: dict[str, str] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)


def seeded_case(family: str, modality: str, seed: int, number: int) -> Case:
    """The same case for the same arguments."""
    return draw_case(family, modality, random.Random(f"{seed}/{family}/{modality}/{number}").choice)


def try_known(peer: Peer, case: Case, entries: tuple[Limitation, ...]) -> Trial:
    """Run a case that entries cover."""
    names = ", ".join(entry.id for entry in entries)
    off, said = None, None
    try:
        if compare(peer, case).flips:
            return Trial()
        return Trial(f"FIXED? {names}: {peer.name} agrees on {case.text()}")
    except Refusal as error:
        said = str(error)
    except (Disagreement, UnexplainedFlip) as error:
        off = error.off
    if explained(entries, said, off):
        return Trial(None, off, said)
    gave = said if said is not None else f"a difference of {off:.1e}"
    return Trial(f"{names} should tell what {peer.name} does, but it gave: {gave}; {case.text()}", off, said)


def run_row(peer: Peer, family: str, modality: str, count: int, seed: int, only: int | None = None) -> Row:
    """Compare ``count`` drawn configurations, the same ones for a seed, and try the record of known failures on what
    comes up between them. ``only``: nothing but the draw of that number, which a failure names."""
    installed = version(peer.needs[0])
    row = Row(family, peer.name, installed, modality)
    assert installed is not None, f"{peer.name} is not installed"
    if only is not None:
        _draw(row, peer, installed, seed, only)
        return row
    settled = 0
    while settled < count and row.drawn < MOST_DRAWS * count and (settled or row.drawn < HOPELESS):
        settled += _draw(row, peer, installed, seed, row.drawn)
    return row


def _draw(row: Row, peer: Peer, installed: str, seed: int, number: int) -> bool:
    """One more case in a row; whether it was one to compare, and said something."""
    case = peer.adapt(seeded_case(row.family, row.modality, seed, number))
    row.drawn += 1
    entries = limitations_of(peer, installed, case)
    try:
        if entries:
            _meet(row, peer, case, entries, number)
            return False
        outcome = compare(peer, case)
        row.outcome.add(outcome)
        row.compared += outcome.logits > 0
        row.tied += outcome.logits == 0
        return outcome.logits > 0
    except Refusal as error:
        row.failures.append(Failure(f"Refusal: {error}; {case.text()}", number))
    except (Disagreement, UnexplainedFlip) as error:
        row.compared += 1
        row.failures.append(Failure(f"{type(error).__name__}: {error}; {case.text()}", number, error.off))
    except Exception as error:  # of our side: the peer's are refusals
        row.failures.append(Failure(f"ours raised {type(error).__name__}: {error}; {case.text()}", number))
    return not entries


def _meet(row: Row, peer: Peer, case: Case, entries: tuple[Limitation, ...], number: int) -> None:
    """Count a case that entries cover; run it if one of them alone does, or if one of several was never run. A run that
    several share must be explained by one of them, and proves none."""
    row.known.update(entry.id for entry in entries)
    tries, enough = (row.alone, KNOWN_TRIES) if len(entries) == 1 else (row.shared, 1)
    if not any(entry.seen(case) for entry in entries) or all(tries[entry.id] >= enough for entry in entries):
        return
    trial = try_known(peer, case, entries)
    if trial.wrong:
        row.failures.append(Failure(trial.wrong, number, trial.off))
    elif trial == Trial():
        return
    tries.update(entry.id for entry in entries)
    if len(entries) == 1 and not trial.wrong:
        (entry,) = entries
        if trial.off is not None:
            row.off.setdefault(entry.id, []).append(trial.off)
        if trial.said is not None:
            row.said[entry.id] = trial.said
