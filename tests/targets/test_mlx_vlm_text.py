"""mlx-vlm on text: chunks of one prompt are given the ids of all of it, and a session begins with a model that has kept
nothing. Two bugs of old releases that show there are planted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx_vlm", reason="mlx-vlm is not installed: pip install 'mlx-kv-harness[mlx-vlm]'")

import mlx.core as mx

from harness.cli import main
from harness.findings import FindingError
from harness.judge import judge_program
from harness.operations import Chunk, Decode, Prefill, Program, Reset
from harness.targets import mlx_vlm
from harness.targets.mlx_vlm_models import FAMILIES, build, frames_apart
from properties import ALL

Call = Callable[..., Any]


def target_of(family: str) -> mlx_vlm.MlxVlmTarget:
    return mlx_vlm.resolve(f"mlx_vlm:{family}")[0]


def whole_ids(call: Call, model: Any, ids: mx.array, given: dict[str, Any]) -> Any:
    """Not sliced: a chunk takes the first of them (before 0.6.8)."""
    if given.get("position_ids") is not None:
        given["position_ids"] = given["position_ids"][..., : ids.shape[1]]
    return call(model, ids, **given)


def not_kept(call: Call, model: Any, ids: mx.array, given: dict[str, Any]) -> Any:
    """The delta that a prompt is given is not kept, so that the next token is taken for a prompt (0.6.4)."""
    kept = model._rope_deltas
    out = call(model, ids, **given)
    if given.get("rope_deltas") is not None:
        model._rope_deltas = kept
    return out


@pytest.mark.parametrize(
    ("bug", "program"),
    [
        pytest.param(whole_ids, Program((Prefill(2), Chunk(2))), id="whole-ids"),
        pytest.param(not_kept, Program((Prefill(2), Decode(1))), id="not-kept"),
    ],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_bug_in_chunks_or_behind_them_is_found(
    bug: Callable[..., Any], program: Program, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = target_of(family)
    judge_program(target, program, ALL)
    kind = type(build(family, "tiny", 0).language_model)
    call = kind.__call__
    monkeypatch.setattr(kind, "__call__", lambda model, ids, **given: bug(call, model, ids, given))
    for _ in range(2):  # the same program, the same finding: nothing is left by the session before
        with pytest.raises(FindingError) as caught:
            judge_program(target, program, ALL)
        assert caught.value.finding.property_id == "positions_are_absolute"
    target.renew()


@pytest.mark.parametrize("family", FAMILIES)
def test_what_one_prompt_leaves_to_the_next_is_still_found(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A session begins afresh, a sequence that is reset does not."""
    target = target_of(family)
    kind = type(build(family, "tiny", 0).language_model)
    call = kind.__call__

    def grown(model: Any, ids: mx.array, **given: Any) -> Any:
        if given.get("position_ids") is not None:
            delta = given.get("rope_deltas")
            given["rope_deltas"] = delta if model._rope_deltas is None else model._rope_deltas + ids.shape[1]
        return call(model, ids, **given)

    monkeypatch.setattr(kind, "__call__", grown)
    judge_program(target, Program((Prefill(3), Decode(1))), ALL)
    judge_program(target, Program((Prefill(3), Decode(1))), ALL)
    with pytest.raises(FindingError) as caught:
        judge_program(target, Program((Prefill(3), Reset(), Prefill(3), Decode(1))), ALL)
    assert caught.value.finding.property_id == "positions_are_absolute"
    target.renew()


@pytest.mark.parametrize("family", FAMILIES)
def test_only_a_chunk_that_follows_a_chunk_belongs_to_the_prompt(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int | None] = []
    kind = type(build(family, "tiny", 0).language_model)
    call = kind.__call__

    def watched(model: Any, ids: mx.array, **beside: Any) -> Any:
        of_all = beside.get("position_ids")
        given.append(None if of_all is None else int(of_all.shape[-1]))
        return call(model, ids, **beside)

    monkeypatch.setattr(kind, "__call__", watched)
    session = target_of(family).open(("pool",))
    for tokens in ((1, 2, 3), (4, 5), (6,), (7, 8)):
        assert session.forward(0, tokens).error is None
    assert given == [3, 5, None, None]
    session.rollback(0, 4)  # into the prompt, of which four tokens are left
    assert session.forward(0, (5, 6)).error is None
    assert given[-1] == 6


def test_a_run_with_images_plants_no_bug_in_models_that_it_does_not_judge(tmp_path: Path) -> None:
    few = ("--programs", "8", "--no-strict", "--out", str(tmp_path))
    assert main(["run", "--target", "mlx_vlm:qwen2_vl+images", *few]) == 0
    data = json.loads((tmp_path / "targets" / "mlx_vlm-qwen2_vl-images.json").read_text())
    assert data["control"] is None and "no bug could be planted in it" in data["control_reason"]


@pytest.mark.parametrize("family", FAMILIES)
def test_whether_text_lies_between_frames_is_what_the_release_counts_on(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Since 0.7.0 it does in the families of qwen3_vl, and before that in none (#2142)."""
    now = family.startswith("qwen3")
    frames_apart.cache_clear()
    assert frames_apart(family, "tiny") == now
    kind = type(build(family, "tiny", 0).language_model)
    together = mx.array([[[0, 1, 2]], [[0, 1, 1]], [[0, 1, 1]]])
    monkeypatch.setattr(kind, "get_rope_index", lambda *_, **__: (together, mx.array([[0]])))
    frames_apart.cache_clear()
    assert not frames_apart(family, "tiny")
    frames_apart.cache_clear()
