"""Images in a ragged batch: every row reads its own prompt, at its own place."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from kv_harness_batch_runs import GRIDS, IMAGE, Run, prompt_of, reader

from reference_models import prompt_rows, registry
from reference_models.engine import BatchKVCache
from reference_models.prompt import Prompt

VARIANTS = [variant for family in registry.FAMILIES for variant in registry.variants(family) if variant.reads_images]
IDS = [f"{variant.family}-{variant.name}" for variant in VARIANTS]


@pytest.fixture(scope="module", params=VARIANTS, ids=IDS)
def model(request: pytest.FixtureRequest) -> Any:
    return request.param.build(seed=3)


@pytest.mark.parametrize("batch", [2, 3, 4])
def test_every_row_answers_as_alone(model: Any, batch: int) -> None:
    Run(model, batch, seed=batch, reader=reader(model)).steps(6)


@pytest.fixture(scope="module")
def prompts(model: Any) -> list[Prompt | None]:
    """Rows of 7 tokens with an image behind two words, of text, and of 6 with one behind none."""
    return [prompt_of(model, GRIDS[1], [1, 2], [3], 0), None, prompt_of(model, GRIDS[0], [], [4, 5, 6, 7], 1)]


def test_each_row_takes_its_own_rows_of_its_own_prompt(model: Any, prompts: list[Prompt | None]) -> None:
    first, _, last = prompts
    assert first is not None and last is not None
    cache = BatchKVCache("rows", 3)
    inside, across = first.tokens[0, 1:5].tolist(), [last.tokens[0, 5].item(), 12, 13, 0]
    tokens = mx.array([inside, [8, 9, 10, 11], across])
    cache.prepare([1, 3, 5])
    rows = mx.ones((3, 1, 5, 2))
    cache.update_and_fetch(rows, rows)
    cache.prepare([4, 4, 3])
    text = model.model.embed_tokens(tokens)
    x, ids, deepstack = prompt_rows.lay_over(cache, prompts, tokens, text)
    assert mx.array_equal(x[0], first.embeddings[0, 1:5]).item()
    assert mx.array_equal(x[1], text[1]).item()
    assert mx.array_equal(x[2, :1], last.embeddings[0, 5:6]).item() and mx.array_equal(x[2, 1:], text[2, 1:]).item()
    assert ids.dtype == mx.int32 and ids.shape == (3, 3, 4)
    assert mx.array_equal(ids[:, 0], first.position_ids[:, 0, 1:5]).item()
    assert ids[:, 1].tolist() == [[3, 4, 5, 6]] * 3
    behind = [6 + last.rope_delta, 7 + last.rope_delta, 8 + last.rope_delta]
    assert ids[:, 2].tolist() == [[last.position_ids[0, 0, 5].item(), *behind]] * 3
    assert len(deepstack) == len(first.deepstack)
    for layer, mine in zip(deepstack, first.deepstack, strict=True):
        assert mx.array_equal(layer[0], mine[0, 1:5]).item() and not np.array(layer[1:]).any()


def test_prompts_of_text_alone_are_the_text_path(model: Any) -> None:
    tokens = mx.array([[1, 2, 3], [4, 5, 6]])
    read = [model.read(tokens[:1]), None]
    outputs = []
    for given in (None, [None, None], read):
        caches = [BatchKVCache("rows", 2) for _ in model.attention_layers]
        outputs.append(np.array(model(tokens, caches, prompt=given)).tobytes())
    assert len(set(outputs)) == 1


def test_a_single_prompt_is_that_of_the_only_row(model: Any, prompts: list[Prompt | None]) -> None:
    first = prompts[0]
    assert first is not None
    outputs = []
    for caches, given in (
        (model.make_caches(), first),
        ([BatchKVCache("rows", 1) for _ in model.attention_layers], first),
        ([BatchKVCache("rows", 1) for _ in model.attention_layers], [first]),
    ):
        outputs.append(np.array(model(first.tokens, caches, prompt=given)).tobytes())
    assert len(set(outputs)) == 1


def test_what_does_not_fit_is_refused_before_anything_is_cached(model: Any, prompts: list[Prompt | None]) -> None:
    first = prompts[0]
    caches = [BatchKVCache("rows", 3) for _ in model.attention_layers]
    tokens = mx.array([[1, 2], [8, 9], [IMAGE, IMAGE]])
    for given, message in (
        (first, "1 given for a batch of 3 rows"),
        ([first, None], "2 given for a batch of 3 rows"),
        ([None, first, prompts[2]], r"row 1: the tokens at positions 0\.\.1 are not those that were read"),
    ):
        with pytest.raises(ValueError, match=message):
            model(tokens, caches, prompt=given)
        assert caches[0].offsets == (0, 0, 0)
    with pytest.raises(ValueError, match="prompts of rows need a batch"):
        model(tokens, model.make_caches(), prompt=prompts)
    model(tokens, caches, prompt=[first, None, prompts[2]])
    assert caches[0].offsets == (2, 2, 2)
