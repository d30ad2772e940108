"""Quantised caches of mlx-lm: what a program makes of them, what is found in them, and which families have none."""

from __future__ import annotations

import importlib
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

pytest.importorskip("mlx_lm", reason="mlx-lm is not installed: pip install 'mlx-kv-harness[mlx-lm]'")

from mlx_lm.models import base
from mlx_lm.models.cache import QuantizedKVCache

from harness.capability import Capability, needs
from harness.execution import execute
from harness.findings import FindingError
from harness.judge import judge_program
from harness.judging import Evidence
from harness.machine import ProgramMachine
from harness.operations import (
    Chunk,
    Decode,
    Fork,
    Operation,
    Prefill,
    Program,
    QuantizeCache,
    Reset,
    Restore,
    Rollback,
    SaveLoad,
    Snapshot,
)
from harness.targets import mlx_lm
from harness.targets.mlx_lm_catalogue import FAMILIES
from properties import ALL, BY_ID

TWO = ("pool", "pool")
LIFE: tuple[Operation, ...] = (
    Prefill(5),
    Snapshot(0),
    QuantizeCache("affine8"),
    Chunk(3),
    Rollback(2),
    SaveLoad(),
    Decode(3),
    Rollback(10_000),
    Chunk(2),
    Fork(1),
    Restore(0),
    QuantizeCache("affine4"),
    Chunk(4),
    QuantizeCache("affine8"),
    Reset(),
    Chunk(4),
    Chunk(3, 1),
)
QUANTISED = Program((Prefill(5), QuantizeCache("affine8"), Chunk(3), Decode(2)))


def target(family: str = "llama") -> mlx_lm.MlxLmTarget:
    return next(each for each in mlx_lm.resolve(f"mlx_lm:{family}") if each.variant == "groups")


def found(program: Program, *names: str) -> str:
    with pytest.raises(FindingError) as caught:
        judge_program(target(), program, [BY_ID[name] for name in names] or ALL)
    return caught.value.finding.property_id


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_life_with_quantised_caches_shows_nothing(family: str) -> None:
    run = judge_program(target(family), Program(LIFE, TWO), ALL).run
    assert [step.refuses for step in run.steps if isinstance(step.operation, QuantizeCache)] == [False, False, True]
    assert run.ledgers[0].storage == "affine4" and run.ledgers[1].storage == "affine8"


def test_which_targets_have_them_and_which_storages() -> None:
    able = {
        (family, each.variant)
        for family in FAMILIES
        for each in mlx_lm.resolve(f"mlx_lm:{family}")
        if Capability.QUANTISE in each.capabilities
    }
    assert able == {(family, "groups") for family in ("glm4_moe_lite", "llama", "qwen3")}
    assert Capability.INT8 not in target().capabilities and Capability.BATCH not in target().capabilities
    assert Capability.QUANTISE not in mlx_lm.resolve("mlx_lm:llama@live-window")[1].capabilities
    assert needs(Program((QuantizeCache("int8"),))) == {Capability.QUANTISE, Capability.INT8}
    assert needs(Program((QuantizeCache("affine4"),))) == {Capability.QUANTISE}


@pytest.mark.parametrize("family", ["cohere2", "gpt_oss", "gemma3n", "recurrent_gemma"])
def test_rotating_caches_refuse_before_anything_is_changed(family: str) -> None:
    model = mlx_lm.resolve(f"mlx_lm:{family}")[0]._model
    caches = importlib.import_module("mlx_lm.models.cache").make_prompt_cache(model)
    model(mx.array([[1, 2, 3]]), cache=caches)
    before = list(caches)
    with pytest.raises(NotImplementedError, match="RotatingKVCache"):
        importlib.import_module("mlx_lm.generate").maybe_quantize_kv_cache(caches, 0, 32, 8)
    assert all(old is new for old, new in zip(before, caches, strict=True))


def test_latent_caches_do_not_and_that_is_found() -> None:
    with pytest.raises(FindingError, match="swapaxes") as caught:
        judge_program(target("glm4_moe_lite"), QUANTISED, ALL)
    assert caught.value.finding.property_id == "every_operation_completes"
    judge_program(target("glm4_moe_lite"), Program((Prefill(5), Chunk(3), Decode(2))), ALL)


def test_the_forward_without_a_cache_reads_the_rows_as_they_are_read() -> None:
    """Much nearer than rows as they were given would be: those of 4 bits are far away."""
    for storage, near, far in (("affine8", 1e-4, 2e-3), ("affine4", 1e-3, 5e-2)):
        evidence = Evidence(execute(target(), Program((Prefill(9), QuantizeCache(storage), Chunk(4)))))  # type: ignore[arg-type]
        plain = Evidence(execute(target(), Program((Prefill(9), Chunk(4)))))
        given = [step.forwards[0].seen.logits for step in evidence.run.steps if step.forwards]
        expected, other = evidence.cache_free, plain.cache_free
        assert (
            not isinstance(expected, str) and not isinstance(other, str) and expected is not None and other is not None
        )
        assert expected.rounding_gap is not None and (expected.rounding_gap == 0).tolist() == [False] * 9 + [True] * 4
        assert np.abs(np.concatenate(given) - expected.logits).max() < near  # type: ignore[arg-type]
        assert np.abs(other.logits[9:] - expected.logits[9:]).max() > far


def test_a_program_that_cannot_be_given_int8_is_given_another_storage() -> None:
    drawn: list[Operation] = []

    class Machine(ProgramMachine):
        target = target()

        def _apply(self, operation: Operation) -> None:
            drawn.append(operation)

    machine = Machine()
    for storage in ("int8", "affine4"):
        machine.quantise_and_go_on(0, (storage, storage), False, False, 2, ())
    assert [op.storage for op in drawn if isinstance(op, QuantizeCache)] == ["affine8", "affine4"]


# Planted bugs, each in the library, and who must find them.


def test_a_cache_that_loses_its_last_row_when_it_is_quantised(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = importlib.import_module("mlx_lm.models.cache")
    original = cache.KVCache.to_quantized

    def short(self: Any, **how: Any) -> Any:
        made = original(self, **how)
        made.offset = max(0, made.offset - 1)
        return made

    monkeypatch.setattr(cache.KVCache, "to_quantized", short)
    assert found(QUANTISED) == "keys_equal_ledger_live_length"


def test_rows_that_are_quantised_with_fewer_bits_than_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    original = QuantizedKVCache.update_and_fetch

    def coarse(self: Any, keys: mx.array, values: mx.array) -> Any:
        keys = mx.dequantize(*mx.quantize(keys, group_size=32, bits=4), group_size=32, bits=4)
        return original(self, keys, values)

    monkeypatch.setattr(QuantizedKVCache, "update_and_fetch", coarse)
    name = "quantised_rows_stay_within_their_bound"
    assert found(QUANTISED, name) == name


@pytest.mark.parametrize(
    ("wrong", "finds"),
    [
        (lambda given: given | {"scale": 2 * given["scale"]}, "outputs_equal_the_cache_free_forward"),
        (lambda given: given | {"mask": None}, "mask_shows_exactly_the_visible_set"),
    ],
)
def test_attention_over_quantised_rows_that_is_wrong(wrong: Any, finds: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = base.quantized_scaled_dot_product_attention

    def planted(queries: Any, keys: Any, values: Any, **given: Any) -> Any:
        return original(queries, keys, values, **wrong(given))

    monkeypatch.setattr(base, "quantized_scaled_dot_product_attention", planted)
    assert found(QUANTISED, finds) == finds
