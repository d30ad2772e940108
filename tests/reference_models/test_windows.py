"""Sliding windows of qwen2_vl: which layers have one, what a config may say of them, and the published numbers."""

import dataclasses
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from reference_models import qwen2_vl, registry
from reference_models.hf import ConfigError, config_from_json
from reference_models.hf.layouts import config_to_json

FULL, SLIDING = "full_attention", "sliding_attention"
ORACLE = "the published implementation is not installed: pip install 'mlx-kv-harness[parity]'"


def tiny(**changes: Any) -> qwen2_vl.Config:
    """Four layers with a window of 5 from the second layer on, changed."""
    fields = {
        "vocab_size": 320,
        "num_hidden_layers": 4,
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 1,
    }
    return dataclasses.replace(qwen2_vl.TINY["plain"], **(fields | changes))


def written(**changes: Any) -> dict[str, Any]:
    """The same as a config.json; a change to ... removes the field."""
    data = config_to_json("qwen2_vl", tiny(), "float32")
    return {key: value for key, value in (data | changes).items() if value is not ...}


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({}, (None, 5, 5, 5)),
        ({"max_window_layers": 0}, (5,) * 4),
        ({"max_window_layers": 4}, (None,) * 4),
        ({"use_sliding_window": False}, (None,) * 4),
        ({"layer_types": (SLIDING, FULL) * 2, "max_window_layers": None}, (5, None) * 2),
        ({"layer_types": (SLIDING, FULL) * 2, "max_window_layers": 80}, (5, None) * 2),  # as transformers writes it
        ({"layer_types": (FULL, SLIDING, SLIDING, SLIDING)}, (None, 5, 5, 5)),
    ],
)
def test_which_layers_have_a_window(changes: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    config = tiny(**changes)
    assert config.windows == windows
    model: Any = registry.Variant("qwen2_vl", "changed", config).build(0)
    assert model.windows == windows
    family, read, _ = config_from_json(config_to_json("qwen2_vl", config, "float32"))
    assert (family, read.windows) == ("qwen2_vl", windows)


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"sliding_window": ...}, (None, 4096, 4096, 4096)),  # the defaults of transformers, which leaves them out
        ({"max_window_layers": ...}, (None,) * 4),
        ({"use_sliding_window": ...}, (None,) * 4),
        ({"use_sliding_window": None, "sliding_window": 32768, "max_window_layers": 28}, (None,) * 4),
        ({"use_sliding_window": False, "sliding_window": None}, (None,) * 4),
    ],
)
def test_what_a_config_leaves_out(changes: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert config_from_json(written(**changes))[1].windows == windows


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"sliding_window": None}, "use_sliding_window is true, but sliding_window is missing"),
        ({"sliding_window": 0}, "sliding_window must lie in 1"),
        ({"sliding_window": 2.5}, "sliding_window must be a whole number"),
        ({"max_window_layers": -1}, "max_window_layers must lie in 0"),
        ({"use_sliding_window": "yes"}, "use_sliding_window must be true or false"),
        ({"layer_types": [FULL] * 3}, "layer_types must name one of .* for each of 4 layers"),
        ({"layer_types": [FULL, SLIDING, SLIDING, "chunked_attention"]}, "layer_types must name one of"),
        ({"layer_types": FULL}, "layer_types must be a list of names"),
        ({"layer_types": [1, 2, 3, 4]}, "layer_types must be a list of names"),
        ({"layer_types": [SLIDING] * 4}, r"layer_types and max_window_layers \(1\) disagree"),
        ({"layer_types": [SLIDING] * 4, "use_sliding_window": False}, "but use_sliding_window is false"),
    ],
)
def test_a_config_that_contradicts_itself_is_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named) as caught:
        config_from_json(written(**changes))
    assert "\n" not in str(caught.value)


def test_nothing_says_where_the_windows_are() -> None:
    with pytest.raises(ValueError, match="neither layer_types nor max_window_layers"):
        tiny(max_window_layers=None)
    with pytest.raises(ValueError, match="max_window_layers must be at least 0"):
        tiny(max_window_layers=-1)
    with pytest.raises(ValueError, match="sliding_window must be at least 1"):
        tiny(sliding_window=0)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("layer_types", [None, (SLIDING, FULL, FULL, SLIDING)])
def test_windows_agree_with_the_published_implementation(attention: str, layer_types: Any) -> None:
    """A prompt of 20 tokens, four times the window, read in chunks and token by token here, at once there."""
    torch = pytest.importorskip("torch", reason=ORACLE)
    transformers = pytest.importorskip("transformers", reason=ORACLE)
    config = tiny(layer_types=layer_types, max_window_layers=80 if layer_types else 1)
    ours: Any = registry.Variant("qwen2_vl", "changed", config).build(5)
    tokens = np.random.default_rng(3).integers(0, 60, (1, 20))
    whole = transformers.Qwen2VLConfig(**config_to_json("qwen2_vl", config, "float32"))
    theirs = transformers.Qwen2VLForConditionalGeneration._from_config(whole, attn_implementation=attention)
    state = {
        name.replace("model.", "model.language_model.", 1): torch.from_numpy(np.array(value))
        for name, value in tree_flatten(ours.parameters())
    }
    missing, unexpected = theirs.load_state_dict(state, strict=False)
    assert not unexpected and all(".visual." in name for name in missing)
    with torch.no_grad():
        expected = theirs.eval()(input_ids=torch.from_numpy(tokens), use_cache=False).logits[0].numpy()
    for cuts in ((20,), (7, 12, 13, 14, 20), tuple(range(1, 21))):
        caches = ours.make_caches()
        starts = (0, *cuts[:-1])
        pieces = [np.array(ours(mx.array(tokens[:, a:b]), caches))[0] for a, b in zip(starts, cuts, strict=True)]
        assert np.abs(np.concatenate(pieces) - expected).max() <= 5e-5 * expected.std()
    blind = dataclasses.replace(config, use_sliding_window=False, layer_types=None)
    full: Any = registry.Variant("qwen2_vl", "changed", blind).build(5)
    without = np.array(full(mx.array(tokens), full.make_caches()))[0]
    assert np.abs(without - expected).max() > 0.1 * expected.std()  # or the windows would not have mattered
