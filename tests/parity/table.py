"""The rows as Markdown, and the block of a file that holds them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.parity.comparing import TOLERANCE
from tests.parity.limitations import LIMITATIONS, Limitation
from tests.parity.peers import PEERS, missing
from tests.parity.running import Row

BEGIN, END = "<!-- parity table: begin; written by `make parity WRITE=1` -->", "<!-- parity table: end -->"
HEADER = (
    "family",
    "peer",
    "prompts",
    "configurations",
    "largest difference",
    "greedy tokens equal",
    "known failures and limitations met",
)
LONGEST = 160  # characters of a refusal
OURS_TOO = frozenset(peer.name for peer in PEERS if peer.needs[0].startswith("mlx"))  # on the same MLX as our models


def markdown(rows: Sequence[Row], examples: int, seed: int, only: int | None = None) -> str:
    """What could not be compared, the table, its sum, the entries that it names, and what was shown about ties."""
    drawn = f"{examples} configurations a row" if only is None else f"Draw {only} of each row alone"
    lines = [
        *(line for text in absent(rows) for line in (text, "")),
        f"{drawn}, seed {seed}, float32 on the CPU. Differences are of a logit (one-shot,",
        f"in chunks, while decoding) in standard deviations of the peer's logits; more than {TOLERANCE:.0e} fails.",
        "",
        _line(HEADER),
        _line("-" * max(len(title), 3) for title in HEADER),
        *(_line(_cells(row)) for row in rows),
        "",
        summary(rows),
    ]
    if any(row.peer in OURS_TOO and row.outcome.logits and not row.outcome.worst for row in rows):
        lines += [
            "",
            "A largest difference of 0.0e+00: both sides run on MLX, it is the same kernels at work.",
        ]
    lines += _record(rows)
    flips = [(row, flip) for row in rows for flip in row.outcome.flips]
    ties = [(row, gap) for row in rows for gap in row.outcome.ties]
    lines += ["", f"Routing ties that the sides ranked differently, each shown to be one: {len(flips)}."]
    lines += [f"- {row.family}, {row.peer}, {row.modality}: {flip.text()}" for row, flip in flips]
    lines += [f"- {row.family}, {row.peer}, {row.modality}: two greedy tokens {gap:.1e} apart" for row, gap in ties]
    return "\n".join(lines)


def absent(rows: Sequence[Row]) -> list[str]:
    """A line for every peer that is not installed."""
    there = {row.peer for row in rows if row.version is None}
    return [
        f"NOT COMPARED with {peer.name}: {', '.join(missing(peer))} not installed"
        for peer in PEERS
        if peer.name in there
    ]


def summary(rows: Sequence[Row]) -> str:
    """How many rows agree, failed, compared nothing, or had no peer; every row counts once."""
    gone = sum(row.version is None for row in rows)
    failed = sum(bool(row.failures) for row in rows)
    nothing = sum(row.version is not None and not row.failures and not row.compared for row in rows)
    parts = [f"{len(rows) - gone - failed - nothing} agree"]
    parts += [f"{failed} FAILED"] * (failed > 0)
    parts += [f"{nothing} compared nothing, and say nothing about our models"] * (nothing > 0)
    parts += [f"{gone} not compared, the peer is not installed"] * (gone > 0)
    return f"{len(rows)} rows: {'; '.join(parts)}."


def _record(rows: Sequence[Row]) -> list[str]:
    """The entries that were met: those that a case of their own showed in this run, and those that none could."""
    met = [entry for entry in LIMITATIONS if any(row.known[entry.id] for row in rows)]
    tried = [entry for entry in met if any(row.alone[entry.id] for row in rows)]
    lines = []
    if tried:
        lines += [
            "",
            "Known failures and limitations of the peers, each tried in this run where no other holds:",
            "",
        ]
        lines += [f"- {_told(entry)}; {_measured(rows, entry)}. {entry.why}." for entry in tried]
    if len(tried) < len(met):
        lines += ["", "Known failures and limitations that this run does not show:", ""]
        lines += [f"- {_told(entry)}; never met alone, so not tried." for entry in met if entry not in tried]
    return lines


def _told(entry: Limitation) -> str:
    return f"`{entry.id}`: {entry.peer} {'refuses' if entry.kind == 'limitation' else 'differs'} when {entry.condition}"


def _measured(rows: Sequence[Row], entry: Limitation) -> str:
    offs = [value for row in rows for value in row.off.get(entry.id, ())]
    if offs and entry.span is not None:
        least, most = entry.span
        return f"measured {span(offs)}, {least:.0e} to {most:.0e} accepted"
    said = [" ".join(row.said[entry.id].split()) for row in rows if entry.id in row.said]
    if said:
        return f"it said {said[0] if len(said[0]) <= LONGEST else said[0][:LONGEST] + '...'}"
    return "FAILED to show it"


def span(values: Sequence[float]) -> str:
    """The smallest and the largest, or the only one."""
    low, high = (f"{value:.1e}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def write_block(path: Path, text: str) -> None:
    """Put the text between the marks of a file. ValueError without marks."""
    old = path.read_text()
    before, begin, rest = old.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{path}: lacks the line {BEGIN!r} or {END!r}")
    path.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")


def _cells(row: Row) -> tuple[str, ...]:
    if row.version is None:
        return row.family, row.peer, row.modality, "not installed", "", "", ""
    outcome = row.outcome
    known = ", ".join(f"`{name}` ({count})" for name, count in sorted(row.known.items()))
    if row.failures:
        known = f"**{len(row.failures)} FAILED** {known}"
    cases = f"{row.compared} of {row.drawn} drawn" if row.drawn > row.compared else str(row.compared)
    if row.tied:
        cases += f", {row.tied} tied at the first token"
    greedy = f"{outcome.equal} of {outcome.greedy}" if outcome.greedy else "none"
    return row.family, f"{row.peer} {row.version}", row.modality, cases, _difference(row), greedy, known


def _difference(row: Row) -> str:
    """The largest one, of what failed if something did; never a number that nothing gave."""
    if offs := [failure.off for failure in row.failures if failure.off is not None]:
        return f"**{max(offs):.1e}**"
    if row.failures and not row.outcome.logits:
        return "nothing agreed"
    return f"{row.outcome.worst:.1e}" if row.outcome.logits else "none to compare"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
