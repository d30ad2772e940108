"""mlx-vlm: loads the published layout; text, images and videos, in the steps that its own generation takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn

from reference_models.drawing import VISION_FAMILIES
from tests.parity import checkpoints
from tests.parity.cases import Case, modalities
from tests.parity.peers.with_mlx_lm import note_gates


class MlxVlm:
    """The vision models of mlx-vlm, through its own loader and its own caches."""

    name = "mlx-vlm"
    needs = ("mlx-vlm",)
    mended: frozenset[str] = frozenset()

    def modalities(self, family: str) -> tuple[str, ...]:
        return modalities(family) if family in VISION_FAMILIES else ()

    def adapt(self, case: Case) -> Case:
        return case

    def open(self, case: Case, folder: Path) -> MlxVlmEngine:
        from mlx_vlm.utils import load_model

        checkpoints.write(case, folder)
        return MlxVlmEngine(case, self._mend(load_model(folder)))

    def _mend(self, model: Any) -> Any:
        return model


class MendedMlxVlm(MlxVlm):
    """mlx-vlm with the two GELUs of qwen3_vl_moe's tower exchanged, so that its images can be compared at all, and what
    else it gets wrong can be met alone."""

    name = "mlx-vlm-mended"
    mended = frozenset({"mlx-vlm-moe-gelus"})

    def modalities(self, family: str) -> tuple[str, ...]:
        return ("image", "images", "video", "mixed") if family == "qwen3_vl_moe" else ()

    def _mend(self, model: Any) -> Any:
        for name, module in model.vision_tower.named_modules():
            if "act_fn" in module:
                module.act_fn = nn.GELU() if "merger" in name else nn.GELU(approx="tanh")
        return model


class MlxVlmEngine:
    """A model of mlx-vlm with one sequence."""

    def __init__(self, case: Case, model: Any):
        from mlx_vlm.models.cache import make_prompt_cache

        self.case, self.model = case, model
        self.cache = make_prompt_cache(model.language_model)
        self.routed = note_gates(model)

    def prefill(self) -> np.ndarray:
        given: dict[str, Any] = {}
        for kind, pixels_name, grid_name in (
            ("image", "pixel_values", "image_grid_thw"),
            ("video", "pixel_values_videos", "video_grid_thw"),
        ):
            pixels = self.case.pixels(kind)
            if pixels is not None:
                given |= {pixels_name: mx.array(pixels), grid_name: mx.array(self.case.grids(kind))}
        tokens = mx.array([list(self.case.tokens)])
        images = given.pop("pixel_values", None)
        features = self.model.get_input_embeddings(tokens, images, mask=None, **given)
        more = {name: value for name, value in features.to_dict().items() if value is not None}
        embeddings = more.pop("inputs_embeds")
        out = self.model.language_model(tokens, inputs_embeds=embeddings, cache=self.cache, **given | more)
        return np.array(out.logits[0].astype(mx.float32))

    def step(self, token: int) -> np.ndarray:
        out = self.model.language_model(mx.array([[token]]), cache=self.cache)
        return np.array(out.logits[0, -1].astype(mx.float32))
