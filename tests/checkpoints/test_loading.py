"""Layouts that no engine writes today but repositories hold, memory, and the commands."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from harness import cli
from harness.checkpoints import greedy, load_model, logits, not_a_number, open_checkpoint, synthesise
from reference_models.hf.sizes import SIZES
from reference_models.registry import FAMILIES
from tests.checkpoints.conftest import Synth
from tests.checkpoints.prompts import prompt

IDS = np.random.default_rng(3).integers(0, 256, (2, 12))
ONE = "model.safetensors"


def run(folder: Path, **options: Any) -> np.ndarray:
    return logits(load_model(open_checkpoint(folder), **options), IDS)


def rewritten(folder: Path, to: Path, change: Any) -> Path:
    shutil.copytree(folder, to)
    weights = dict(mx.load(str(folder / ONE)))
    mx.save_safetensors(str(to / ONE), change(weights))
    return to


def per_expert(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    made = {}
    for name, array in weights.items():
        if ".switch_mlp." in name:
            for index, expert in enumerate(array):
                made[name.replace("switch_mlp", f"experts.{index}")] = mx.contiguous(expert)
        else:
            made[name] = array
    return made


@pytest.mark.parametrize("family", ["mistral4", "qwen3_vl_moe"])
@pytest.mark.parametrize("bits", [None, 4])
def test_one_linear_per_expert(family: str, bits: int | None, synth: Synth, tmp_path: Path) -> None:
    source = synth(family, layout="mlx", bits=bits)
    if bits is not None:  # only the unstacked form of packed experts differs; unpacked after it is stacked
        folder = rewritten(source, tmp_path / "c", per_expert)
        assert np.abs(run(folder) - run(source)).max() < 1e-4 * run(source).std()
        return
    np.testing.assert_array_equal(run(rewritten(source, tmp_path / "c", per_expert)), run(source))


@pytest.mark.parametrize("square", ["gate_up", "down"])
@pytest.mark.parametrize("swapped", [True, False])
def test_square_experts_are_read_the_right_way(square: str, swapped: bool, tmp_path: Path) -> None:
    """2I = H makes one tensor square, I = H the other; which axes are swapped shows in the other one."""
    import dataclasses

    config = SIZES["tiny"]["qwen3_vl_moe"]()
    config = dataclasses.replace(config, moe_intermediate_size=config.hidden_size // (2 if square == "gate_up" else 1))
    synthesise("qwen3_vl_moe", tmp_path / "c", config=config)
    want = run(tmp_path / "c")
    if not swapped:

        def turn(weights: dict[str, mx.array]) -> dict[str, mx.array]:
            return {n: mx.contiguous(a.swapaxes(1, 2)) if ".experts." in n else a for n, a in weights.items()}

        rewritten(tmp_path / "c", tmp_path / "d", turn)
        np.testing.assert_array_equal(run(tmp_path / "d"), want)


@pytest.mark.parametrize("prefix", ["model.", "language_model.model.", "model.language_model."])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_prefix_is_known(family: str, prefix: str, synth: Synth, tmp_path: Path) -> None:
    def rename(weights: dict[str, mx.array]) -> dict[str, mx.array]:
        stem = re.compile(r"^(model\.language_model\.|language_model\.model\.|model\.(?!visual))")
        extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": mx.zeros((4,))}
        if "_vl" not in family:
            extra["vision_tower.x.weight"] = mx.zeros((2,))
        return {stem.sub(prefix, name): array for name, array in weights.items()} | extra

    folder = rewritten(synth(family), tmp_path / "c", rename)
    np.testing.assert_array_equal(run(folder), run(synth(family)))
    if "_vl" not in family:
        assert list(open_checkpoint(folder).vision) == ["visual.x.weight"]


def test_mistral4_inside_mistral3(synth: Synth, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(synth("mistral4"), tmp_path / "c"))
    inner = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({"model_type": "mistral3", "text_config": inner, "tie_word_embeddings": True, "vision_config": {}})
    )
    np.testing.assert_array_equal(run(folder), run(synth("mistral4")))


@pytest.mark.parametrize("family", ["mistral4", "qwen3_vl_moe"])
@pytest.mark.parametrize("how", ["hf", "hf cast", "mlx", "mlx packed", "per expert"])
def test_peak_memory_is_that_of_the_weights(family: str, how: str, tmp_path: Path) -> None:
    """Of MLX's own allocator, on a model whose experts are most of it, as in the published ones."""
    import dataclasses

    config = SIZES["tiny"][family]()
    tower = {"vision": dataclasses.replace(config.vision, out_hidden_size=256)} if hasattr(config, "vision") else {}
    config = dataclasses.replace(config, hidden_size=256, moe_intermediate_size=320, num_hidden_layers=12, **tower)
    options: dict[str, Any] = {"layout": "hf" if how.startswith("hf") else "mlx", "config": config}
    synthesise(family, tmp_path / "c", **options, bits=4 if "packed" in how else None)
    folder = tmp_path / "c"
    if how == "per expert":
        folder = rewritten(folder, tmp_path / "d", per_expert)
    mx.clear_cache()
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    checkpoint = open_checkpoint(folder)
    model = load_model(checkpoint, "float16" if "cast" in how else None)
    peak = mx.get_peak_memory() - before
    held = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
    assert peak <= 1.15 * max(held, checkpoint.weights.bytes), f"{peak / held:.3f} of the weights"


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_is_found_in_every_type(dtype: str, bad: float, synth: Synth) -> None:
    model = load_model(open_checkpoint(synth("mistral4")), dtype)
    assert not_a_number(model) == []
    norm = model.model.layers[1].mlp.experts
    norm.up_proj = mx.where(mx.arange(norm.up_proj.shape[-1]) == 5, bad, norm.up_proj).astype(norm.up_proj.dtype)
    assert not_a_number(model) == ["model.layers.1.mlp.experts.up_proj"]


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl", "qwen3_vl_moe"])
@pytest.mark.parametrize("named", [True, False])
def test_a_packed_tower(family: str, named: bool, synth: Synth, tmp_path: Path) -> None:
    """As mlx-vlm packs it when told to; the config may name the layers, with bits of their own, and one of them is left
    alone. The model is that of the numbers which the packing stands for."""
    plain: dict[str, mx.array] = {}
    bits = 8 if named else 4
    said: dict[str, Any] = {"bits": 4, "group_size": 32}

    def packed(weights: dict[str, mx.array]) -> dict[str, mx.array]:
        made = dict(weights)
        plain.update(weights)
        for name, array in weights.items():
            stem = name.removesuffix(".weight")
            if "vision_tower" not in name or array.ndim != 2:
                continue
            if stem.endswith("0.attn.proj"):
                said.update({stem: False} if named else {})
                continue
            parts = mx.quantize(array, group_size=32, bits=bits)
            said.update({stem: {"bits": bits, "group_size": 32}} if named else {})
            made |= zip((name, f"{stem}.scales", f"{stem}.biases"), parts, strict=True)
            plain[name] = mx.dequantize(*parts, group_size=32, bits=bits)
        return made

    source = synth(family, layout="mlx")
    folder = rewritten(source, tmp_path / "packed", packed)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization": said}))
    same = rewritten(source, tmp_path / "plain", lambda _: plain)
    model, wanted = load_model(open_checkpoint(folder)), load_model(open_checkpoint(same))
    assert "scales" in model.visual.blocks[0].attn.qkv and "scales" not in model.visual.blocks[0].attn.proj
    inputs = prompt(model.config, "two images")
    mine, theirs = logits(model, inputs), logits(wanted, inputs)
    assert np.abs(mine - theirs).max() <= 5e-5 * theirs.std()


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_tower_in_half_precision(family: str, dtype: str, synth: Synth) -> None:
    checkpoint = open_checkpoint(synth(family, dtype=dtype))
    half, wide = load_model(checkpoint), load_model(checkpoint, "float32")
    assert str(half.visual.patch_embed.proj.weight.dtype) == f"mlx.core.{dtype}"
    inputs = prompt(half.config, "image and video")
    made, wanted = logits(half, inputs), logits(wide, inputs)
    assert np.abs(made - wanted).max() < (0.02 if dtype == "float16" else 0.2) * wanted.std()


def test_greedy_continues_the_logits(synth: Synth) -> None:
    model = load_model(open_checkpoint(synth("qwen3_vl")))
    ids = IDS
    for _ in range(6):
        ids = np.concatenate([ids, logits(model, ids)[:, -1:].argmax(-1)], axis=1)
    np.testing.assert_array_equal(greedy(model, IDS, 6), ids[:, -6:])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("bits", [None, 4])
def test_half_precision_runs_or_says_what_to_do(
    family: str, dtype: str, bits: int | None, synth: Synth, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """MLX multiplies unpacked experts in float32 alone on a CPU; everything else runs in what is stored."""
    folder, ids, out = synth(family, dtype=dtype, bits=bits), tmp_path / "ids.npz", tmp_path / "out.npz"
    np.savez(ids, ids=IDS)
    command = ["logits", str(folder), "--input", str(ids), "--output", str(out)]
    code = cli.main(command)
    said = capsys.readouterr().err
    experts = family in ("glm4_moe_lite", "mistral4", "qwen3_vl_moe") and bits is None
    if experts and mx.default_device() == mx.Device(mx.cpu):
        assert code == 2 and not out.exists()
        assert said.count("\n") == 1 and said.endswith("; try --dtype float32\n") and "cannot run here" in said
        assert cli.main([*command, "--dtype", "float32"]) == 0
    else:
        assert code == 0, said
    made, wide = np.load(out)["logits"], run(folder, dtype="float32")
    # Half precision routes near ties elsewhere, so most tokens must agree, not all.
    off = np.abs(made - wide).max(axis=-1) / wide.std()
    assert np.median(off) < 0.1, off


@pytest.mark.parametrize("family", FAMILIES)
def test_synth_identify_logits(family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, ids, out = tmp_path / "c", tmp_path / "ids.npz", tmp_path / "out"
    assert cli.main(["synth", family, str(folder), "--bits", "4", "--seed", "7"]) == 0
    np.savez(ids, ids=IDS)
    assert cli.main(["identify", str(folder)]) == 0
    said = capsys.readouterr().out
    for word in (family, "MLX affine, 4 bits, groups of 32", "sha256:", "hidden_size", "text logits"):
        assert word in said
    assert cli.main(["identify", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["family"] == family
    assert cli.main(["logits", str(folder), "--input", str(ids), "--output", str(out)]) == 0
    made = np.load(out)["logits"]
    assert made.dtype == np.float32 and made.shape == (2, 12, 320)
    np.testing.assert_array_equal(made, run(folder))


@pytest.mark.parametrize(
    ("arrays", "expected"),
    [
        ({"tokens": IDS}, "holds no array called ids; it has tokens"),
        ({"ids": IDS[0]}, "ids must be whole numbers [B, T]"),
        ({"ids": IDS.astype(float)}, "ids must be whole numbers [B, T]"),
        ({"ids": IDS + 400}, "ids must lie in 0..319"),
        ({"ids": np.zeros((1, 0), int)}, "ids must be whole numbers [B, T]"),
    ],
)
def test_input_that_cannot_be_used(
    arrays: dict[str, np.ndarray], expected: str, synth: Synth, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.savez(tmp_path / "ids.npz", **arrays)
    command = ["logits", str(synth("qwen3_vl")), "--input", str(tmp_path / "ids.npz"), "--output", str(tmp_path / "o")]
    assert cli.main(command) == 2
    said = capsys.readouterr().err
    assert expected in said and said.count("\n") == 1 and "ids.npz" in said


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["qwen2vl", "d"], "nearest: qwen2_vl"),
        (["qwen2_vl", "d", "--bits", "7"], "bits is one of 2, 3, 4, 5, 6, 8"),
        (["qwen2_vl", "d", "--bits", "4", "--layout", "hf"], "exist in the mlx layout only"),
        (["qwen2_vl", "d", "--seed", "-1"], "argument --seed"),
        (["qwen2_vl", "."], "is not an empty directory"),
    ],
)
def test_synth_refuses(
    arguments: list[str],
    expected: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "something").write_text("")
    assert cli.main(["synth", *arguments]) == 2
    said = capsys.readouterr().err
    assert expected in said and said.count("\n") == 1


def test_the_same_seed_writes_the_same_bytes(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        synthesise("qwen3_vl", tmp_path / name, seed=seed)
    first, again, other = ((tmp_path / name / ONE).read_bytes() for name in "abc")
    assert first == again != other
