"""Checkpoints as targets of mlx-lm: loaded by the library, and told truly."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

pytest.importorskip("mlx_lm", reason="mlx-lm is not installed: pip install 'mlx-kv-harness[mlx-lm]'")

from harness.checkpoints import synthesise
from harness.findings import FindingError
from harness.judge import judge_program
from harness.operations import (
    Batch,
    BatchForward,
    Chunk,
    Decode,
    Fork,
    Prefill,
    Program,
    Rollback,
    SaveLoad,
    TrimFront,
    Verify,
)
from harness.targets import mlx_lm, naming
from harness.targets.mlx_lm_catalogue import FAMILIES
from harness.targets.mlx_lm_checkpoints import calls_of, windows_of
from harness.targets.mlx_lm_models import build, library, variants
from properties import ALL, BY_ID

ROOT = Path(__file__).parents[2]
#: Layers that attend to the keys of others, so that nothing tells what is read.
SHARED = {"afm7", "iquestloopcoder", "gemma3n", "gemma4", "gemma4_text"}
LIFE = (Prefill(9), Chunk(6), Decode(2), Verify(3, 1), Chunk(14), SaveLoad(), Chunk(3), Decode(2))
Save = Callable[..., Path]


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Digests are kept in the test's own directory, not in the user's."""
    monkeypatch.setenv("KV_HARNESS_CACHE", str(tmp_path / "digest-cache"))


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that ``kv-harness synth`` writes."""
    folder = tmp_path_factory.mktemp("ours") / "tiny-olmo3"
    synthesise("olmo3", folder)
    return folder


@pytest.fixture(scope="module")
def save(tmp_path_factory: pytest.TempPathFactory) -> Save:
    """``save(model_type, **config)``: the folder of a tiny random model that transformers saved."""
    pytest.importorskip("torch", reason="torch is not installed: pip install 'mlx-kv-harness[peers]'")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")

    def made(model_type: str, **config: Any) -> Path:
        sizes = {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "vocab_size": 48,
        }
        told = transformers.AutoConfig.for_model(model_type, **sizes | config)
        model = transformers.AutoModelForCausalLM.from_config(told)
        folder = tmp_path_factory.mktemp("saved") / f"tiny-{model_type}"
        model.save_pretrained(folder)
        return folder

    return made


def only(name: str) -> mlx_lm.MlxLmTarget:
    (target,) = mlx_lm.resolve(name)
    return target


def judge(folder: Path) -> None:
    """What the caches of the library can do shows nothing, and neither do ours."""
    target = only(f"mlx_lm:{folder}")
    assert target.checkpoint is not None and target.checkpoint.path == str(folder.resolve())
    judge_program(target, Program(LIFE), ALL)
    together = (Prefill(6), Prefill(3, 1), Fork(0, 2), Batch((0, 1)), BatchForward((2, 5)), Chunk(3, 2))
    judge_program(target, Program(together, ("pool",) * 3), ALL)
    trimmed = (Prefill(9), TrimFront(3), Chunk(6), Rollback(2), Chunk(4), TrimFront(2, keep=1), Chunk(3))
    judge_program(only(f"mlx_lm:{folder}@live-window"), Program(trimmed), ALL)


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_what_transformers_saves_is_judged(save: Save, model_type: str) -> None:
    target = only(f"mlx_lm:{save(model_type)}")
    assert target.windows == (None,) * 4 and target.rules == (None,) * 4
    judge(save(model_type))


#: Entries of the catalogue whose checkpoints say another ``model_type``, and that.
CALLED = [(name, one.variant, one.module) for name, entries in FAMILIES.items() for one in entries if one.module]


@pytest.mark.parametrize(("family", "variant", "called"), [*CALLED, ("llama", "tiny", "mistral")])
def test_a_config_that_names_the_module_and_not_the_entry(
    family: str, variant: str, called: str, tmp_path: Path
) -> None:
    """What the library loads for a ``model_type`` decides which entry of the catalogue is meant."""
    (entry,) = (one for one in variants(family) if one.variant == variant)
    (tmp_path / "config.json").write_text(json.dumps(entry.config | {"model_type": called}))
    weights: Any = tree_flatten(build(family, variant, 0).parameters())
    mx.save_safetensors(str(tmp_path / "model.safetensors"), dict(weights), {"format": "mlx"})
    target = only(f"mlx_lm:{tmp_path}@live-window")
    assert target.model_type == family and target.family.config["model_type"] == called
    chunk = () if variant == "linear-first" else (TrimFront(3), Chunk(6))  # whose mask is a known failure
    judge_program(target, Program((Prefill(9), *chunk, Decode(2))), ALL)
    assert mlx_lm.target_from_identity(target.identity.to_json()).identity == target.identity


def test_the_windows_of_a_family_with_some_are_those_of_its_config(save: Save) -> None:
    folder = save("gemma3_text", sliding_window=12, num_hidden_layers=7)
    target = only(f"mlx_lm:{folder}")
    assert target.windows == (12, 12, 12, 12, 12, None, 12)
    assert [rule and rule.window for rule in target.rules] == list(target.windows)
    judge(folder)


def test_layers_that_the_library_gives_another_window_than_the_config_are_found(save: Save) -> None:
    """The windows of the config are not those of the caches: mlx-lm counts layers by a pattern of six."""
    types = ["full_attention" if layer in (1, 6) else "sliding_attention" for layer in range(7)]
    folder = save("gemma3_text", sliding_window=12, num_hidden_layers=7, layer_types=types)
    target = only(f"mlx_lm:{folder}")
    assert target.windows == (12, None, 12, 12, 12, 12, None)
    with pytest.raises(FindingError) as caught:
        judge_program(target, Program((Prefill(15),)), [BY_ID["mask_shows_exactly_the_visible_set"]])
    assert "layer 5" in str(caught.value.finding.message)


def test_what_synth_writes_is_judged(ours: Path) -> None:
    assert set(only(f"mlx_lm:{ours}").windows) == {
        None,
        json.loads((ours / "config.json").read_text())["sliding_window"],
    }
    judge(ours)


def test_packed_weights_stay_packed_and_are_judged(tmp_path: Path) -> None:
    synthesise("olmo3", tmp_path / "four-bits", bits=4, dtype="bfloat16")
    target = only(f"mlx_lm:{tmp_path / 'four-bits'}")
    module = target._model.model.layers[0].self_attn.q_proj
    assert module.weight.dtype == mx.uint32 and module.scales.dtype == mx.float32
    assert any("stored as" in limit and "BF16" in limit and "U32" in limit for limit in target.family.limits)
    judge(tmp_path / "four-bits")


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_read_off_a_model_is_what_the_catalogue_says(family: str) -> None:
    """The catalogue was written by hand."""
    for variant in variants(family):
        model = build(family, variant.variant, 0)
        if family in SHARED or variant.attention == "states alone":
            why = "cannot be told" if family in SHARED else mlx_lm.NO_KEYS
            with pytest.raises(naming.TargetError, match=why):
                calls_of(model)
            continue
        target = mlx_lm.MlxLmTarget(family, variant.variant)
        calls, caches = calls_of(model)
        assert tuple((layer, target._with_keys[number]) for layer, number in calls) == target._calls
        assert windows_of(variant.config, calls, caches, len(model.layers)) == target.windows


def test_windows_that_nothing_tells_of_are_refused() -> None:
    caches = library().make_prompt_cache(build("llama", "tiny", 0))
    calls = tuple((layer, layer) for layer in range(3))

    def windows(**config: Any) -> tuple[int | None, ...]:
        return windows_of(config, calls, caches, 3)

    assert windows() == windows(sliding_window=12, use_sliding_window=False) == windows(sliding_window=4096)
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    assert windows(sliding_window=12, layer_types=types) == (12, None, 12)
    with pytest.raises(naming.TargetError, match="of which layers"):
        windows(sliding_window=12)
    with pytest.raises(naming.TargetError, match="no sliding_window"):
        windows(layer_types=types)


def _no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def _cut_off(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])


def _missing_shard(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")


def _unknown_type(folder: Path) -> None:
    _configure(folder, model_type="none")


def _without_type(folder: Path) -> None:
    _configure(folder, model_type=None)


def _own_code(folder: Path) -> None:
    _configure(folder, model_file="model.py")
    (folder / "model.py").write_text("raise SystemExit('it ran')")


def _stray_weights(folder: Path) -> None:
    (folder / "model-old.safetensors").write_bytes((folder / "model.safetensors").read_bytes())


def _another_size(folder: Path) -> None:
    _configure(folder, vocab_size=11)


def _no_window(folder: Path) -> None:
    _configure(folder, sliding_window=None)


def _configure(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_no_config, "config.json: missing"),
        (_cut_off, "model.safetensors"),
        (_missing_shard, "missing shard"),
        (_unknown_type, "no family 'none'"),
        (_without_type, "model_type is missing"),
        (_own_code, "not run"),
        (_stray_weights, "model-old.safetensors"),
        (_another_size, "cannot load it"),
        (_no_window, "folder"),
    ],
)
def test_a_folder_that_cannot_be_used_is_refused_in_one_line(
    tmp_path: Path, spoil: Callable[[Path], None], said: str
) -> None:
    synthesise("olmo3", tmp_path / "folder")
    spoil(tmp_path / "folder")
    with pytest.raises(naming.TargetError) as caught:
        naming.resolve(f"mlx_lm:{tmp_path / 'folder'}", naming.Asked())
    assert said in str(caught.value) and "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)


def test_the_command_line_says_it_and_ends_with_2(tmp_path: Path, ours: Path) -> None:
    for folder, behind in ((tmp_path / "none", ""), (tmp_path, ""), (ours, "@paged")):
        ran = cli("run", "--target", f"mlx_lm:{folder}{behind}", "--out", str(tmp_path / "reports"))
        assert ran.returncode == 2 and "Traceback" not in ran.stderr, ran.stderr
        assert len(ran.stderr.strip().splitlines()) == 1 and str(folder) in ran.stderr


def cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "harness.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)


def test_a_run_names_the_checkpoint_and_a_trace_replays_on_it_alone(tmp_path: Path) -> None:
    folder = tmp_path / "an@odd name"
    synthesise("olmo3", folder)
    ran = cli("run", "--target", f"mlx_lm:{folder}@live-window", "--profile", "smoke", "--policy", "offset",
              "--programs", "6", "--out", str(tmp_path / "reports"))  # fmt: skip
    assert ran.returncode == 1, ran.stderr
    (report,) = (tmp_path / "reports" / "targets").glob("*.json")
    assert report.stem == "mlx_lm-olmo3-an-odd-name-live-window@offset-mask"
    data = json.loads(report.read_text())
    assert any(f"weights of {folder}" in limit for limit in data["limits"])
    trace = sorted((tmp_path / "reports" / "findings").iterdir())[0]
    told = json.loads(trace.read_text())["target"]
    assert told["variant"] == "an@odd name@live-window" and told["checkpoint"]["path"] == str(folder)
    again = cli("replay", str(trace))
    assert again.returncode == 1 and str(folder) in again.stdout, again.stderr

    folder.rename(tmp_path / "moved")
    gone = cli("replay", str(trace))
    synthesise("olmo3", folder, seed=1)
    other = cli("replay", str(trace))
    for refused, said in ((gone, "no such directory"), (other, "another checkpoint")):
        assert refused.returncode == 2 and said in refused.stderr
        assert len(refused.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("caches", ["", "@live-window"])
def test_a_target_is_rebuilt_from_what_a_trace_says_of_it(ours: Path, caches: str) -> None:
    target = only(f"mlx_lm:{ours}{caches}")
    again = mlx_lm.target_from_identity(target.identity.to_json())
    assert again == target and again.identity == target.identity
    told = target.identity.to_json()
    for odd in ({"path": "x"}, 3, told["checkpoint"] | {"path": 1}):
        with pytest.raises(naming.TargetError, match="a checkpoint must be"):
            mlx_lm.target_from_identity(told | {"checkpoint": odd})


@pytest.mark.parametrize("shard_bytes", [1 << 30, 20_000], ids=["single", "sharded"])
def test_the_weights_are_those_of_the_folder(tmp_path: Path, shard_bytes: int) -> None:
    from mlx_lm.utils import load_model

    synthesise("olmo3", tmp_path / "one", shard_bytes=shard_bytes)
    assert (len(list((tmp_path / "one").glob("*.safetensors"))) > 1) == (shard_bytes < 1 << 30)
    model, _ = load_model(tmp_path / "one")
    seen = only(f"mlx_lm:{tmp_path / 'one'}").open(("pool",)).forward(0, (1, 2, 3))
    assert seen.logits is not None
    assert np.array_equal(seen.logits, np.array(model(mx.array([[1, 2, 3]]))[0]))


@pytest.mark.parametrize("model_type", ["mamba", "mamba2", "rwkv7"])
def test_a_checkpoint_of_states_alone_is_refused_for_that(
    model_type: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And not because nothing tells what its attention reads: there is none."""
    from harness.cli import main

    (family,) = variants(model_type)
    weights = dict(tree_flatten(build(model_type, family.variant, 0).parameters()))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), weights, metadata={"format": "mlx"})
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, **family.config}))
    sizes = ("--tokens", "64", "--max-kv-size", "32", "--prefill-chunk-size", "16", "--out", str(tmp_path / "reports"))
    assert main(["validate", str(tmp_path), "--engine", "mlx_lm", *sizes]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("kv-harness: error: ") and "cannot be judged: no keys, recurrent states only" in said
