"""Positions in slot order, as a list of runs: consecutive positions in consecutive slots."""

from collections.abc import Iterable

import mlx.core as mx


def as_array(runs: Iterable[range]) -> mx.array:
    """All positions, int32 ``[n]``."""
    parts = [mx.arange(run.start, run.stop, dtype=mx.int32) for run in runs]
    return mx.concatenate(parts) if parts else mx.zeros((0,), mx.int32)


def joined(runs: Iterable[range]) -> list[range]:
    """The same positions in the same order, in as few runs as can be."""
    out: list[range] = []
    for run in runs:
        if out and out[-1].stop == run.start:
            run = range(out.pop().start, run.stop)
        if run:
            out.append(run)
    return out


def in_slots(runs: Iterable[range], first: int, last: int) -> list[range]:
    """The positions in slots ``[first, last)``."""
    cut = []
    for run in runs:
        part = run[max(first, 0) : max(last, 0)]
        if part:
            cut.append(part)
        first, last = first - len(run), last - len(run)
    return cut


def found(runs: Iterable[range], wanted: Iterable[range]) -> list[tuple[int, range]]:
    """Which of the ``wanted`` positions are there: ``(slot of the first, positions)``, by ascending position."""
    wanted = tuple(wanted)
    parts, slot = [], 0
    for run in runs:
        for other in wanted:
            part = range(max(run.start, other.start), min(run.stop, other.stop))
            if part:
                parts.append((slot + part.start - run.start, part))
        slot += len(run)
    return sorted(parts, key=lambda each: each[1].start)
