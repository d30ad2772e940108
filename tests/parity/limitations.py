"""What a peer refuses or gets wrong, as data: when, since which version, what it says or by how much, and why.

``limitation``: the peer refuses, with ``says`` in its message. ``known failure``: it answers and is off by more than
the tolerance, within a range. Every entry is tried on cases that no other one covers, which alone prove it; one that no
longer fails is reported as ``FIXED?`` and fails the run, until its ``versions`` end where the peer was mended.
"""

from __future__ import annotations

import re

from tests.parity.cases import Case
from tests.parity.comparing import DECODES
from tests.parity.conditions import (
    bare,
    few_experts,
    long_video,
    longest_window,
    mistaken_patches,
    shortest_window,
    tower,
    turned,
    unscaled_yarn,
)
from tests.parity.entry import Kind as Kind
from tests.parity.entry import Limitation as Limitation
from tests.parity.peers.base import Peer
from tests.parity.text_limitations import TEXT_LIMITATIONS

QWEN3 = ("qwen3_vl", "qwen3_vl_moe")
QWEN = ("qwen2_vl", *QWEN3)


def _cut(case: Case) -> bool:
    """A window that the prompt, or what is decoded behind it, outgrows."""
    return shortest_window(case) < len(case.tokens) + DECODES


LIMITATIONS: tuple[Limitation, ...] = (
    Limitation(
        id="transformers-one-expert-a-group",
        peer="transformers",
        families=("glm4_moe_lite", "mistral4"),
        versions=">=5.24",
        kind="limitation",
        condition="a group holds one expert",
        holds=few_experts,
        says="selected index k out of range",
        why="the TopkRouter of both families scores every group by topk(2), a single group as well",
    ),
    Limitation(
        id="transformers-ids-behind-a-long-video",
        peer="transformers",
        families=("qwen2_vl",),
        versions=">=5.24",
        kind="known failure",
        condition="tokens follow on a video with more frames than rows and columns of tokens",
        holds=long_video,
        seen=lambda case: longest_window(case) > 1,  # else no token sees another, wherever they stand
        span=(3e-3, 30.0),
        why="get_rope_index goes on at start + max(h, w) // merge and leaves the frames out; the paper (arXiv "
        "2409.12191, section 2.1), the code published with the checkpoints and mlx-vlm go on above the largest id",
    ),
    Limitation(
        id="mlx-lm-yarn-without-mscale",
        peer="mlx-lm",
        families=("mistral4",),
        versions=">=0.32.2",
        kind="known failure",
        condition="mscale is 0, mscale_all_dim is not, and factor is above 1",
        holds=unscaled_yarn,
        span=(5e-3, 40.0),
        why="YarnRoPE divides the two corrections even if one of them is 0; the published code takes the ratio only if "
        "both are set, else the correction of the factor alone",
    ),
    Limitation(
        id="mlx-lm-no-windows",
        peer="mlx-lm",
        families=("qwen2_vl",),
        versions=">=0.32.2",
        kind="known failure",
        condition="a layer has a sliding window shorter than the sequence",
        holds=_cut,
        seen=lambda case: shortest_window(case) <= len(case.tokens) // 2,
        span=(3e-2, 40.0),
        why="qwen2_vl is qwen2 there, which has neither use_sliding_window nor layer_types",
    ),
    Limitation(
        id="mlx-vlm-no-windows",
        peer="mlx-vlm",
        families=("qwen2_vl",),
        versions=">=0.7.10",
        kind="known failure",
        condition="a layer has a sliding window shorter than the sequence",
        holds=_cut,
        seen=lambda case: shortest_window(case) <= len(case.tokens) // 2,
        span=(3e-2, 40.0),
        why="TextConfig reads sliding_window and use_sliding_window, and no model code looks at them",
    ),
    Limitation(
        id="mlx-lm-attention-bias",
        peer="mlx-lm",
        families=QWEN3,
        versions=">=0.32.2",
        kind="limitation",
        condition="attention_bias is set",
        holds=lambda case: case.config.attention_bias,
        says="parameters not in model:.*self_attn.*bias",
        why="Attention of qwen3 and qwen3_moe makes its projections with bias=False",
    ),
    Limitation(
        id="mlx-lm-tied-moe",
        peer="mlx-lm",
        families=("qwen3_vl_moe",),
        versions=">=0.32.2",
        kind="limitation",
        condition="tie_word_embeddings is set",
        holds=lambda case: case.config.tie_word_embeddings,
        says="lm_head",
        why="Model.sanitize of qwen3_vl_moe takes weights['lm_head'] whether or not there is one",
    ),
    Limitation(
        id="mlx-vlm-attention-bias",
        peer="mlx-vlm",
        families=QWEN3,
        versions=">=0.7.10",
        kind="limitation",
        condition="attention_bias is set",
        holds=lambda case: case.config.attention_bias,
        says="parameters not in model:.*self_attn.*bias",
        why="Attention of both families makes its projections with bias=False",
    ),
    Limitation(
        id="mlx-vlm-patches-taken-for-its-own",
        peer="mlx-vlm",
        families=QWEN,
        versions=">=0.7.10",
        kind="limitation",
        condition="the patch embedding looks as if channels came last: patch_size 3, or temporal_patch_size = "
        "patch_size <= in_channels",
        holds=tower(mistaken_patches),
        says="patch_embed.proj.weight",
        why="VisionModel.sanitize guesses the layout from the shape alone (check_array_shape) and leaves such a weight "
        "as it is; published sizes (3 channels, 2 frames, patches of 14 or 16) are guessed right",
    ),
    Limitation(
        id="mlx-vlm-merge-of-two",
        peer="mlx-vlm",
        families=("qwen2_vl",),
        versions=">=0.7.10",
        kind="limitation",
        condition="spatial_merge_size is not 2",
        holds=tower(lambda vision: vision.spatial_merge_size != 2),
        says="vision_tower.merger.mlp",
        why="VisionModel builds PatchMerger with its default of 2 instead of spatial_merge_size",
    ),
    Limitation(
        id="mlx-vlm-quick-gelu-only",
        peer="mlx-vlm",
        families=("qwen2_vl",),
        versions=">=0.7.10",
        kind="known failure",
        condition="the tower's hidden_act is not quick_gelu",
        holds=tower(lambda vision: vision.hidden_act != "quick_gelu"),
        span=(5e-4, 15.0),
        why="MLP of the tower has GELU(approx='fast') whatever hidden_act says",
    ),
    Limitation(
        id="mlx-vlm-tanh-gelu-only",
        peer="mlx-vlm",
        families=QWEN3,
        versions=">=0.7.10",
        kind="known failure",
        condition="the tower's hidden_act is not gelu_pytorch_tanh",
        holds=tower(lambda vision: vision.hidden_act != "gelu_pytorch_tanh"),
        seen=tower(lambda vision: vision.hidden_act != "gelu"),  # the two GELUs may give 7e-5, hardly over the line
        span=(2e-4, 20.0),
        why="MLP of the tower has GELU(approx='tanh') whatever hidden_act says",
    ),
    Limitation(
        id="mlx-vlm-picture-without-start",
        peer="mlx-vlm",
        families=QWEN,
        versions=">=0.7.10",
        kind="known failure",
        condition="no vision_start token stands before a picture whose ids are not those of text",
        holds=bare,
        seen=lambda case: turned(case) > 0.1,
        span=(3e-3, 30.0),
        why="get_rope_index counts pictures by the tokens behind vision_start and takes the others for text, as the "
        "code published with Qwen2-VL does; the published prompts always have the token",
    ),
    Limitation(
        id="mlx-vlm-image-beside-video",
        peer="mlx-vlm",
        families=("qwen2_vl",),
        versions=">=0.7.10",
        kind="known failure",
        condition="images and videos stand in one prompt",
        holds=lambda case: case.modality == "mixed",
        span=(0.1, 60.0),
        why="get_input_embeddings looks at pixel_values_videos only when there is no pixel_values: the video's "
        "placeholders keep the embedding of their token",
    ),
    Limitation(
        id="mlx-vlm-mixed-without-deepstack",
        peer="mlx-vlm",
        families=("qwen3_vl",),
        versions=">=0.7.10",
        kind="limitation",
        condition="images and videos stand in one prompt, and deepstack_visual_indexes is empty",
        holds=lambda case: case.modality == "mixed" and not case.config.vision.deepstack_visual_indexes,
        says="No arrays provided for stacking",
        why="_merge_deepstack_features stacks the layers of an empty list",
    ),
    Limitation(
        id="mlx-vlm-moe-mixed",
        peer="mlx-vlm",
        families=("qwen3_vl_moe",),
        versions=">=0.7.10",
        kind="limitation",
        condition="images and videos stand in one prompt",
        holds=lambda case: case.modality == "mixed",
        says="Image features and image tokens do not match",
        why="get_input_embeddings looks at either images or videos, while both kinds of placeholders are counted",
    ),
    Limitation(
        id="mlx-vlm-moe-gelus",
        peer="mlx-vlm",
        families=("qwen3_vl_moe",),
        versions=">=0.7.10",
        kind="known failure",
        condition="there is an image or a video",
        holds=lambda case: bool(case.pictures),
        span=(6e-5, 0.5),
        why="vision.py of qwen3_vl_moe has the exact GELU in the blocks and the tanh one in the mergers; the published "
        "code, transformers and mlx-vlm's own qwen3_vl have them the other way round; exchanged, it agrees (rows "
        "mlx-vlm-mended)",
    ),
    *TEXT_LIMITATIONS,
)


def limitations_of(peer: Peer, version: str, case: Case) -> tuple[Limitation, ...]:
    """The entries whose condition a case meets."""
    return tuple(entry for entry in LIMITATIONS if entry.applies(peer, version, case))


def explained(entries: tuple[Limitation, ...], said: str | None, off: float | None) -> bool:
    """Whether a refusal, or a difference in deviations of the logits, is what one of these entries tells. Several known
    failures at once may add up."""
    if said is not None:
        return any(entry.kind == "limitation" and re.search(entry.says, said, re.DOTALL) for entry in entries)
    spans = [entry.span for entry in entries if entry.span is not None]
    return off is not None and bool(spans) and min(least for least, _ in spans) <= off <= sum(most for _, most in spans)
