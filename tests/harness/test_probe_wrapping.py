"""What the probe wraps it unwraps; hooks; compiled functions."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import pytest

from harness.probe import PositionHook, Probe

ORIGINALS = (mx.fast.scaled_dot_product_attention, mx.fast.rope, mx.softmax, mx.quantized_matmul)


@pytest.fixture(autouse=True)
def _nothing_stays_wrapped() -> Iterator[None]:
    yield
    assert (
        mx.fast.scaled_dot_product_attention,
        mx.fast.rope,
        mx.softmax,
        mx.quantized_matmul,
    ) == ORIGINALS


def attend() -> None:
    q = mx.zeros((1, 2, 3, 8))
    mx.fast.scaled_dot_product_attention(q, q, q, scale=1.0)


def identity(positions: mx.array, *_: Any, **__: Any) -> mx.array:
    return positions


def test_everything_is_unwrapped_after_an_exception() -> None:
    probe = Probe()

    def stopped() -> Any:
        with probe.watching() as record:
            attend()
            records.append(record)
            raise KeyboardInterrupt

    records: list[Any] = []
    with pytest.raises(KeyboardInterrupt):
        stopped()
    (record,) = records
    assert len(record.attention()) == 1 and mx.fast.rope is ORIGINALS[1]
    with probe.watching() as again:  # and it can watch again
        attend()
    assert len(again.attention()) == 1 and len(record.attention()) == 1


def test_not_reentrant_and_the_outer_block_goes_on() -> None:
    probe = Probe()
    with probe.watching() as record:
        with pytest.raises(RuntimeError, match="already watching"), probe.watching():
            pass
        attend()
    assert len(record.attention()) == 1


def test_nothing_is_recorded_outside() -> None:
    probe = Probe()
    kept = []
    with probe.watching() as record:
        kept.append(mx.fast.scaled_dot_product_attention)  # a model may keep a wrapper in a closure
    attend()
    q = mx.zeros((1, 2, 3, 8))
    kept[0](q, q, q, scale=1.0)
    assert record.attention() == () and record.positions() == ()


def test_a_hook_sees_the_positions_and_changes_nothing() -> None:
    module: Any = types.ModuleType("angles")
    module.angles = original = lambda positions, *, factor: positions * factor
    probe = Probe([PositionHook(module, "angles", "mrope", lambda positions, **_: positions)])
    ids = mx.broadcast_to(mx.array([4, 5]), (3, 1, 2))
    with probe.watching() as record:
        out = module.angles(ids, factor=2)
    assert out[0, 0].tolist() == [8, 10]
    (call,) = record.positions()
    assert call.kind == "mrope" and call.positions.shape == (3, 1, 2) and call.positions[0, 0].tolist() == [4, 5]
    assert module.angles is original


def test_hooks_on_a_method_a_static_method_and_an_inherited_one() -> None:
    class Base:
        def inherited(self, positions: mx.array) -> mx.array:
            return positions + 1

    class Rotation(Base):
        def method(self, positions: mx.array) -> mx.array:
            return positions + 2

        @staticmethod
        def static(positions: mx.array) -> mx.array:
            return positions + 3

    before = dict(vars(Rotation))
    hooks = [
        PositionHook(Rotation, "method", "method", lambda self, positions: positions),
        PositionHook(Rotation, "static", "static", identity),
        PositionHook(Rotation, "inherited", "inherited", lambda self, positions: positions),
    ]
    made, ids = Rotation(), mx.array([5])
    with Probe(hooks).watching() as record:
        values = [made.method(ids), made.static(ids), made.inherited(ids), Rotation.static(ids)]
    assert [int(value) for value in values] == [7, 8, 6, 8]
    assert [call.kind for call in record.positions()] == ["method", "static", "inherited", "static"]
    assert dict(vars(Rotation)) == before  # also: the inherited one was not left in the subclass


def test_two_hooks_on_one_function_both_see_it() -> None:
    module: Any = types.ModuleType("angles")
    module.angles = original = lambda positions: positions
    probe = Probe([PositionHook(module, "angles", kind, identity) for kind in ("mrope", "query_scale")])
    with probe.watching() as record:
        module.angles(mx.array([1]))
    assert sorted(call.kind for call in record.positions()) == ["mrope", "query_scale"]
    assert module.angles is original


def test_a_hook_on_something_that_does_not_exist_leaves_the_probe_usable() -> None:
    module: Any = types.ModuleType("angles")
    probe = Probe([PositionHook(module, "angles", "mrope", identity)])
    for _ in range(2):  # the second time it must not say "already watching"
        with pytest.raises(AttributeError, match="angles"), probe.watching():
            pass
        assert mx.fast.rope is ORIGINALS[1]
    module.angles = identity
    with probe.watching() as record:
        module.angles(mx.array([1]))
    assert len(record.positions()) == 1


@pytest.fixture
def _compiling(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compilation on, as where nobody set the variable."""
    monkeypatch.delenv("MLX_DISABLE_COMPILE", raising=False)
    mx.enable_compile()
    yield
    mx.disable_compile()


@pytest.mark.usefixtures("_compiling")
def test_a_compiled_function_is_seen_before_and_after_its_first_call() -> None:
    traces = []

    def forward(q: mx.array) -> mx.array:
        traces.append(1)
        q = mx.fast.rope(q, 8, traditional=False, base=1e4, scale=1.0, offset=6)
        return mx.fast.scaled_dot_product_attention(q, q, q, scale=1.0)

    compiled: Callable[[mx.array], mx.array] = mx.compile(forward)
    q = mx.ones((1, 2, 3, 8))
    mx.eval(compiled(q), compiled(q))
    assert len(traces) == 1  # it is replayed: without help the probe would see nothing
    probe = Probe()
    for _ in range(2):
        with probe.watching() as record:
            mx.eval(compiled(q))
        (call,) = record.attention()
        (turn,) = record.positions()
        assert call.key_len == 3 and turn.positions.tolist() == [6, 7, 8]
    traced = len(traces)
    mx.eval(compiled(q))
    assert len(traces) == traced  # compilation is on again, and the graph of the first trace is used
