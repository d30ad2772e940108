"""Numbers that a model divides by: a config, a drawn one too, refuses those that make NaN or infinity of everything."""

import re
from dataclasses import replace
from typing import Any

import pytest

from reference_models import drawn, nemotron_nas
from reference_models.hf.sizes import SIZES
from reference_models.nemotron_nas import AttentionBlock, BlockConfig, FFNBlock
from reference_models.registry import FAMILIES

BAD = [0.0, -1.0, 1e-300, 1e39, float("nan"), float("inf")]


def _fields(config: Any) -> list[str]:
    return [name for name in ("rope_theta", "rms_norm_eps") if hasattr(config, name)]


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_refuses_divisors_that_are_none(family: str, value: float) -> None:
    config = SIZES["tiny"][family]()
    for name in _fields(config):
        with pytest.raises(ValueError, match=rf"^{name} must be above 0 .*, not {re.escape(str(value))}$"):
            replace(config, **{name: value})
    if family == "mistral4":
        with pytest.raises(ValueError, match=r"^rope_theta must be above 0"):
            replace(config.rope_parameters, rope_theta=value)


@pytest.mark.parametrize("value", [0, -1, 1e-300])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_drawn_variant_refuses_them_in_one_line(family: str, value: float) -> None:
    variant = drawn.drawn_variants(family, 0, 1)[0]
    for name in _fields(variant.config):
        data = drawn.variant_to_json(variant)
        data["config"][name] = value
        with pytest.raises(ValueError, match=f"{name} must be above 0") as caught:
            drawn.read_variant(family, "drawn-1", data)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("value", "why"), [*((value, "above 0") for value in BAD), (1e-9, "of no width")])
def test_a_feed_forward_has_a_width(value: float, why: str) -> None:
    config = nemotron_nas.TINY["plain"]
    blocks = (BlockConfig(AttentionBlock(n_heads_in_group=1), FFNBlock(ffn_mult=value)),) * config.num_hidden_layers
    with pytest.raises(ValueError, match=rf"^block_configs\[0\]: ffn_mult .*{why}"):
        replace(config, block_configs=blocks)
