"""Synthetic checkpoints with images in every engine that is installed: ours, transformers, mlx-vlm; and mlx-vlm's own
conversions of them, read by us. Same logits, same continuations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness import cli
from harness.checkpoints import Inputs, greedy, load_model, logits, open_checkpoint
from tests.checkpoints.conftest import Synth
from tests.checkpoints.engines import (
    MLX_VLM,
    ONE_ROW,
    PARITY,
    STEPS,
    TOLERANCE,
    agree,
    with_mlx_vlm,
    with_transformers,
)
from tests.checkpoints.prompts import PROMPTS, prompt

FAMILIES = ("qwen2_vl", "qwen3_vl", "qwen3_vl_moe")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shard_bytes", [1 << 30, 60_000], ids=["single", "sharded"])
def test_transformers_sees_what_we_see(family: str, shard_bytes: int, synth: Synth) -> None:
    pytest.importorskip("torch", reason=PARITY)
    pytest.importorskip("transformers", reason=PARITY)
    folder = synth(family, shard_bytes=shard_bytes)
    agree(folder, with_transformers(folder), PROMPTS)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", ["hf", "mlx"])
def test_mlx_vlm_sees_what_we_see(family: str, layout: str, synth: Synth) -> None:
    pytest.importorskip("mlx_vlm", reason=MLX_VLM)
    folder = synth(family, layout=layout)
    agree(folder, with_mlx_vlm(folder), ONE_ROW)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", ["hf", "mlx"])
def test_every_layout_holds_the_same_tower(family: str, layout: str, synth: Synth) -> None:
    models = [load_model(open_checkpoint(folder)) for folder in (synth(family), synth(family, layout=layout))]
    inputs = prompt(models[0].config, "image and video")
    np.testing.assert_array_equal(*(logits(model, inputs) for model in models))


def everything(path: str, module: Any) -> Any:
    """A recipe that packs the tower too: 8 bits there, 4 elsewhere, the output of its attention left alone."""
    if not hasattr(module, "to_quantized") or module.weight.shape[-1] % 32 or path.endswith("attn.proj"):
        return False
    return {"group_size": 32, "bits": 8 if "vision_tower" in path else 4}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("how", ["plain", "4 bits", "tower too", "float16"])
def test_we_read_what_mlx_vlm_converts(family: str, how: str, synth: Synth, tmp_path: Path) -> None:
    pytest.importorskip("mlx_vlm", reason=MLX_VLM)
    from mlx_vlm import convert

    options: dict[str, Any] = {
        "plain": {},
        "4 bits": {"quantize": True, "q_bits": 4, "q_group_size": 32},
        "tower too": {"quantize": True, "q_bits": 4, "q_group_size": 32, "quant_predicate": everything},
        "float16": {"dtype": "float16"},
    }[how]
    folder = tmp_path / "converted"
    convert(str(synth(family)), str(folder), **options)
    packed = [name for name in open_checkpoint(folder).vision if name.endswith(".scales")]
    assert bool(packed) == (how == "tower too")
    if how != "float16":
        agree(folder, with_mlx_vlm(folder), ONE_ROW, 2e-4)
        return
    model, first = load_model(open_checkpoint(folder), "float32"), load_model(open_checkpoint(synth(family)))
    inputs = prompt(model.config, "two images")
    mine, wanted = logits(model, inputs), logits(first, inputs)
    assert np.abs(mine - wanted).max() < 0.05 * wanted.std()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_processor_of_transformers_makes_our_input(
    family: str, synth: Synth, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From a picture and a film to logits, on both sides, through the command."""
    torch = pytest.importorskip("torch", reason=PARITY)
    pytest.importorskip("PIL", reason="the processors need pillow")
    pytest.importorskip("torchvision", reason="the processors of videos need torchvision")
    import transformers

    folder, rng = synth(family), np.random.default_rng(0)
    processor = transformers.AutoProcessor.from_pretrained(folder)
    content = [{"type": "video"}, {"type": "text", "text": "hi"}, {"type": "image"}]
    text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    picture, film = rng.integers(0, 256, (30, 50, 3)), rng.integers(0, 256, (4, 30, 50, 3))
    given = processor(
        text=[text],
        images=[picture.astype(np.uint8)],
        videos=[film.astype(np.uint8)],
        do_sample_frames=False,
        return_tensors="pt",
    )
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        theirs = model(**given, use_cache=False).logits.numpy()
    arrays = {"ids" if name == "input_ids" else name: array.numpy() for name, array in given.items()}
    assert {"pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw"} <= set(arrays)
    np.savez(tmp_path / "in.npz", **arrays)
    command = ["logits", str(folder), "--input", str(tmp_path / "in.npz"), "--output", str(tmp_path / "out.npz")]
    assert cli.main(command) == 0, capsys.readouterr().err
    mine = np.load(tmp_path / "out.npz")["logits"]
    assert np.abs(mine - theirs).max() <= TOLERANCE * theirs.std()


@pytest.mark.parametrize("family", FAMILIES)
def test_mlx_vlm_describes_a_picture(family: str, synth: Synth, tmp_path: Path) -> None:
    """Its own processor, template and generation take the directory as it is; the tokens are those that we give."""
    pytest.importorskip("mlx_vlm", reason=MLX_VLM)
    image = pytest.importorskip("PIL.Image", reason="the processors need pillow")
    import mlx.core as mx
    from mlx_vlm import generate
    from mlx_vlm.prompt_utils import apply_chat_template
    from mlx_vlm.utils import load, prepare_inputs

    folder = synth(family)
    pixels = np.random.default_rng(0).integers(0, 256, (30, 50, 3)).astype(np.uint8)
    image.fromarray(pixels).save(tmp_path / "a.png")
    model, processor = load(str(folder))
    text = apply_chat_template(processor, model.config, "hi", num_images=1)
    said = generate(model, processor, text, image=[str(tmp_path / "a.png")], max_tokens=STEPS, temperature=0.0)
    given = prepare_inputs(processor, images=[str(tmp_path / "a.png")], prompts=[text])
    names = {"input_ids": "ids", "pixel_values": "pixel_values", "image_grid_thw": "image_grid_thw"}
    inputs = Inputs(**{ours: np.array(given[theirs]) for theirs, ours in names.items()})
    ours = load_model(open_checkpoint(folder))
    assert mx.array_equal(mx.array(said.token_ids), mx.array(greedy(ours, inputs, STEPS)[0]))
