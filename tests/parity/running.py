"""Many cases of one family, peer and modality: what was compared, what is known to fail, what is new."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

from tests.parity.cases import Case, draw_case
from tests.parity.comparing import Disagreement, Outcome, Refusal, compare
from tests.parity.limitations import Limitation, limitations_of
from tests.parity.peers import Peer, version
from tests.parity.routing import UnexplainedFlip

KNOWN_TRIES = 3  # of every entry in a row; its other cases are drawn and counted, not run
MOST_DRAWS = 200  # per configuration that is to be compared
HOPELESS = 500  # draws without a single one that no entry covers


@dataclass
class Row:
    """One line of the table. ``known``: entry -> how many drawn cases it covers; ``tried``: how many of them were run;
    ``off``: the differences that a known failure gave alone; ``failures``: lines that make the run fail."""

    family: str
    peer: str
    version: str | None
    modality: str
    compared: int = 0
    drawn: int = 0
    outcome: Outcome = field(default_factory=Outcome)
    known: Counter[str] = field(default_factory=Counter)
    tried: Counter[str] = field(default_factory=Counter)
    off: dict[str, list[float]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)


def seeded_case(family: str, modality: str, seed: int, number: int) -> Case:
    """The same case for the same arguments."""
    return draw_case(family, modality, random.Random(f"{seed}/{family}/{modality}/{number}").choice)


def try_known(peer: Peer, case: Case, entries: tuple[Limitation, ...]) -> tuple[str | None, float | None]:
    """Run a case that entries cover: what is wrong with the record (None: it fails as recorded), and the difference."""
    names = ", ".join(entry.id for entry in entries)
    refusal, off = None, None
    try:
        compare(peer, case)
    except Refusal as error:
        refusal = str(error)
    except (Disagreement, UnexplainedFlip) as error:
        off = getattr(error, "off", None)
    else:
        return f"FIXED? {names}: {peer.name} agrees on {case.text()}", None
    if any(entry.explains(refusal) for entry in entries):
        return None, off
    said = refusal if refusal is not None else "another answer"
    return f"{names} should tell what {peer.name} does, but it gave: {said}; {case.text()}", off


def run_row(peer: Peer, family: str, modality: str, count: int, seed: int) -> Row:
    """Compare ``count`` drawn configurations, the same ones for a seed, and try the record of known failures on what
    comes up between them."""
    installed = version(peer.needs[0])
    row = Row(family, peer.name, installed, modality)
    assert installed is not None, f"{peer.name} is not installed"
    while row.compared < count and row.drawn < MOST_DRAWS * count and (row.compared or row.drawn < HOPELESS):
        case = peer.adapt(seeded_case(family, modality, seed, row.drawn))
        row.drawn += 1
        entries = limitations_of(peer, installed, case)
        row.compared += not entries
        try:
            if entries:
                _meet(row, peer, case, entries)
            else:
                row.outcome.add(compare(peer, case))
        except (Refusal, Disagreement, UnexplainedFlip) as error:
            row.failures.append(f"{type(error).__name__}: {error}; {case.text()}")
        except Exception as error:  # of our side: the peer's are refusals
            row.failures.append(f"ours raised {type(error).__name__}: {error}; {case.text()}")
    return row


def _meet(row: Row, peer: Peer, case: Case, entries: tuple[Limitation, ...]) -> None:
    """Count a case that entries cover; run it if one of them alone does, or if one was never run."""
    row.known.update(entry.id for entry in entries)
    enough = KNOWN_TRIES if len(entries) == 1 else 1
    if not any(entry.seen(case) for entry in entries) or all(row.tried[entry.id] >= enough for entry in entries):
        return
    row.tried.update(entry.id for entry in entries)
    wrong, off = try_known(peer, case, entries)
    if wrong:
        row.failures.append(wrong)
    if off is not None and len(entries) == 1:
        row.off.setdefault(entries[0].id, []).append(off)
