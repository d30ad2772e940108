"""The published crash, at its real head sizes, and the regression that the field asks for."""

from __future__ import annotations

import dataclasses

import mlx.core as mx
import pytest

import properties
from harness.execution import execute
from harness.findings import FindingError
from harness.judge import judge_program
from harness.operations import Chunk, EnforceMaxKvSize, Operation, Prefill, Program, TrimFront
from harness.targets.reference import FAMILIES, ReferenceTarget, targets
from harness.targets.reference_caches import STORAGES
from reference_models.engine import CachePool, KVCache, Scheduler, masks
from reference_models.registry import Variant

P, C, PROMPT = 1024, 512, 2048  # --max-kv-size, prefill chunk, prompt tokens
HEADS, KV_HEADS, HEAD_DIM = 12, 2, 128  # those of the published report (Qwen2-VL 2B)


def _attend(policy: masks.MaskPolicy) -> tuple[Scheduler, list[tuple[tuple[int, ...], int]]]:
    """A scheduler over one attention layer of the published sizes, and the (mask shape, keys) of every chunk."""
    seen: list[tuple[tuple[int, ...], int]] = []

    def forward(tokens: mx.array, caches: tuple[KVCache, ...]) -> mx.array:
        length = tokens.shape[1]
        draw = mx.random.normal((1, HEADS + 2 * KV_HEADS, length, HEAD_DIM), key=mx.random.key(len(seen)))
        q, k, v = mx.split(draw, [HEADS, HEADS + KV_HEADS], axis=1)
        mask = masks.chunk_mask(length, caches[0], policy)
        keys, values = caches[0].update_and_fetch(k, v)
        assert mask is not None
        seen.append((tuple(mask.shape), keys.shape[-2]))
        out = mx.fast.scaled_dot_product_attention(q, keys, values, scale=HEAD_DIM**-0.5, mask=mask)
        mx.eval(out)
        return out

    pool = CachePool()
    pool.open([KVCache()])
    return Scheduler(forward, pool, max_kv_size=P, prefill_chunk_size=C), seen


def test_chunk_four_breaks_under_the_offset_policy() -> None:
    scheduler, seen = _attend("offset")
    with pytest.raises(ValueError, match=r"broadcast_shapes.*\(512,2048\).*\(1,12,512,1536\)"):
        scheduler.prefill(0, [1] * PROMPT)
    assert seen == [((512, 512), 512), ((512, 1024), 1024), ((512, 1536), 1536), ((512, 2048), 1536)]


def test_all_chunks_run_under_the_live_policy() -> None:
    scheduler, seen = _attend("live")
    scheduler.prefill(0, [1] * PROMPT)
    assert seen == [((512, 512), 512), ((512, 1024), 1024), ((512, 1536), 1536), ((512, 1536), 1536)]


def _published(policy: masks.MaskPolicy) -> ReferenceTarget:
    """The qwen2_vl reference with the published heads (and one narrow layer, so that it runs in seconds)."""
    base = targets("qwen2_vl")[0].variant
    config = dataclasses.replace(
        base.config,
        hidden_size=HEADS * 16,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        rope_scaling=dataclasses.replace(base.config.rope_scaling, mrope_section=(2, 3, 3)),
    )
    return ReferenceTarget(Variant("qwen2_vl", "published-heads", config), policy)


def _server_prefill() -> Program:
    operations: list[Operation] = [Prefill(C), EnforceMaxKvSize(P)]
    for _ in range(PROMPT // C - 1):
        operations += [Chunk(C), EnforceMaxKvSize(P)]
    return Program(tuple(operations))


def test_the_harness_reports_the_published_shapes() -> None:
    """The same program through the harness: its finding carries the published numbers."""
    with pytest.raises(FindingError) as caught:
        judge_program(_published("offset"), _server_prefill(), properties.ALL)
    finding = caught.value.finding
    assert finding.property_id == "mask_key_axis_equals_live_keys"
    assert finding.message == (
        "layer 0: the mask has 2048 keys, attention received 1536 (offset 1536, live_start 512, chunk of 512)"
    )
    run = execute(_published("offset"), _server_prefill())
    assert [step.error is None for step in run.steps] == [True] * 6 + [False]
    assert run.steps[-1].error is not None
    assert "(512,2048) and (1,12,512,1536)" in run.steps[-1].error
    judge_program(_published("live"), _server_prefill(), properties.ALL)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("family", FAMILIES)
def test_write_8_trim_3_append_4(family: str, storage: str) -> None:
    """9 keys, a live mask 9 wide, an offset mask 12 wide; in every variant of the family."""
    program = Program((Prefill(8), TrimFront(3), Chunk(4)))
    for policy, width in (("live", 9), ("offset", 12)):
        chosen = [target for target in targets(family, policy) if target.storage == storage]  # type: ignore[arg-type]
        assert chosen
        for target in chosen:
            last = execute(target, program).steps[-1]
            call = last.forwards[0].seen.attention[0]
            assert (call.mask, call.mask_keys, call.key_len, call.value_len) == ("bool", width, 9, 9)
            assert (last.error is None) == (policy == "live")
