"""Synthetic checkpoints in every engine that is installed: ours, transformers, mlx-lm. Same logits, same continuations.

Also mlx-lm's own conversions of them, quantised and not, read by us.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.checkpoints import greedy, load_model, logits, open_checkpoint, synthesise
from reference_models import nemotron_nas
from reference_models.hf.layouts import ONLY_MLX
from reference_models.registry import FAMILIES
from tests.checkpoints.conftest import Synth

PARITY = "the published implementations are not installed: pip install 'mlx-kv-harness[peers]'"
IDS = np.random.default_rng(3).integers(0, 256, (2, 12))
STEPS = 12
TOLERANCE = 5e-5  # of the deviation of the logits


def ours(folder: Path, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """Logits of ``IDS`` and a greedy continuation."""
    model = load_model(open_checkpoint(folder), **options)
    return logits(model, IDS), greedy(model, IDS, STEPS)


def with_mlx_lm(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    import mlx.core as mx
    from mlx_lm.utils import load_model as load

    model, _ = load(folder)
    ids = mx.array(IDS)
    for _ in range(STEPS):
        ids = mx.concatenate([ids, mx.argmax(model(ids)[:, -1:], axis=-1)], axis=1)
    return np.array(model(mx.array(IDS)).astype(mx.float32)), np.array(ids[:, -STEPS:])


def with_transformers(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    import torch
    import transformers

    name = open_checkpoint(folder).config["architectures"][0]
    model, said = getattr(transformers, name).from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not said["unexpected_keys"] and not said["missing_keys"]
    ids = torch.from_numpy(IDS)
    with torch.no_grad():
        out = model.eval()(input_ids=ids, use_cache=False).logits
        for _ in range(STEPS):
            ids = torch.cat([ids, model(input_ids=ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    return out.numpy(), ids[:, -STEPS:].numpy()


def agree(mine: tuple[np.ndarray, np.ndarray], other: tuple[np.ndarray, np.ndarray], tolerance: float) -> None:
    off = float(np.abs(mine[0] - other[0]).max() / other[0].std())
    assert off <= tolerance, f"logits differ by {off:.1e} of their deviation"
    np.testing.assert_array_equal(mine[1], other[1])


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in ONLY_MLX])
@pytest.mark.parametrize("shard_bytes", [1 << 30, 60_000], ids=["single", "sharded"])
def test_transformers_continues_as_we_do(family: str, shard_bytes: int, synth: Synth) -> None:
    pytest.importorskip("torch", reason=PARITY)
    pytest.importorskip("transformers", reason=PARITY)
    folder = synth(family, shard_bytes=shard_bytes)
    assert (len(list(folder.glob("*.safetensors"))) > 1) == (shard_bytes < 1 << 30)
    agree(ours(folder), with_transformers(folder), TOLERANCE)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", ["hf", "mlx"])
def test_mlx_lm_continues_as_we_do(family: str, layout: str, synth: Synth) -> None:
    pytest.importorskip("mlx_lm", reason=PARITY)
    if layout == "hf" and family in ONLY_MLX:
        pytest.skip("mlx-lm does not rename the linear replacements of the original layout")
    folder = synth(family, layout=layout)
    agree(ours(folder), with_mlx_lm(folder), TOLERANCE)


def test_mlx_lm_scales_rope_as_we_do(tmp_path: Path) -> None:
    pytest.importorskip("mlx_lm", reason=PARITY)
    config = dataclasses.replace(
        nemotron_nas.TINY["llama3-rope"], vocab_size=320, rope_theta=10000.0, tie_word_embeddings=True
    )
    synthesise("nemotron_nas", tmp_path / "c", config=config)
    agree(ours(tmp_path / "c"), with_mlx_lm(tmp_path / "c"), TOLERANCE)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_mlx_lm_reads_our_quantisation_as_we_do(family: str, bits: int, synth: Synth) -> None:
    pytest.importorskip("mlx_lm", reason=PARITY)
    folder = synth(family, bits=bits)
    # A packed product and an unpacked one round differently; mlx-lm keeps MLA's matrix and the routers packed.
    agree(ours(folder), with_mlx_lm(folder), 2e-4)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", ["hf", "mlx"])
def test_every_layout_holds_the_same_model(family: str, layout: str, synth: Synth) -> None:
    first, other = ours(synth(family)), ours(synth(family, layout=layout))
    np.testing.assert_array_equal(first[0], other[0])
    np.testing.assert_array_equal(first[1], other[1])


def _odd_layers(path: str, module: Any) -> Any:
    """A recipe with everything: 8 bits for the output, 3 bits here and there, layer 1's attention left alone."""
    if path.endswith("lm_head"):
        return {"bits": 8, "group_size": 64}
    if ".layers.1.self_attn" in path:
        return False
    if path.endswith(("down_proj", "embed_q", "linear")):
        return {"bits": 3, "group_size": 32}
    return True


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("how", ["plain", "float16", "4 bits", "recipe"])
def test_we_read_what_mlx_lm_converts(family: str, how: str, synth: Synth, tmp_path: Path) -> None:
    pytest.importorskip("mlx_lm", reason=PARITY)
    from mlx_lm import convert

    options: dict[str, Any] = {
        "plain": {},
        "float16": {"dtype": "float16"},
        "4 bits": {"quantize": True, "q_bits": 4, "q_group_size": 32},
        "recipe": {"quantize": True, "q_bits": 6, "q_group_size": 32, "quant_predicate": _odd_layers},
    }[how]
    folder = tmp_path / "converted"
    convert(str(synth(family)), str(folder), **options)
    if how != "float16":
        agree(ours(folder), with_mlx_lm(folder), 2e-4)
        return
    # float16 experts do not run on every CPU; the stored numbers are what matters here
    mine = ours(folder, dtype="float32")[0]
    reference = ours(synth(family))[0]
    assert np.abs(mine - reference).max() < 0.05 * reference.std()


def test_the_tokenizer_says_what_was_written(synth: Synth) -> None:
    transformers = pytest.importorskip("transformers", reason=PARITY)
    for family in FAMILIES:
        tokenizer = transformers.AutoTokenizer.from_pretrained(synth(family))
        text = "Zw\u00f6lf <|im_end|>\n\t ok"
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids) == text and 258 in ids and max(ids) < 263, family
