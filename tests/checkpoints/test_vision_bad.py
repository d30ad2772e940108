"""Vision parts that do not fit: each gets one line that names file and key, or the field of the config."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from harness import cli
from harness.checkpoints import CheckpointError, check, load_model, logits, open_checkpoint, synthesise
from reference_models.hf import ConfigError, config_from_json
from tests.checkpoints.conftest import Synth
from tests.checkpoints.prompts import prompt

FAMILIES = ("qwen2_vl", "qwen3_vl", "qwen3_vl_moe")
ONE = "model.safetensors"
Weights = dict[str, mx.array]


def changed(folder: Path, to: Path, change: Callable[[Weights], object]) -> Path:
    shutil.copytree(folder, to)
    weights = dict(mx.load(str(folder / ONE)))
    change(weights)
    mx.save_safetensors(str(to / ONE), weights)
    return to


def reconfigured(folder: Path, to: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    shutil.copytree(folder, to)
    config = json.loads((to / "config.json").read_text())
    change(config)
    (to / "config.json").write_text(json.dumps(config))
    return to


def refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of ``identify``, before which nothing was allocated."""
    mx.clear_cache()
    mx.reset_peak_memory()
    assert cli.main(["identify", str(folder)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and said.startswith("kv-harness: error: ")
    assert mx.get_peak_memory() - mx.get_active_memory() < 1 << 20
    return said


def tower_key(weights: Weights, end: str) -> str:
    return next(name for name in weights if ("visual." in name or "vision_tower." in name) and name.endswith(end))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", ["hf", "mlx"])
def test_keys(family: str, layout: str, synth: Synth, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = synth(family, layout=layout)
    names = list(mx.load(str(source / ONE)))
    key, extra = tower_key(dict.fromkeys(names), "blocks.1.attn.qkv.weight"), "blocks.9.attn.qkv.weight"
    prefix = key.removesuffix("blocks.1.attn.qkv.weight")
    cases: dict[str, tuple[Callable[[Weights], object], str]] = {
        "missing": (lambda w: w.pop(key), "missing key 'visual.blocks.1.attn.qkv.weight'"),
        "unexpected": (lambda w: w.update({prefix + extra: mx.zeros((2, 2))}), f"unexpected key '{prefix}{extra}'"),
        "shape": (lambda w: w.update({key: mx.zeros((96, 31))}), f"key '{key}' has the wrong shape [96, 31]"),
        "type": (lambda w: w.update({key: mx.zeros((96, 32), dtype=mx.int32)}), f"key '{key}' is I32"),
        "patches": (
            lambda w: w.update({f"{prefix}patch_embed.proj.weight": mx.zeros((32, 4, 4, 2, 3))}),
            f"key '{prefix}patch_embed.proj.weight' has the wrong shape [32, 4, 4, 2, 3]",
        ),
        "scales": (lambda w: w.update({key.replace("weight", "scales"): mx.zeros((96, 1))}), "missing key 'visual."),
        "twice": (
            lambda w: w.update({"model.vision_tower.blocks.1.attn.qkv.weight": mx.zeros((96, 32))}),
            "duplicate key",
        ),
    }
    for case, (change, expected) in cases.items():
        said = refused(changed(source, tmp_path / case, change), capsys)
        assert f"{tmp_path / case / ONE}: " in said and expected in said, case


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("depth", (-1, 0, 1 << 40, 2.5, "2", [2], True)),
        ("num_heads", (-1, 0, 3, 1 << 40)),
        ("patch_size", (-4, 0, 1 << 30, [4, 4])),
        ("temporal_patch_size", (0, 1 << 30, [2, 2])),
        ("spatial_merge_size", (-2, 0, 1 << 40)),
        ("in_channels", (0, -3, 1 << 30)),
        ("hidden_size", (-1, 0, 1 << 40)),
        ("hidden_act", ("relu", 3, ["gelu"])),
        ("model_type", ("qwen2_5_vl", "pixtral", 1)),
        ("window_size", (112,)),
        ("layer_norm_eps", (1e-5,)),
        ("rope_parameters", ({"rope_theta": 5.0}, {"rope_type": "yarn"}, [])),
    ],
)
def test_fields(
    family: str,
    field: str,
    values: tuple[object, ...],
    synth: Synth,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for number, value in enumerate(values):
        to = tmp_path / str(number)
        said = refused(reconfigured(synth(family), to, lambda c: c["vision_config"].update({field: value})), capsys)  # noqa: B023
        assert f"{to / 'config.json'}: " in said and field in said, value


FIELDS: list[tuple[str, dict[str, object], str]] = [
    ("qwen2_vl", {"in_chans": 1}, "vision_config.in_channels is 3, but vision_config.in_chans is 1"),
    ("qwen2_vl", {"spatial_patch_size": 7}, "vision_config.spatial_patch_size is 7"),
    ("qwen2_vl", {"mlp_ratio": 1 << 30}, "vision_config.mlp_ratio must lie in"),
    (
        "qwen2_vl",
        {"embed_dim": 1 << 20, "num_heads": 1, "spatial_merge_size": 64},
        "merge blocks of 4,294,967,296",
    ),
    ("qwen2_vl", {"patch_size": 3, "in_channels": 3, "in_chans": 3, "temporal_patch_size": 3}, "a cube does not show"),
    ("qwen3_vl", {"out_hidden_size": 32}, "vision out_hidden_size (32) must be the hidden_size of the text (64)"),
    ("qwen3_vl", {"num_position_embeddings": 15}, "num_position_embeddings (15) must be a square number"),
    ("qwen3_vl", {"deepstack_visual_indexes": [0, 9]}, "deepstack_visual_indexes [0, 9] must name different blocks"),
    ("qwen3_vl", {"deepstack_visual_indexes": [-1]}, "vision_config.deepstack_visual_indexes must be a list of whole"),
    ("qwen3_vl", {"deepstack_visual_indexes": "01"}, "vision_config.deepstack_visual_indexes must be a list of whole"),
    ("qwen3_vl", {"deepstack_visual_indexes": [0, 1, 2]}, "makes 3 features, the text has 2 layers"),
]


@pytest.mark.parametrize(("family", "change", "expected"), FIELDS)
def test_fields_that_do_not_go_together(family: str, change: dict[str, object], expected: str, synth: Synth) -> None:
    data = json.loads((synth(family) / "config.json").read_text())
    data["vision_config"] |= change
    with pytest.raises(ConfigError) as caught:
        config_from_json(data)
    assert expected in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"image_token_id": 320}, "image_token_id (320) must lie in 0..vocab_size - 1"),
        ({"image_token_id": -1}, "image_token_id must lie in 0.."),
        ({"video_token_id": 261}, "image_token_id and video_token_id are both 261"),
        ({"image_token_index": 7}, "image_token_index is 7: image_token_id is 261"),
        ({"vision_config": [1]}, "vision_config must be an object"),
    ],
)
def test_tokens(change: dict[str, object], expected: str, synth: Synth) -> None:
    data = json.loads((synth("qwen3_vl") / "config.json").read_text()) | change
    with pytest.raises(ConfigError) as caught:
        config_from_json(data)
    assert expected in str(caught.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_absent_fields_have_the_defaults_of_the_published_classes(family: str, synth: Synth) -> None:
    data = json.loads((synth(family) / "config.json").read_text())
    width = {"qwen2_vl": "hidden_size"}.get(family, "out_hidden_size")
    data["vision_config"] = {width: 64}
    if family != "qwen2_vl":
        data["vision_config"]["deepstack_visual_indexes"] = [8]
    tower = config_from_json(data)[1].vision
    published = {"qwen2_vl": (32, 1280, 14, "quick_gelu")}.get(family, (27, 1152, 16, "gelu_pytorch_tanh"))
    own = tower.embed_dim if family == "qwen2_vl" else tower.hidden_size
    assert (tower.depth, own, tower.patch_size, tower.hidden_act) == published


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_without_a_tower_are_a_model_of_text(
    family: str, synth: Synth, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What mlx-lm converts: no vision weights, but vision_config is kept, whatever is in it."""

    def drop(weights: Weights) -> None:
        for name in [name for name in weights if "vision_tower." in name]:
            del weights[name]

    source = synth(family, layout="mlx")
    folder = changed(source, tmp_path / "text", drop)
    odd = reconfigured(folder, tmp_path / "odd", lambda c: c["vision_config"].update(hidden_act="relu"))
    ids = np.arange(12)[None]
    for path in (folder, odd):
        assert cli.main(["identify", str(path)]) == 0
        said = capsys.readouterr()
        assert "the weights hold no vision tower" in said.err and "logits behind images" not in said.out
        assert "not checked" in said.out and "images: the weights hold no vision tower" in said.out
        model = load_model(open_checkpoint(path))
        np.testing.assert_array_equal(logits(model, ids), logits(load_model(open_checkpoint(source)), ids))
    with pytest.raises(CheckpointError, match="pixel_values: this checkpoint has no vision tower"):
        logits(model, prompt(open_checkpoint(source).model_config, "image"))
    assert cli.main(["identify", str(source)]) == 0
    assert "logits behind images and videos" in capsys.readouterr().out


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tower_that_the_config_does_not_know(family: str, synth: Synth, tmp_path: Path) -> None:
    folder = reconfigured(synth(family), tmp_path / "c", lambda config: config.pop("vision_config"))
    with pytest.raises(CheckpointError, match=r"unexpected key '(model\.)?visual\."):
        check(open_checkpoint(folder))


def test_a_model_of_text_is_written_and_read(tmp_path: Path) -> None:
    """A config without a tower: readers still get a vision_config, and no weights for it."""
    import dataclasses

    from reference_models.hf.sizes import SIZES

    for family in FAMILIES:
        config = dataclasses.replace(SIZES["tiny"][family](), vision=None)
        synthesise(family, tmp_path / family, config=config)
        checkpoint = open_checkpoint(tmp_path / family)
        assert not checkpoint.vision and checkpoint.model_config.vision is None
        check(checkpoint)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("prefix", ["visual.", "model.visual.", "vision_tower.", "model.vision_tower."])
def test_every_prefix_of_a_tower(family: str, prefix: str, synth: Synth, tmp_path: Path) -> None:
    def rename(weights: Weights) -> None:
        for name in [name for name in weights if "visual." in name]:
            weights[prefix + name.split("visual.")[1]] = weights.pop(name)
        weights[f"{prefix}rotary_pos_emb.inv_freq"] = mx.zeros((4,))

    folder = changed(synth(family), tmp_path / "c", rename)
    model, first = load_model(open_checkpoint(folder)), load_model(open_checkpoint(synth(family)))
    inputs = prompt(model.config, "image")
    np.testing.assert_array_equal(logits(model, inputs), logits(first, inputs))
