"""mlx-lm as a target: what is told of its caches is true, and what is known to be wrong in it is found."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

pytest.importorskip("mlx_lm", reason="mlx-lm is not installed: pip install 'mlx-kv-harness[mlx-lm]'")

from harness.campaign import run_campaign
from harness.capability import Capability, needs
from harness.execution import execute
from harness.findings import FindingError, Verdict
from harness.judge import judge_program
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
    SaveLoad,
    Snapshot,
    TrimFront,
    Verify,
)
from harness.profiles import PROFILES
from harness.targets import mlx_lm, mlx_lm_release, naming
from harness.targets.mlx_lm_catalogue import FAMILIES, WITHOUT_ENTRY
from harness.targets.mlx_lm_models import build, variants
from properties import ALL, BY_ID

STATES_ALONE = ("mamba", "mamba2", "rwkv7")
JUDGED = [family for family in FAMILIES if family not in STATES_ALONE]
ON_OURS = [family for family in JUDGED if family != "llama4"]  # which is refused: see test_mlx_lm_chunked
NAMES = [*(f"mlx_lm:{family}" for family in JUDGED), *(f"mlx_lm:{family}@live-window" for family in ON_OURS)]
TWO = ("pool", "pool")

#: In one sequence and in two, inside every window and beyond it.
LONG_LIFE: tuple[Operation, ...] = (
    Prefill(5),
    Snapshot(0),
    Decode(2),
    Verify(3, 1),
    Chunk(9),
    Decode(3),
    TrimFront(4),
    Chunk(6),
    TrimFront(2, keep=1),
    Chunk(3),
    SaveLoad(),
    Decode(2),
    Restore(0),
    Chunk(14),
    Reset(),
    Prefill(3),
)
TOGETHER: tuple[Operation, ...] = (Prefill(6), Prefill(2, 1), Fork(2, 1), Chunk(3, 2), Decode(2, 0))
IN_A_BATCH: tuple[Operation, ...] = (
    Prefill(6),
    Prefill(2, 1),
    Batch((0, 1)),
    BatchForward((2, 5)),
    BatchDecode(9),
    Batch((1,)),
    Batch((1, 0)),
    BatchDecode(2),
)
RAGGED = Program((Batch((0, 1)), BatchForward((1, 2)), BatchDecode(1)), TWO)
#: Known failures of the library of which IN_A_BATCH shows something.
NOT_IN_BATCHES = {
    *("jamba", "longcat_flash_ngram", "nemotron_h", "nemotron_nas", "recurrent_gemma"),
    *("afm7", "bailing_moe_linear", "baichuan_m1", "gemma2", "gpt_bigcode", "olmo_hybrid", "plamo3"),
}
NOT_LIVE_SAFE = {"afm7": "positions_are_absolute", "plamo3": "mask_shows_exactly_the_visible_set"}
NOT_EVEN_ALONE = {"mlx_lm:gemma3n", "mlx_lm:afm7@live-window", "mlx_lm:plamo3", "mlx_lm:plamo3@live-window"}


def only(name: str, number: int = 0) -> mlx_lm.MlxLmTarget:
    return mlx_lm.resolve(name)[number]


def able(target: mlx_lm.MlxLmTarget, operations: tuple[Operation, ...], owners: tuple[str, ...]) -> Program:
    """Those of the operations that the target can do."""
    kept = [op for op in operations if needs(Program((op,), owners)) <= target.capabilities]  # type: ignore[arg-type]
    return Program(tuple(kept), owners)  # type: ignore[arg-type]


def found_in(target: mlx_lm.MlxLmTarget, program: Program, *names: str) -> str:
    with pytest.raises(FindingError) as caught:
        judge_program(target, program, [BY_ID[name] for name in names])
    return caught.value.finding.property_id


@pytest.mark.parametrize("name", NAMES)
def test_every_attention_call_of_a_family_is_mapped_to_a_layer_and_a_cache(name: str) -> None:
    for target in mlx_lm.resolve(name):
        session = target.open(("pool",))
        seen = session.forward(0, (1, 2, 3))
        assert seen.error is None
        assert len(seen.attention) == len(target.attention_layers) == len(target.windows) == len(target.rules)
        assert bool(seen.positions) == (Capability.POSITIONS in target.capabilities)
        assert [told.offset for told in session.lengths(0)] == [3] * len(target.attention_layers)
        for call, rows in zip(seen.attention, session.rows(0), strict=True):
            assert rows.keys.shape[2] == call.key_len == 3


@pytest.mark.parametrize("name", [name for name in NAMES if name not in NOT_EVEN_ALONE])
def test_a_long_life_alone_and_two_together_show_nothing(name: str) -> None:
    target = only(name)
    judge_program(target, able(target, LONG_LIFE, ("pool",)), ALL)
    judge_program(target, able(target, TOGETHER, ("pool",) * 3), ALL)


@pytest.mark.parametrize("name", [name for name in NAMES if name.split(":")[1].split("@")[0] not in NOT_IN_BATCHES])
def test_batches_show_nothing(name: str) -> None:
    target = only(name)
    properties = [prop for prop in ALL if (name, prop.id) != ("mlx_lm:gemma3n", "outputs_equal_the_cache_free_forward")]
    judge_program(target, able(target, IN_A_BATCH, TWO), properties)


@pytest.mark.parametrize("name", ["mlx_lm:llama", "mlx_lm:qwen3", "mlx_lm:llama@live-window"])
def test_a_campaign_on_a_sound_family_passes(name: str) -> None:
    result = run_campaign(name, mlx_lm.resolve(name), ALL, PROFILES["smoke"], 5)
    assert not result.found
    assert result.verdict in (Verdict.PASS, Verdict.VACUOUS)  # few programs: not every property need be decisive


@pytest.mark.parametrize("family", ON_OURS)
def test_masks_of_the_offset_are_found_in_every_family(family: str) -> None:
    """The control: what the library's caches measure masks by is wrong behind a front trim."""
    target = only(f"mlx_lm:{family}@live-window")
    program = Program((Prefill(5), TrimFront(2), Chunk(3)))
    if family in NOT_LIVE_SAFE:
        assert found_in(target, program, NOT_LIVE_SAFE[family])
    else:
        judge_program(target, program, ALL)
    assert found_in(target.counterpart(), program, "mask_key_axis_equals_live_keys", "every_operation_completes")


@pytest.mark.parametrize(
    ("name", "number", "program", "finds"),
    [
        ("mlx_lm:nemotron_nas", 1, Program((Verify(1, 0),)), "trim_reports_what_it_removed"),
        ("mlx_lm:nemotron_nas", 0, Program((Prefill(1), Batch((0,)), Reset(0)), TWO), "every_operation_completes"),
        (
            "mlx_lm:nemotron_nas",
            1,
            Program((Prefill(1), Batch((0,)), BatchForward((2,))), TWO),
            "mask_key_axis_equals_live_keys",
        ),
        (
            "mlx_lm:cohere2",
            0,
            Program((Prefill(12), Batch((0, 1)), BatchDecode(1), BatchForward((2,))), TWO),
            "mask_shows_exactly_the_visible_set",
        ),
        ("mlx_lm:gemma3n", 0, Program((Prefill(1),)), "outputs_equal_the_cache_free_forward"),
        ("mlx_lm:nemotron_h", 0, RAGGED, "batch_rows_equal_solo_runs"),
        ("mlx_lm:jamba", 0, RAGGED, "batch_rows_equal_solo_runs"),
        ("mlx_lm:recurrent_gemma", 0, RAGGED, "batch_rows_equal_solo_runs"),
        ("mlx_lm:longcat_flash_ngram", 0, RAGGED, "batch_rows_equal_solo_runs"),
    ],
)
def test_what_is_known_to_be_wrong_is_found(name: str, number: int, program: Program, finds: str) -> None:
    assert found_in(only(name, number), program, finds) == finds


def test_a_rotating_cache_that_is_full_refuses_to_go_back_and_that_is_right() -> None:
    target = only("mlx_lm:olmo3")
    assert {rule.window for rule in target.rules if rule} == {12} and None in target.rules
    session = target.open(("pool",))
    session.forward(0, range(11))
    assert session.rollback(0, 1).removed == (1, 1, 1)
    session.forward(0, range(5))
    assert session.rollback(0, 1).refused is not None
    judge_program(target, Program((Prefill(11), Rollback(3), Chunk(9), Rollback(2), Decode(2))), ALL)


@pytest.mark.parametrize("family", ["qwen3_next", "recurrent_gemma", "falcon_h1", "longcat_flash_ngram"])
def test_states_refuse_every_rollback(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = only(f"mlx_lm:{family}")
    rounds = (Verify(2, 1), Verify(2, 2), Fork(1), Verify(1, 0, 1))
    program = Program((Rollback(1), Prefill(3), Rollback(1), Chunk(2), *rounds), TWO)
    run = judge_program(target, program, ALL).run
    assert [step.refuses for step in run.steps] == [False, False, True, False, True, False, False, True]
    judge_program(target, Program((Prefill(1), Batch((0, 1)), Rollback(1, 1), Rollback(1)), TWO), ALL)
    monkeypatch.setattr(mlx_lm_release, "asks_to_rewind", lambda: False)  # as speculation of 0.31.1 did
    assert found_in(target, program, "trim_reports_what_it_removed") == "trim_reports_what_it_removed"


def test_the_forward_without_a_cache_knows_positions_behind_forks_and_trims() -> None:
    """It is decisive there: with the masks of untrimmed sequences it is not what the session gave."""
    target = only("mlx_lm:llama@live-window")
    trims = (TrimFront(2), Chunk(3), TrimFront(6), Chunk(2))
    program = Program((Prefill(5), Fork(1), *trims, Rollback(1, 1), Chunk(4, 1)), TWO)
    prop = BY_ID["outputs_equal_the_cache_free_forward"]
    judge_program(target, program, [prop])

    @dataclasses.dataclass(frozen=True)
    class Untrimmed(mlx_lm.MlxLmTarget):
        def _with_masks(self, tokens: mx.array, shown: object, *rest: object) -> mx.array:
            return super()._with_masks(tokens, lambda window: np.tri(tokens.shape[1], dtype=bool), *rest)

    untrimmed = Untrimmed(target.model_type, target.variant, target.caches)
    assert found_in(untrimmed, program, prop.id) == prop.id


def test_states_are_copied_and_reset_with_the_caches_of_a_sequence() -> None:
    target = only("mlx_lm:qwen3_next@live-window")
    assert Capability.ROLLBACK not in target.capabilities and Capability.FRONT_TRIM in target.capabilities
    session = target.open(TWO)
    first = session.forward(0, (1, 2, 3)).logits
    session.snapshot(0, 0)
    session.fork(0, 1)
    apart = [session.forward(number, (4, 5)).logits for number in (0, 1)]
    assert np.array_equal(apart[0], apart[1])
    session.restore(0, 0)
    assert np.array_equal(session.forward(0, (4, 5)).logits, apart[0])
    session.reset(0)
    assert np.array_equal(session.forward(0, (1, 2, 3)).logits, first)


def test_what_cannot_be_decided_is_not_applicable_and_says_why() -> None:
    said = {each.id: each.reason for each in _results("mlx_lm:llama") if each.verdict is Verdict.NOT_APPLICABLE}
    assert "nothing ever leaves the front" in said["mask_key_axis_equals_live_keys"]
    assert "independent witness" in said["outputs_equal_the_witness"]
    said = {each.id: each.reason for each in _results("mlx_lm:lfm2") if each.verdict is Verdict.NOT_APPLICABLE}
    assert "every rollback is refused" in said["keys_equal_ledger_live_length"]
    assert "nothing ever leaves the front" in said["mask_key_axis_equals_live_keys"]
    assert "trim_reports_what_it_removed" not in said  # a refusal that does not come would be found
    assert any("cannot go back" in limit for limit in mlx_lm.limits("mlx_lm:lfm2"))
    assert any("no keys to trim" in limit for limit in mlx_lm.limits("mlx_lm:lfm2@live-window"))


def _results(name: str) -> list:
    profile = dataclasses.replace(PROFILES["smoke"], programs=2, patience=0)
    return run_campaign(name, mlx_lm.resolve(name), ALL, profile, 0).properties


@pytest.mark.parametrize("name", ["mlx_lm:llama", "mlx_lm:nemotron_nas", "mlx_lm:qwen3@live-window"])
def test_a_target_is_rebuilt_from_what_a_trace_says_of_it(name: str) -> None:
    for target in mlx_lm.resolve(name):
        again = mlx_lm.target_from_identity(target.identity.to_json())
        assert again == target and again.identity == target.identity


@pytest.mark.parametrize(
    "name", ["mlx_lm:", "mlx_lm:none", "mlx_lm:llama@paged", "reference:llama", *(f"mlx_lm:{f}" for f in WITHOUT_ENTRY)]
)
def test_a_name_that_means_nothing_is_refused_in_one_line(name: str) -> None:
    with pytest.raises(mlx_lm.UnknownFamily) as caught:
        mlx_lm.resolve(name)
    assert "\n" not in str(caught.value)


#: Methods of a session on the library's caches that do nothing but raise, and when a session is asked for them.
NEVER_ASKED = {
    "trim_front": Capability.FRONT_TRIM,
    "enforce": Capability.ENFORCE,
    "memory": Capability.BYTES,
    "footprint": Capability.FOOTPRINT,
    "watch_arguments": Capability.ARGUMENTS,
    "arguments": Capability.ARGUMENTS,
}


def test_what_a_session_cannot_do_no_target_says_it_can() -> None:
    raising = {
        name
        for name, method in vars(mlx_lm.LibrarySession).items()
        if callable(method) and "NotImplementedError" in inspect.getsource(method)
    }
    assert raising == set(NEVER_ASKED)
    for name in NAMES:
        for target in mlx_lm.resolve(name):
            never = {Capability.WITNESS, Capability.INT8, Capability.IMAGES, Capability.FOOTPRINT}
            never |= set() if name.endswith("@live-window") else set(NEVER_ASKED.values())
            assert not never & target.capabilities, name


def test_its_models_answer_over_the_wire(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another release of mlx-lm can live in an environment of its own."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    subject = naming.resolve(f"wire:{sys.executable} -m harness.wire.worker mlx_lm:qwen3", naming.Asked())
    here, there = mlx_lm.resolve("mlx_lm:qwen3")[0], subject.targets[0]
    assert there.capabilities == here.capabilities and there.attention_layers == here.attention_layers
    program = Program((Prefill(5), Chunk(3), Verify(2, 1), SaveLoad(), Decode(2)))
    for one, other in zip(execute(here, program).steps, execute(there, program).steps, strict=True):
        assert (one.error, other.error) == (None, None)
        for mine, theirs in zip(one.forwards, other.forwards, strict=True):
            assert mine.seen.logits is not None and theirs.seen.logits is not None
            assert np.array_equal(mine.seen.logits, theirs.seen.logits)
    subject.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_seed_alone_decides_the_weights(family: str) -> None:
    """Or a trace would be replayed on another model. Constructors draw biases and decays, too."""
    for variant in variants(family):
        first = tree_flatten(build.__wrapped__(family, variant.variant, 3).parameters())
        again = dict(tree_flatten(build.__wrapped__(family, variant.variant, 3).parameters()))
        assert [name for name, array in first if not mx.array_equal(array, again[name])] == []
