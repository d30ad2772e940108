"""What a checkpoint is, its fingerprint, and where it is found."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from harness import cli
from harness.checkpoints import CheckpointError, check, fingerprint, load_model, open_checkpoint
from harness.checkpoints.description import quantisation
from harness.checkpoints.fingerprint import cache_file
from reference_models.hf import ConfigError, claimed_families, config_from_json, contradiction
from reference_models.registry import FAMILIES
from tests.checkpoints.conftest import Synth


def copy(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to))


def rewrite(folder: Path, **fields: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


#: Pairs of which one may look like the other: a layer of DeciLM may be like any other or lack any part, and Mistral 4
#: may be without experts.
ALIKE: tuple[set[str], ...] = ({"qwen2_vl", "nemotron_nas"}, {"cohere2", "nemotron_nas"}, {"minicpm3", "mistral4"})


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", ["hf", "mlx"])
def test_the_family_is_read_from_config_and_weights(family: str, layout: str, synth: Synth) -> None:
    checkpoint = open_checkpoint(synth(family, layout=layout))
    assert checkpoint.family == family
    assert contradiction(family, checkpoint.text) is None
    check(checkpoint)


@pytest.mark.parametrize("weights", FAMILIES)
@pytest.mark.parametrize("config", FAMILIES)
def test_another_familys_weights_are_refused(config: str, weights: str, synth: Synth, tmp_path: Path) -> None:
    """Every pair; where traits alone cannot tell, keys and shapes do."""
    if config == weights:
        return
    folder = copy(synth(weights), tmp_path / "c")
    shutil.copy(synth(config) / "config.json", folder / "config.json")
    with pytest.raises(CheckpointError) as caught:
        check(open_checkpoint(folder))
    said = str(caught.value)
    assert "\n" not in said and str(folder) in said
    if {config, weights} not in ALIKE:
        assert f"the config says {config}, but the weights are of another model" in said


def test_a_hybrid_model_in_a_folder_called_nemotron_nas(
    synth: Synth, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """This happened: a checkpoint was validated as one family and was another architecture."""
    folder = copy(synth("nemotron_nas"), tmp_path / "nemotron-nas-8b")
    hybrid = {
        "backbone.layers.0.mixer.A_log": mx.zeros((4,)),
        "backbone.layers.0.mixer.conv1d.weight": mx.zeros((4, 4)),
    }
    mx.save_safetensors(str(folder / "model.safetensors"), hybrid)
    assert cli.main(["identify", str(folder)]) == 2
    said = capsys.readouterr().err
    assert "state-space or recurrent layers (backbone.layers.0.mixer.A_log)" in said
    assert "the config says nemotron_nas, but the weights are of another model" in said
    rewrite(folder, model_type="nemotron_h")
    assert cli.main(["identify", str(folder)]) == 2
    said = capsys.readouterr().err
    assert "unknown model type 'nemotron_h'" in said and "a name proves nothing" in said


def test_a_folder_called_after_another_family_is_refused(synth: Synth, tmp_path: Path) -> None:
    folder = copy(synth("qwen2_vl"), tmp_path / "Qwen3-VL-2B")
    with pytest.raises(CheckpointError, match="says qwen3_vl or qwen3_vl_moe, but config and weights are of qwen2"):
        open_checkpoint(folder)
    folder = copy(synth("qwen2_vl"), tmp_path / "my Qwen2-VL")
    assert open_checkpoint(folder).family == "qwen2_vl"


def test_claims_of_names() -> None:
    assert claimed_families("Qwen3-VL-30B-A3B-Instruct") == ("qwen3_vl", "qwen3_vl_moe")
    assert claimed_families("Qwen2.5-VL-7B") == () == claimed_families("snapshot")
    assert claimed_families("nemotron-nas") == ("nemotron_nas",)
    assert claimed_families("x/qwen3_vl_moe") == ("qwen3_vl_moe",)


def test_absent_tie_is_decided_by_the_weights(synth: Synth) -> None:
    data = json.loads((synth("mistral4") / "config.json").read_text())
    del data["tie_word_embeddings"]
    for has_lm_head, tied in ((True, False), (False, True), (None, False)):
        _, config, notes = config_from_json(data, has_lm_head)
        assert config.tie_word_embeddings is tied and "tie_word_embeddings is absent" in notes[0]


@pytest.mark.parametrize(
    ("family", "change", "expected"),
    [
        ("qwen3_vl", {"use_sliding_window": True}, "text_config.use_sliding_window is True"),
        ("qwen3_vl", {"hidden_act": "gelu"}, "text_config.hidden_act is 'gelu'"),
        ("qwen3_vl", {"rope_parameters": {"rope_theta": 7.0}}, "rope_theta is 5000000.0, but"),
        ("qwen3_vl", {"rope_scaling": {"rope_type": "yarn"}}, "rope_type is 'yarn'"),
        ("qwen3_vl_moe", {"norm_topk_prob": False}, "text_config.norm_topk_prob is False"),
        ("qwen3_vl_moe", {"model_type": "qwen2_vl_text"}, "text_config.model_type is 'qwen2_vl_text'"),
    ],
)
def test_what_a_model_here_does_not_do_is_refused(
    family: str, change: dict[str, object], expected: str, synth: Synth
) -> None:
    data = json.loads((synth(family) / "config.json").read_text())
    data.get("text_config", data).update(change)
    with pytest.raises(ConfigError) as caught:
        config_from_json(data)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"bits": 7}, "quantization.bits is one of"),
        ({"bits": 8}, "is packed with 4 bits in groups of 32; the config says 8 bits, groups of 32"),
        ({"group_size": 48}, "quantization.group_size is one of"),
        ({"mode": "mxfp4"}, "quantization.mode is 'mxfp4'"),
        ({"lm_head": False}, "unexpected key 'lm_head.scales': the config leaves this layer unquantised"),
        ({"lm_head": {"bits": 8, "group_size": 32}}, "key 'lm_head.weight' is packed with 4 bits in groups of 32"),
        ({"model.norm": {"bits": 4, "group_size": 32}}, "missing key 'model.norm.scales'"),
        ({"lm_head": 3}, "quantization.lm_head must be an object"),
        ({"quant_method": "fp8"}, "of the kind 'fp8'"),
        (None, "the config has no quantization"),
    ],
)
def test_quantisation_that_is_not_what_the_config_says(
    change: dict[str, object] | None, expected: str, synth: Synth, tmp_path: Path
) -> None:
    folder = copy(synth("mistral4", bits=4), tmp_path / "c")
    said = json.loads((folder / "config.json").read_text())["quantization"]
    rewrite(folder, quantization=None if change is None else said | change, quantization_config=None)
    with pytest.raises(CheckpointError) as caught:
        check(open_checkpoint(folder))
    assert expected in str(caught.value)


def test_what_is_quantised_is_measured_from_the_weights(
    synth: Synth, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A config that claims it above plain weights would have them reported, and judged, as what they are not."""
    folder = copy(synth("mistral4"), tmp_path / "claims")
    rewrite(folder, quantization={"bits": 4, "group_size": 32})
    for command in ("identify", "validate"):
        assert cli.main([command, str(folder)]) == 2
        said = capsys.readouterr()
        assert said.out == "" and said.err.count("\n") == 1
        assert (
            "config.json: says that the weights are quantised (4 bits, groups of 32), but none of them is" in said.err
        )
    packed = copy(synth("mistral4", bits=4), tmp_path / "packed")
    told = quantisation(open_checkpoint(packed)) or ""
    weights = sum(name.endswith(".scales") for name in open_checkpoint(packed).weights.tensors)
    assert told.startswith("MLX affine, 4 bits, groups of 32 (") and "; 8 bits, groups of 32 (" in told
    assert sum(map(int, re.findall(r"(\d+) weights", told))) == weights
    assert quantisation(open_checkpoint(synth("mistral4"))) is None


def test_packed_weights_stay_packed(synth: Synth) -> None:
    checkpoint = open_checkpoint(synth("qwen3_vl_moe", bits=4))
    model = load_model(checkpoint)
    from mlx.utils import tree_flatten

    held = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
    assert held <= 1.15 * checkpoint.weights.bytes


def test_the_fingerprint_is_of_the_files_and_remembered(
    synth: Synth, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copy(synth("qwen3_vl", shard_bytes=60_000), tmp_path / "c")
    first = fingerprint(open_checkpoint(folder))
    for path in (folder / "config.json", folder / "model.safetensors.index.json", *folder.glob("*.safetensors")):
        assert first.files[path.name] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert not any(path.name == "digests.json" for path in folder.iterdir()) and cache_file().exists()

    def forbidden(_: Path) -> str:
        raise AssertionError("read again")

    from harness.checkpoints import fingerprint as module

    monkeypatch.setattr(sys.modules["harness.checkpoints.fingerprint"], "_digest", forbidden)
    assert module(open_checkpoint(folder)) == first
    monkeypatch.undo()
    monkeypatch.setenv("KV_HARNESS_CACHE", "/dev/null/no")  # cannot be written
    moved = folder.rename(tmp_path / "elsewhere")
    assert fingerprint(open_checkpoint(moved)) == first
    shard = sorted(moved.glob("*.safetensors"))[0]
    raw = bytearray(shard.read_bytes())
    raw[-1] ^= 1
    shard.write_bytes(bytes(raw))
    assert fingerprint(open_checkpoint(moved)).digest != first.digest


def test_a_cache_of_nonsense_is_only_slower(synth: Synth) -> None:
    cache_file().parent.mkdir(parents=True)
    cache_file().write_text('{"a": 3')
    first = fingerprint(open_checkpoint(synth("qwen3_vl")))
    cache_file().write_text("[1]")
    assert fingerprint(open_checkpoint(synth("qwen3_vl"))) == first


@pytest.mark.parametrize("where", ["", "no/such/place", "a/../b", "nothing"])
def test_what_is_neither_a_directory_nor_an_id(where: str) -> None:
    if where:
        with pytest.raises(CheckpointError, match="no such directory, and not the id of a repository"):
            open_checkpoint(where)
