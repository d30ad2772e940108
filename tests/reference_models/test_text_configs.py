"""What a config.json of the later text families may say, and what is refused in one line."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from reference_models import registry
from reference_models.hf import ConfigError, config_from_json
from reference_models.hf.layouts import config_to_json

FULL, SLIDING = "full_attention", "sliding_attention"


def written(family: str, variant: str, **changes: Any) -> dict[str, Any]:
    """A tiny variant as a config.json; a change to ... removes the field."""
    config = next(v.config for v in registry.variants(family) if v.name == variant)
    data = config_to_json(family, config, "float32")
    return {key: value for key, value in (data | changes).items() if value is not ...}


def read(*arguments: Any, **changes: Any) -> Any:
    return config_from_json(written(*arguments, **changes))[1]


@pytest.mark.parametrize("family", ["cohere2"])
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


def test_who_ties_when_nothing_is_said() -> None:
    data = written("cohere2", "plain", tie_word_embeddings=...)
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
