"""enforce_max_kv_size, and when the scheduler calls it."""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference_models.engine import (
    CachePool,
    EnforceReport,
    Generation,
    KVCache,
    Owner,
    Scheduler,
    TrimReport,
    UnknownSequence,
    chunk_mask,
    enforce_max_kv_size,
)

GENERATIONS: tuple[Generation, ...] = ("trim", "sinks", "shift")


def forward(tokens: mx.array, caches: Sequence[KVCache]) -> mx.array:
    """Stores each token's id as its row; returns what the last cache holds, [1, live_len]."""
    rows = tokens[:, None, :, None].astype(mx.float32)
    for cache in caches:
        keys, _ = cache.update_and_fetch(rows, rows)
    return keys[0, :, :, 0]


def opened(live: int, owner: Owner = "pool", layers: int = 2) -> tuple[CachePool, int]:
    pool = CachePool()
    seq = pool.open([KVCache() for _ in range(layers)], owner)
    if live > 0:
        forward(mx.arange(live)[None], pool.forward_caches(seq))
    return pool, seq


def slots(pool: CachePool, seq: int) -> list[int]:
    """The ids held by the sequence, in slot order."""
    row = np.array(forward(mx.array([[0]]), pool.forward_caches(seq)))[0, :-1]
    for cache in pool.forward_caches(seq):
        cache.rollback(1)
    return [int(x) for x in row]


def scheduler(pool: CachePool, limit: int | None, chunk: int | None, **more: int) -> Scheduler:
    return Scheduler(forward, pool, limit, chunk, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("generation", "limit", "keep", "n_discard", "kept", "depth"),
    [
        ("trim", 20, 4, 0, 0, 0),
        ("trim", 12, 4, 9, 0, 8),
        ("trim", 1, 4, 0, 0, 19),
        ("sinks", 20, 4, 0, 4, 0),
        ("sinks", 12, 0, 9, 4, 8),
        ("sinks", 4, 9, 0, 3, 16),
        ("sinks", 1, 4, 0, 0, 19),
        ("shift", 20, 4, 3, 4, 0),
        ("shift", 18, 4, 0, 4, 8),  # half of the 16 beyond the prefix
        ("shift", 18, 3, 0, 3, 8),  # half of 17, rounded down
        ("shift", 18, 0, 0, 0, 10),
        ("shift", 18, 4, 3, 4, 3),
        ("shift", 18, 4, 1, 4, 2),  # the excess is larger
        ("shift", 18, 4, 99, 4, 16),  # at most all beyond the prefix
        ("shift", 6, 4, 0, 2, 14),  # keep clamped to limit - 4; the excess is larger than half of 18
        ("shift", 3, 4, 0, 0, 17),
        ("shift", 1, 9, 0, 0, 19),
        ("shift", 8, 8, 0, 4, 12),
        ("shift", 10, 99, 0, 6, 10),
        ("shift", 18, 0, 99, 0, 20),  # everything goes
    ],
)
def test_depth_and_keep(generation: Generation, limit: int, keep: int, n_discard: int, kept: int, depth: int) -> None:
    pool, seq = opened(20)
    report = enforce_max_kv_size(pool, seq, limit, generation, keep, n_discard)
    trim = TrimReport(depth, (depth, depth)) if depth else TrimReport(0, ())
    assert report == EnforceReport(seq, limit, generation, 20, kept, depth, trim)
    ids = list(range(20))
    assert slots(pool, seq) == (ids[:kept] + ids[kept + depth :] if depth else ids)
    assert pool.offset(seq) == 20


def test_defaults_are_a_plain_trim() -> None:
    pool, seq = opened(9)
    report = enforce_max_kv_size(pool, seq, 5)
    assert (report.generation, report.keep, report.depth) == ("trim", 0, 4)


@settings(max_examples=100, deadline=None, database=None)
@given(
    live=st.integers(0, 30),
    limit=st.integers(1, 32),
    generation=st.sampled_from(GENERATIONS),
    keep=st.integers(0, 35),
    n_discard=st.integers(0, 35),
)
def test_the_bound_holds_and_a_second_call_does_nothing(
    live: int, limit: int, generation: Generation, keep: int, n_discard: int
) -> None:
    pool, seq = opened(live)
    report = enforce_max_kv_size(pool, seq, limit, generation, keep, n_discard)
    left = slots(pool, seq)
    assert len(left) == pool.live_len(seq) == live - report.depth <= limit
    assert pool.offset(seq) == live
    assert left == [i for i in range(live) if i < report.keep or i >= report.keep + report.depth]
    assert all(entry == report.depth for entry in report.trim.removed)
    again = enforce_max_kv_size(pool, seq, limit, generation, keep, n_discard)
    assert (again.depth, again.trim) == (0, TrimReport(0, ()))
    assert slots(pool, seq) == left


@pytest.mark.parametrize("generation", GENERATIONS)
def test_an_empty_cache_is_left_alone(generation: Generation) -> None:
    pool, seq = opened(0)
    assert enforce_max_kv_size(pool, seq, 1, generation).depth == 0
    assert (pool.live_len(seq), pool.offset(seq)) == (0, 0)


@pytest.mark.parametrize("generation", GENERATIONS)
def test_a_model_owned_sequence_is_never_bounded(generation: Generation) -> None:
    pool, seq = opened(20, "model")
    report = enforce_max_kv_size(pool, seq, 5, generation)
    assert (report.live_before, report.depth, report.trim) == (0, 0, TrimReport(0, ()))
    assert pool.live_len(seq) == 20


def test_bad_settings_are_refused() -> None:
    pool, seq = opened(9)
    for number, more in ((0, {"limit": 0}), (-1, {"keep": -1}), (-3, {"n_discard": -3})):
        with pytest.raises(ValueError, match=f"got {number}"):
            enforce_max_kv_size(pool, seq, **{"limit": 5, **more})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'ring'"):
        enforce_max_kv_size(pool, seq, 5, "ring")  # type: ignore[arg-type]
    with pytest.raises(UnknownSequence):
        enforce_max_kv_size(pool, 5, 5)
    assert pool.live_len(seq) == 9
    for limit, chunk, more in ((0, 1, {}), (1, 0, {}), (1, 1, {"keep": -1}), (None, 1, {"n_discard": -1})):
        with pytest.raises(ValueError, match="got"):
            scheduler(pool, limit, chunk, **more)
    with pytest.raises(ValueError, match="'ring'"):
        Scheduler(forward, pool, None, None, "ring")  # type: ignore[arg-type]


def test_a_short_first_cache_does_not_hide_a_due_trim() -> None:
    pool, seq = opened(6)
    pool.forward_caches(seq)[0].rollback(4)
    with pytest.raises(RuntimeError, match="cache 0: 2, cache 1: 6"):
        enforce_max_kv_size(pool, seq, 5)


def test_prefill_enforces_after_and_decode_and_verify_before() -> None:
    pool, seq = opened(0)
    engine = scheduler(pool, 5, 4)
    assert engine.prefill(seq, list(range(10))).tolist() == [[3, 4, 5, 6, 7, 8, 9]]
    assert engine.decode(seq, 10).tolist() == [[5, 6, 7, 8, 9, 10]]
    assert engine.verify(seq, [11, 12, 13]).tolist() == [[6, 7, 8, 9, 10, 11, 12, 13]]
    assert engine.decode(seq, 14).tolist() == [[9, 10, 11, 12, 13, 14]]
    seen = [(e.kind, e.tokens, e.live_before, e.offset_before, e.report and e.report.depth) for e in engine.events]
    assert seen == [
        ("forward", (0, 1, 2, 3), 0, 0, None),
        ("enforce", (), 4, 4, 0),
        ("forward", (4, 5, 6, 7), 4, 4, None),
        ("enforce", (), 8, 8, 3),
        ("forward", (8, 9), 5, 8, None),
        ("enforce", (), 7, 10, 2),
        ("enforce", (), 5, 10, 0),
        ("forward", (10,), 5, 10, None),
        ("enforce", (), 6, 11, 1),
        ("forward", (11, 12, 13), 5, 11, None),
        ("enforce", (), 8, 14, 3),
        ("forward", (14,), 5, 14, None),
    ]
    assert {event.seq for event in engine.events} == {seq}


def test_one_shot_prefill_enforces_once_at_its_end() -> None:
    pool, seq = opened(0)
    engine = scheduler(pool, 5, None)
    engine.prefill(seq, list(range(12)))
    assert [event.kind for event in engine.events] == ["forward", "enforce"]
    assert len(engine.events[0].tokens) == 12
    assert slots(pool, seq) == [7, 8, 9, 10, 11]


def test_no_bound_means_no_enforcement() -> None:
    pool, seq = opened(0)
    engine = scheduler(pool, None, 3)
    engine.prefill(seq, list(range(7)))
    engine.decode(seq, 7)
    assert [(event.kind, len(event.tokens)) for event in engine.events] == [("forward", n) for n in (3, 3, 1, 1)]
    assert pool.live_len(seq) == 8


@settings(max_examples=40, deadline=None, database=None)
@given(limit=st.integers(1, 12), chunk=st.integers(1, 9), chunks=st.integers(1, 6))
def test_recurrence_of_offset_and_live_length(limit: int, chunk: int, chunks: int) -> None:
    pool, seq = opened(0)
    engine = scheduler(pool, limit, chunk)
    engine.prefill(seq, list(range(chunk * chunks)))
    forwards = [event for event in engine.events if event.kind == "forward"]
    assert len(forwards) == chunks
    live = 0
    for index, event in enumerate(forwards):
        assert (event.offset_before, event.live_before) == (index * chunk, live)
        live = min(live + chunk, limit)
    assert pool.live_len(seq) == live


def test_published_example() -> None:
    """P = 1024, C = 512: in chunk 4 the offset mask is (512, 2048) against 1536 keys."""
    shapes = []

    def watch(tokens: mx.array, caches: Sequence[KVCache]) -> mx.array:
        wrong, right = (chunk_mask(tokens.shape[1], caches[0], policy) for policy in ("offset", "live"))
        assert wrong is not None and right is not None
        held = forward(tokens, caches)
        shapes.append((wrong.shape, right.shape, held.shape[1]))
        return held

    pool, seq = opened(0, layers=1)
    Scheduler(watch, pool, 1024, 512).prefill(seq, [1] * 2048)
    assert [wrong == right for wrong, right, _ in shapes] == [True, True, True, False]
    assert shapes[3] == ((512, 2048), (512, 1536), 1536)


def test_settings_reach_the_enforcement() -> None:
    pool, seq = opened(0)
    engine = Scheduler(forward, pool, 10, None, "shift", keep=2, n_discard=7)
    engine.prefill(seq, list(range(12)))
    report = engine.events[-1].report
    assert report is not None
    assert (report.limit, report.generation, report.keep, report.depth) == (10, "shift", 2, 7)
    assert slots(pool, seq) == [0, 1, 9, 10, 11]


def test_a_trim_to_nothing_continues_at_the_absolute_position() -> None:
    pool, seq = opened(0)
    engine = Scheduler(forward, pool, 4, 6, "shift", keep=0, n_discard=99)
    engine.prefill(seq, list(range(6)))
    assert (pool.live_len(seq), pool.offset(seq)) == (0, 6)
    assert engine.decode(seq, 6).tolist() == [[6]]
    assert (pool.live_len(seq), pool.offset(seq)) == (1, 7)


def test_limit_of_one() -> None:
    pool, seq = opened(0)
    engine = scheduler(pool, 1, 2)
    assert engine.prefill(seq, [0, 1, 2, 3, 4]).tolist() == [[3, 4]]
    assert engine.decode(seq, 5).tolist() == [[4, 5]]
    assert engine.decode(seq, 6).tolist() == [[5, 6]]


def test_a_model_owned_sequence_grows_through_the_scheduler() -> None:
    pool, seq = opened(0, "model")
    engine = scheduler(pool, 3, 4)
    engine.prefill(seq, list(range(9)))
    engine.decode(seq, 9)
    assert (pool.live_len(seq), pool.offset(seq)) == (10, 10)
    reports = [event.report for event in engine.events if event.report is not None]
    assert len(reports) == 4
    assert all(report.trim.removed == () and report.live_before == 0 for report in reports)
    assert [event.live_before for event in engine.events if event.kind == "enforce"] == [4, 8, 9, 9]


def test_empty_input_is_refused_before_anything_happens() -> None:
    pool, seq = opened(9)
    engine = scheduler(pool, 3, 4)
    for call in (engine.prefill, engine.verify):
        with pytest.raises(ValueError, match="at least one token"):
            call(seq, [])
        with pytest.raises(UnknownSequence):
            call(5, [1])
    assert engine.events == [] and pool.live_len(seq) == 9


def test_a_forward_that_throws_is_the_last_event() -> None:
    def broken(tokens: mx.array, caches: Sequence[KVCache]) -> mx.array:
        raise ValueError("[broadcast_shapes] planted")

    pool, seq = opened(0)
    engine = Scheduler(broken, pool, 3, 4)
    with pytest.raises(ValueError, match="planted"):
        engine.prefill(seq, [1, 2])
    assert [event.kind for event in engine.events] == ["forward"]
