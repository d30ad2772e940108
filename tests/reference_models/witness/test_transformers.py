"""The witness and the published implementation, with the weights that transformers made: one witness of the witness."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from harness.oracle import History
from harness.target import PromptInput
from harness.targets.witnesses import Witnesses
from reference_models.drawing import VISION_FAMILIES
from reference_models.hf.layouts import ONLY_MLX
from reference_models.mrope_ids import Placeholders, position_ids
from reference_models.registry import FAMILIES, Variant
from tests.parity import checkpoints
from tests.parity.cases import Case
from tests.parity.limitations import limitations_of
from tests.parity.peers import missing, version
from tests.parity.peers.with_transformers import Transformers
from tests.parity.running import seeded_case

PEER = Transformers()
CONFIGURATIONS = 6
ROWS = [
    *((family, "text") for family in FAMILIES if family not in (*VISION_FAMILIES, *ONLY_MLX)),
    *((family, kind) for family in VISION_FAMILIES for kind in ("text", "images", "video")),
]


def history(case: Case, model: Any) -> History:
    """One prompt in one forward, as the harness would have recorded it."""
    tokens = np.array(case.tokens)
    count = len(tokens)
    places, prompts = np.broadcast_to(np.arange(count), (3, count)), ()
    if case.pictures:
        grids = {kind: case.grids(kind) for kind in ("image", "video")}
        config, tower = case.config, model.visual
        marks = Placeholders(
            config.image_token_id, config.video_token_id, tower.config.spatial_merge_size, tower.frames_apart
        )
        places = np.array(position_ids(case.tokens, grids["image"], grids["video"], marks)[0])[:, 0]
        given = [part for kind in grids for part in (case.pixels(kind), np.array(grids[kind]) if grids[kind] else None)]
        prompts = (PromptInput(case.tokens, *given),)
    visible, whose = np.tri(count, dtype=bool), np.full(count, 0 if prompts else -1)
    storages = np.full(count, "rows")
    return History(tokens, np.arange(count), places, visible, prompts, whose, storages, np.arange(count))


@pytest.mark.parametrize(("family", "modality"), ROWS)
def test_the_witness_agrees_with_transformers(family: str, modality: str, tmp_path: Path) -> None:
    if absent := missing(PEER):
        pytest.skip(f"not installed: {', '.join(absent)} (pip install 'mlx-kv-harness[peers]')")
    installed = version("transformers")
    compared = number = 0
    while compared < CONFIGURATIONS:
        case = seeded_case(family, modality, 77, number)
        number += 1
        if limitations_of(PEER, installed, case):
            continue
        folder = tmp_path / str(number)
        theirs = PEER.open(case, folder).prefill()
        model = checkpoints.load(case, folder)
        variant = Variant(family, "drawn-1", case.config, case.options, drawn=True)
        rules = (None,) * len(model.attention_layers)
        said = Witnesses(variant, model, rules).float64(history(case, model))
        assert said.choice_gap is not None
        decided = said.choice_gap > 2e-5
        off = np.abs(theirs - said.logits).max(axis=-1)[decided] / said.logits.std()
        assert off.max(initial=0) <= 5e-5, (case.text(), off)
        assert decided.any()
        compared += 1
    mx.clear_cache()
