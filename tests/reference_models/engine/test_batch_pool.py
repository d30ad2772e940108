"""A pool one of whose parts is a batch: who is in it, what a row holds, and that an error changes nothing."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from reference_models.engine import BatchPool, KVCache, Storage, TrimReport, UnknownSequence

LAYERS = 2


def rows(count: int, start: int = 0, heads: int = 1, dim: int = 2) -> mx.array:
    """``[1, heads, count, dim]``, every row its own numbers."""
    numbers = mx.arange(start * dim, (start + count) * dim, dtype=mx.float32).reshape(1, 1, count, dim)
    return mx.broadcast_to(numbers, (1, heads, count, dim))


def caches(length: int, start: int = 0, storage: Storage = "rows", layers: int = LAYERS, **shape: int) -> list[KVCache]:
    made = [KVCache(storage) for _ in range(layers)]
    for cache in made if length else ():
        cache.update_and_fetch(rows(length, start, **shape), -rows(length, start, **shape))
    return made


def pool(*lengths: int, storage: Storage = "rows") -> BatchPool:
    """Sequences 0, 1, ... of these lengths; the numbers of sequence i begin at 100 i."""
    made = BatchPool()
    for number, length in enumerate(lengths):
        made.open(caches(length, 100 * number, storage))
    return made


def told(of: BatchPool, seq: int) -> list[Any]:
    """All that the caches of a sequence say."""
    return [
        (
            cache.offset,
            cache.live_start,
            cache.positions.tolist(),
            [None if side is None else side.tolist() for side in cache.rows()],
        )
        for cache in of.caches_of(seq)
    ]


def all_told(of: BatchPool) -> Any:
    return of.rows, [told(of, seq) for seq in of.sequences], [cache.offsets for cache in of.batch_caches]


@pytest.mark.parametrize("storage", ["rows", "int8"])
@pytest.mark.parametrize(
    "orders",
    [
        [(0, 1), ()],
        [(2, 0), (2, 0, 1), (1,), ()],
        [(0, 1, 2), (2, 0), (0, 2, 1), (1, 0), (0, 2), ()],
        [(1,), (1, 2), (2,), (2, 0), ()],
    ],
    ids=str,
)
def test_whoever_comes_and_goes_holds_what_it_held(orders: list[tuple[int, ...]], storage: Storage) -> None:
    made = pool(5, 2, 0, storage=storage)
    made.trim_front(0, 2, 1)
    before = [told(made, seq) for seq in made.sequences]
    for order in orders:
        assert made.batch(order) == (LAYERS if order else 0) == len(made.batch_caches)
        assert made.rows == order and all(cache.batch == len(order) for cache in made.batch_caches)
        assert [told(made, seq) for seq in made.sequences] == before
    assert all(cache.storage == storage for seq in made.sequences for cache in made.forward_caches(seq))


@pytest.mark.parametrize("storage", ["rows", "int8"])
def test_trims_and_rollbacks_reach_their_row_alone(storage: Storage) -> None:
    batched, solo = pool(6, 3, 4, storage=storage), pool(6, 3, 4, storage=storage)
    batched.batch((2, 0, 1))
    for act in (
        lambda p: p.trim_front(0, 2, 1),
        lambda p: p.rollback(2, 3),
        lambda p: p.trim_front(1, 99),
        lambda p: p.rollback(0, 0),
        lambda p: p.rollback(0, 2),
    ):
        report = act(batched)
        assert report == act(solo) and isinstance(report, TrimReport) and report.caches == LAYERS
        assert [told(batched, seq) for seq in (0, 1, 2)] == [told(solo, seq) for seq in (0, 1, 2)]
    batched.batch(())
    assert [told(batched, seq) for seq in (0, 1, 2)] == [told(solo, seq) for seq in (0, 1, 2)]


def test_what_leaves_goes_on_by_itself() -> None:
    made = pool(4, 2)
    made.batch((0, 1))
    made.batch((1,))
    for cache in made.forward_caches(0):
        cache.update_and_fetch(rows(1, 50), rows(1, 50))
    assert (made.offset(0), made.batch_caches[0].offsets) == (5, (2,))
    made.trim_front(0, 1)
    assert made.live_len(0) == 4 and told(made, 1)[0][0] == 2


def _with_another(**named: Any) -> BatchPool:
    made = pool(4, 2)
    made.open(caches(3, 200, **named))
    return made


REFUSED = [
    (pool(4, 2, 3), (0, 0), ValueError, "each once"),
    (pool(4, 2, 3), (2, 1, 0), ValueError, "the new ones last"),
    (pool(4, 2, 3), (0, 7), UnknownSequence, "not open"),
    (_with_another(storage="int8"), (1, 2), ValueError, "storages"),
    (_with_another(heads=2), (1, 2), ValueError, "cannot stand in a batch"),
    (_with_another(dim=4), (0, 1, 2), ValueError, "cannot stand in a batch"),
    (_with_another(layers=1), (0, 1, 2), ValueError, "argument"),
    (_with_another(layers=3), (1, 2), ValueError, "argument"),
]


@pytest.mark.parametrize(("made", "order", "error", "said"), REFUSED, ids=[str(case[1:]) for case in REFUSED])
def test_an_error_leaves_nothing_changed(
    made: BatchPool, order: tuple[int, ...], error: type[Exception], said: str
) -> None:
    made.batch((0, 1))
    made.trim_front(1, 1)
    before = all_told(made)
    with pytest.raises(error, match=said):
        made.batch(order)
    assert all_told(made) == before
    assert made.batch((1, 0)) == LAYERS and made.rows == (1, 0)


def test_only_the_last_layer_does_not_fit_and_the_first_ones_are_as_they_were() -> None:
    made = pool(4, 2)
    odd = [*caches(3, 200, layers=1), *caches(3, 200, layers=1, dim=4)]
    made.open(odd)
    made.batch((0, 1))
    before = all_told(made)
    with pytest.raises(ValueError, match="cannot stand"):
        made.batch((0, 2))
    assert all_told(made) == before


def test_a_model_owned_sequence_never_joins() -> None:
    made = pool(4, 2)
    seq = made.open(caches(3), "model")
    made.batch((0,))
    before = all_told(made)
    with pytest.raises(ValueError, match="model-owned"):
        made.batch((0, seq))
    assert all_told(made) == before
