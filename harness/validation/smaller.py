"""Smaller programs that are built as one of a plan is: where a server's prompt fails, a short one often does as well.

Pure, as the plan is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from harness.operations import Decode, Operation, Program, tokens_of
from harness.validation.plan import Asked, PlanError, Planned, make_plan

BOUND = 4  # chunks that a smaller bound holds at most: what more of them show, a reader does not need


def smaller(asked: Asked, planned: Planned, step: int | None) -> list[Program]:
    """The smallest first. ``step``: the operation of ``planned`` at which it broke, None for its end. First the same
    plan for smaller chunks, with the bound and the prompt that go with them, up to its first decisive forward and as a
    whole; then the program itself up to there, and up to where it broke."""
    found: list[Program] = []
    operations = planned.program.operations
    for program in (*_scaled(asked, planned), _to_first_decisive(planned), _cut(operations, step)):
        if program is not None and _size(program) < _size(planned.program) and program not in found:
            found.append(program)
    return found


def _scaled(asked: Asked, planned: Planned) -> Iterator[Program | None]:
    size = 2
    while size < asked.prefill_chunk_size:
        bound = max(1, min(asked.max_kv_size * size // asked.prefill_chunk_size, BOUND * size))
        tokens = (bound // size + 2) * size  # one chunk behind the first trim
        few = replace(asked, max_kv_size=bound, prefill_chunk_size=size, tokens=tokens, decode=min(asked.decode, 1))
        for other in _programs(few, planned):
            yield _to_first_decisive(other)
            yield other.program
        size *= 4


def _programs(asked: Asked, planned: Planned) -> list[Planned]:
    """The one of the same name and path in the plan for these numbers; none where there is no such plan, and of images,
    whose program has sizes of its own."""
    try:
        plan = make_plan(asked, images=False)
    except PlanError:
        return []
    return [other for other in plan.programs if (other.name, other.path) == (planned.name, planned.path)]


def _to_first_decisive(planned: Planned) -> Program | None:
    operations = planned.program.operations
    for number, (operation, state) in enumerate(zip(operations, planned.states, strict=False)):
        if tokens_of(operation) > 1 and not isinstance(operation, Decode) and state.offset != state.live_len:
            return _cut(operations, number)
    return None


def _cut(operations: tuple[Operation, ...], last: int | None) -> Program | None:
    return None if last is None else Program(operations[: last + 1])


def _size(program: Program) -> tuple[int, int]:
    return sum(map(tokens_of, program.operations)), len(program.operations)
