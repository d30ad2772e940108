"""mlx-vlm as a target: a sound family shows nothing, on text and on images, and what is broken in it is found."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mlx_vlm", reason="mlx-vlm is not installed: pip install 'mlx-kv-harness[mlx-vlm]'")

import mlx.core as mx

from harness.campaign import run_campaign
from harness.capability import Capability
from harness.findings import FindingError, Verdict
from harness.images import prompt_input
from harness.judge import judge_program
from harness.media import Media, places
from harness.operations import (
    Batch,
    BatchDecode,
    BatchForward,
    Chunk,
    Decode,
    Fork,
    Operation,
    Prefill,
    Program,
    Reset,
    Restore,
    Rollback,
    Snapshot,
    Verify,
)
from harness.profiles import PROFILES
from harness.targets import mlx_vlm, naming
from harness.targets.mlx_vlm_models import FAMILIES, build
from harness.targets.mlx_vlm_session import VisionSession
from properties import ALL, BY_ID

NAMES = [f"mlx_vlm:{family}{path}" for family in FAMILIES for path in ("", "+images")]
TWO = ("pool", "pool")
IMAGE, SECOND, VIDEO = Media(2, 2, 3), Media(11, 3, 2), Media(3, 2, 2, 3)
#: Families whose several sequences show a known failure once one of them reads an image, and in batches of text.
NOT_TOGETHER, NOT_IN_BATCHES = {"qwen3_vl", "qwen3_vl_moe"}, {"qwen3_vl_moe"}

#: One sequence: chunks that end inside an image and behind the prompt, and everything that may follow.
LONG_LIFE: tuple[Operation, ...] = (
    Prefill(5, media=(IMAGE, SECOND)),
    Chunk(6),
    Snapshot(0),
    Chunk(9),
    Decode(2),
    Verify(3, 1),
    Chunk(4),
    Restore(0),
    Chunk(3),
    Rollback(4),
    Chunk(3),
    Decode(2),
    Reset(),
    Prefill(4),
    Decode(2),
    Reset(),
    Prefill(4, media=(VIDEO,)),
    Chunk(14),
    Decode(2),
    Rollback(12),
    Decode(1),
)
TOGETHER: tuple[Operation, ...] = (
    Prefill(5, media=(IMAGE,)),
    Prefill(3, 1, media=(SECOND,)),
    Decode(2),
    Chunk(9, 1),
    Chunk(7),
    Decode(1, 1),
    Fork(0, 1),
    Decode(1),
    Decode(2, 1),
)
IN_A_BATCH: tuple[Operation, ...] = (
    Prefill(5, media=(IMAGE,)),
    Prefill(2, 1),
    Batch((0, 1)),
    BatchForward((2, 5)),
    BatchForward((5, 1)),
    BatchDecode(3),
    Rollback(2, 1),
    BatchDecode(1),
    Batch((1,)),
    Batch((1, 0)),
    BatchDecode(2),
)


def only(name: str) -> mlx_vlm.MlxVlmTarget:
    return mlx_vlm.resolve(name)[0]


def able(target: mlx_vlm.MlxVlmTarget, operations: tuple[Operation, ...], owners: tuple[str, ...] = TWO) -> Program:
    """The same without images for a target that takes none."""
    plain = (dataclasses.replace(op, media=()) if isinstance(op, Prefill) else op for op in operations)
    return Program(operations if target.images else tuple(plain), owners)  # type: ignore[arg-type]


def found_in(target: mlx_vlm.MlxVlmTarget, program: Program, *names: str) -> str:
    with pytest.raises(FindingError) as caught:
        judge_program(target, program, [BY_ID[name] for name in names] or ALL)
    return caught.value.finding.property_id


@pytest.mark.parametrize("name", NAMES)
def test_what_a_first_forward_shows_is_mapped_to_layers_and_caches(name: str) -> None:
    target = only(name)
    session = target.open(("pool",))
    seen = session.forward(0, (1, 2, 3))
    assert seen.error is None
    assert len(seen.attention) == len(target.attention_layers) == len(target.windows) == len(target.rules) == 3
    assert [call.positions.shape for call in seen.positions] == [(3, 1, 3)]
    assert [told.offset for told in session.lengths(0)] == [3] * 3
    for call, rows in zip(seen.attention, session.rows(0), strict=True):
        assert rows.keys.shape[2] == call.key_len == 3


@pytest.mark.parametrize("name", NAMES)
def test_a_long_life_alone_shows_nothing(name: str) -> None:
    judge_program(only(name), able(only(name), LONG_LIFE, ("pool",)), ALL)


@pytest.mark.parametrize("name", [name for name in NAMES if name.split(":")[1].split("+")[0] not in NOT_TOGETHER])
def test_two_together_show_nothing_in_a_batch_or_out_of_it(name: str) -> None:
    judge_program(only(name), able(only(name), TOGETHER), ALL)
    judge_program(only(name), able(only(name), IN_A_BATCH), ALL)


@pytest.mark.parametrize("family", sorted(NOT_TOGETHER))
def test_text_together_shows_nothing(family: str) -> None:
    target = only(f"mlx_vlm:{family}")
    judge_program(target, able(target, TOGETHER), ALL)
    if family not in NOT_IN_BATCHES:
        judge_program(target, able(target, IN_A_BATCH), ALL)


@pytest.mark.parametrize("name", ["mlx_vlm:qwen2_vl", "mlx_vlm:qwen2_vl+images", "mlx_vlm:qwen2_5_vl+images"])
def test_a_campaign_on_a_sound_family_passes(name: str) -> None:
    result = run_campaign(name, mlx_vlm.resolve(name), ALL, PROFILES["smoke"], 5)
    assert not result.found
    assert result.verdict in (Verdict.PASS, Verdict.VACUOUS)  # few programs: not every property need be decisive


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl"])
def test_a_batch_of_sequences_that_have_had_no_forward(family: str) -> None:
    program = Program((Batch((0, 1)), BatchForward((2, 3)), BatchDecode(1)), ("pool", "pool"))
    judge_program(only(f"mlx_vlm:{family}"), program, ALL)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl"])
def test_the_ids_of_the_library_are_those_of_the_ledger(family: str) -> None:
    """What stands at position 0 moves one up: the library counts images by the token in front of them."""
    target = only(f"mlx_vlm:{family}+images")
    assert target.images is not None and target.images.start_token == 39
    media = (IMAGE, dataclasses.replace(VIDEO, at=12))
    prompt = prompt_input(0, media, 40, target.vocab_size, target.images)
    read = build(family, "tiny", 0).language_model.get_rope_index
    grids = {name: mx.array(getattr(prompt, name)) for name in ("image_grid_thw", "video_grid_thw")}
    ids, _ = read(mx.array([prompt.tokens]), **grids)
    expected = places(media, target.images.frames_apart, len(prompt.tokens))
    assert np.array_equal(np.array(ids)[:, 0].T, expected)
    judge_program(target, Program((Prefill(1, media=(Media(0, 1, 2),)), Chunk(4), Decode(1))), ALL)


Call = Callable[..., Any]


def _whole_ids(call: Call, model: Any, ids: mx.array, given: dict[str, Any]) -> Any:
    """Not sliced: a chunk takes the first of them (before 0.6.8)."""
    if given.get("position_ids") is not None:
        given["position_ids"] = given["position_ids"][..., : ids.shape[1]]
    return call(model, ids, **given)


def _lost(call: Call, model: Any, ids: mx.array, given: dict[str, Any]) -> Any:
    """The delta does not outlive the prompt (0.6.4)."""
    if given.get("position_ids") is None and "rope_deltas" in given:
        given["rope_deltas"] = mx.zeros_like(given["rope_deltas"])
    out = call(model, ids, **given)
    model._rope_deltas = mx.zeros((1, 1), mx.int32)
    return out


def _kept(call: Call, model: Any, ids: mx.array, given: dict[str, Any]) -> Any:
    """The delta of the first prompt is that of all."""
    if model._rope_deltas is not None and given.get("rope_deltas") is not None:
        given["rope_deltas"] = mx.broadcast_to(model._rope_deltas[:1], given["rope_deltas"].shape)
    return call(model, ids, **given)


@pytest.mark.parametrize(
    ("bug", "program"),
    [
        (_whole_ids, Program((Prefill(5, media=(IMAGE,)), Chunk(5)))),
        (_lost, Program((Prefill(11, media=(IMAGE,)), Decode(1)))),
        (_lost, Program((Prefill(11, media=(IMAGE,)), Prefill(3, 1), Decode(1)), TWO)),
        (_kept, Program((Prefill(11, media=(IMAGE,)), Reset(), Prefill(3), Decode(1)))),
        (_kept, Program((Prefill(11, media=(IMAGE,)), Prefill(3, 1), Decode(1, 1)), TWO)),
    ],
)
@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_a_bug_in_what_the_model_keeps_is_found(
    bug: Callable[..., Any], program: Program, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = only(f"mlx_vlm:{family}+images")
    target.renew()
    judge_program(target, program, ALL)
    target.renew()
    kind = type(build(family, "tiny", 0).language_model)
    call = kind.__call__

    def broken(model: Any, ids: mx.array, **given: Any) -> Any:
        return bug(call, model, ids, given)

    monkeypatch.setattr(kind, "__call__", broken)
    assert found_in(target, program) == "positions_are_absolute"
    target.renew()
    assert found_in(target, program, "outputs_equal_the_cache_free_forward") == "outputs_equal_the_cache_free_forward"
    target.renew()


@pytest.mark.parametrize(
    ("name", "program", "finds"),
    [
        (
            "mlx_vlm:qwen3_vl+images",
            Program((Prefill(2, media=(Media(1, 1, 2),)), Chunk(1)), TWO),
            "outputs_equal_the_cache_free_forward",
        ),
        (
            "mlx_vlm:qwen3_vl+images",
            Program(
                (
                    Prefill(1, media=(Media(1, 1, 2),)),
                    Prefill(1, 1, media=(Media(1, 1, 2),)),
                    Batch((0, 1)),
                    BatchForward((2, 2)),
                ),
                TWO,
            ),
            "batch_rows_equal_solo_runs",
        ),
        (
            "mlx_vlm:qwen3_vl_moe+images",
            Program((Prefill(1, media=(Media(0, 1, 1), Media(2, 1, 1, 1))),)),
            "every_operation_completes",
        ),
        (
            "mlx_vlm:qwen3_vl_moe",
            Program((Prefill(2, 1), Batch((0, 1)), BatchForward((3, 1)), BatchDecode(1)), TWO),
            "mask_key_axis_equals_live_keys",
        ),
    ],
)
def test_what_is_known_to_be_wrong_is_found(name: str, program: Program, finds: str) -> None:
    assert found_in(only(name), program, finds) == finds


@pytest.mark.parametrize("name", NAMES)
def test_a_target_is_rebuilt_from_what_a_trace_says_of_it(name: str) -> None:
    target = dataclasses.replace(only(name), weights_seed=3)
    again = mlx_vlm.target_from_identity(target.identity.to_json())
    assert again == target and again.identity == target.identity
    with pytest.raises(naming.TargetError, match="no variant, policy and seed"):
        mlx_vlm.target_from_identity(target.identity.to_json() | {"variant": "none"})


@pytest.mark.parametrize("name", ["mlx_vlm:none", "mlx_vlm:qwen2_vl+sound", "mlx_vlm:+images"])
def test_a_name_that_means_nothing_is_refused_in_one_line(name: str) -> None:
    with pytest.raises(naming.TargetError) as caught:
        naming.resolve(name, naming.Asked())
    assert "\n" not in str(caught.value)


def test_another_mask_policy_is_refused_and_reports_have_names_of_their_own() -> None:
    with pytest.raises(naming.TargetError, match="no other policy"):
        naming.resolve("mlx_vlm:qwen2_vl", naming.Asked(policy="offset"))
    subjects = [naming.resolve(name, naming.Asked()) for name in ("mlx_vlm:qwen2_vl", "mlx_vlm:qwen2_vl+images")]
    assert [each.file_name for each in subjects] == ["mlx_vlm-qwen2_vl", "mlx_vlm-qwen2_vl-images"]
    assert any("no prompt holds an image" in limit for limit in subjects[0].limits)


def test_without_the_library_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    build.cache_clear()
    for name in [name for name in sys.modules if name.split(".")[0] == "mlx_vlm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "mlx_vlm", None)
    with pytest.raises(naming.TargetError, match=r"not installed: pip install 'mlx-kv-harness\[mlx-vlm\]'"):
        naming.resolve("mlx_vlm:qwen2_vl", naming.Asked())
    build.cache_clear()


def test_what_a_session_cannot_do_no_target_says_it_can() -> None:
    never = {"trim_front", "enforce", "quantise", "memory", "footprint", "save_and_load"}
    never |= {"watch_arguments", "arguments"}
    methods = {name: getattr(VisionSession, name) for name in dir(VisionSession) if not name.startswith("_")}
    assert never == {name for name, method in methods.items() if "NotImplementedError" in inspect.getsource(method)}
    for name in NAMES:
        lacks = mlx_vlm.LACKS | (set() if name.endswith("+images") else {Capability.IMAGES})
        assert only(name).capabilities == frozenset(Capability) - lacks
