"""``synth --sizes heads``: what a cache sees is of the published shape, everything else is small."""

from pathlib import Path
from typing import Any

import pytest

from harness.checkpoints.checkpoint import open_checkpoint
from harness.checkpoints.synthesis import synthesise
from reference_models.hf.sizes import SIZES

#: What decides the shape of a row, and how it turns with its position.
OF_A_ROW = ("head_dim", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "rope_theta")
SCALINGS = ("rope_scaling", "rope_parameters")
#: Query heads that share a key head, where it is not that of the model in ``sizes``: Qwen2-VL-2B's.
GROUPS = {"qwen2_vl": 6}


def groups(config: Any) -> int:
    """Query heads that share a key head; 0 for latent attention and for layers that differ in it."""
    shared: int | None = getattr(config, "num_key_value_heads", None)
    return config.num_attention_heads // shared if shared else 0


@pytest.mark.parametrize("family", SIZES["heads"])
def test_rows_are_those_of_the_published_model(family: str) -> None:
    published, heads = SIZES["published"][family](), SIZES["heads"][family]()
    for name in (*OF_A_ROW, *SCALINGS):
        assert getattr(heads, name, None) == getattr(published, name, None), name
    assert groups(heads) == GROUPS.get(family, groups(published))
    assert heads.hidden_size < published.hidden_size and heads.num_hidden_layers == published.num_hidden_layers


@pytest.mark.parametrize("family", ["minicpm3", "nemotron_nas", "qwen2_vl", "qwen3_vl_moe"])
@pytest.mark.parametrize("bits", [None, 4])
def test_such_a_checkpoint_is_what_was_asked_for(family: str, bits: int | None, tmp_path: Path) -> None:
    synthesise(family, tmp_path / "c", sizes="heads", bits=bits)
    checkpoint = open_checkpoint(tmp_path / "c")
    assert checkpoint.model_config == SIZES["heads"][family]()
    assert checkpoint.weights.bytes < 80e6
