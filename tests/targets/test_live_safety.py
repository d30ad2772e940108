"""The table of families that can live with a front trim."""

from __future__ import annotations

import importlib
import importlib.util
import json
import pkgutil
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.cli import main
from harness.commands import live_safety
from harness.targets.mlx_lm import NO_KEYS, TRIMS_ITSELF
from harness.targets.mlx_lm_catalogue import FAMILIES, WITHOUT_ENTRY

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
    ran = run("--only", "llama4,mamba,phi3small")
    assert ran.returncode == 0
    *table, empty, counted = ran.stdout.splitlines()
    assert [line.count("|") for line in table] == [len(live_safety.COLUMNS) + 1] * 5 and not empty
    assert counted == "3 rows: 0 yes, 0 no, 0 not shown, 2 not applicable, 1 not judged"
    assert "| not judged | a forward of its block-sparse attention damages the heap" in table[-1]


def test_the_table_is_written_and_the_same_on_several_processes(tmp_path: Path) -> None:
    pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")
    arguments = ("--only", "nemotron_nas,llama4,mamba,phi3small", "--programs", "4")
    ran = run(*arguments, "--jobs", "2", "--out", str(tmp_path / "new" / "one"))
    assert ran.returncode == 0 and ran.stdout == run(*arguments).stdout
    folder = tmp_path / "new" / "one"
    assert sorted(path.name for path in folder.iterdir()) == ["live-safety.json", "live-safety.md"]
    data = json.loads((folder / "live-safety.json").read_text())
    assert data["command"] == "kv-harness live-safety --only nemotron_nas,llama4,mamba,phi3small --programs 4 --seed 0"
    assert [row["family"] for row in data["rows"]][-3:] == ["llama4", "mamba", "phi3small"]
    assert any(row["live_safe"] == "no" and row["found"] for row in data["rows"])
    text = (folder / "live-safety.md").read_text()
    assert data["summary"] in text and data["command"] in text
    assert sum(line.startswith("| ") for line in text.splitlines()) == len(data["rows"]) + 1


def test_a_process_that_dies_is_a_row_and_nothing_is_written_of_half_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")
    from harness import workers

    rows = {name: live_safety.Row(name, *"vocam", "yes", {}, 1, {}) for name in ("llama", "qwen3")}
    ends = [(1, [rows["qwen3"]]), (2, workers.Died("SIGKILL")), (0, [rows["llama"]])]
    monkeypatch.setattr(workers, "in_processes", lambda calls, jobs: iter(ends))
    made = list(live_safety.each(["llama", "qwen3", "gemma"], 1, 0, jobs=2))
    assert [row.family for row in made] == ["llama", "qwen3", "gemma"]
    assert (made[2].live_safe, made[2].reason) == ("not judged", "its process died (SIGKILL)")

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(live_safety, "rows", interrupted)
    (tmp_path / "live-safety.json").write_text("of yesterday")
    with monkeypatch.context() as here:
        here.chdir(tmp_path)
        assert main(["live-safety", "--out", "."]) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["live-safety.json"]
    assert (tmp_path / "live-safety.json").read_text() == "of yesterday"


def test_every_module_of_the_installed_release_has_a_row() -> None:
    """Asked of the modules themselves; one ends the process where a package of its own is missing."""
    pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")
    models = importlib.import_module("mlx_lm.models")
    there = set()
    for module in pkgutil.iter_modules(models.__path__):
        try:
            loaded = importlib.import_module(f"mlx_lm.models.{module.name}")
        except (ImportError, SystemExit):
            there.add(module.name)
            continue
        if hasattr(loaded, "Model") and hasattr(loaded, "ModelArgs"):
            there.add(module.name)
    families = live_safety.all_families()
    named = {one.module or family for family in families for one in FAMILIES.get(family, ())}
    assert len(there) > 100 and there <= {*named, *families} and len(set(families)) == len(families)
    assert {*FAMILIES, *WITHOUT_ENTRY} <= set(families)
    assert set(families) - {*FAMILIES, *WITHOUT_ENTRY} <= there


def test_what_ships_is_read_in_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")
    from harness.targets.mlx_lm_models import shipped

    for name, source in {
        "plain": "raise SystemExit(1)\nclass ModelArgs: ...\nclass Model: ...\n",
        "borrowed": "from .plain import Model\nfrom .plain import Other as ModelArgs\n",
        "assigned": "import plain\nModel = plain.Model\nModelArgs = plain.ModelArgs\n",
        "layers": "class ModelArgs: ...\ndef f():\n    class Model: ...\n",
        "broken": "class Model(: ...\n",
    }.items():
        (tmp_path / f"{name}.py").write_text(source)
    spec = types.SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    assert shipped() == ("assigned", "borrowed", "plain")
    (row,) = live_safety.rows(["plain"], programs=1, seed=0)
    assert (row.live_safe, row.evidence) == ("not judged", live_safety.NO_CONFIGURATION)
    assert row.cells()[:6] == ("plain", *["-"] * 5)


@pytest.mark.parametrize(
    ("ships", "says"),
    [(True, "cannot import its model gear: ModuleNotFoundError"), (False, "has no model gear")],
    ids=["not importable", "not there"],
)
def test_a_model_that_the_release_lacks_is_a_row_and_others_go_on(
    ships: bool, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")
    from harness.targets import mlx_lm_models

    mlx_lm_models.build.cache_clear()
    monkeypatch.setitem(sys.modules, "mlx_lm.models.gear", None)
    if not ships:
        monkeypatch.setattr(mlx_lm_models, "shipped", lambda: ())
    gear, llama4 = live_safety.rows(["gear", "llama4"], programs=1, seed=0)
    assert gear.live_safe == "not judged" and says in gear.evidence and "\n" not in gear.evidence
    assert llama4.live_safe == "not applicable"


def _states_alone(model: Any, caches: list[Any]) -> bool:
    leaves = [leaf for cache in caches for leaf in getattr(cache, "caches", (cache,))]
    return bool(leaves) and not any(hasattr(leaf, "update_and_fetch") for leaf in leaves)


@pytest.mark.parametrize("family", ["mamba", "mamba2", "rwkv7"])
def test_a_family_without_keys_is_told_by_its_own_caches(family: str) -> None:
    pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")
    from harness.targets import mlx_lm
    from harness.targets.naming import Asked, TargetError

    (row,) = live_safety.rows([family], programs=1, seed=0)
    (target,) = mlx_lm.resolve(f"mlx_lm:{family}")
    assert (row.live_safe, row.reason) == ("not applicable", NO_KEYS) and all(row.cells())
    assert REASONS[row.reason](target._model, target._library.make_prompt_cache(target._model))
    for caches in ("", "@live-window", "@batch-generator", "@speculative"):
        with pytest.raises(TargetError, match="cannot be judged: no keys, recurrent states only") as caught:
            mlx_lm.subject(f"{family}{caches}", Asked("live", 0, 0, None))
        assert "\n" not in str(caught.value)


def test_a_family_with_states_beside_keys_is_judged() -> None:
    pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")
    from harness.targets import mlx_lm

    (target,) = mlx_lm.resolve("mlx_lm:lfm2")
    assert target.has_keys and target.has_states
    assert not _states_alone(target._model, target._library.make_prompt_cache(target._model))


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
REASONS: dict[str, Callable[[Any, list[Any]], bool]] = {TRIMS_ITSELF: _drop_their_fronts, NO_KEYS: _states_alone}
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


@pytest.mark.parametrize("arguments", [("--only", "none"), ("--programs", "0"), ("--out", ""), ("--jobs", "0")])
def test_bad_input_is_one_clear_line(arguments: tuple[str, str]) -> None:
    ran = run(*arguments)
    assert ran.returncode == 2
    assert "Traceback" not in ran.stderr and arguments[0] in ran.stderr.splitlines()[-1]
