"""The plan: which chunk of a bounded prompt is the first that can show the bug, and what is said where none can."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.operations import EnforceMaxKvSize, Prefill, Program, tokens_of
from harness.validation.plan import Asked, ChunkState, PlanError, chunks_of, make_plan, most_tokens, why_vacuous

PUBLISHED = Asked(1024, 512, 2048)


def test_the_published_crash() -> None:
    plan = make_plan(PUBLISHED, images=False)
    assert [(chunk.offset, chunk.live_len) for chunk in plan.chunks] == [(0, 0), (512, 512), (1024, 1024), (1536, 1024)]
    assert plan.first_decisive == ChunkState(4, 512, 1536, 1024)
    assert [planned.name for planned in plan.programs] == ["untrimmed", "bounded", "sinks_and_rollback"]


@pytest.mark.parametrize(
    ("asked", "first"),
    [
        (Asked(4, 2, 8), ChunkState(4, 2, 6, 4)),
        (Asked(5, 4, 11), ChunkState(3, 3, 8, 5)),  # the last chunk is a rest
        (Asked(1, 2, 4), ChunkState(2, 2, 2, 1)),
        (Asked(100, 512, 1024), ChunkState(2, 512, 512, 100)),  # a chunk larger than the bound
        (Asked(), ChunkState(4, 64, 192, 128)),
    ],
)
def test_first_decisive_chunk_by_hand(asked: Asked, first: ChunkState) -> None:
    assert make_plan(asked, images=False).first_decisive == first


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (Asked(1024, 512, 1200), "P=1024 and C=512 a prompt needs more than 1537 tokens; 1200 were asked for"),
        (Asked(1024, 512, 1536), "no chunk follows the first trim"),
        (Asked(1024, 512, 1537), "behind the first trim comes one token, which builds no mask"),
        (Asked(4096, 512, 1200), "never exceeds --max-kv-size 4096"),
        (Asked(64, 1, 500), "chunks of one token build no mask"),
    ],
)
def test_what_is_said_of_a_prompt_that_shows_nothing(asked: Asked, words: str) -> None:
    why = why_vacuous(asked)
    assert why is not None and words in why and "\n" not in why
    assert "ask for" in why
    with pytest.raises(PlanError):
        make_plan(asked, images=True)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(bound=st.integers(1, 40), size=st.integers(2, 20), tokens=st.integers(1, 120))
def test_it_agrees_with_lists_of_positions_and_with_what_it_says(bound: int, size: int, tokens: int) -> None:
    """The ledger against the recurrence offset_i = (i-1) C, live_i = min(live_(i-1) + C, P), and a prompt one token
    longer than what is said to be too short is not."""
    asked, live, expected = Asked(bound, size, tokens), 0, []
    for start in range(0, tokens, size):
        expected.append((min(size, tokens - start), start, live))
        live = min(live + size, bound)
    assert [(chunk.tokens, chunk.offset, chunk.live_len) for chunk in chunks_of(asked)] == expected
    decisive = any(count > 1 and start != held for count, start, held in expected)
    why = why_vacuous(asked)
    assert (why is None) == decisive
    if why is not None:
        enough = int(why.split("needs more than ")[1].split()[0])
        assert why_vacuous(Asked(bound, size, enough)) is not None
        assert why_vacuous(Asked(bound, size, enough + 1)) is None
        assert all(why_vacuous(other) is None for other in advised(asked, why))


_OPTION = re.compile(r"--(max-kv-size|prefill-chunk-size|tokens|decode) (\d+)")


def advised(asked: Asked, why: str) -> list[Asked]:
    """What is to be asked for instead, by these words: one or two ways of changing some of the numbers."""
    ways = why.split("ask for ")[1].split(", or for ")
    return [
        replace(asked, **{name.replace("-", "_"): int(value) for name, value in _OPTION.findall(way)}) for way in ways
    ]


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    bound=st.integers(1, 8192),
    size=st.sampled_from((1, 2, 3, 8, 64, 500, 2047, 2048)),
    tokens=st.integers(1, 8191),
    decode=st.sampled_from((0, 8, 900, 2048)),
)
def test_what_is_advised_can_be_run_and_shows_something(bound: int, size: int, tokens: int, decode: int) -> None:
    """P and N of 8,192 at most, C of 2,048, 2,000 operations: within them, or it is said that nothing is."""
    asked = Asked(bound, size, tokens, decode)
    try:
        why = why_vacuous(asked)
    except PlanError:
        return
    if why is None:
        return
    assert "\n" not in why
    if "ask for a smaller --prefill-chunk-size or --decode" in why:
        most = most_tokens(asked)
        assert not any(decisive(replace(asked, max_kv_size=1, tokens=n)) for n in range(1, most + 1, max(1, size // 4)))
        return
    ways = advised(asked, why)
    assert ways and all(map(decisive, ways))
    for way in ways:  # and it is no more than is needed
        if way.max_kv_size != asked.max_kv_size and way.prefill_chunk_size == size:
            assert not decisive(replace(way, max_kv_size=way.max_kv_size + 1))


def decisive(asked: Asked) -> bool:
    try:
        return why_vacuous(asked) is None
    except PlanError:
        return False


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.integers(1, 40), st.integers(2, 20), st.integers(2, 120), st.integers(0, 5), st.integers(0, 2**32 - 1))
def test_every_program_but_the_first_has_a_decisive_chunk(p: int, c: int, n: int, k: int, seed: int) -> None:
    asked = Asked(p, c, n, k, seed)
    if why_vacuous(asked) is not None:
        return
    plan = make_plan(asked, images=True)
    assert [planned.decisive for planned in plan.programs] == [False, True, True, True]
    untrimmed, bounded, sinks, images = (planned.program for planned in plan.programs)
    assert sum(map(tokens_of, untrimmed.operations)) == n + k
    assert sum(map(tokens_of, bounded.operations)) == n + k + c
    assert sum(map(tokens_of, sinks.operations)) == n + 2 * c
    assert _bounds(bounded) == {p} and not _bounds(untrimmed)
    assert images.has_media
    assert plan == make_plan(asked, images=True)  # the seed decides


def _bounds(program: Program) -> set[int]:
    return {operation.limit for operation in program.operations if isinstance(operation, EnforceMaxKvSize)}


@pytest.mark.parametrize("seed", range(20))
def test_the_image_is_cut_by_a_chunk_and_by_a_trim(seed: int) -> None:
    images = make_plan(Asked(seed=seed), images=True).programs[-1]
    prefill = images.program.operations[0]
    assert isinstance(prefill, Prefill)
    (image,) = prefill.media
    placeholders = set(range(image.at, image.at + image.rows * image.columns))
    assert prefill.tokens - 1 in placeholders and prefill.tokens in placeholders  # the chunk begins inside
    behind_trim = images.states[3]
    assert 0 < len(placeholders & set(behind_trim.held)) < len(placeholders)


@pytest.mark.parametrize(
    ("asked", "option"),
    [
        (Asked(max_kv_size=0), "--max-kv-size"),
        (Asked(prefill_chunk_size=0), "--prefill-chunk-size"),
        (Asked(prefill_chunk_size=4096), "--prefill-chunk-size"),
        (Asked(tokens=0), "--tokens"),
        (Asked(tokens=8192), "--tokens"),
        (Asked(decode=-1), "--decode"),
        (Asked(prefill_chunk_size=2, tokens=4000), "--prefill-chunk-size"),
    ],
)
def test_numbers_of_which_no_program_can_be_made(asked: Asked, option: str) -> None:
    with pytest.raises(PlanError, match=f"argument {option}: ") as caught:
        why_vacuous(asked)
    assert "\n" not in str(caught.value)


def test_memory_is_given_back_where_a_trim_leaves_256_keys_less() -> None:
    assert make_plan(Asked(), images=False).gives_back
    assert make_plan(PUBLISHED, images=False).gives_back
    assert not make_plan(Asked(24, 8, 64), images=False).gives_back
