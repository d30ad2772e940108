"""Where the parameters of our models stand in a checkpoint: prefixes, renames, and tensors that must be rebuilt.

Two layouts of every family are in use. Hugging Face: fused ``experts.gate_up_proj [E, 2I, H]`` and ``down_proj
[E, H, I]`` (the published Qwen3-VL-MoE has both with their last axes swapped), or one Linear per expert; ``kv_b_proj``.
MLX (mlx-lm): ``switch_mlp.{gate,up,down}_proj``; MLA's matrix split into ``embed_q [heads, rank, nope]`` and
``unembed_out [heads, v, rank]``; ``.linear`` for both of DeciLM's replacements. A patch embedding ``[width, C, T, P,
P]`` has its channels last in mlx-vlm, ``[width, T, P, P, C]``; mlx-lm drops the vision tower.

A name as the checkpoint has it, less prefix, is *canonical*: ``model.layers.0...`` or ``lm_head...`` for text,
``visual...`` for images.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

Shape = tuple[int, ...]

_PREFIXES = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.visual.", "visual."),
    ("model.vision_tower.", "visual."),
    ("vision_tower.", "visual."),
    ("model.multi_modal_projector.", "visual.multi_modal_projector."),
    ("multi_modal_projector.", "visual.multi_modal_projector."),
)
_EXPERT = re.compile(r"^(?P<mlp>.*\.mlp)\.experts\.(?P<part>gate|up|down)_proj$")
_LINEAR = re.compile(r"\.(self_attn\.linear|mlp\.linear)_(attn|mlp)\.(weight|bias)$")
#: The one parameter of a vision tower that the layouts hold differently. A cube, where both look alike, is refused by
#: ``vision_configs``.
PATCHES = "visual.patch_embed.proj.weight"
#: Buffers that some exports hold; positions give them anyway.
DERIVED = re.compile(r"\.rotary_(pos_)?emb\.inv_freq$")


@dataclass(frozen=True)
class Recipe:
    """How one parameter grows from tensors of the checkpoint.

    ``shapes`` are those that the parts must have, unquantised. ``whole``: the only part is the parameter as it is,
    so that a quantised one may stay quantised.
    """

    parts: tuple[str, ...]
    shapes: tuple[Shape, ...]
    build: Callable[..., mx.array]
    whole: bool = False


def canonical(name: str) -> str:
    """The checkpoint's name of a weight less the prefix of its layout."""
    for prefix, ours in _PREFIXES:
        if name.startswith(prefix):
            return ours + name.removeprefix(prefix)
    return name


def is_vision(name: str) -> bool:
    """Whether a canonical name belongs to the image part."""
    return name.startswith("visual.")


def stored_weight(parameter: str) -> str:
    """The name of a parameter's weight in canonical form: a stacked expert matrix gets the ``.weight`` of a module."""
    return f"{parameter}.weight" if _EXPERT.match(parameter) else parameter


def recipe(parameter: str, shape: Shape, config: Any, have: Mapping[str, Shape]) -> Recipe:
    """How ``parameter`` of that shape grows from a checkpoint with the canonical names ``have`` (with shapes).

    Names parts that are missing too: the caller reports those.
    """
    if expert := _EXPERT.match(parameter):
        return _expert_recipe(expert["mlp"], expert["part"], shape, have)
    if parameter.endswith(".self_attn.kv_b_proj.weight"):
        stem = parameter.removesuffix("kv_b_proj.weight")
        if f"{stem}embed_q.weight" in have and parameter not in have:
            return _absorbed_recipe(stem, shape, config)
    if _LINEAR.search(parameter) and parameter not in have:
        short = _LINEAR.sub(r".\1.\3", parameter)
        if short in have:
            return Recipe((short,), (shape,), _same, whole=True)
    if parameter == PATCHES and have.get(parameter) == (last := (shape[0], *shape[2:], shape[1])) != shape:
        return Recipe((parameter,), (last,), lambda array: array.transpose(0, 4, 1, 2, 3))
    return Recipe((parameter,), (shape,), _same, whole=True)


def _same(array: mx.array) -> mx.array:
    return array


def _expert_recipe(mlp: str, part: str, shape: Shape, have: Mapping[str, Shape]) -> Recipe:
    switch = f"{mlp}.switch_mlp.{part}_proj.weight"
    if switch in have:
        return Recipe((switch,), (shape,), _same, whole=True)
    count, rows, columns = shape
    if f"{mlp}.experts.0.{part}_proj.weight" in have:
        single = tuple(f"{mlp}.experts.{index}.{part}_proj.weight" for index in range(count))
        return Recipe(single, ((rows, columns),) * count, lambda *experts: mx.stack(list(experts)))
    hidden, inner = (rows, columns) if part == "down" else (columns, rows)
    fused, down = f"{mlp}.experts.gate_up_proj", f"{mlp}.experts.down_proj"
    swapped = _is_swapped(have.get(fused), have.get(down), hidden, inner)
    if part == "down":
        stored = (count, inner, hidden) if swapped else (count, hidden, inner)
        return Recipe((down,), (stored,), lambda array: array.swapaxes(-1, -2) if swapped else array)
    stored = (count, hidden, 2 * inner) if swapped else (count, 2 * inner, hidden)
    first = part == "gate"

    def half(array: mx.array) -> mx.array:
        upright = array.swapaxes(-1, -2) if swapped else array
        return upright[:, :inner] if first else upright[:, inner:]

    return Recipe((fused,), (stored,), half)


def _is_swapped(fused: Shape | None, down: Shape | None, hidden: int, inner: int) -> bool:
    """Whether the last axes are swapped. One of the tensors may be square, but never both: 2I = H and I = H."""
    if fused is not None and hidden != 2 * inner:
        return fused[1:] == (hidden, 2 * inner)
    return down is not None and hidden != inner and down[1:] == (inner, hidden)


def _absorbed_recipe(stem: str, shape: Shape, config: Any) -> Recipe:
    heads, nope, value = config.num_attention_heads, config.qk_nope_head_dim, config.v_head_dim
    rank = shape[-1]

    def join(embed_q: mx.array, unembed_out: mx.array) -> mx.array:
        return mx.concatenate([embed_q.swapaxes(-1, -2), unembed_out], axis=1).reshape(shape)

    names = (f"{stem}embed_q.weight", f"{stem}unembed_out.weight")
    return Recipe(names, ((heads, rank, nope), (heads, value, rank)), join)
