"""The rule of a cache against its definition, and what follows from it."""

import itertools

import mlx.core as mx
import pytest

from reference_models.engine import KVCache, NoCache, VisibilityRule, chunk_mask

RULES = [
    VisibilityRule(),
    *(VisibilityRule(window, sinks) for window, sinks in ((1, 0), (3, 0), (3, 2), (6, 1), (2**40, 0), (2**40, 5))),
    *(VisibilityRule(chunk=chunk) for chunk in (1, 2, 5, 2**40)),
    VisibilityRule(window=3, chunk=4),
]


def sees(rule: VisibilityRule, q: int, p: int) -> bool:
    near = rule.window is None or p < rule.sinks or p > q - (rule.window - rule.sinks)
    return p <= q and near and (rule.chunk is None or p // rule.chunk == q // rule.chunk)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_before_and_mask_say_the_same(rule: VisibilityRule) -> None:
    positions = list(range(14))
    mask = rule.mask(mx.array(positions), mx.array(positions)).tolist()
    assert mask == [[sees(rule, q, p) for p in positions] for q in positions]
    for q in positions:
        parts = rule.before(q)
        assert list(itertools.chain(*parts)) == [p for p in range(q) if sees(rule, q, p)]
        assert all(parts) and all(first.stop <= second.start for first, second in itertools.pairwise(parts))


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_what_a_query_has_lost_no_later_one_sees(rule: VisibilityRule) -> None:
    """So a cache may drop what the next token does not see."""
    for p, q in itertools.product(range(12), range(13)):
        if p <= q and not sees(rule, q, p):
            assert not sees(rule, q + 1, p)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"window": 0}, "window 0"),
        ({"window": 4, "sinks": 4}, "sinks 4"),
        ({"sinks": 1}, "sinks 1"),
        ({"window": 4, "sinks": -1}, "sinks -1"),
        ({"chunk": 0}, "chunk 0"),
    ],
)
def test_a_rule_that_hides_the_own_key_is_refused(fields: dict[str, int], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        VisibilityRule(**fields)


def test_where_no_rule_is_the_dense_paths_are_as_they_were() -> None:
    cache = KVCache()
    rows = mx.ones((1, 1, 5, 2))
    cache.update_and_fetch(rows, rows)
    cache.trim_front(2, keep=1)
    assert cache.rule == VisibilityRule() and chunk_mask(1, cache) is None
    assert cache.key_positions(2).tolist() == [0, 3, 4, 5, 6] and cache.held_len == cache.live_len == 3


def test_without_a_cache_the_keys_are_the_tokens() -> None:
    assert NoCache().key_positions(3).tolist() == [0, 1, 2]
    assert NoCache(mx.array([4, 0, 1])).key_positions(3).tolist() == [4, 0, 1]
    assert NoCache().rule == VisibilityRule() and NoCache().positions.shape == (0,)
