"""What can be built, from which weights, and which configs are refused."""

import ast
import dataclasses
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx.utils import tree_flatten

import reference_models
from reference_models import (
    cohere2,
    glm4_moe_lite,
    minicpm3,
    mistral4,
    nemotron_nas,
    olmo3,
    qwen2_vl,
    qwen3_vl,
    qwen3_vl_moe,
    registry,
    rope,
    weights,
)


def test_families_are_sorted_and_their_variants_have_names_of_their_own() -> None:
    assert list(registry.FAMILIES) == sorted(registry.FAMILIES)
    for family in registry.FAMILIES:
        variants = registry.variants(family)
        assert len({variant.name for variant in variants}) == len(variants) == len(set(variants))
        assert {variant.family for variant in variants} == {family}
    forms = [variant.options["cache_form"] for variant in registry.variants("mistral4")]
    assert forms == ["latent", "decompressed"] * len(mistral4.TINY)


@pytest.mark.parametrize(
    ("asked", "nearest"), [("qwen3vl", "qwen3_vl"), ("nemotron-nas", "nemotron_nas"), ("gpt", "cohere2")]
)
def test_an_unknown_family_names_the_nearest(asked: str, nearest: str) -> None:
    with pytest.raises(registry.UnknownFamily, match=nearest):
        registry.variants(asked)


def test_weights_repeat_for_a_seed_and_differ_for_another() -> None:
    variant = registry.variants("qwen3_vl_moe")[0]
    first, again, other = (dict(tree_flatten(variant.build(seed).parameters())) for seed in (1, 1, 2))
    assert all(mx.array_equal(first[name], again[name]) for name in first)
    assert not any(mx.array_equal(first[name], other[name]) for name in first)
    assert {array.dtype for array in first.values()} == {mx.float32}


def test_weights_do_not_depend_on_other_parameters() -> None:
    one, two = nn.Module(), nn.Module()
    one.a, one.b = nn.Linear(8, 8), nn.Linear(8, 8)
    two.b = nn.Linear(8, 8)
    weights.randomise(one, 5)
    weights.randomise(two, 5)
    assert mx.array_equal(one.b.weight, two.b.weight)
    assert not mx.array_equal(one.a.weight, one.b.weight)


def test_weights_keep_the_scale_of_their_input() -> None:
    model = nn.Module()
    model.embed_tokens, model.wide, model.norm = nn.Embedding(64, 64), nn.Linear(400, 64), nn.RMSNorm(4096)
    weights.randomise(model, 0)
    deviation = {name: float(np.array(array).std()) for name, array in tree_flatten(model.parameters())}
    assert deviation["embed_tokens.weight"] == pytest.approx(1, rel=0.1)
    assert deviation["wide.weight"] == pytest.approx(0.05, rel=0.1)
    assert float(model.norm.weight.mean().item()) == pytest.approx(1, abs=0.02)


SECTIONS = rope.MRopeScaling((2, 1, 1))
REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (cohere2, {"num_key_value_heads": 3}, "num_key_value_heads"),
    (cohere2, {"num_attention_heads": 5}, "hidden_size"),
    (cohere2, {"num_attention_heads": 32, "num_key_value_heads": 1}, "head_dim"),
    (cohere2, {"sliding_window": 0}, "sliding_window"),
    (cohere2, {"sliding_window_pattern": -1}, "sliding_window_pattern"),
    (cohere2, {"logit_scale": 0.0}, "logit_scale"),
    (cohere2, {"layer_types": ("full_attention",)}, "layer_types"),
    (cohere2, {"layer_types": ("full_attention", "sliding_attention")}, "disagree"),
    (glm4_moe_lite, {"qk_rope_head_dim": 7}, "even"),
    (glm4_moe_lite, {"num_experts_per_tok": 5}, "num_experts_per_tok"),
    (glm4_moe_lite, {"n_group": 3}, "n_group"),
    (glm4_moe_lite, {"first_k_dense_replace": 3}, "first_k_dense_replace"),
    (glm4_moe_lite, {"q_lora_rank": 0}, "q_lora_rank"),
    (minicpm3, {"num_attention_heads": 5}, "hidden_size"),
    (minicpm3, {"qk_rope_head_dim": 7}, "even"),
    (minicpm3, {"qk_rope_head_dim": 4}, "short_factor has 4 numbers"),
    (minicpm3, {"kv_lora_rank": 0}, "kv_lora_rank"),
    (minicpm3, {"dim_model_base": 0}, "dim_model_base"),
    (minicpm3, {"scale_depth": 0.0}, "scale_depth"),
    (mistral4, {"qk_rope_head_dim": 7}, "even"),
    (mistral4, {"num_experts_per_tok": 5}, "num_experts_per_tok"),
    (mistral4, {"n_group": 3}, "n_group"),
    (mistral4, {"n_group": 4}, "two experts"),
    (mistral4, {"n_group": 2, "topk_group": 3}, "topk_group"),
    (mistral4, {"first_k_dense_replace": 3}, "first_k_dense_replace"),
    (mistral4, {"q_lora_rank": 0}, "q_lora_rank"),
    (nemotron_nas, {"num_hidden_layers": 3}, "block_configs"),
    (nemotron_nas, {"num_attention_heads": 3}, "hidden_size"),
    (nemotron_nas, {"num_attention_heads": 32}, "head_dim"),
    (olmo3, {"num_key_value_heads": 3}, "num_key_value_heads"),
    (olmo3, {"num_attention_heads": 5}, "hidden_size"),
    (olmo3, {"sliding_window": 0}, "sliding_window"),
    (olmo3, {"layer_types": ("chunked_attention",) * 2}, "layer_types"),
    (qwen2_vl, {"num_key_value_heads": 3}, "num_key_value_heads"),
    (qwen2_vl, {"num_attention_heads": 2}, "mrope_section"),
    (qwen2_vl, {"num_attention_heads": 5}, "hidden_size"),
    (qwen2_vl, {"rope_scaling": rope.MRopeScaling((2, 1, 1), True)}, "chunked"),
    (qwen3_vl, {"rope_scaling": SECTIONS}, "interleaved"),
    (qwen3_vl, {"head_dim": 16}, "mrope_section"),
    (qwen3_vl, {"vocab_size": 0}, "vocab_size"),
    (qwen3_vl_moe, {"rope_scaling": SECTIONS}, "interleaved"),
    (qwen3_vl_moe, {"mlp_only_layers": (2,)}, "mlp_only_layers"),
    (qwen3_vl_moe, {"num_experts_per_tok": 0}, "num_experts_per_tok"),
    (qwen3_vl_moe, {"decoder_sparse_step": 0}, "decoder_sparse_step"),
]


@pytest.mark.parametrize(
    ("family", "change", "named"), REFUSED, ids=[f"{f.__name__.split('.')[1]}-{n}" for f, _, n in REFUSED]
)
def test_a_config_that_does_not_fit_is_refused(family: Any, change: dict[str, Any], named: str) -> None:
    base = family.TINY["experts" if family is mistral4 else "plain"]
    with pytest.raises(ValueError, match=named):
        dataclasses.replace(base, **change)


def test_an_unknown_cache_form_is_refused() -> None:
    with pytest.raises(ValueError, match="cache_form"):
        mistral4.Model(mistral4.TINY["experts"], cache_form="both")  # type: ignore[arg-type]


def test_the_package_imports_mlx_and_the_standard_library_only() -> None:
    folder = Path(reference_models.__file__).parent
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                assert name.split(".")[0] not in {"harness", "hypothesis", "numpy", "mlx_lm", "torch"}, path
