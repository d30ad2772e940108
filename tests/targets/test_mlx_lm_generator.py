"""mlx-lm's BatchGenerator as a whole: what is right in it is not reported, and bugs planted in it are found."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

pytest.importorskip("mlx_lm", reason="mlx-lm is not installed: pip install 'mlx-kv-harness[mlx-lm]'")

from mlx_lm.models import cache as caches_of

from harness.campaign import CampaignResult, run_campaign
from harness.capability import Capability
from harness.execution import execute
from harness.findings import Verdict
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
    Snapshot,
)
from harness.profiles import PROFILES
from harness.targets import mlx_lm, naming
from harness.targets.mlx_lm_generator import SETTINGS, GeneratorSession
from properties import ALL

generate = importlib.import_module("mlx_lm.generate")  # the package has a function of that name
WHOLE, IN_PIECES = SETTINGS
THREE = ("pool", "pool", "pool")

#: Joins of one and of several while others generate, prompts of unequal lengths with and without a cache, rows that
#: leave from the middle, copies of a request that goes on, one that is cancelled.
LIFE: tuple[Operation, ...] = (
    Prefill(5),
    Prefill(3, 1),
    Decode(2),
    Batch((0, 1)),
    BatchForward((3, 1)),
    BatchDecode(3),
    Prefill(4, 2),
    Batch((0, 1, 2)),
    BatchDecode(3),
    Batch((2, 0, 1)),
    BatchForward((1, 2, 7)),
    BatchDecode(2),
    Snapshot(0, 1),
    Decode(2, 1),
    Batch((0, 2)),
    BatchDecode(1),
    Restore(0, 1),
    Chunk(2, 1),
    Fork(0, 1),
    Decode(2),
    Decode(1, 1),
    Reset(2),
    Prefill(6, 2),
    Batch((1, 0, 2)),
    BatchForward((4, 1, 9)),
    BatchDecode(2),
)


def target(family: str, caches: str) -> Any:
    return mlx_lm.resolve(f"mlx_lm:{family}@{caches}")[0]


def campaign(family: str, caches: str, programs: int) -> CampaignResult:
    profile = dataclasses.replace(PROFILES["smoke"], programs=programs)
    return run_campaign(f"{family}-{caches}", [target(family, caches)], ALL, profile, 0, first_only=True, attempts=0)


@pytest.mark.parametrize("caches", SETTINGS)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "lfm2"])
def test_a_long_life_breaks_nothing(family: str, caches: str) -> None:
    judged = judge_program(target(family, caches), Program(LIFE, THREE), ALL)
    assert len(judged.run.steps) == len(LIFE) and judged.run.steps[-1].error is None


@pytest.mark.parametrize("caches", SETTINGS)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_what_is_right_is_not_reported(family: str, caches: str) -> None:
    result = campaign(family, caches, 12)
    assert not result.found and result.tally.coverage.programs >= 12
    verdicts = {found.id: found.verdict for found in result.properties}
    assert set(verdicts.values()) == {Verdict.PASS, Verdict.NOT_APPLICABLE}
    for prop in ("outputs_equal_the_cache_free_forward", "batch_rows_equal_solo_runs", "batches_keep_their_rows"):
        assert verdicts[prop] is Verdict.PASS
    seen = Verdict.PASS if caches == WHOLE else Verdict.NOT_APPLICABLE
    assert verdicts["mask_shows_exactly_the_visible_set"] is seen
    assert all(found.reason for found in result.properties if found.verdict is Verdict.NOT_APPLICABLE)


def wrapped(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, around: Callable[..., Any]) -> None:
    """``around(original, self, ...)`` in the place of a method."""
    original = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *given, **named: around(original, *given, **named))


def padding_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mask of a batch hides nothing of what stands in front of a row's keys."""

    def make_mask(original: Any, self: Any, *given: Any, **named: Any) -> Any:
        padding, self.left_padding = self.left_padding, mx.zeros_like(self.left_padding)
        try:
            return original(self, *given, **named)
        finally:
            self.left_padding = padding

    wrapped(monkeypatch, caches_of.BatchKVCache, "make_mask", make_mask)


def right_padding_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts that ended early keep what padded them as if it were keys."""
    monkeypatch.setattr(caches_of.BatchKVCache, "finalize", lambda self: setattr(self, "_right_padding", None))


def rows_change_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who stays in the batch gets the caches of another who stays."""

    def filter_(original: Any, self: Any, keep: list[int]) -> None:
        original(self, keep[::-1])

    wrapped(monkeypatch, caches_of.BatchKVCache, "filter", filter_)


def another_row_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first row of the caches goes, whoever was removed."""

    def filter_(original: Any, self: Any, keep: list[int]) -> None:
        rows = self.offset.shape[0]
        original(self, list(range(rows - len(keep), rows)))

    wrapped(monkeypatch, caches_of.BatchKVCache, "filter", filter_)


def tokens_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is fed next is that of the first rows, whoever is left."""

    def filter_(original: Any, self: Any, keep: list[int]) -> None:
        tokens = self._next_tokens
        original(self, keep)
        self._next_tokens = tokens[: len(keep)] if keep else None

    wrapped(monkeypatch, generate.GenerationBatch, "filter", filter_)


def logprobs_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request is answered with the logprobs of another; nothing else is wrong."""

    def filter_(original: Any, self: Any, keep: list[int]) -> None:
        logprobs = self._next_logprobs
        original(self, keep)
        self._next_logprobs = logprobs[: len(keep)]

    wrapped(monkeypatch, generate.GenerationBatch, "filter", filter_)


def caches_of_another_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that come together get each other's prompt caches."""

    def insert(original: Any, self: Any, *given: Any, caches: Any = None, **named: Any) -> Any:
        return original(self, *given, caches=caches and caches[::-1], **named)

    wrapped(monkeypatch, generate.BatchGenerator, "insert_segments", insert)


def a_neighbours_cache_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that ends is given the cache of the row in front of it."""

    def extract_cache(original: Any, self: Any, row: int) -> Any:
        return original(self, max(0, row - 1))

    wrapped(monkeypatch, generate.GenerationBatch, "extract_cache", extract_cache)


def pieces_begin_at_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every piece of a prompt is rotated as if it were the first."""

    def prompt(original: Any, self: Any, tokens: Any) -> None:
        for each in self.prompt_cache if tokens else ():
            each.offset = mx.zeros_like(each.offset)
        original(self, tokens)

    wrapped(monkeypatch, generate.PromptProcessingBatch, "prompt", prompt)


#: In which generator, and by what it is found: the first property that meets it, whichever program does.
ROWS = {
    "cached_rows_stay_what_they_were",
    "batches_keep_their_rows",
    "batch_rows_equal_solo_runs",
    "outputs_equal_the_cache_free_forward",
}
BUGS = {
    padding_is_shown: (WHOLE, {"keys_equal_ledger_live_length"}),
    right_padding_stays: (WHOLE, {"keys_equal_ledger_live_length"}),
    rows_change_places: (WHOLE, ROWS | {"keys_equal_ledger_live_length"}),
    another_row_is_removed: (IN_PIECES, ROWS),
    tokens_stay: (WHOLE, {"every_operation_completes"}),
    logprobs_stay: (WHOLE, {"every_operation_completes"}),
    caches_of_another_request: (WHOLE, {"keys_equal_ledger_live_length"}),
    a_neighbours_cache_comes_back: (IN_PIECES, ROWS),
    pieces_begin_at_zero: (IN_PIECES, {"chunks_equal_one_shot", "outputs_equal_the_cache_free_forward"}),
}


@pytest.mark.parametrize("plant", BUGS, ids=lambda plant: plant.__name__)
def test_an_ordinary_campaign_finds_what_is_planted(plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    caches, by = BUGS[plant]
    plant(monkeypatch)
    found = campaign("llama", caches, PROFILES["smoke"].programs).found
    assert len(found) == 1 and found[0].finding.property_id in by


def test_more_padding_than_needed_is_no_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three slots in front of everything, which every mask hides; requests come in another order."""

    def merge(original: Any, caches: list[Any]) -> Any:
        made = original(caches)
        if made.keys is not None:
            pad = [(0, 0), (0, 0), (3, 0), (0, 0)]
            made.keys, made.values = mx.pad(made.keys, pad), mx.pad(made.values, pad)
            made.left_padding, made._idx = made.left_padding + 3, made._idx + 3
        return made

    original = caches_of.BatchKVCache.merge
    monkeypatch.setattr(caches_of.BatchKVCache, "merge", lambda caches: merge(original, caches))
    for caches in SETTINGS:
        judge_program(target("llama", caches), Program(LIFE, THREE), ALL)


def test_a_session_reports_what_the_generator_handed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of a token that was generated are those of the request's own processor, not of the model."""

    def step(original: Any, self: Any) -> Any:
        model, self.model = self.model, lambda *given, **named: model(*given, **named) + 1.0
        try:
            return original(self)
        finally:
            self.model = model

    program = Program((Prefill(4), Decode(1)))
    plain = execute(target("llama", WHOLE), program).steps
    wrapped(monkeypatch, generate.GenerationBatch, "_step", step)
    moved = execute(target("llama", WHOLE), program).steps
    for number, by in enumerate((0.0, 1.0)):
        was, now = (run[number].forwards[0].seen.logits for run in (plain, moved))
        np.testing.assert_allclose(now, was + by, atol=1e-5)


def test_a_generator_that_stands_still_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate.BatchGenerator, "_next", lambda self: ([], []))
    step = execute(target("llama", WHOLE), Program((Prefill(4),))).steps[0]
    assert step.error is not None and "has nothing to do" in step.error


def test_what_a_session_cannot_do_no_target_says_it_can() -> None:
    never = {"trim_front", "rollback", "enforce", "save_and_load", "quantise", "memory", "footprint"}
    never |= {"watch_arguments", "arguments"}
    methods = {name: getattr(GeneratorSession, name) for name in dir(GeneratorSession) if not name.startswith("_")}
    assert never == {name for name, method in methods.items() if "NotImplementedError" in inspect.getsource(method)}
    cannot = {
        Capability.FRONT_TRIM,
        Capability.ROLLBACK,
        Capability.ENFORCE,
        Capability.SAVE_LOAD,
        Capability.QUANTISE,
        Capability.BYTES,
        Capability.FOOTPRINT,
        Capability.ARGUMENTS,
    }
    seen = {Capability.ATTENTION, Capability.ATTENTION_VALUES, Capability.POSITIONS}
    for caches in SETTINGS:
        able = target("llama", caches).capabilities
        assert not able & cannot and {Capability.BATCH, Capability.UNPADDED} <= able
        assert able & seen == (seen if caches == WHOLE else set())


def test_names_and_traces() -> None:
    for caches in SETTINGS:
        subject = naming.resolve(f"mlx_lm:qwen3@{caches}", naming.Asked(seed=3))
        assert subject.family == f"qwen3@{caches}" and any("takes no token" in words for words in subject.limits)
        made = naming.target_from_identity(subject.targets[0].identity.to_json(), naming.Asked())
        assert made == subject.targets[0]
    with pytest.raises(naming.TargetError, match="BatchGenerator merges caches, which not all of this model's can"):
        naming.resolve(f"mlx_lm:llama4@{WHOLE}", naming.Asked())
    with pytest.raises(naming.TargetError, match=r"is not mlx_lm:<model type or folder>") as error:
        naming.resolve("mlx_lm:llama@batch-generators", naming.Asked())
    offered = re.findall(r"@[^\s,]+", str(error.value))[1:]  # behind the name that was asked for
    assert len(offered) == 5
    for each in offered:
        for caches in {re.sub(r"\[.*\]", "", each), re.sub(r"[\[\]]", "", each)}:
            assert naming.resolve(f"mlx_lm:qwen3{caches.replace('=N', '=12')}", naming.Asked()).targets
