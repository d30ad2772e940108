"""The pool: ownership, ids, and what a trim visits."""

import dataclasses

import mlx.core as mx
import pytest

from reference_models.engine import CachePool, CannotTrim, KVCache, Owner, RotatingKVCache, TrimReport, UnknownSequence


def filled(*lengths: int) -> list[KVCache]:
    """One cache per length; row i of each holds the number i."""
    caches = [KVCache() for _ in lengths]
    for cache, length in zip(caches, lengths, strict=True):
        if length > 0:
            rows = mx.arange(length, dtype=mx.float32).reshape(1, 1, length, 1)
            cache.update_and_fetch(rows, rows)
    return caches


def test_ids_count_up_and_are_never_used_again() -> None:
    pool = CachePool()
    assert list(pool.sequences) == []
    assert [pool.open(filled(1)) for _ in range(3)] == [0, 1, 2]
    pool.close(1)
    assert pool.sequences == (0, 2)
    assert [pool.open(filled(1)) for _ in range(2)] == [3, 4]


@pytest.mark.parametrize("owner", ["pool", "model"])
def test_both_owners_expose_caches_to_the_forward(owner: Owner) -> None:
    pool, caches = CachePool(), filled(7, 7)
    caches[0].trim_front(2)
    caches[1].trim_front(2)
    seq = pool.open(caches, owner)
    assert pool.owner(seq) == owner
    assert all(a is b for a, b in zip(pool.forward_caches(seq), caches, strict=True))
    assert (pool.live_len(seq), pool.offset(seq)) == (5, 7)


def test_the_slice_of_a_pool_owned_sequence_is_all_caches() -> None:
    pool, caches = CachePool(), filled(7, 7)
    seq = pool.open(caches)
    assert pool.owner(seq) == "pool"
    assert all(a is b for a, b in zip(pool.scheduler_slice(seq), caches, strict=True))


def test_trim_and_rollback_visit_every_pool_owned_cache() -> None:
    pool, caches = CachePool(), filled(7, 7, 7)
    other = pool.open(filled(4))
    seq = pool.open(caches)
    report = pool.trim_front(seq, 3, keep=2)
    assert report == TrimReport(3, (3, 3, 3)) and report.caches == 3
    assert pool.rollback(seq, 1) == TrimReport(1, (1, 1, 1))
    one = mx.full((1, 1, 1, 1), 99.0)
    for cache in caches:
        assert (cache.offset, cache.live_start, cache.live_len) == (6, 3, 3)
        assert cache.update_and_fetch(one, one)[0].flatten().tolist() == [0, 1, 5, 99]
    assert pool.live_len(other) == 4


def test_requests_are_reported_before_clamping() -> None:
    pool = CachePool()
    seq = pool.open(filled(5, 5))
    assert pool.trim_front(seq, 0) == TrimReport(0, (0, 0))
    assert pool.rollback(seq, 0) == TrimReport(0, (0, 0))
    assert pool.trim_front(seq, 9) == TrimReport(9, (5, 5))
    assert pool.trim_front(seq, 9) == TrimReport(9, (0, 0))
    assert pool.rollback(seq, 9) == TrimReport(9, (0, 0))
    assert (pool.live_len(seq), pool.offset(seq)) == (0, 5)


def test_a_model_owned_sequence_is_never_trimmed() -> None:
    pool = CachePool()
    seq = pool.open(filled(5, 5), "model")
    assert len(pool.scheduler_slice(seq)) == 0
    for report in (pool.trim_front(seq, 3), pool.rollback(seq, 3)):
        assert report == TrimReport(3, ()) and report.caches == 0
    assert (pool.live_len(seq), pool.offset(seq)) == (5, 5)


@pytest.mark.parametrize("owner", ["pool", "model"])
def test_negative_numbers_are_refused_for_either_owner(owner: Owner) -> None:
    pool = CachePool()
    seq = pool.open(filled(5), owner)
    with pytest.raises(ValueError, match="-1"):
        pool.trim_front(seq, -1)
    with pytest.raises(ValueError, match="-2"):
        pool.trim_front(seq, 1, keep=-2)
    with pytest.raises(ValueError, match="-1"):
        pool.rollback(seq, -1)
    assert pool.live_len(seq) == 5


def test_disagreeing_caches_are_named_and_left_alone() -> None:
    pool, caches = CachePool(), filled(5, 4, 5)
    seq = pool.open(caches)
    for trim in (pool.trim_front, pool.rollback):
        with pytest.raises(RuntimeError, match=r"sequence 0 .*cache 0: 5, cache 1: 4, cache 2: 5"):
            trim(seq, 1)
    assert [cache.live_len for cache in caches] == [5, 4, 5]


def test_unknown_and_closed_sequences() -> None:
    pool = CachePool()
    seq = pool.open(filled(5))
    pool.open(filled(5))
    pool.close(seq)
    calls = (
        pool.close,
        pool.owner,
        pool.forward_caches,
        pool.scheduler_slice,
        pool.live_len,
        pool.offset,
        lambda s: pool.trim_front(s, 1),
        lambda s: pool.rollback(s, 1),
    )
    for call in calls:
        for bad in (seq, 7):
            with pytest.raises(UnknownSequence) as caught:
                call(bad)
            assert isinstance(caught.value, KeyError)
            assert str(caught.value) == f"sequence {bad} is not open (open: [1])"


def test_open_refuses_what_cannot_be_a_sequence() -> None:
    pool, caches = CachePool(), filled(1, 1)
    with pytest.raises(ValueError, match="at least one cache"):
        pool.open([])
    with pytest.raises(ValueError, match="'scheduler'"):
        pool.open(caches, "scheduler")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="cache 1 is already in use by cache 0"):
        pool.open([caches[0], caches[0]])
    seq = pool.open(caches)
    with pytest.raises(ValueError, match="cache 0 is already in use by sequence 0"):
        pool.open([caches[1]])
    pool.close(seq)
    assert pool.open(caches) == 1


def test_reports_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        TrimReport(0, ()).requested = 1  # type: ignore[misc]


def test_a_dense_and_a_rotating_cache_are_trimmed_together_or_not_at_all() -> None:
    pool, rows = CachePool(), mx.ones((1, 1, 9, 2))
    caches = [KVCache(), RotatingKVCache(4)]
    for cache in caches:
        for at in range(9):
            cache.update_and_fetch(rows[:, :, at : at + 1], rows[:, :, at : at + 1])
    seq = pool.open(caches)
    for refused in (lambda: pool.rollback(seq, 3), lambda: pool.trim_front(seq, 3, keep=1)):
        with pytest.raises(CannotTrim):
            refused()
        assert [(cache.offset, cache.live_start) for cache in caches] == [(9, 0), (9, 0)]
    assert pool.trim_front(seq, 7).removed == (7, 7)
    assert [sorted(cache.positions.tolist()) for cache in caches] == [[7, 8], [7, 8]]
    assert pool.rollback(seq, 1).removed == (1, 1)
    assert [cache.offset for cache in caches] == [8, 8]


def test_a_sequence_becomes_quantised_whole_or_not_at_all() -> None:
    def caches(*dims: int) -> list[KVCache]:
        made = [KVCache() for _ in dims]
        for cache, dim in zip(made, dims, strict=True):
            cache.update_and_fetch(mx.ones((1, 1, 3, dim)), mx.ones((1, 1, 3, dim)))
        return made

    pool = CachePool()
    even, odd, theirs = pool.open(caches(32, 64)), pool.open(caches(32, 8)), pool.open(caches(32), "model")
    assert pool.to_storage(even, "affine8") == 2
    assert [cache.storage for cache in pool.forward_caches(even)] == ["affine8", "affine8"]
    with pytest.raises(ValueError, match="D=8"):
        pool.to_storage(odd, "affine8")
    assert pool.to_storage(theirs, "int8") == 0
    assert {cache.storage for seq in (odd, theirs) for cache in pool.forward_caches(seq)} == {"rows"}
    assert pool.to_storage(odd, "int8") == 2 and pool.live_len(odd) == 3
    with pytest.raises(UnknownSequence):
        pool.to_storage(9, "int8")
