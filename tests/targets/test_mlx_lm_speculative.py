"""mlx-lm's speculative generation as a whole: drafts of ours, caches that must hold what was accepted alone."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

pytest.importorskip("mlx_lm", reason="mlx-lm is not installed: pip install 'mlx-kv-harness[mlx-lm]'")

from harness.campaign import CampaignResult, run_campaign
from harness.capability import Capability
from harness.execution import execute
from harness.findings import Verdict
from harness.judge import judge_program
from harness.operations import Chunk, Decode, Fork, Operation, Prefill, Program, Rollback, SaveLoad, Verify
from harness.profiles import PROFILES
from harness.targets import mlx_lm, naming
from harness.targets.mlx_lm_speculative import SPECULATIVE
from properties import ALL

generate = importlib.import_module("mlx_lm.generate")  # the package has a function of that name

LIFE: tuple[Operation, ...] = (
    Prefill(9),
    Decode(5),
    Chunk(8),
    Verify(4, 2),
    Chunk(20),
    Rollback(3),
    Decode(4),
    Fork(1),
    Chunk(5, 1),
    Decode(3),
    SaveLoad(),
    Chunk(7),
)


def target(family: str) -> Any:
    return mlx_lm.resolve(f"mlx_lm:{family}@{SPECULATIVE}")[0]


def campaign(family: str, programs: int) -> CampaignResult:
    profile = dataclasses.replace(PROFILES["smoke"], programs=programs)
    return run_campaign(f"{family}-{SPECULATIVE}", [target(family)], ALL, profile, 0, first_only=True, attempts=0)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_what_is_right_is_not_reported(family: str) -> None:
    judge_program(target(family), Program(LIFE, ("pool", "pool")), ALL)
    result = campaign(family, 14)
    assert not result.found
    verdicts = {found.id: found.verdict for found in result.properties}
    assert set(verdicts.values()) == {Verdict.PASS, Verdict.NOT_APPLICABLE}
    assert verdicts["outputs_equal_the_cache_free_forward"] is verdicts["chunks_equal_one_shot"] is Verdict.PASS


def test_forwards_are_rounds_with_drafts_of_every_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the drafts of a round none, some or all are taken back, and caches hold no other token behind it."""
    taken: list[int] = []
    monkeypatch.setattr(generate, "trim_prompt_cache", trims(lambda n: n, taken.append))
    run = execute(target("llama"), Program(tuple(Chunk(n) if n else Decode(12) for n in (24, 0, 7, 13, 0, 9))))
    assert {0, 1, 2, 3} <= set(taken)
    assert [told.lengths[0].offset for step in run.steps for told in step.told] == [24, 36, 43, 56, 68, 77]


def trims(how_many: Callable[[int], int], seen: Callable[[int], Any] = int) -> Callable[..., int]:
    """What speculative generation takes drafts back by, with another number; the caches of drafts are none."""
    original = generate.trim_prompt_cache

    def trim(caches: list[Any], n: int) -> int:
        if caches:
            seen(n)
        return int(original(caches, how_many(n)))

    return trim


def sampled_from_the_row_before(original: Any) -> Any:
    """What is yielded comes with the logprobs of another row."""

    def steps(*given: Any, **named: Any) -> Any:
        last = None
        for token, logprobs, drafted in original(*given, **named):
            yield token, logprobs if last is None else last, drafted
            last = logprobs

    return steps


BUGS = {
    "rejected-drafts-stay": ("trim_prompt_cache", lambda: trims(lambda n: 0)),
    "one-draft-stays": ("trim_prompt_cache", lambda: trims(lambda n: max(0, n - 1))),
    "an-accepted-token-goes": ("trim_prompt_cache", lambda: trims(lambda n: n + (n == 2))),
    "logprobs-of-another-row": (
        "speculative_generate_step",
        lambda: sampled_from_the_row_before(generate.speculative_generate_step),
    ),
}


@pytest.mark.parametrize("bug", BUGS)
def test_an_ordinary_campaign_finds_what_is_planted(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, planted = BUGS[bug]
    monkeypatch.setattr(generate, name, planted())
    found = campaign("llama", PROFILES["smoke"].programs).found
    by = "every_operation_completes" if bug == "logprobs-of-another-row" else "outputs_equal_the_cache_free_forward"
    assert [each.finding.property_id for each in found] == [by]


def test_a_round_that_fills_the_window_is_found() -> None:
    """A bug of the library (``speculation_crosses_the_window``)."""
    (found,) = campaign("gemma3_text", 12).found
    assert found.finding.property_id in ("outputs_equal_the_cache_free_forward", "trim_reports_what_it_removed")


def test_a_prompt_behind_a_full_window_is_read_plainly() -> None:
    """The library refuses to speculate on such caches: a server must not ask it to."""
    made = target("gemma3_text")
    session = made.open(("pool",))
    session._caches[0] = made._library.make_prompt_cache(made._model)
    made._model(mx.array([list(range(20))]), cache=session._caches[0])
    seen = session.forward(0, [1, 2, 3])
    assert seen.error is None and seen.logits.shape == (3, made.vocab_size)


def test_names_and_what_it_cannot_show() -> None:
    subject = naming.resolve(f"mlx_lm:qwen3@{SPECULATIVE}", naming.Asked(seed=3))
    assert any("draft model" in words for words in subject.limits)
    assert naming.target_from_identity(subject.targets[0].identity.to_json(), naming.Asked()) == subject.targets[0]
    assert not subject.targets[0].capabilities & {Capability.ATTENTION, Capability.BATCH, Capability.UNPADDED}
    with pytest.raises(naming.TargetError, match="refuses caches that cannot be trimmed"):
        naming.resolve(f"mlx_lm:lfm2@{SPECULATIVE}", naming.Asked())
