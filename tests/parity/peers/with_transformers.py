"""transformers: builds a random model from a drawn config, saves it, and answers for it."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy as np

from reference_models.hf.layouts import ARCHITECTURES, ONLY_MLX
from tests.parity import checkpoints
from tests.parity.cases import Case, modalities, special_tokens


class Transformers:
    """The published model classes, attention in its plain form."""

    name = "transformers"
    needs = ("transformers", "torch")
    mended: frozenset[str] = frozenset()

    def modalities(self, family: str) -> tuple[str, ...]:
        return () if family in ONLY_MLX else modalities(family)

    def adapt(self, case: Case) -> Case:
        return case

    def open(self, case: Case, folder: Path) -> TransformersEngine:
        """A model that transformers made and saved, in its own dialect; weights large enough that context matters."""
        import torch
        import transformers

        torch.manual_seed(case.seed)
        architecture = getattr(transformers, ARCHITECTURES[case.family])
        config = architecture.config_class.from_dict(checkpoints.config_json(case))
        model = architecture._from_config(config, attn_implementation="eager").eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim == 1:
                    parameter.add_(0.1 * torch.randn_like(parameter))
                    continue
                if name.endswith(("embed_tokens.weight", "pos_embed.weight")):
                    fan_in = 1
                else:
                    fan_in = parameter[0].numel() if parameter.ndim > 3 else parameter.shape[-1]
                parameter.normal_(0, fan_in**-0.5)
            for name, buffer in model.named_buffers():
                if name.endswith("e_score_correction_bias"):
                    buffer.normal_(0, 0.1)
        model.save_pretrained(folder)
        return TransformersEngine(case, model)


class TransformersEngine:
    """A model of transformers with one sequence."""

    def __init__(self, case: Case, model: Any):
        from transformers import DynamicCache

        self.case, self.model = case, model
        self.cache = DynamicCache()
        self.routed: list[np.ndarray] = []
        parameters = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        for module in model.modules():
            if type(module).__name__.lower().endswith("topkrouter"):
                module.register_forward_hook(self._note)

    def _note(self, module: Any, _inputs: Any, output: Any) -> None:
        noted = output[0].detach().float()
        if hasattr(module, "e_score_correction_bias"):
            noted = noted.sigmoid() + module.e_score_correction_bias
        self.routed.append(noted.numpy().reshape(-1, noted.shape[-1]).copy())

    def prefill(self) -> np.ndarray:
        import torch

        more: dict[str, Any] = {}
        for kind, pixels_name, grid_name in (
            ("image", "pixel_values", "image_grid_thw"),
            ("video", "pixel_values_videos", "video_grid_thw"),
        ):
            pixels = self.case.pixels(kind)
            if pixels is not None:
                more |= {pixels_name: torch.from_numpy(pixels), grid_name: torch.tensor(self.case.grids(kind))}
        if more:
            named = special_tokens(self.case.config)
            kinds = {named["image_token_id"]: 1, named["video_token_id"]: 2}
            more["mm_token_type_ids"] = torch.tensor([[kinds.get(token, 0) for token in self.case.tokens]])
        return self._forward(self.case.tokens, more)

    def step(self, token: int) -> np.ndarray:
        return self._forward((token,), {})[0]

    def _forward(self, tokens: tuple[int, ...], more: dict[str, Any]) -> np.ndarray:
        import torch

        with torch.no_grad():
            out = self.model(
                input_ids=torch.tensor([list(tokens)]), use_cache=True, **{self._cache_name: self.cache}, **more
            )
        return np.asarray(out.logits[0].float())
