"""Variants that were drawn: the seed decides, and what is written comes back equal or is refused in one line."""

import copy
import json
from typing import Any

import pytest

from reference_models import drawn, registry
from reference_models.config_json import config_from_fields, config_to_fields
from reference_models.drawing import VISION_FAMILIES, draw_config
from reference_models.hf import ConfigError


def through_json(value: Any) -> Any:
    return json.loads(json.dumps(value, allow_nan=False))


@pytest.mark.parametrize("family", registry.FAMILIES)
def test_the_seed_decides_and_no_two_are_equal(family: str) -> None:
    first = drawn.drawn_variants(family, 5, 6)
    assert [variant.name for variant in first] == [f"drawn-{number}" for number in range(1, 7)]
    assert drawn.drawn_variants(family, 5, 6) == first
    assert drawn.drawn_variants(family, 5, 3) == first[:3]  # more of them change none
    built_in = [(variant.config, variant.options) for variant in registry.variants(family)]
    everything = [(variant.config, variant.options) for variant in first] + built_in
    assert all(one not in everything[:at] for at, one in enumerate(everything))
    others = [drawn.drawn_variants(family, seed, 6) for seed in range(6, 10)]
    assert all(not {v.config for v in first} & {v.config for v in other} for other in others)
    assert drawn.drawn_variants(family, 5, 0) == ()


def test_windows_are_drawn_where_the_family_has_them() -> None:
    some = [variant.config for seed in range(20) for variant in drawn.drawn_variants("qwen2_vl", seed, 3)]
    kinds = {(any(config.windows), all(config.windows)) for config in some}
    assert kinds == {(False, False), (True, False), (True, True)}
    assert not any(
        draw_config("qwen2_vl", lambda options: options[-1]).windows
    )  # the peers of the parity table have none


def test_a_family_that_allows_no_more_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    only = registry.variants("qwen3_vl")[0].config
    monkeypatch.setattr(drawn, "draw_config", lambda *_, **__: only)
    with pytest.raises(RuntimeError, match="qwen3_vl has no 1 configurations"):
        drawn.drawn_variants("qwen3_vl", 0, 1)


@pytest.mark.parametrize("family", registry.FAMILIES)
def test_what_is_written_is_read_back_equal(family: str) -> None:
    for seed in range(25):
        for variant in drawn.drawn_variants(family, seed, 2):
            again = drawn.read_variant(family, variant.name, through_json(drawn.variant_to_json(variant)))
            assert again == variant and again.options == variant.options
    for variant in registry.variants(family):
        written = through_json(config_to_fields(variant.config))
        assert config_from_fields(registry.config_class(family), written) == variant.config


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_a_vision_tower_is_read_back_as_well(family: str) -> None:
    import random

    for seed in range(25):
        config = draw_config(family, random.Random(seed).choice, images=True)
        assert config_from_fields(registry.config_class(family), through_json(config_to_fields(config))) == config


def test_a_field_that_a_file_lacks_has_its_default() -> None:
    variant = drawn.drawn_variants("qwen2_vl", 1, 1)[0]
    data = drawn.variant_to_json(variant)
    for name in ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types", "vision"):
        del data["config"][name]
    assert drawn.read_variant("qwen2_vl", "drawn-1", data).config.use_sliding_window is False


def put(*path: str | int, to: Any) -> Any:
    def change(data: Any) -> None:
        for step in path[:-1]:
            data = data[step]
        data[path[-1]] = to

    return change


def gone(*path: str | int) -> Any:
    def change(data: Any) -> None:
        for step in path[:-1]:
            data = data[step]
        del data[path[-1]]

    return change


HOSTILE: list[tuple[str, Any, str]] = [
    ("qwen2_vl", put("config", to=None), "config must be an object"),
    ("qwen2_vl", put("config", to=[1]), "config must be an object"),
    ("qwen2_vl", put("config", "hidden_size", to=1 << 40), "config.hidden_size must be a whole number in 0..4096"),
    ("qwen2_vl", put("config", "hidden_size", to=-8), "config.hidden_size must be a whole number"),
    ("qwen2_vl", put("config", "hidden_size", to=True), "config.hidden_size must be a whole number"),
    ("qwen2_vl", put("config", "hidden_size", to=32.0), "config.hidden_size must be a whole number"),
    ("qwen2_vl", put("config", "hidden_size", to="32"), "config.hidden_size must be a whole number"),
    ("qwen2_vl", put("config", "vocab_size", to=1 << 20), "config.vocab_size must be a whole number in 0..65536"),
    (
        "qwen2_vl",
        put("config", "num_hidden_layers", to=1000),
        "config.num_hidden_layers must be a whole number in 0..64",
    ),
    ("qwen2_vl", put("config", "num_attention_heads", to=0), "config: num_attention_heads must be at least 1"),
    ("qwen2_vl", put("config", "num_attention_heads", to=4096), "config.num_attention_heads must be"),
    ("qwen2_vl", put("config", "rope_theta", to=1e300), "config.rope_theta must be a number"),
    ("qwen2_vl", put("config", "rope_theta", to=float("nan")), "config.rope_theta must be a number"),
    ("qwen2_vl", put("config", "tie_word_embeddings", to=1), "config.tie_word_embeddings must be true or false"),
    ("qwen2_vl", put("config", "rope_scaling", "mrope_section", to=[1, 1]), "mrope_section must have 3 entries"),
    ("qwen2_vl", put("config", "rope_scaling", "mrope_section", to="211"), "mrope_section must be a list"),
    ("qwen2_vl", put("config", "rope_scaling", "mrope_section", to=[1] * 65), "must be a list of at most 64 entries"),
    ("qwen2_vl", put("config", "rope_scaling", "more", to=1), "config.rope_scaling has no field 'more'"),
    ("qwen2_vl", put("config", "__class__", to="x"), "config has no field '__class__'"),
    ("qwen2_vl", gone("config", "vocab_size"), "config.vocab_size is missing"),
    ("qwen2_vl", put("config", "layer_types", to=["chunked"]), "config.layer_types[0] must be one of full_attention"),
    ("qwen2_vl", put("config", "layer_types", to=[[]]), "config.layer_types[0] must be one of full_attention"),
    ("qwen2_vl", put("options", to={"cache_form": "latent"}), "qwen2_vl cannot be built with the options"),
    ("qwen2_vl", gone("options"), "an object with config and options"),
    ("mistral4", put("options", to={}), "mistral4 cannot be built with the options"),
    ("mistral4", put("options", to=[]), "mistral4 cannot be built with the options"),
    ("mistral4", put("config", "num_experts_per_tok", to=99), "config: num_experts_per_tok"),
    ("mistral4", put("config", "n_routed_experts", to=4096), "parameters; at most 4,000,000 are built from a file"),
    ("mistral4", put("config", "rope_parameters", "rope_type", to="x" * 65), "rope_type must be a short text"),
    ("nemotron_nas", put("config", "block_configs", to=[]), "config: block_configs has 0 entries"),
    (
        "nemotron_nas",
        put("config", "block_configs", 0, "ffn", "ffn_mult", to=1e9),
        "no model can be built|parameters; at",
    ),
    ("nemotron_nas", put("config", "block_configs", 0, "ffn", to={}), "block_configs[0].ffn: set exactly one"),
    ("nemotron_nas", put("config", "block_configs", 0, to={}), "block_configs[0].attention is missing"),
]


@pytest.mark.parametrize(("family", "change", "named"), HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_configuration_is_refused_in_one_line(family: str, change: Any, named: str) -> None:
    data = through_json(drawn.variant_to_json(drawn.drawn_variants(family, 0, 1)[0]))
    if family == "nemotron_nas":
        data["config"]["block_configs"][0]["ffn"] = {"ffn_mult": 1.0}
    wide = copy.deepcopy(data)
    change(wide)
    with pytest.raises(ConfigError) as caught:
        drawn.read_variant(family, "drawn-1", wide)
    assert any(words in str(caught.value) for words in named.split("|"))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


def test_the_largest_of_everything_is_refused_without_building_it() -> None:
    """Every size at its bound: terabytes, were a single array computed."""
    data = through_json(drawn.variant_to_json(drawn.drawn_variants("qwen3_vl_moe", 0, 1)[0]))
    data["config"] |= {
        "vocab_size": 1 << 16,
        "hidden_size": 4096,
        "head_dim": 4096,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "num_hidden_layers": 64,
        "num_experts": 4096,
        "moe_intermediate_size": 4096,
        "rope_scaling": {"mrope_section": [2048, 0, 0], "mrope_interleaved": True},
    }
    with pytest.raises(ConfigError, match=r"the model has [\d,]{15,} parameters"):
        drawn.read_variant("qwen3_vl_moe", "drawn-1", data)


@pytest.mark.parametrize("name", ["drawn-", "drawn-x", "plain", "drawn-1\n", "drawn-1234567", "drawn-²", "../drawn-1"])
def test_a_drawn_variant_has_no_other_name(name: str) -> None:
    data = drawn.variant_to_json(drawn.drawn_variants("qwen2_vl", 0, 1)[0])
    with pytest.raises(ConfigError, match="a drawn variant is called drawn-1"):
        drawn.read_variant("qwen2_vl", name, data)


def test_an_unknown_family_is_refused() -> None:
    with pytest.raises(registry.UnknownFamily):
        drawn.read_variant("qwen4", "drawn-1", {})
