"""The three vision families against transformers, whole: tower, join, position ids, prefill and greedy decode.

Hypothesis draws a configuration and a prompt of text, images and videos; our random weights are copied by name.
``KV_HARNESS_PARITY_EXAMPLES`` sets how many configurations a family gets (10, always the same ones, when it is not
set). A run with ``-s`` says how far the two sides were apart.
"""

import dataclasses
import inspect
import os
from collections import Counter
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kv_harness_vision_cases import FAMILIES, IMAGE, VIDEO, Segment, compose, configs, layouts
from mlx.utils import tree_flatten

from reference_models import moe
from reference_models import prompt as prompts
from reference_models.weights import randomise

ORACLE = "the published implementations are not installed: pip install 'mlx-kv-harness[parity]'"
EXAMPLES = os.environ.get("KV_HARNESS_PARITY_EXAMPLES")
TOLERANCE = 5e-5  # of the deviation of the logits
TIE = 1e-4  # router logits (of unit scale) nearer than this may be ranked either way
DECODES = 4


class Case:
    """One prompt on both sides, with the same weights."""

    def __init__(self, family: str, config: Any, layout: list[Segment], seed: int):
        import torch

        rng = np.random.default_rng(seed)
        merge = config.vision.spatial_merge_size
        self.family, self.config, self.layout = family, config, layout
        self.tokens = compose(layout, family != "qwen2_vl", rng)
        self.grids = {kind: [(t, h * merge, w * merge) for k, (t, h, w) in layout if k == kind] for kind in GIVEN}
        self.pixels = {
            kind: rng.standard_normal((sum(map(int, np.prod(grids, axis=1))), config.vision.patch_pixels)).astype("f4")
            for kind, grids in self.grids.items()
            if grids
        }
        self.model = FAMILIES[family][0].Model(config)
        randomise(self.model, seed)
        self.other = published(family, config, dict(tree_flatten(self.model.parameters())))
        self.given = {}
        for kind, values in self.pixels.items():
            pixels, grid = GIVEN[kind]
            self.given |= {pixels: torch.from_numpy(values), grid: torch.tensor(self.grids[kind])}

    def read(self) -> prompts.Prompt:
        ours = {}
        for kind, values in self.pixels.items():
            pixels, grid = GIVEN[kind]
            ours |= {pixels: mx.array(values), grid: mx.array(self.grids[kind])}
        return self.model.read(mx.array([self.tokens]), prompts.Images(**ours) if ours else None)


GIVEN = {"image": ("pixel_values", "image_grid_thw"), "video": ("pixel_values_videos", "video_grid_thw")}


def published(family: str, config: Any, weights: dict[str, mx.array]) -> Any:
    """The model of transformers that has all of ``weights`` and nothing else."""
    import torch
    import transformers

    fields = dataclasses.asdict(config)
    vision, tied = fields.pop("vision"), fields.pop("tie_word_embeddings")
    tokens = {name: fields.pop(name) for name in ("image_token_id", "video_token_id")}
    scaling = fields.pop("rope_scaling") | {"rope_type": "default", "rope_theta": fields.pop("rope_theta")}
    listed = {name: list(value) for name, value in fields.items() if isinstance(value, tuple)}
    name = FAMILIES[family][1]
    whole = getattr(transformers, f"{name}Config")(
        text_config=fields | listed | {"rope_parameters": scaling, "pad_token_id": None},
        vision_config=vision,
        tie_word_embeddings=tied,
        **tokens,
    )
    other = getattr(transformers, f"{name}ForConditionalGeneration")._from_config(whole, attn_implementation="eager")
    state = {}
    for ours, value in weights.items():
        key = "model." + ours if ours.startswith("visual.") else ours.replace("model.", "model.language_model.")
        array = np.array(value)
        if key.endswith("experts.gate_proj"):
            up = np.array(weights[ours.replace("gate_proj", "up_proj")])
            key, array = key.replace("gate_proj", "gate_up_proj"), np.concatenate([array, up], axis=1)
        if not key.endswith("experts.up_proj"):
            state[key] = torch.from_numpy(array)
    if tied:
        state["lm_head.weight"] = state["model.language_model.embed_tokens.weight"]
    other.load_state_dict(state, strict=True)
    return other.eval()


@contextmanager
def routers(other: Any):  # type: ignore[no-untyped-def]
    """Two lists that fill with the router logits ``[tokens, E]`` of every expert layer, ours and theirs."""
    ours, theirs = [], []
    original = moe.TopKRouter.__call__

    def noted(self: Any, x: mx.array) -> Any:
        ours.append(np.array(x @ self.weight.T)[0])
        return original(self, x)

    def hook(_module: Any, _inputs: Any, output: Any) -> None:
        theirs.append(output[0].detach().numpy().copy())

    gates = [module for module in other.modules() if type(module).__name__.endswith("TopKRouter")]
    handles = [gate.register_forward_hook(hook) for gate in gates]
    moe.TopKRouter.__call__ = noted  # type: ignore[method-assign]
    try:
        yield ours, theirs
    finally:
        moe.TopKRouter.__call__ = original  # type: ignore[method-assign]
        for handle in handles:
            handle.remove()


def first_flip(ours: list[np.ndarray], theirs: list[np.ndarray], top_k: int) -> int | None:
    """First token whose experts differ because two of them tie: in its first such layer both sides rank the last one
    chosen and the first one left out within TIE. None when no token is like that."""
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        chosen = [np.sort(np.argsort(-side, axis=-1, kind="stable")[:, :top_k]) for side in (mine, other)]
        flipped = np.flatnonzero((chosen[0] != chosen[1]).any(axis=-1))
        if flipped.size:
            ranked = [-np.sort(-side[flipped], axis=-1) for side in (mine, other)]
            gaps = [side[:, top_k - 1] - side[:, top_k] for side in ranked]
            assert max(gap.max() for gap in gaps) <= TIE, f"experts differ without a tie: {gaps}"
            return int(flipped[0])
    return None


def compare_ids(case: Case, prompt: prompts.Prompt, kinds: Any, tally: Counter[str]) -> bool:
    """Whether transformers would take the position ids and the delta of ``prompt`` by itself.

    It must, except behind a video of qwen2_vl with more frames than rows and columns: see ``mrope_ids``.
    """
    import torch

    ours, delta = np.array(prompt.position_ids), prompt.rope_delta
    if not case.given:
        assert delta == 0 and (ours == np.arange(len(case.tokens))).all()
        return True
    grids = {name: value for name, value in case.given.items() if name.endswith("thw")}
    theirs, their_delta = case.other.model.get_rope_index(torch.tensor([case.tokens]), mm_token_type_ids=kinds, **grids)
    other = (ours != theirs.numpy()).any(axis=(0, 1))
    if not other.any():
        assert delta == their_delta.item()
        tally["ids equal"] += 1
        return True
    merge = case.config.vision.spatial_merge_size
    long = any(t > max(h, w) // merge for t, h, w in case.grids["video"])
    assert case.family == "qwen2_vl" and long and case.tokens[other.argmax() - 1] == VIDEO
    tally["ids behind a long video as in the paper"] += 1
    return False


def compare(case: Case, tally: Counter[str], worst: dict[str, float]) -> None:
    """Prefill and a few greedy tokens on both sides."""
    import torch
    from transformers import DynamicCache

    prompt, tokens = case.read(), case.tokens
    kinds = torch.tensor([[{IMAGE: 1, VIDEO: 2}.get(token, 0) for token in tokens]])
    more: dict[str, Any] = case.given | ({"mm_token_type_ids": kinds} if case.given else {})
    by_itself = compare_ids(case, prompt, kinds, tally)
    if not by_itself:
        more["position_ids"] = torch.from_numpy(np.array(prompt.position_ids)).long()
    counts = {kind: len(grids) for kind, grids in case.grids.items() if grids}
    tally[" and ".join(f"{count} {kind}" for kind, count in counts.items()) or "text"] += 1

    caches, cache = case.model.make_caches(), DynamicCache()
    cache_name = "cache" if "cache" in inspect.signature(case.other.forward).parameters else "past_key_values"
    for step in range(1 + DECODES):
        with torch.no_grad(), routers(case.other) as routed:
            ours = np.array(case.model(mx.array([tokens]), caches, prompt=prompt))[0]
            out = case.other(input_ids=torch.tensor([tokens]), use_cache=True, **{cache_name: cache}, **more)
        theirs = out.logits[0].numpy()
        off = np.abs(ours - theirs).max(axis=-1) / theirs.std()
        if off.max() > TOLERANCE and routed[0]:
            flip = first_flip(*routed, case.config.num_experts_per_tok)
            if flip is not None:
                assert (off[:flip] <= TOLERANCE).all()
                tally["routing ties"] += 1
                return
        assert off.max() <= TOLERANCE, f"step {step}: {off.max():.1e} of the deviation of the logits"
        name = "decode" if step else "prefill"
        worst[name] = max(worst.get(name, 0.0), float(off.max()))
        best, other_best = int(ours[-1].argmax()), int(theirs[-1].argmax())
        if best != other_best:
            assert theirs[-1, other_best] - theirs[-1, best] <= 2 * TOLERANCE * theirs.std()
            tally["greedy ties"] += 1
        tally["greedy tokens"] += 1
        tokens, more = [other_best], {}
        if not by_itself:
            more = {"position_ids": torch.full((3, 1, 1), caches[0].offset + prompt.rope_delta)}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_drawn_configuration_agrees_with_transformers(family: str) -> None:
    for package in ("torch", "transformers"):
        pytest.importorskip(package, reason=ORACLE)
    tally: Counter[str] = Counter()
    worst: dict[str, float] = {}

    @settings(
        max_examples=int(EXAMPLES or 10),
        derandomize=EXAMPLES is None,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(config=configs(family), layout=layouts(), seed=st.integers(0, 2**16))
    def run(config: Any, layout: list[Segment], seed: int) -> None:
        tally["configurations"] += 1
        compare(Case(family, config, layout, seed), tally, worst)

    run()
    shown = ", ".join(f"{name} {value:.1e}" for name, value in worst.items())
    print(f"\n{family}: worst {shown} of the deviation of the logits; {dict(tally)}")
    assert tally["greedy tokens"] > 0


def test_a_routing_flip_must_be_a_tie() -> None:
    clear = np.array([[3.0, 2.0, 1.0], [0.0, 1.0, 2.0]])
    tie = np.array([[3.0, 2.0, 1.0], [1.0, 1.00001, 2.0]])
    other = np.array([[3.0, 2.0, 1.0], [1.00001, 1.0, 2.0]])
    assert first_flip([clear], [clear + 1e-6], 2) is None
    assert first_flip([clear, tie], [clear, other], 2) == 1
    with pytest.raises(AssertionError, match="without a tie"):
        first_flip([clear], [clear[:, ::-1]], 2)
