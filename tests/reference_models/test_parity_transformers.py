"""The five families against their published implementations, on every tiny configuration.

Text alone: ``test_parity_vision`` looks at images. Our random weights are copied into a model of transformers
(or, for nemotron_nas, of mlx-lm) by name; every weight of the other side must be covered. The logits of one
uncached forward must agree in float32. Mistral 4's query scale moves every 8 positions, so 20 tokens see three
of its steps.
"""

import dataclasses
import importlib
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from reference_models import registry, rope

TOKENS = np.random.default_rng(11).integers(0, 64, (2, 20))
TOLERANCE = 5e-5  # of the deviation of the logits
VARIANTS = [variant for family in registry.FAMILIES for variant in registry.variants(family)]
ORACLE = "the published implementations are not installed: pip install 'mlx-kv-harness[parity]'"

Weights = dict[str, np.ndarray]


def published(config: Any) -> dict[str, Any]:
    """The fields of a config as a config.json has them."""
    return {
        name: list(value) if isinstance(value, tuple) else value for name, value in dataclasses.asdict(config).items()
    }


def fused_experts(weights: Weights) -> Weights:
    """transformers keeps gate and up of all experts in one tensor ``[E, 2 * intermediate, hidden]``."""
    fused = {}
    for name, value in weights.items():
        if name.endswith("experts.gate_proj"):
            up = weights[name.replace("gate_proj", "up_proj")]
            fused[name.replace("gate_proj", "gate_up_proj")] = np.concatenate([value, up], axis=1)
        elif not name.endswith("experts.up_proj"):
            fused[name] = value
    return fused


def run_torch(model: Any, weights: Weights) -> np.ndarray:
    """Logits of a transformers model that holds ``weights``; vision parameters keep what they have."""
    import torch

    own = {name: name.replace("model.language_model.", "model.") for name in model.state_dict()}
    wanted = {name: ours for name, ours in own.items() if ".visual." not in name}
    if model.config.tie_word_embeddings:
        weights = weights | {"lm_head.weight": weights["model.embed_tokens.weight"]}
    assert set(wanted.values()) == set(weights)
    state = {name: torch.from_numpy(weights[ours].copy()) for name, ours in wanted.items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and all(".visual." in name for name in missing)
    with torch.no_grad():
        return np.asarray(model.eval()(input_ids=torch.from_numpy(TOKENS), use_cache=False).logits)


def mistral4(config: Any, weights: Weights) -> np.ndarray:
    from transformers import Mistral4Config, Mistral4ForCausalLM

    fields = published(config) | {"num_key_value_heads": config.num_attention_heads, "pad_token_id": None}
    return run_torch(Mistral4ForCausalLM._from_config(Mistral4Config(**fields), attn_implementation="eager"), weights)


def qwen(config: Any, weights: Weights, name: str, vision: dict[str, Any]) -> np.ndarray:
    import transformers

    fields = published(config)
    for join in ("vision", "image_token_id", "video_token_id"):
        del fields[join]
    tied = fields.pop("tie_word_embeddings")
    scaling = fields.pop("rope_scaling") | {"rope_type": "default", "rope_theta": fields.pop("rope_theta")}
    whole = getattr(transformers, f"{name}Config")(
        text_config=fields | {"rope_parameters": scaling, "pad_token_id": None},
        vision_config={"depth": 1, "num_heads": 2, "patch_size": 2} | vision,
        tie_word_embeddings=tied,
    )
    model = getattr(transformers, f"{name}ForConditionalGeneration")
    return run_torch(model._from_config(whole, attn_implementation="eager"), weights)


def qwen2_vl(config: Any, weights: Weights) -> np.ndarray:
    return qwen(config, weights, "Qwen2VL", {"embed_dim": 16, "hidden_size": config.hidden_size})


QWEN3_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}


def qwen3_vl(config: Any, weights: Weights) -> np.ndarray:
    return qwen(config, weights, "Qwen3VL", QWEN3_VISION)


def qwen3_vl_moe(config: Any, weights: Weights) -> np.ndarray:
    return qwen(config, weights, "Qwen3VLMoe", QWEN3_VISION)


def nemotron_nas(config: Any, weights: Weights) -> np.ndarray:
    module = importlib.import_module("mlx_lm.models.nemotron-nas")
    fields = published(config)
    other = module.Model(module.ModelArgs(**fields))
    renamed = {
        name.replace("linear_attn", "linear").replace("linear_mlp", "linear"): mx.array(value)
        for name, value in weights.items()
    }
    other.load_weights(list(renamed.items()), strict=True)
    return np.array(other(mx.array(TOKENS)))


ORACLES = {
    "mistral4": mistral4,
    "nemotron_nas": nemotron_nas,
    "qwen2_vl": qwen2_vl,
    "qwen3_vl": qwen3_vl,
    "qwen3_vl_moe": qwen3_vl_moe,
}


@pytest.mark.parametrize("variant", VARIANTS, ids=[f"{v.family}-{v.name}" for v in VARIANTS])
def test_logits_agree_with_the_published_implementation(variant: registry.Variant) -> None:
    needed = ["mlx_lm"] if variant.family == "nemotron_nas" else ["torch", "transformers"]
    for package in needed:
        pytest.importorskip(package, reason=ORACLE)
    model: Any = variant.build(seed=5)
    every = tree_flatten(model.parameters())
    weights = {name: np.array(value) for name, value in every if not name.startswith("visual.")}
    ours = np.array(model(mx.array(TOKENS), model.make_caches()))
    theirs = ORACLES[variant.family](variant.config, fused_experts(weights))
    off = float(np.abs(ours - theirs).max() / theirs.std())
    print(f"{variant.family} {variant.name}: {off:.1e} of the deviation of the logits")
    assert off <= TOLERANCE


@pytest.mark.parametrize(
    ("package", "name", "sections"),
    [
        ("qwen2_vl", "Qwen2VL", (2, 3, 3)),
        ("qwen3_vl", "Qwen3VLText", (4, 2, 2)),
        ("qwen3_vl", "Qwen3VLText", (3, 3, 2)),
    ],
)
def test_mrope_angles_agree_where_text_cannot_tell(package: str, name: str, sections: tuple[int, int, int]) -> None:
    """Text has equal T, H and W ids, so the logits above say nothing of sections; the angles do."""
    torch = pytest.importorskip("torch", reason=ORACLE)
    transformers = pytest.importorskip("transformers", reason=ORACLE)
    module = importlib.import_module(f"transformers.models.{package}.modeling_{package}")
    config = getattr(transformers, f"{name.removesuffix('Text')}TextConfig")(
        hidden_size=32,
        num_attention_heads=2,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0, "mrope_section": list(sections)},
        **({} if package == "qwen2_vl" else {"head_dim": 16}),
    )
    ids = np.random.default_rng(4).integers(0, 40, (3, 2, 7))
    theirs = getattr(module, f"{name}RotaryEmbedding")(config)(torch.zeros(1), torch.from_numpy(ids))
    inv_freq = 1 / rope.standard_freqs(16, 100.0)
    ours = rope.mrope_angles(mx.array(ids), inv_freq, sections, interleaved=package == "qwen3_vl")
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(np.array(mine), other[..., :8].numpy(), atol=2e-5)
