"""The text decoder that the M-RoPE families share: what differs is the blocks, the sections and the vision tower.

One forward builds the position ids, their angles and the mask once; every layer uses them. Vision happens in ``read``,
once per prompt; a forward takes from the ``Prompt`` whatever lies at the positions of its chunk.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx import nn

from reference_models import layers, prompt_rows, rope
from reference_models import prompt as prompts
from reference_models.engine import CacheSpec, make_caches, masks
from reference_models.engine.batch_cache import Cache
from reference_models.engine.batch_rows import BatchLengths
from reference_models.engine.kv_cache import KVCache, Storage


class MRopeDecoder(nn.Module):
    """Tokens ``[B, L]`` -> logits ``[B, L, vocab]``.

    ``config``: of a family; read are vocab_size, hidden_size, head_dim, rope_theta, rope_scaling, rms_norm_eps,
    tie_word_embeddings and the ids of the placeholders. ``blocks``: one per layer, all with attention. ``tower``: what
    the checkpoints call ``visual``, None for text alone. ``windows``: of every layer, how many keys a token sees, its
    own included, None for all; empty where no layer has one.
    """

    def __init__(
        self,
        config: Any,
        blocks: list[layers.Block],
        tower: nn.Module | None = None,
        windows: tuple[int | None, ...] = (),
    ):
        super().__init__()
        self.config = config
        self.visual = tower
        self.attention_layers = tuple(range(len(blocks)))
        self.windows = windows or (None,) * len(blocks)
        self._inv_freq = 1 / rope.standard_freqs(config.head_dim, config.rope_theta)
        self.model = layers.Trunk(config.vocab_size, config.hidden_size, config.rms_norm_eps, blocks)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def make_caches(self, storage: Storage | CacheSpec = "rows") -> list[KVCache]:
        """Empty caches, one per attention layer."""
        return make_caches(storage, self.windows)

    def read(self, tokens: mx.array, images: prompts.Images | None = None) -> prompts.Prompt:
        """What forwards over the prompt ``tokens [1, S]`` need of it and of its images. Raises ValueError."""
        return prompts.read(tokens, images, embed=self.model.embed_tokens, tower=self.visual, config=self.config)

    def __call__(
        self,
        tokens: mx.array,
        caches: Sequence[Cache],
        mask_policy: masks.MaskPolicy | masks.GivenMasks = "live",
        prompt: prompt_rows.Prompts = None,
    ) -> mx.array:
        """``prompt``: what was read for the first positions of the sequence, or of each row of a batch; text when None,
        and behind its end."""
        layers.check_inputs(tokens, caches, self.attention_layers)
        length, scaling = tokens.shape[1], self.config.rope_scaling
        x, position_ids, deepstack = self._read_rows(tokens, caches[0], prompt)
        cos, sin = rope.mrope_angles(
            position_ids, self._inv_freq, scaling.mrope_section, interleaved=scaling.mrope_interleaved
        )

        def rotation(q: mx.array, k: mx.array) -> tuple[mx.array, mx.array]:
            return rope.apply_mrope(q, k, cos, sin)

        # One mask for every kind of layer, from the first cache of that kind.
        made = {
            window: masks.mask_for(length, caches[self.windows.index(window)], mask_policy, window)
            for window in dict.fromkeys(self.windows)
        }
        for index, (block, cache) in enumerate(zip(self.model.layers, caches, strict=True)):
            x = block(x, rotation, cache, made[self.windows[index]])
            if index < len(deepstack):
                x = x + deepstack[index]
        x = self.model.norm(x)
        return self.model.embed_tokens.as_linear(x) if self.config.tie_word_embeddings else self.lm_head(x)

    def _read_rows(
        self, tokens: mx.array, cache: Cache, prompt: prompt_rows.Prompts
    ) -> tuple[mx.array, mx.array, tuple[mx.array, ...]]:
        """Embeddings ``[B, L, hidden]``, ids ``[3, B, L]`` and DeepStack's ``[B, L, hidden]`` per layer."""
        x = self.model.embed_tokens(tokens)
        if isinstance(cache, BatchLengths):
            return prompt_rows.lay_over(cache, prompt, tokens, x)
        if prompt is not None and not isinstance(prompt, prompts.Prompt):
            raise ValueError("prompts of rows need a batch of caches, which says where each row stands")
        delta = prompt.rope_delta if prompt else 0
        position_ids = rope.text_position_ids(cache.offset, delta, *tokens.shape)
        return prompt.lay_over(cache.offset, tokens, x, position_ids) if prompt else (x, position_ids, ())


def qwen3_attention(config: Any) -> layers.GroupedAttention:
    """Qwen3's attention, the same in both of its families: head_dim of its own, RMS norm on each head of q and k."""
    return layers.GroupedAttention(
        config.hidden_size,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
        qkv_bias=config.attention_bias,
        o_bias=config.attention_bias,
        qk_norm_eps=config.rms_norm_eps,
    )
