"""What a config.json of the later text families may say, and what is refused in one line."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from reference_models import registry
from reference_models.hf import ConfigError, config_from_json
from reference_models.hf.layouts import config_to_json

FULL, SLIDING = "full_attention", "sliding_attention"


LONG: dict[str, Any] = {
    "type": "longrope",
    "short_factor": [1.0, 1.0, 1.0, 1.0],
    "long_factor": [2.0, 2.0, 2.0, 2.0],
    "original_max_position_embeddings": 64,
}


def written(family: str, variant: str, **changes: Any) -> dict[str, Any]:
    """A tiny variant as a config.json; a change to ... removes the field."""
    config = next(v.config for v in registry.variants(family) if v.name == variant)
    data = config_to_json(family, config, "float32")
    return {key: value for key, value in (data | changes).items() if value is not ...}


def read(*arguments: Any, **changes: Any) -> Any:
    return config_from_json(written(*arguments, **changes))[1]


@pytest.mark.parametrize("family", ["cohere2", "glm4_moe_lite", "minicpm3", "olmo3"])
def test_every_tiny_config_is_read_back(family: str) -> None:
    for variant in registry.variants(family):
        name, config, _ = config_from_json(config_to_json(family, variant.config, "float32"))
        assert (name, config) == (family, variant.config)


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({}, (6, 6, 6, None)),
        ({"sliding_window_pattern": ...}, (6, 6, 6, None)),  # every fourth layer, if nothing is said
        ({"sliding_window_pattern": ..., "_sliding_window_pattern": 2}, (6, None, 6, None)),
        ({"sliding_window_pattern": 1}, (None,) * 4),
        ({"sliding_window_pattern": 9}, (6,) * 4),
        ({"sliding_window_pattern": ..., "layer_types": [FULL, SLIDING, SLIDING, FULL]}, (None, 6, 6, None)),
        ({"layer_types": [SLIDING, SLIDING, SLIDING, FULL]}, (6, 6, 6, None)),
        ({"sliding_window": ...}, (4096, 4096, 4096, None)),
    ],
)
def test_which_layers_of_cohere2_have_a_window(changes: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    config = read("cohere2", "published-pattern", **changes)
    assert config.windows == windows and config.rotates == any(windows)
    again = config_from_json(config_to_json("cohere2", config, "float32"))[1]
    assert again.windows == windows


DEFAULT: dict[str, Any] = {"rope_type": "default", "rope_theta": 100.0}
YARN = DEFAULT | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}


@pytest.mark.parametrize(
    ("said", "factor"),
    [
        ({"rope_theta": 100.0, "rope_scaling": None}, None),
        ({"rope_theta": 100.0, "rope_scaling": YARN}, 4.0),
        (
            {"rope_theta": 100.0, "rope_scaling": {"type": "yarn", "factor": 2, "original_max_position_embeddings": 8}},
            2.0,
        ),
        ({"rope_parameters": {"full_attention": YARN, "sliding_attention": DEFAULT}}, 4.0),
        ({"rope_parameters": {"sliding_attention": DEFAULT}, "rope_theta": 100.0}, None),
        ({"rope_parameters": YARN}, 4.0),
    ],
)
def test_how_olmo3_turns(said: dict[str, Any], factor: float | None) -> None:
    nothing = dict.fromkeys(("rope_parameters", "rope_scaling", "rope_theta"), ...)
    config = read("olmo3", "plain", **nothing | said)
    assert config.rope_theta == 100.0
    assert (None if config.rope_scaling is None else config.rope_scaling.factor) == factor


@pytest.mark.parametrize(
    ("changes", "dense"),
    [
        ({"mlp_layer_types": ..., "first_k_dense_replace": ...}, 1),
        ({"mlp_layer_types": ..., "first_k_dense_replace": 0}, 0),
        ({"mlp_layer_types": ["dense", "dense"], "first_k_dense_replace": ...}, 2),
        ({"mlp_layer_types": ["sparse", "sparse"], "first_k_dense_replace": ...}, 0),
    ],
)
def test_which_layers_of_glm4_moe_lite_are_dense(changes: dict[str, Any], dense: int) -> None:
    assert read("glm4_moe_lite", "plain-latent", **changes).first_k_dense_replace == dense


@pytest.mark.parametrize(("family", "variant"), [("cohere2", "plain"), ("minicpm3", "plain-latent")])
def test_who_ties_when_nothing_is_said(family: str, variant: str) -> None:
    data = written(family, variant, tie_word_embeddings=...)
    for has_lm_head, tied in ((None, True), (True, False), (False, True)):
        assert config_from_json(data, has_lm_head)[1].tie_word_embeddings is tied


@pytest.mark.parametrize(
    ("family", "variant", "changes", "named"),
    [
        ("cohere2", "published-pattern", {"attention_bias": True}, "attention_bias is True"),
        ("cohere2", "published-pattern", {"use_qk_norm": True}, "use_qk_norm is True"),
        ("cohere2", "published-pattern", {"use_parallel_block": False}, "use_parallel_block is False"),
        ("cohere2", "published-pattern", {"rotary_pct": 0.5}, "rotary_pct is 0.5"),
        ("cohere2", "published-pattern", {"head_dim": 16}, "head_dim is 16"),
        ("cohere2", "published-pattern", {"rope_scaling": {"rope_type": "yarn"}}, "rope_type is 'yarn'"),
        ("cohere2", "published-pattern", {"layer_types": [FULL] * 4}, "disagree about which layers have a window"),
        ("cohere2", "published-pattern", {"layer_types": [FULL] * 3}, "layer_types must name one of"),
        ("cohere2", "published-pattern", {"layer_types": "full"}, "layer_types must be a list of names"),
        ("cohere2", "published-pattern", {"sliding_window": 0}, "sliding_window must lie in 1"),
        ("cohere2", "published-pattern", {"sliding_window_pattern": 0}, "sliding_window_pattern must lie in 1"),
        ("cohere2", "published-pattern", {"logit_scale": 0}, "logit_scale must be above 0"),
        ("cohere2", "published-pattern", {"num_attention_heads": 0}, "num_attention_heads must lie in 1"),
        ("glm4_moe_lite", "plain-latent", {"topk_method": "greedy"}, "topk_method is 'greedy'"),
        ("glm4_moe_lite", "plain-latent", {"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ("glm4_moe_lite", "plain-latent", {"moe_layer_freq": 2}, "moe_layer_freq is 2"),
        ("glm4_moe_lite", "plain-latent", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ("glm4_moe_lite", "plain-latent", {"num_key_value_heads": 2}, "num_key_value_heads is 2"),
        ("glm4_moe_lite", "plain-latent", {"rope_scaling": {"type": "yarn"}}, "rope_type is 'yarn'"),
        ("glm4_moe_lite", "plain-latent", {"first_k_dense_replace": 0}, "mlp_layer_types names 1 dense layers"),
        ("glm4_moe_lite", "plain-latent", {"mlp_layer_types": ["sparse", "dense"]}, "must name dense layers, then"),
        ("glm4_moe_lite", "plain-latent", {"mlp_layer_types": ["dense"]}, "must name dense layers, then"),
        ("minicpm3", "plain-latent", {"v_head_dim": 5}, "v_head_dim is 5"),
        ("minicpm3", "plain-latent", {"num_key_value_heads": 2}, "num_key_value_heads is 2"),
        ("minicpm3", "plain-latent", {"mlp_bias": True}, "mlp_bias is True"),
        ("minicpm3", "plain-latent", {"q_lora_rank": None}, "q_lora_rank is missing"),
        ("minicpm3", "plain-latent", {"rope_scaling": None}, "rope_type is 'default'"),
        ("minicpm3", "plain-latent", {"rope_scaling": {"type": "yarn"}}, "rope_type is 'yarn'"),
        ("minicpm3", "plain-latent", {"rope_scaling": LONG | {"short_factor": [1.0]}}, "one number for every pair"),
        ("minicpm3", "plain-latent", {"rope_scaling": LONG | {"short_factor": 2.0}}, "must be a list of numbers"),
        ("minicpm3", "plain-latent", {"rope_scaling": LONG | {"long_factor": ["x"] * 4}}, r"long_factor\[0\] must be"),
        ("minicpm3", "plain-latent", {"rope_scaling": LONG | {"factor": 2.0}}, "factor is 2.0: max_position"),
        ("minicpm3", "plain-latent", {"rope_scaling": LONG | {"attention_factor": 1.2}}, "attention_factor is 1.2"),
        ("minicpm3", "plain-latent", {"qk_rope_head_dim": 4}, "short_factor has 4 numbers"),
        ("olmo3", "plain", {"rope_theta": 5.0}, "rope_theta is 5.0, but"),
        ("olmo3", "plain", {"rope_scaling": {"rope_type": "llama3"}}, "rope_type is '(llama3|default)'"),
        ("olmo3", "yarn", {"rope_scaling": {"rope_type": "yarn", "mscale": 1.0}}, "mscale is 1.0: attention_factor"),
        ("olmo3", "yarn", {"rope_scaling": {"rope_type": "yarn", "truncate": False}}, "truncate is False"),
        ("olmo3", "yarn", {"rope_scaling": {"rope_type": "yarn", "factor": 8.0}}, "factor is 8.0, but"),
        (
            "olmo3",
            "plain",
            {"rope_parameters": {"sliding_attention": YARN, "full_attention": DEFAULT}},
            "sliding_attention.rope_type is 'yarn'",
        ),
        (
            "olmo3",
            "plain",
            {"rope_parameters": {"sliding_attention": {"rope_theta": 7.0}, "full_attention": DEFAULT}},
            "sliding_attention.rope_theta is 7.0",
        ),
        ("olmo3", "plain", {"layer_types": [SLIDING]}, "layer_types must name one of"),
        ("olmo3", "plain", {"head_dim": 16}, "head_dim is 16"),
    ],
)
def test_what_a_model_here_does_not_do_is_refused(
    family: str, variant: str, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named) as caught:
        read(family, variant, **changes)
    assert "\n" not in str(caught.value)


def test_defaults_are_those_of_the_published_class() -> None:
    config = read("cohere2", "plain", rope_theta=..., logit_scale=..., layer_norm_eps=..., num_key_value_heads=...)
    assert dataclasses.astuple(config)[9:12] == (10000.0, 1e-5, 0.0625)
    assert config.num_key_value_heads == config.num_attention_heads
