"""What a validation runs: the programs of a server with a bounded KV cache, and where they can show the mask bug.

Pure: nothing here knows a model. The ledger says before anything is loaded whether a prompt of so many tokens gets to a
chunk behind a trim at all; most validations of the bug that prove nothing stop short of it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from harness.ledger import SequenceLedger
from harness.media import Media
from harness.operations import (
    MAX_OPERATIONS,
    MAX_TOKENS,
    MAX_TOTAL_TOKENS,
    Chunk,
    Decode,
    EnforceMaxKvSize,
    Operation,
    Prefill,
    Program,
    Rollback,
    TrimFront,
    tokens_of,
)
from harness.seeds import derive_seed

BOUNDED = "bounded"
UNTRIMMED = "untrimmed"
"""The name of the program that a server runs; without it there is nothing to validate."""
GROWTH = 256  # slots by which a cache may be larger than what it holds: less than that need not be given back


class PlanError(ValueError):
    """Numbers of which no program can be made; one line that names the option."""


@dataclass(frozen=True)
class Asked:
    """The options of a server, in tokens: ``--max-kv-size`` (P), ``--prefill-chunk-size`` (C), a prompt of ``tokens``
    (N) and ``decode`` tokens behind it (K). ``seed``: of the depths and sizes that are drawn."""

    max_kv_size: int = 128
    prefill_chunk_size: int = 64
    tokens: int = 512
    decode: int = 8
    seed: int = 0


@dataclass(frozen=True)
class ChunkState:
    """A forward of the bounded prompt, counted from 1: its tokens, and what the sequence held in front of it."""

    number: int
    tokens: int
    offset: int
    live_len: int

    @property
    def decisive(self) -> bool:
        """Is a mask built, and is it another one by the offset?"""
        return self.tokens > 1 and self.offset != self.live_len

    def __str__(self) -> str:
        return f"chunk {self.number} ({self.tokens} tokens at offset {self.offset}, live_len {self.live_len})"


@dataclass(frozen=True)
class Planned:
    """A program, its name, a phrase that says what it is, and what the prompt holds."""

    name: str
    phrase: str
    program: Program
    path: Literal["text", "images"] = "text"

    @cached_property
    def states(self) -> tuple[SequenceLedger, ...]:
        """The ledger's sequence in front of every operation, and behind the last."""
        ledger, number = SequenceLedger(), 0
        states = [ledger.copied("pool")]
        for operation in self.program.operations:
            if count := tokens_of(operation):
                ledger.append(count, number)
                number += count
            else:
                ledger.remove(operation)
            states.append(ledger.copied("pool"))
        return tuple(states)

    @property
    def decisive(self) -> bool:
        """Does a forward of several tokens follow a trim?"""
        return any(
            tokens_of(operation) > 1 and not isinstance(operation, Decode) and state.offset != state.live_len
            for operation, state in zip(self.program.operations, self.states, strict=False)
        )

    @property
    def gives_back(self) -> bool:
        """Does a trim leave so few keys that the cache must become smaller?"""
        return any(
            isinstance(operation, (TrimFront, EnforceMaxKvSize)) and before.live_len > after.live_len + GROWTH
            for operation, before, after in zip(self.program.operations, self.states, self.states[1:], strict=False)
        )

    @property
    def tokens(self) -> int:
        """Processed in all."""
        return sum(map(tokens_of, self.program.operations))

    @property
    def forwards(self) -> int:
        """In all."""
        operations = self.program.operations
        return sum(tokens_of(each) if isinstance(each, Decode) else bool(tokens_of(each)) for each in operations)

    @property
    def rows_told(self) -> int:
        """Keys that are copied out of a cache in all: those held, behind every operation."""
        return sum(state.live_len for state in self.states[1:])


@dataclass(frozen=True)
class Plan:
    """``chunks``: of the bounded prompt."""

    asked: Asked
    chunks: tuple[ChunkState, ...]
    programs: tuple[Planned, ...]

    @property
    def first_decisive(self) -> ChunkState:
        return next(chunk for chunk in self.chunks if chunk.decisive)

    @property
    def gives_back(self) -> bool:
        return any(planned.gives_back for planned in self.programs)


def chunks_of(asked: Asked) -> tuple[ChunkState, ...]:
    """The forwards of the bounded prompt, by the ledger."""
    ledger, found = SequenceLedger(), []
    for number, size in enumerate(_sizes(asked), 1):
        found.append(ChunkState(number, size, ledger.offset, ledger.live_len))
        ledger.append(size)
        ledger.remove(EnforceMaxKvSize(asked.max_kv_size))
    return tuple(found)


@dataclass(frozen=True)
class Nothing:
    """``why`` a prompt shows nothing, and what would, if anything can: phrases."""

    why: str
    instead: str

    def __str__(self) -> str:
        return f"{self.why} ({self.instead})"


def shows_nothing(asked: Asked) -> Nothing | None:
    """None where a chunk follows a trim. Raises PlanError."""
    _check(asked)
    if any(chunk.decisive for chunk in chunks_of(asked)):
        return None
    bound, size, tokens = asked.max_kv_size, asked.prefill_chunk_size, asked.tokens
    if size == 1:
        return Nothing("chunks of one token build no mask, so that there is none to get wrong", _larger_chunks(asked))
    trimmed = (bound // size + 1) * size  # processed when the bound is exceeded for the first time
    said = f"with P={bound} and C={size} a prompt needs more than {trimmed + 1} tokens"
    if tokens <= bound:
        said = f"a prompt of {tokens} tokens never exceeds --max-kv-size {bound}, so that nothing is trimmed: {said}"
    elif tokens <= trimmed:
        said = f"no chunk follows the first trim: {said}; {tokens} were asked for"
    else:
        said = f"behind the first trim comes one token, which builds no mask: {said}; {tokens} were asked for"
    return Nothing(said, _advice(asked, trimmed))


def why_vacuous(asked: Asked) -> str | None:
    """As above, on one line."""
    nothing = shows_nothing(asked)
    return None if nothing is None else str(nothing)


def _advice(asked: Asked, trimmed: int) -> str:
    """Which other numbers show something. What it names can be run: a program has its limits as well."""
    most, size = most_tokens(asked), asked.prefill_chunk_size
    ways = [f"--tokens {tokens}" for tokens in (trimmed + size, trimmed + 2) if tokens <= most][:1]
    if (bound := _largest_bound(asked.tokens, size)) >= 1:
        ways.append(f"--max-kv-size {bound} or less")
    if ways:
        return f"ask for {', or for '.join(ways)}"
    said = f"no prompt of the {most} tokens that fit with C={size} and K={asked.decode} can be decisive"
    if (bound := _largest_bound(most, size)) >= 1:
        return f"{said} under that bound: ask for --max-kv-size {bound} --tokens {most}"
    return f"{said}: ask for a smaller --prefill-chunk-size or --decode"


def _larger_chunks(asked: Asked) -> str:
    """The smallest chunks with which the other numbers are decisive, or else what does not fit."""
    for size in (2**power for power in range(1, MAX_TOKENS.bit_length())):
        other = replace(asked, prefill_chunk_size=size)
        if asked.tokens <= most_tokens(other) and why_vacuous(other) is None:
            return f"ask for --prefill-chunk-size {size}"
    default = Asked()
    return (
        f"with this --max-kv-size, --tokens and --decode no size of chunks is decisive: ask for --prefill-chunk-size "
        f"{default.prefill_chunk_size} --max-kv-size {default.max_kv_size} --tokens {default.tokens} --decode "
        f"{default.decode}"
    )


def most_tokens(asked: Asked) -> int:
    """The longest prompt that fits into a program with chunks of C and K decodes; 0 and less: none does."""
    size = asked.prefill_chunk_size
    total = MAX_TOTAL_TOKENS - asked.decode - 2 * size
    return total if size == 1 else min(total, (MAX_OPERATIONS // 2 - asked.decode - 2) * size)


def _largest_bound(tokens: int, size: int) -> int:
    """The largest P under which a prompt of so many tokens in chunks of ``size`` (2 or more) has two tokens behind the
    first trim; 0 or less: none."""
    return (tokens - 2) // size * size - 1


def make_plan(asked: Asked, images: bool) -> Plan:
    """The programs, each judged by itself; ``images``: the model has a vision tower. Raises PlanError, also where the
    prompt shows nothing."""
    if (why := why_vacuous(asked)) is not None:
        raise PlanError(why)
    programs = [_untrimmed(asked), _bounded(asked), _sinks_and_rollback(asked)]
    if images:
        programs.append(_images(asked))
    return Plan(asked, chunks_of(asked), tuple(programs))


def _check(asked: Asked) -> None:
    size, total = asked.prefill_chunk_size, asked.tokens + asked.decode + 2 * asked.prefill_chunk_size
    for option, value, low, high in (
        ("--max-kv-size", asked.max_kv_size, 1, MAX_TOTAL_TOKENS),
        ("--prefill-chunk-size", size, 1, MAX_TOKENS),
        ("--tokens", asked.tokens, 1, MAX_TOTAL_TOKENS),
        ("--decode", asked.decode, 0, MAX_TOKENS),
    ):
        if not low <= value <= high:
            raise PlanError(f"argument {option}: must lie in [{low}, {high}], got {value}")
    if total > MAX_TOTAL_TOKENS:
        raise PlanError(
            f"argument --tokens: with --decode and two more chunks this makes {total} tokens, at most "
            f"{MAX_TOTAL_TOKENS} are processed"
        )
    operations = 2 * (-(-asked.tokens // size) + asked.decode + 2)
    if size > 1 and operations > MAX_OPERATIONS:
        raise PlanError(
            f"argument --prefill-chunk-size: {asked.tokens} tokens in chunks of {size} and {asked.decode} decodes are "
            f"{operations} operations, a program has at most {MAX_OPERATIONS}"
        )


def _sizes(asked: Asked) -> list[int]:
    whole, rest = divmod(asked.tokens, asked.prefill_chunk_size)
    return [asked.prefill_chunk_size] * whole + [rest] * bool(rest)


def _prompt(asked: Asked) -> list[Operation]:
    first, *others = _sizes(asked)
    return [Prefill(first), *map(Chunk, others)]


def _untrimmed(asked: Asked) -> Planned:
    decode = [Decode(asked.decode)] if asked.decode else []
    return Planned(UNTRIMMED, "the prompt without a bound", Program((*_prompt(asked), *decode)))


def _bounded(asked: Asked) -> Planned:
    """As a server runs it: the bound behind every forward of the prompt, and in front of every other forward."""
    enforce = EnforceMaxKvSize(asked.max_kv_size)
    operations = [step for forward in _prompt(asked) for step in (forward, enforce)]
    operations += [step for _ in range(asked.decode) for step in (enforce, Decode(1))]
    operations += [enforce, Chunk(asked.prefill_chunk_size), enforce]
    return Planned(BOUNDED, "the prompt under the bound, decodes, one more chunk", Program(tuple(operations)))


def _sinks_and_rollback(asked: Asked) -> Planned:
    drawn, size = random.Random(derive_seed(asked.seed, "sinks")), asked.prefill_chunk_size
    trim = TrimFront(asked.tokens - asked.max_kv_size, drawn.randint(1, 4))
    program = (*_prompt(asked), trim, Chunk(size), Rollback(drawn.randint(1, size)), Chunk(size))
    return Planned("sinks_and_rollback", "a front trim behind sinks, a rollback, a chunk", Program(program))


def _images(asked: Asked) -> Planned:
    """One image, which a chunk cuts and of which a trim leaves a part."""
    drawn = random.Random(derive_seed(asked.seed, "images"))
    at, rows, columns = drawn.randint(1, 4), drawn.randint(4, 6), drawn.randint(4, 6)
    area = rows * columns
    first = at + area // 2
    program = (
        Prefill(first, media=(Media(at, rows, columns),)),
        Chunk(at + area + 3 - first),
        TrimFront(at + area // 3),
        Chunk(6),
        Decode(2),
    )
    return Planned("images", "an image cut by a chunk and by a trim", Program(program), "images")
