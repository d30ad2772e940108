"""Builds the models of mlx-vlm, and is where the library is imported. The catalogue is that of mlx-lm's families, in
another folder."""

from __future__ import annotations

import copy
import functools
import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from harness.probe import PositionHook, Probe
from harness.target import ImageFormat
from harness.targets.mlx_lm_catalogue import Family, catalogue, unknown
from harness.targets.mlx_lm_models import NotInstalled, UnknownFamily, randomised

MODULES = ["text", "vision"]
"""Of a configuration, as the library's loader names them."""


@dataclass(frozen=True)
class VisionFamily(Family):
    """A family with images."""

    @property
    def text(self) -> dict[str, Any]:
        """The part of the configuration that speaks of the language model."""
        return dict(self.config.get("text_config", self.config))

    def images(self, apart: bool) -> ImageFormat:
        """``apart``: of ``frames_apart``."""
        vision = self.config["vision_config"]
        pixels = vision["in_channels"] * vision["temporal_patch_size"] * vision["patch_size"] ** 2
        image, video, start = (self.config[f"{name}_token_id"] for name in ("image", "video", "vision_start"))
        return ImageFormat(image, video, vision["spatial_merge_size"], pixels, apart, start)


FAMILIES, WITHOUT_ENTRY = catalogue(Path(__file__).parent / "mlx_vlm_families", VisionFamily)


def _module(name: str) -> Any:
    try:
        return importlib.import_module(f"mlx_vlm.{name}")
    except ImportError as error:
        if not (error.name or "").startswith("mlx_vlm"):
            raise NotInstalled(f"mlx-vlm cannot be imported: {' '.join(str(error).split())}") from error
        raise NotInstalled("mlx-vlm is not installed: pip install 'mlx-kv-harness[mlx-vlm]'") from error


def version() -> str:
    """Of mlx-vlm. NotInstalled where there is none."""
    return str(_module("version").__version__)


@functools.lru_cache(maxsize=1)
def probe() -> Probe:
    """Sees also the M-RoPE ids of a forward: [3, B, l]. Ids of two axes, which the models make too, mean the same for
    all three. Made once, when everything that a model needs has been imported."""
    rotary = _module("models.rope_utils").MRoPERotaryEmbedding

    def ids(_: Any, __: Any, position_ids: mx.array) -> mx.array:
        return position_ids if position_ids.ndim == 3 else mx.broadcast_to(position_ids, (3, *position_ids.shape))

    return Probe([PositionHook(rotary, "__call__", "mrope", ids)])


@functools.lru_cache(maxsize=1)
def batching() -> Any:
    """Where ``BatchGenerator`` lives, with the functions by which it takes apart and joins what prompts were read as.
    NotInstalled in a release without them."""
    module = _module("generate.ar")
    wanted = [f"_prompt_kwarg_{name}" for name in ("batch_size", "row")] + ["_concat_prompt_kwarg_rows"]
    wanted += [f"_{verb}_sequence_aligned_prompt_kwarg" for verb in ("is", "pad", "slice")]
    if lacking := [name for name in wanted if not hasattr(module, name)]:
        raise NotInstalled(f"mlx-vlm {version()} batches otherwise: it has no generate.ar.{lacking[0]}")
    return module


class Caches:
    """What of ``mlx_vlm.models.cache`` a session uses, for the language half of one model."""

    def __init__(self, language_model: Any) -> None:
        self._language_model = language_model

    def make_prompt_cache(self, _: Any = None) -> list[Any]:
        """As ``generate_step`` makes one."""
        made: list[Any] = _module("models.cache").make_prompt_cache(self._language_model)
        return made

    def __getattr__(self, name: str) -> Any:
        """The library's classes: a batch of sequences that have had no forward is made by them."""
        return getattr(_module("models.cache"), name)


def variants(model_type: str) -> tuple[VisionFamily, ...]:
    """The configurations of a model type. UnknownFamily where there are none."""
    if model_type not in FAMILIES:
        raise UnknownFamily(unknown(model_type, FAMILIES, "mlx_vlm"))
    return FAMILIES[model_type]


@functools.lru_cache(maxsize=16)
def build(model_type: str, variant: str, seed: int) -> Any:
    """A tiny model with random weights, made from its configuration as the library's loader does it."""
    family = next(each for each in variants(model_type) if each.variant == variant)
    utils = _module("utils")
    config = {"model_type": model_type, **copy.deepcopy(family.config)}
    config.setdefault("text_config", {key: config[key] for key in config if key != "vision_config"})
    try:
        module, _ = utils.get_model_and_args(config)
    except (ImportError, ValueError) as error:
        raise NotInstalled(f"mlx-vlm {version()} has no model {model_type}") from error
    made = utils.update_module_configs(module.ModelConfig.from_dict(copy.deepcopy(config)), module, config, MODULES)
    return randomised(lambda: module.Model(made), seed)


@functools.lru_cache
def frames_apart(model_type: str, variant: str) -> bool:
    """Does a token of text lie between the frames of a video? In prompts for qwen3_vl it does since 0.7.0. Found by
    asking for the ids of a video of two frames without one: where it does, the second frame counts as text."""
    family = next(each for each in variants(model_type) if each.variant == variant)
    video, start = (family.config[f"{name}_token_id"] for name in ("video", "vision_start"))
    merge = family.config["vision_config"]["spatial_merge_size"]
    model = build(model_type, variant, 0).language_model
    grid = mx.array([[2, merge, merge]])
    ids = model.get_rope_index(mx.array([[start, video, video]]), video_grid_thw=grid)[0]
    return bool(ids[1, 0, 2] != ids[1, 0, 1])


__all__ = [
    "FAMILIES",
    "Caches",
    "NotInstalled",
    "UnknownFamily",
    "VisionFamily",
    "batching",
    "build",
    "frames_apart",
    "probe",
    "variants",
    "version",
]
