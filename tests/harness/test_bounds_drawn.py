"""What is drawn often enough to be met: bounds that bind, as a server sets them, storages that fit, batches of as many
rows as KV heads and of others. Nothing is judged here."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable

import pytest

from harness.campaign import run_campaign, shares_of
from harness.execution import Execution
from harness.judging import Evidence
from harness.operations import Decode, EnforceMaxKvSize, QuantizeCache, Verify
from harness.profiles import PROFILES
from harness.quantised import takes_affine
from harness.tally import Coverage, Tally
from harness.targets.reference import FAMILIES, ReferenceTarget, paths, targets

QUICK = PROFILES["quick"]
RUNS = [(family, path) for family in FAMILIES for path in paths(family)]
RINGS = ("rotating-6", "rotating-layers", "chunked-5")


class _Listening(Tally):
    """Counts the programs that have each of some words said of them."""

    def __init__(self, words: Callable[[Execution], set[str]]) -> None:
        super().__init__()
        self.met: Counter[str] = Counter()
        self._words = words

    def on_end(self, evidence: Evidence) -> None:
        super().on_end(evidence)
        self.met.update(self._words(evidence.run))


def drawn(
    chosen: tuple[ReferenceTarget, ...], programs: int, words: Callable[[Execution], set[str]]
) -> tuple[Counter[str], Coverage]:
    """Of so many programs on each of these targets."""
    listening = _Listening(words)
    profile = dataclasses.replace(QUICK, programs=programs * len(chosen), least=programs, of_a_kind=0, far=0)
    run_campaign("drawn", chosen, [], profile, 0, also=listening)
    return listening.met, listening.coverage


def _bounds(run: Execution) -> set[str]:
    words = set()
    for step, following in zip(run.steps, (*run.steps[1:], None), strict=True):
        operation = step.operation
        if not isinstance(operation, EnforceMaxKvSize) or not step.expected_removed:
            continue
        words.add(operation.generation)
        if operation.generation == "shift":
            words.add("nothing kept" if not operation.keep else "some kept")
            words.add("half" if not operation.n_discard else "discards")
        if following is not None and isinstance(following.operation, (Decode, Verify)):
            words.add(f"{operation.generation}, then {type(following.operation).__name__}")
    return words


def test_bounds_bind_as_a_server_sets_them() -> None:
    """In each generation in front of tokens and of verify rounds, and every argument of a context shift."""
    met, _ = drawn((targets("minicpm3")[2],), 100, _bounds)
    generations = ("trim", "sinks", "shift")
    for word in (*generations, "nothing kept", "some kept", "half", "discards"):
        assert met[word] >= 4, (word, met)
    for word in (f"{generation}, then {then}" for generation in generations for then in ("Decode", "Verify")):
        assert met[word] >= 1, (word, met)


@pytest.mark.parametrize("storage", RINGS)
def test_bounds_bind_on_caches_that_show_less_than_they_were_given(storage: str) -> None:
    (ring,) = (target for target in targets("olmo3") if target.storage == storage)
    met, _ = drawn((ring,), 60, _bounds)
    assert met["trim"] >= 6, met


@pytest.mark.parametrize(("family", "path"), RUNS)
def test_rows_become_affine_in_mid_sequence(family: str, path: str) -> None:
    """Every run has rows that fit, gives them as many programs as any kind of caches, and draws what fits them."""
    everything = targets(family, path=path)  # type: ignore[arg-type]
    wide = tuple(target for target in everything if target.storage == "rows" and takes_affine(target))
    shares = dict(zip(everything, shares_of(everything, QUICK), strict=True))
    assert wide and sum(shares[target] for target in wide) >= QUICK.of_a_kind
    assert {"affine8", "affine4"} <= {target.storage for target in everything}

    def words(run: Execution) -> set[str]:
        quantised = [step for step in run.steps if isinstance(step.operation, QuantizeCache)]
        of_rows = [step for step in quantised if step.effective and step.before.live_len]
        return {step.after.storage[:6] for step in of_rows} | {"refused" for step in quantised if step.refuses}

    met, cover = drawn(wide[-1:], 40, words)
    assert met["affine"] >= cover.programs / 12, met
    narrow = next(target for target in everything if target.storage == "rows" and not takes_affine(target))
    met, cover = drawn((narrow,), 40, words)
    assert met["int8"] and met["refused"], met


@pytest.mark.parametrize(("family", "path"), RUNS)
def test_batches_have_as_many_rows_as_there_are_kv_heads_and_others(family: str, path: str) -> None:
    met, cover = drawn(targets(family, path=path), 3, lambda run: set())  # type: ignore[arg-type]
    assert not met
    assert min(cover.batched_as_kv_heads, cover.batched_unlike_kv_heads) >= cover.programs / 20
