"""The rows as Markdown, and the block of a file that holds them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.parity.comparing import TOLERANCE
from tests.parity.limitations import LIMITATIONS
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


def markdown(rows: Sequence[Row], examples: int, seed: int) -> str:
    """The table, the entries that it names, and what was shown about ties."""
    lines = [
        f"{examples} configurations a row, seed {seed}, float32 on the CPU. Differences are of a logit (one-shot,",
        f"in chunks, while decoding) in standard deviations of the peer's logits; more than {TOLERANCE:.0e} fails.",
        "",
        _line(HEADER),
        _line("-" * max(len(title), 3) for title in HEADER),
        *(_line(_cells(row)) for row in rows),
    ]
    met = {name for row in rows for name in row.known}
    if met:
        lines += ["", "Known failures and limitations of the peers, each tried again in this run:", ""]
    for entry in LIMITATIONS:
        if entry.id in met:
            measured = f"; measured {span(offs)}" if (offs := _offs(rows, entry.id)) else f"; measured {entry.measured}"
            told = "refuses" if entry.kind == "limitation" else "differs"
            lines.append(f"- `{entry.id}`: {entry.peer} {told} when {entry.condition}{measured}. {entry.why}.")
    flips = [(row, flip) for row in rows for flip in row.outcome.flips]
    ties = [(row, gap) for row in rows for gap in row.outcome.ties]
    lines += ["", f"Routing ties that the sides ranked differently, each shown to be one: {len(flips)}."]
    lines += [f"- {row.family}, {row.peer}, {row.modality}: {flip.text()}" for row, flip in flips]
    lines += [f"- {row.family}, {row.peer}, {row.modality}: two greedy tokens {gap:.1e} apart" for row, gap in ties]
    return "\n".join(lines)


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
    return (
        row.family,
        f"{row.peer} {row.version}",
        row.modality,
        f"{row.compared} of {row.drawn} drawn" if row.drawn > row.compared else str(row.compared),
        f"{outcome.worst:.1e}" if row.compared else "none to compare",
        f"{outcome.equal} of {outcome.greedy}",
        known,
    )


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _offs(rows: Sequence[Row], name: str) -> list[float]:
    return [value for row in rows for value in row.off.get(name, ())]
