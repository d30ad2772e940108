"""The table of families that can live with a front trim."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.commands import live_safety
from harness.targets.mlx_lm import TRIMS_ITSELF
from harness.targets.mlx_lm_catalogue import FAMILIES

ROOT = Path(__file__).parents[2]
THIRTY = (
    *("mistral4", "nemotron_nas", "qwen2_vl", "qwen3_vl", "qwen3_vl_moe"),
    *("cohere2", "gemma3n", "olmo3"),
    *("glm4_moe_lite", "minicpm3"),
    *("nemotron_h", "jamba"),
    *("qwen3_5", "falcon_h1", "granitemoehybrid", "gemma3", "gemma4", "llama4", "lfm2", "plamo2", "recurrent_gemma"),
    *("qwen3_next", "kimi_linear", "longcat_flash_ngram", "gpt_oss", "exaone4", "ministral3", "mellum", "step3p5"),
    "exaone_moe",
)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "harness.cli", "live-safety", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)


def test_an_answer_of_every_kind() -> None:
    pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")
    ran = run("--only", "llama,nemotron_nas,lfm2,llama4", "--programs", "16", "--json")
    assert ran.returncode == 0, ran.stderr
    rows = {(row["family"], row["variant"]): row for row in map(json.loads, ran.stdout.splitlines())}
    assert rows["llama", "tiny"]["live_safe"] == "yes" and rows["llama", "tiny"]["found"] == {}
    assert all(rows["llama", "tiny"]["decisive"][name] for name in live_safety.DECISIVE)
    assert rows["llama", "tiny"]["mask_length"] == "make_mask of the cache"
    linear = rows["nemotron_nas", "linear-first"]
    assert linear["live_safe"] == "no" and linear["mask_length"] == "a cache that gets no keys"
    assert linear["found"]["mask_key_axis_equals_live_keys"] == "Prefill(1) ; Chunk(2)"
    assert rows["lfm2", "tiny"]["reason"].startswith("of its attention")
    assert rows["llama4", "tiny"]["live_safe"] == "not applicable" and rows["llama4", "tiny"]["reason"]


def test_a_table() -> None:
    pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")
    ran = run("--only", "llama4")
    assert ran.returncode == 0
    assert [line.count("|") for line in ran.stdout.splitlines()] == [len(live_safety.COLUMNS) + 1] * 3


def _drop_their_fronts(model: Any, caches: list[Any]) -> bool:
    """The library's own caches begin further behind with every chunk, and masks are as long as what is left."""
    import mlx.core as mx

    from harness.targets.mlx_lm_session import probe

    chunked = [cache for cache in caches if hasattr(cache, "maybe_trim_front")]
    starts = []
    for _ in range(4):
        with probe().watching() as record:
            mx.eval(model(mx.array([[1, 2, 3, 4, 5]]), cache=caches))
        starts.append([cache.start_position for cache in chunked])
        masks = [call.mask_keys for call in record.attention() if call.mask_keys is not None]
        assert masks == [chunked[0].offset - chunked[0].start_position] * len(chunked)
    return (
        bool(chunked)
        and starts[0] == [0] * len(chunked)
        and all(was < now for was, now in zip(*starts[2:], strict=True))
    )


#: Why a front trim does not apply to a family: each with what the library's own caches must then do.
REASONS: dict[str, Callable[[Any, list[Any]], bool]] = {TRIMS_ITSELF: _drop_their_fronts}
#: What is not a yes.
ANSWERS = {("nemotron_nas", "linear-first"): "no", ("llama4", "tiny"): "not applicable"}


@pytest.mark.parametrize("family", THIRTY)
def test_each_of_the_thirty_has_its_rows(family: str) -> None:
    """No cell is empty, and what stands in it is so: by the library's own caches where nothing was judged."""
    pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")
    from harness.targets import mlx_lm

    found = list(live_safety.rows([family], programs=10, seed=0))
    targets = mlx_lm.resolve(f"mlx_lm:{family}")
    assert [(row.family, row.variant) for row in found] == [(family, target.variant) for target in targets]
    for row, target in zip(found, targets, strict=True):
        assert len(row.cells()) == len(live_safety.COLUMNS) and all(cell.strip() for cell in row.cells())
        assert row.live_safe == ANSWERS.get((family, row.variant), "yes"), row.evidence
        caches = target._library.make_prompt_cache(target._model)
        made = hasattr(target._model, "make_cache")
        assert row.owner == ("the model (make_cache)" if made else "the library (make_prompt_cache)")
        leaves = [leaf for cache in caches for leaf in getattr(cache, "caches", (cache,))]
        recurrent = [leaf for leaf in leaves if not hasattr(leaf, "update_and_fetch")]
        assert ("a state has no keys to trim" in row.evidence) == bool(recurrent)
        if row.live_safe == "not applicable":
            assert REASONS[row.reason](target._model, caches)
        elif row.live_safe == "no":
            assert row.found
        else:
            assert all(row.decisive[name] for name in live_safety.DECISIVE[:2])


def test_they_are_thirty() -> None:
    assert len(set(THIRTY)) == len(THIRTY) == 30 and set(THIRTY) <= set(FAMILIES)


@pytest.mark.parametrize("arguments", [("--only", "none"), ("--programs", "0")])
def test_bad_input_is_one_clear_line(arguments: tuple[str, str]) -> None:
    ran = run(*arguments)
    assert ran.returncode == 2
    assert "Traceback" not in ran.stderr and arguments[0] in ran.stderr.splitlines()[-1]
