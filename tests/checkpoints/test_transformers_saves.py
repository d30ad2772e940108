"""Checkpoints that transformers itself wrote: single file and shards, both config dialects, the Mistral 3 wrapper.

The logits of the saved model are those that we get from the directory, in float32.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.checkpoints import Inputs, load_model, logits, open_checkpoint
from tests.checkpoints.prompts import PROMPTS, as_torch, prompt
from tests.checkpoints.text_makers import BASE, TEXT_MAKERS

REASON = "the published implementations are not installed: pip install 'mlx-kv-harness[peers]'"
torch = pytest.importorskip("torch", reason=REASON)
transformers = pytest.importorskip("transformers", reason=REASON)

IDS = np.random.default_rng(5).integers(0, 59, (2, 20))
TOLERANCE = 5e-5  # of the deviation of the logits
MROPE = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [2, 1, 1]}
VISION2 = {"depth": 2, "num_heads": 2, "patch_size": 2, "embed_dim": 16, "hidden_size": 32}
VISION3 = {
    "depth": 3,
    "num_heads": 2,
    "patch_size": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [2, 0],
}
TOKENS = {"image_token_id": 61, "video_token_id": 62, "vision_start_token_id": 59, "vision_end_token_id": 60}
MISTRAL = BASE | {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 16,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "rope_parameters": {
        "type": "yarn",
        "rope_type": "yarn",
        "rope_theta": 100.0,
        "factor": 4.0,
        "original_max_position_embeddings": 8,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
}


def mistral4() -> Any:
    return transformers.Mistral4ForCausalLM(transformers.Mistral4Config(**MISTRAL))


def mistral3() -> Any:
    config = transformers.Mistral3Config(
        text_config=transformers.Mistral4Config(**MISTRAL),
        vision_config={
            "model_type": "pixtral",
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "patch_size": 2,
            "image_size": 16,
        },
        tie_word_embeddings=False,
    )
    return transformers.Mistral3ForConditionalGeneration(config)


def qwen2_vl() -> Any:
    config = transformers.Qwen2VLConfig(
        text_config=BASE | {"rope_parameters": MROPE},
        vision_config=VISION2,
        tie_word_embeddings=True,
        **TOKENS,
    )
    return transformers.Qwen2VLForConditionalGeneration(config)


def qwen3_vl() -> Any:
    config = transformers.Qwen3VLConfig(
        text_config=BASE | {"head_dim": 8, "rope_parameters": MROPE | {"mrope_interleaved": True}},
        vision_config=VISION3,
        **TOKENS,
    )
    return transformers.Qwen3VLForConditionalGeneration(config)


def qwen3_vl_moe() -> Any:
    experts = {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": [0]}
    config = transformers.Qwen3VLMoeConfig(
        text_config=BASE | experts | {"head_dim": 8, "rope_parameters": MROPE | {"mrope_interleaved": True}},
        vision_config=VISION3,
        **TOKENS,
    )
    return transformers.Qwen3VLMoeForConditionalGeneration(config)


MAKERS = {
    **TEXT_MAKERS,
    "mistral4": mistral4,
    "mistral3": mistral3,
    "qwen2_vl": qwen2_vl,
    "qwen3_vl": qwen3_vl,
    "qwen3_vl_moe": qwen3_vl_moe,
}


def made(kind: str) -> tuple[Any, np.ndarray]:
    """A model with weights large enough that context matters, and its logits."""
    torch.manual_seed(1)
    model = MAKERS[kind]().eval()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.1)
        return model, model(input_ids=torch.from_numpy(IDS), use_cache=False).logits.numpy()


def off(folder: Path, theirs: np.ndarray, inputs: Inputs | np.ndarray = IDS) -> float:
    mine = logits(load_model(open_checkpoint(folder)), inputs)
    return float(np.abs(mine - theirs).max() / theirs.std())


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("size", ["5GB", "20KB"], ids=["single", "sharded"])
def test_a_saved_model_is_the_same_model(kind: str, size: str, tmp_path: Path) -> None:
    model, theirs = made(kind)
    model.save_pretrained(tmp_path / "saved", max_shard_size=size)
    files = list((tmp_path / "saved").glob("*.safetensors"))
    assert (len(files) > 1) == (size == "20KB")
    far = off(tmp_path / "saved", theirs)
    print(f"{kind}: {far:.1e} of the deviation of the logits")
    assert far <= TOLERANCE
    checkpoint = open_checkpoint(tmp_path / "saved")
    assert checkpoint.family == ("mistral4" if kind == "mistral3" else kind)
    assert bool(checkpoint.vision) == (kind in (*VISION_KINDS, "mistral3"))


VISION_KINDS = ("qwen2_vl", "qwen3_vl", "qwen3_vl_moe")


@pytest.mark.parametrize("kind", VISION_KINDS)
def test_a_saved_model_sees_the_same(kind: str, tmp_path: Path) -> None:
    """Text, one image, several, videos, both, and rows of a batch with shares of their own."""
    model, _ = made(kind)
    model.save_pretrained(tmp_path / "saved")
    ours = load_model(open_checkpoint(tmp_path / "saved"))
    seen = []
    for name in PROMPTS:
        inputs = prompt(ours.config, name)
        with torch.no_grad():
            theirs = model(**as_torch(inputs), use_cache=False).logits.numpy()
        far = float(np.abs(logits(ours, inputs) - theirs).max() / theirs.std())
        print(f"{kind} {name}: {far:.1e} of the deviation of the logits")
        assert far <= TOLERANCE, name
        if inputs.has_images:
            seen.append(name)
            other = dataclasses.replace(inputs, **{key: -array for key, array in pixels(inputs).items()})
            assert np.abs(logits(ours, other) - theirs).max() > 0.01 * theirs.std(), f"{name}: pixels play no part"
    assert len(seen) >= 5


def pixels(inputs: Inputs) -> dict[str, np.ndarray]:
    found = {name: getattr(inputs, name) for name in ("pixel_values", "pixel_values_videos")}
    return {name: array for name, array in found.items() if array is not None}


@pytest.mark.parametrize(
    "kind", ["qwen2_vl", "qwen3_vl", "qwen3_vl_moe", "mistral4", "cohere2", "olmo3", "minicpm3", "glm4_moe_lite"]
)
def test_the_dialect_of_transformers_4_says_the_same(kind: str, tmp_path: Path) -> None:
    model, theirs = made(kind)
    model.save_pretrained(tmp_path / "saved")
    path = tmp_path / "saved" / "config.json"
    config = json.loads(path.read_text())
    text = config.get("text_config", config)
    parameters = text.pop("rope_parameters")
    parameters = parameters.get("full_attention", parameters)
    text["rope_theta"] = parameters.pop("rope_theta")
    text["rope_scaling"] = parameters
    kept = parameters.pop("rope_type")
    parameters["type"] = "mrope" if kept == "default" else kept
    if kind in VISION_KINDS:
        vision = config["vision_config"]
        assert vision.pop("rope_parameters")["rope_type"] == "axial"
        vision["model_type"] = kind
        (vision if kind == "qwen2_vl" else {})["in_chans"] = vision.pop("in_channels", 3)
    if kind == "qwen2_vl":  # flat, as published
        config |= text | {"model_type": "qwen2_vl", "tie_word_embeddings": config["tie_word_embeddings"]}
        del config["text_config"]
    if kind == "glm4_moe_lite":  # as published
        del config["mlp_layer_types"], text["rope_scaling"]
        config["first_k_dense_replace"] = 2
    if kind == "cohere2":  # as published
        del config["layer_types"], text["rope_scaling"]
        config["sliding_window_pattern"] = 4
    if kind == "qwen3_vl_moe":
        del config["tie_word_embeddings"], text["tie_word_embeddings"]
        text["mlp_only_layers"] = [0]
    path.write_text(json.dumps(config))
    assert off(tmp_path / "saved", theirs) <= TOLERANCE


@pytest.mark.parametrize("kind", ["mistral4", "qwen3_vl"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_kept_or_cast(kind: str, dtype: str, tmp_path: Path) -> None:
    model, theirs = made(kind)
    model.to(getattr(torch, dtype)).save_pretrained(tmp_path / "saved")
    checkpoint = open_checkpoint(tmp_path / "saved")
    stored = {"float16": "F16", "bfloat16": "BF16"}[dtype]
    assert set(checkpoint.dtypes) == {stored}
    wide = logits(load_model(checkpoint, "float32"), IDS)
    assert np.abs(wide - theirs).max() < (0.05 if dtype == "float16" else 0.5) * theirs.std()
    kept = load_model(checkpoint)
    assert str(kept.model.norm.weight.dtype) == f"mlx.core.{dtype}"


def test_transformers_gives_a_published_theta_to_some_layers_of_olmo3() -> None:
    """Why we write both dialects. The published 7B has the default theta, where nobody notices."""
    read = transformers.Olmo3Config.from_dict(BASE | {"rope_theta": 100.0})
    thetas = {kind: settings["rope_theta"] for kind, settings in read.rope_parameters.items()}
    assert thetas == {"full_attention": 100.0, "sliding_attention": 500000.0}, "FIXED? then one dialect is enough"
