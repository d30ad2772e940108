"""Drawn configurations in a campaign: found like the built-in ones, replayed from what the trace itself says."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

import properties
from harness import cli, runner
from harness.campaign import CampaignResult, run_campaign
from harness.execution import execute
from harness.faults.patching import replacing
from harness.media import Media
from harness.operations import Chunk, Prefill, Program, TrimFront
from harness.profiles import PROFILES, Profile
from harness.recording import record
from harness.replay import Outcome, replay
from harness.runner import family_targets
from harness.targets.reference import FAMILIES, ReferenceTarget, paths, target_from_identity, targets
from harness.trace import Trace, read_trace
from harness.words import in_words
from reference_models import drawing, drawn, mistral4, nemotron_nas, qwen3_vl
from reference_models.engine import masks

MASK = "mask_key_axis_equals_live_keys"
QUICK = PROFILES["quick"]
FEW = dataclasses.replace(QUICK, programs=24, least=2, configurations=6)


def drawn_targets(family: str, policy: Any, seed: int, path: Any = "text") -> list[ReferenceTarget]:
    return [target for target in family_targets(family, policy, QUICK, seed, path) if target.variant.drawn]


def found_trace(family: str, path: str, seed: int) -> Trace:
    """What a campaign on the offset mask writes when it has drawn configurations alone."""
    chosen = drawn_targets(family, "offset", seed, path)
    result = run_campaign(family, chosen, [properties.BY_ID[MASK]], FEW, seed, first_only=True)
    (bug,) = result.found
    return record(execute(bug.target, bug.finding.program), bug.finding, {})


@pytest.mark.parametrize(("family", "path"), [(family, path) for family in FAMILIES for path in paths(family)])
def test_the_offset_mask_is_found_and_its_trace_replays(
    family: str, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = found_trace(family, path, 4)
    assert made.file_name.startswith("mask_key_axis-drawn-1-")
    file = tmp_path / made.file_name
    file.write_text(made.to_text())

    def never(*_: object, **__: object) -> None:
        raise AssertionError("a replay must not draw")

    monkeypatch.setattr(drawing, "draw_config", never)
    monkeypatch.setattr(drawn, "draw_config", never)
    monkeypatch.setattr(drawn, "drawn_variants", never)
    trace = read_trace(file)
    target = target_from_identity(trace.target)
    assert (target.variant.drawn, target.path) == (True, path) and target.identity.to_json() == made.target
    result = replay(trace, target, properties.ALL)
    assert (result.outcome, result.same) == (Outcome.FAILED, True)
    assert cli.main(["replay", str(file)]) == 1
    *_, named, told = capsys.readouterr().out.splitlines()
    assert "variant drawn-1, rows cache" in named
    assert told.startswith("      drawn     ") and f"hidden_size={target.variant.config.hidden_size} " in told

    file.write_text(dataclasses.replace(trace, target=trace.target | {"policy": "live"}).to_text())
    assert cli.main(["replay", str(file)]) == 0
    assert capsys.readouterr().out.startswith(f"FIXED   {MASK} holds now")


def test_a_trace_means_its_configuration_not_its_name() -> None:
    one, other = drawn_targets("qwen3_vl", "live", 3)
    as_other = one.identity.to_json() | {"drawn": other.identity.to_json()["drawn"]}
    assert target_from_identity(as_other).variant.config == other.variant.config != one.variant.config
    built_in = targets("qwen3_vl")[0].identity
    assert "drawn" not in built_in.to_json() and built_in.drawn is None


def test_the_seed_decides_and_the_storages_take_turns() -> None:
    for family in FAMILIES:
        first = family_targets(family, "live", QUICK, 1)
        assert family_targets(family, "live", QUICK, 1) == first
        new = [target for target in first if target.variant.drawn]
        assert [(t.variant.name, t.storage) for t in new] == [("drawn-1", "rows"), ("drawn-2", "int8")]
        assert tuple(t for t in first if not t.variant.drawn) == targets(family, weights_seed=1, far=True)
        other = [target for target in family_targets(family, "live", QUICK, 2) if target.variant.drawn]
        assert not {t.variant.config for t in new} & {t.variant.config for t in other}
        control = family_targets(family, "offset", QUICK, 1)
        assert all(t.variant.reads_images for p in paths(family)[1:] for t in drawn_targets(family, "live", 1, p))
        assert [t.variant for t in control] == [t.variant for t in first] and {t.policy for t in control} == {"offset"}
    configs = [drawn_targets(family, "live", 1)[-1].variant.config for family in ("qwen3_vl", "qwen3_vl_moe")]
    assert configs[0].rope_theta != configs[1].rope_theta or configs[0].hidden_size != configs[1].hidden_size


def test_larger_profiles_draw_more() -> None:
    counts = [PROFILES[name].configurations for name in ("smoke", "quick", "ci", "nightly")]
    assert counts == sorted(set(counts)) and counts[0] > 0


def run(out: Path, seed: int, policy: str = "live") -> tuple[dict[str, Any], str]:
    """The record and the Markdown of a run on qwen3_vl, without what time it took."""
    cli.main(
        ["run", "--families", "qwen3_vl", "--path", "text", "--seed", str(seed), "--policy", policy, "--out", str(out)]
    )
    data = json.loads((out / "families" / "qwen3_vl.json").read_text())
    text = (out / "families" / "qwen3_vl.md").read_text()
    for part in (data, data["control"] or {}):
        part.pop("seconds", None)
    return data, "\n".join(line for line in text.splitlines() if "seconds" not in line and " s in all" not in line)


def test_a_run_reports_what_it_drew_and_repeats_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = Profile("quick", programs=8, operations=5, shrink=False, least=1, patience=0, configurations=3)
    monkeypatch.setitem(PROFILES, "quick", small)
    monkeypatch.setattr(runner, "DATABASE", tmp_path / "db")
    first, again = (run(tmp_path / name, 4) for name in ("first", "again"))
    assert first == again
    rows = [one for one in first[0]["configurations"] if one["drawn"]]
    assert [one["variant"] for one in rows] == ["drawn-1", "drawn-2", "drawn-3"]
    assert all(one["programs"] >= 1 for one in rows) and first[0]["budget"]["configurations"] == 3
    everything = first[0]["configurations"]
    assert f"{len(everything)} of {len(everything)} run; 3 drawn by the seed" in first[1]
    base = everything[0]["config"]
    for one in rows:
        assert f"- {one['variant']}: {in_words(one['config'], base)}" in first[1].replace("\\", "")
    kind = qwen3_vl.Config
    assert drawn.config_from_fields(kind, rows[0]["config"]) == drawn_targets("qwen3_vl", "live", 4)[0].variant.config


# Bugs that live in rare configurations only.


def planted(module: Any, rare: Callable[[Any], bool]) -> AbstractContextManager[None]:
    """The models of a family show each token the one after it, if their configuration is a rare one."""
    made = masks.chunk_mask

    def leaking(*arguments: Any) -> Any:
        mask = made(*arguments)
        return None if mask is None else masks.mx.concatenate([mask[1:], mask[-1:]])

    def make(call: Any) -> Any:
        def chosen(self: Any, *arguments: Any, **named: Any) -> Any:
            with replacing(masks, "chunk_mask", lambda right: leaking if rare(self.config) else right)():
                return call(self, *arguments, **named)

        return chosen

    return replacing(module.Model, "__call__", make)()


def campaign(family: str, chosen: list[ReferenceTarget]) -> CampaignResult:
    content = properties.BY_ID["mask_shows_exactly_the_visible_set"]
    return run_campaign(family, chosen, [content], FEW, 2, first_only=True)


@pytest.mark.parametrize(
    ("module", "rare"),
    [
        (qwen3_vl, lambda c: c.num_key_value_heads == 1),
        (nemotron_nas, lambda c: c.block_configs[0].attention.no_op),
        (nemotron_nas, lambda c: c.block_configs[0].attention.replace_with_linear),
        (mistral4, lambda c: c.num_experts_per_tok == c.n_routed_experts > 1),
        (mistral4, lambda c: c.num_hidden_layers == 1),
    ],
    ids=["one KV head", "no-op first", "linear first", "all experts chosen", "one layer"],
)
def test_a_bug_of_an_awkward_configuration_is_found_whatever_is_drawn(module: Any, rare: Any) -> None:
    family = module.__name__.rpartition(".")[2]
    with planted(module, rare):
        result = campaign(family, list(targets(family)))
    (bug,) = result.found
    assert isinstance(bug.target, ReferenceTarget) and rare(bug.target.variant.config)


def test_a_bug_of_a_configuration_that_is_not_built_in_is_found_among_the_drawn() -> None:
    def rare(config: Any) -> bool:
        return bool(config.num_hidden_layers == 4)

    assert not any(rare(target.variant.config) for target in targets("qwen3_vl"))
    with planted(qwen3_vl, rare):
        assert campaign("qwen3_vl", list(targets("qwen3_vl"))).found == []
        everything = family_targets("qwen3_vl", "live", FEW, 3)
        (bug,) = campaign("qwen3_vl", list(everything)).found
    assert isinstance(bug.target, ReferenceTarget) and bug.target.variant.drawn and rare(bug.target.variant.config)


# What cannot be used.


def put(trace: Trace, drawn_part: Any, **changes: Any) -> Trace:
    return dataclasses.replace(trace, target=trace.target | {"drawn": drawn_part} | changes)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda t: put(t, None), "what was drawn must be an object with config and options"),
        (lambda t: put(t, {"config": {}, "options": {}}), "config.vocab_size is missing"),
        (lambda t: put(t, t.target["drawn"], variant="plain"), "a drawn variant is called drawn-1"),
        (lambda t: put(t, t.target["drawn"], family="qwen3_vl_moe"), "config.moe_intermediate_size is missing"),
        (lambda t: put(t, t.target["drawn"], family="qwen4"), "nearest"),
        (lambda t: put(t, t.target["drawn"], more=1), "with the fields"),
        (lambda t: wide(t, hidden_size=1 << 40), "config.hidden_size must be a whole number in 0..4096"),
        (lambda t: wide(t, vocab_size=1 << 16, hidden_size=4096), "parameters; at most 4,000,000"),
        (lambda t: wide(t, num_hidden_layers=0), "num_hidden_layers must be at least 1"),
        (lambda t: wide(t, **{"x" * 5000: 1}), "has no field"),
        (lambda t: put(t, t.target["drawn"], path="images"), "has no vision tower"),
        (lambda t: without(t), "has no variant 'drawn-1'"),
    ],
)
def test_a_hostile_trace_is_one_line(
    change: Callable[[Trace], Trace], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = drawn_targets("qwen3_vl", "offset", 3)[0]
    made = change(record(execute(target, runner_program()), None, {}))
    path = tmp_path / "hostile.json"
    path.write_text(made.to_text())
    assert cli.main(["replay", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and why in err and len(err) < 500


def wide(trace: Trace, **sizes: Any) -> Trace:
    part = trace.target["drawn"]
    return put(trace, {**part, "config": part["config"] | sizes})


def without(trace: Trace) -> Trace:
    return dataclasses.replace(trace, target={k: v for k, v in trace.target.items() if k != "drawn"})


def runner_program() -> Any:
    from harness.operations import Chunk, Prefill, Program

    return Program((Prefill(3), Chunk(2)))


def test_a_configuration_in_words() -> None:
    assert in_words({}) == ""
    assert in_words({"a": 1, "b": {"c": 0.5, "d": {}}, "e": True, "f": None, "g": (), "h": [2, 1]}) == (
        "a=1 b.c=0.5 b.d={} e=true f=none g=none h=2,1"
    )
    blocks = [{"attention": {"group": 2, "no_op": False}, "ffn": {"no_op": True, "mult": None}}, {"x": 1e-6}]
    assert in_words({"blocks": blocks}) == "blocks=[attention.group=2 ffn.no_op; x=1e-06]"
    assert in_words({"a": 1, "b": {"c": 1, "d": 2}, "n": None}, {"a": 1, "b": {"c": 1, "d": 3}}) == "b.d=2 n=none"


def test_configurations_with_a_vision_tower_are_drawn_for_the_path_with_images(tmp_path: Path) -> None:
    targets = [t for t in family_targets("qwen3_vl", "offset", QUICK, 4, "images") if t.variant.drawn]
    assert len(targets) == QUICK.configurations and all(target.images is not None for target in targets)
    assert targets == [t for t in family_targets("qwen3_vl", "offset", QUICK, 4, "images") if t.variant.drawn]
    program = Program((Prefill(4, media=(Media(1, 2, 2),)), TrimFront(3), Chunk(3)))
    trace = record(execute(targets[0], program), None, {})
    path = tmp_path / "drawn.json"
    path.write_text(trace.to_text())
    again = read_trace(path)
    assert target_from_identity(again.target) == targets[0] and again.target["path"] == "images"
    assert record(execute(target_from_identity(again.target), again.program), None, {}).steps == trace.steps
