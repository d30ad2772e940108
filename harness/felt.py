"""Do the logits of a target feel what stood before a token? Where not, nothing that compares them proves a thing.

Constant logits, those of a token alone, and caches whose trims move counters only agree with themselves in whatever way
the same tokens are processed. Each target is asked once, by two programs that a right one cannot answer alike.
"""

from __future__ import annotations

from collections.abc import Mapping

from harness.comparison import Array, bytes_of
from harness.execution import Execution, execute_numbered
from harness.images import token_ids
from harness.judging import Felt
from harness.operations import Chunk, Operation, Prefill, TrimFront
from harness.target import Capability, Target

CONTEXT = "the logits do not depend on the tokens before: another token in front changes none of them"
TRIMS = "a trim does not reach the logits: behind it they are, byte for byte, those of the untrimmed sequence"
_NEW = 4  # tokens of the chunk whose logits are looked at
_LENGTHS = (9, 7, 5)  # of what stands in front: no chunk of a cache begins behind all of them


def unfelt(target: Target) -> Mapping[Felt, str]:
    """What does not reach the logits of a target, and that in words. Nothing where it raised or cannot trim: then other
    properties have the word."""
    if all(window == 1 for window in target.windows):  # each token sees itself alone, as it says: what it is must count
        logits = _chunk(target, [(Prefill(1), 0)])
        alike = logits is not None and bool((logits == logits[:1]).all())
        return {"context": CONTEXT} if alike else {}
    if not _context(target):
        return {"context": CONTEXT}
    return {"trims": TRIMS} if Capability.FRONT_TRIM in target.capabilities and not _trims(target) else {}


def _context(target: Target) -> bool:
    """The same chunk behind one token, and behind another."""
    first = token_ids(0, 1, 0, target.vocab_size, target.images)
    others = (number for number in range(1, 1000) if token_ids(0, 1, number, target.vocab_size, target.images) != first)
    return _differ(*(_chunk(target, [(Prefill(1), number)]) for number in (0, next(others))))


def _trims(target: Target) -> bool:
    """The same chunk behind a trim, and without it. Where every layer forgets, only what it would still see can be
    missed: all must go."""
    some = any(window is None and rule is None for window, rule in zip(target.windows, target.rules, strict=True))
    for length in _LENGTHS:
        begun: list[tuple[Operation, int]] = [(Prefill(length), 0)]
        left_out = length // 2 if some else length
        if _differ(_chunk(target, begun), _chunk(target, [*begun, (TrimFront(left_out), length)])):
            return True
    return False


def _chunk(target: Target, begun: list[tuple[Operation, int]]) -> Array | None:
    """The logits of the same new tokens behind these operations (with the number of the first token of each); None
    where something raised."""
    lines = [(operation, (number,), None) for operation, number in (*begun, (Chunk(_NEW), 2000))]
    run: Execution = execute_numbered(target, ("pool",), lines)
    last = run.steps[-1]
    done = all(step.expected_removed == getattr(step.operation, "n", step.expected_removed) for step in run.steps)
    return last.forwards[-1].seen.logits if done and len(run.steps) == len(lines) and last.error is None else None


def _differ(left: Array | None, right: Array | None) -> bool:
    return left is None or right is None or left.shape != right.shape or bytes_of(left) != bytes_of(right)
