"""transformers' Llama for nemotron_nas: a layer with attention and feed-forward is a Llama layer of its own sizes.

transformers has no Nemotron-NAS. Its Llama layers, one config each, stacked between the embedding and the norm, are
the same model wherever no part is replaced or absent.
"""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import numpy as np

from reference_models import nemotron_nas
from tests.parity import checkpoints
from tests.parity.cases import Case


class LlamaLayers:
    """The published Llama layers; only configurations in which every layer is one."""

    name = "transformers-llama"
    needs = ("transformers", "torch")
    mended: frozenset[str] = frozenset()

    def modalities(self, family: str) -> tuple[str, ...]:
        return ("text",) if family == "nemotron_nas" else ()

    def adapt(self, case: Case) -> Case:
        """Parts that are replaced or absent become real ones."""
        choose = random.Random(case.seed).choice
        heads = case.config.num_attention_heads
        groups = [group for group in range(1, heads + 1) if heads % group == 0]
        blocks = tuple(
            nemotron_nas.BlockConfig(
                nemotron_nas.AttentionBlock(block.attention.n_heads_in_group or choose(groups)),
                nemotron_nas.FFNBlock(block.ffn.ffn_mult or 1.0),
            )
            for block in case.config.block_configs
        )
        return dataclasses.replace(case, config=dataclasses.replace(case.config, block_configs=blocks))

    def open(self, case: Case, folder: Path) -> LlamaEngine:
        checkpoints.write(case, folder)
        return LlamaEngine(case, folder)


def llama_layer(config: nemotron_nas.Config, index: int, weights: dict[str, Any]) -> tuple[Any, Any]:
    """The Llama layer (and its RoPE) that layer ``index`` of a config is; both its parts are real."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    block = config.block_configs[index]
    assert block.attention.n_heads_in_group is not None and block.ffn.ffn_mult is not None
    turning: dict[str, Any] = {"rope_type": "default"}
    if config.rope_scaling is not None:
        turning = dataclasses.asdict(config.rope_scaling)
    llama = LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=nemotron_nas.intermediate_size(block.ffn.ffn_mult, config.hidden_size),
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_attention_heads // block.attention.n_heads_in_group,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        attention_bias=config.attention_bias,
        mlp_bias=config.mlp_bias,
        rope_parameters=turning | {"rope_theta": config.rope_theta},
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="eager",
    )
    layer = LlamaDecoderLayer(llama, index).eval()
    prefix = f"model.layers.{index}."
    layer.load_state_dict({name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)})
    return layer, LlamaRotaryEmbedding(llama)


class LlamaEngine:
    """Llama layers with one sequence."""

    def __init__(self, case: Case, folder: Path):
        from safetensors.torch import load_file
        from transformers import DynamicCache
        from transformers.models.llama.modeling_llama import LlamaRMSNorm

        self.case, self.routed = case, list[np.ndarray]()
        self.weights = load_file(folder / "model.safetensors")
        self.layers = [llama_layer(case.config, index, self.weights) for index in range(case.config.num_hidden_layers)]
        self.norm = LlamaRMSNorm(case.config.hidden_size, eps=case.config.rms_norm_eps)
        self.norm.load_state_dict({"weight": self.weights["model.norm.weight"]})
        self.cache = DynamicCache()
        self.offset = 0

    def prefill(self) -> np.ndarray:
        return self._forward(self.case.tokens)

    def step(self, token: int) -> np.ndarray:
        return self._forward((token,))[0]

    def _forward(self, tokens: tuple[int, ...]) -> np.ndarray:
        import torch

        embedding = self.weights["model.embed_tokens.weight"]
        with torch.no_grad():
            x = embedding[torch.tensor([list(tokens)])]
            for layer, rotary in self.layers:
                x = run_layer(layer, rotary, x, self.offset, self.cache)
            x = self.norm(x)
            head = embedding if self.case.config.tie_word_embeddings else self.weights["lm_head.weight"]
            self.offset += len(tokens)
            return np.asarray((x @ head.T)[0])


def run_layer(layer: Any, rotary: Any, x: Any, offset: int, cache: Any) -> Any:
    """A Llama layer over ``x [1, L, hidden]`` at ``offset``, its mask made as its model makes it."""
    import torch

    length = x.shape[1]
    positions = torch.arange(offset, offset + length)[None]
    hidden = torch.arange(offset + length)[None, :] > positions[0][:, None]
    mask = torch.zeros(hidden.shape).masked_fill(hidden, float("-inf"))[None, None]
    return layer(
        x,
        attention_mask=mask,
        position_ids=positions,
        position_embeddings=rotary(x, positions),
        cache=cache,
        use_cache=cache is not None,
    )
