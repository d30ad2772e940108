"""mlx-lm: loads the published layout; text alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from tests.parity import checkpoints
from tests.parity.cases import Case

#: Families whose latent attention has norms inside, to which mlx-lm gives another epsilon than the models in
#: transformers do (rms_norm_eps, or the default of MLX). It moves logits by 1e-6 to 1e-4 of their deviation, on either
#: side of what is called a difference here; so it is set before we compare.
INNER_NORMS = ("glm4_moe_lite", "minicpm3")
INNER_EPS = 1e-6


class MlxLm:
    """The text models of mlx-lm, through its own loader and its own caches."""

    name = "mlx-lm"
    needs = ("mlx-lm",)
    mended: frozenset[str] = frozenset()

    def modalities(self, family: str) -> tuple[str, ...]:
        return ("text",)

    def adapt(self, case: Case) -> Case:
        return case

    def open(self, case: Case, folder: Path) -> MlxLmEngine:
        from mlx_lm.utils import load_model

        checkpoints.write(case, folder)
        model, _ = load_model(folder)
        for layer in model.layers if case.family in INNER_NORMS else ():
            for name in ("q_a_layernorm", "kv_a_layernorm"):
                if name in layer.self_attn:
                    layer.self_attn[name].eps = INNER_EPS
        return MlxLmEngine(case, model)


class MlxLmEngine:
    """A model of mlx-lm with one sequence."""

    def __init__(self, case: Case, model: Any):
        from mlx_lm.models.cache import make_prompt_cache

        self.case, self.model = case, model
        self.cache = make_prompt_cache(model)
        self.routed = note_gates(model)

    def prefill(self) -> np.ndarray:
        return np.array(self.model(mx.array([list(self.case.tokens)]), cache=self.cache)[0].astype(mx.float32))

    def step(self, token: int) -> np.ndarray:
        return np.array(self.model(mx.array([[token]]), cache=self.cache)[0, -1].astype(mx.float32))


def note_gates(model: Any) -> list[np.ndarray]:
    """A list that fills with what the routers (``mlp.gate``, one linear map to all experts) of an MLX model give."""
    seen: list[np.ndarray] = []

    def wrap(gate: Any) -> Any:
        def noted(x: mx.array) -> mx.array:
            said = gate(x)
            logits = said
            if (correction := getattr(gate, "e_score_correction_bias", None)) is not None:  # it has chosen already
                logits = mx.sigmoid((x @ gate.weight.T).astype(mx.float32)) + correction
            seen.append(np.array(logits.astype(mx.float32)).reshape(-1, logits.shape[-1]))
            return said

        return noted

    for layer in model.layers:
        mlp = layer.mlp if "mlp" in layer else None
        if mlp is not None and "switch_mlp" in mlp:
            mlp.gate = wrap(mlp.gate)
    return seen
