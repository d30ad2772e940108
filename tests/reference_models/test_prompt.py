"""A prompt that was read: what forwards take from it, however the prompt is cut and whatever is trimmed."""

import itertools
from collections import Counter
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from reference_models import layers, registry, rope
from reference_models.engine import masks
from reference_models.prompt import Images, Prompt

FAMILIES = ("qwen2_vl", "qwen3_vl", "qwen3_vl_moe")
VARIANTS = [variant for family in FAMILIES for variant in registry.variants(family) if variant.config.vision]
IDS = [f"{variant.family}-{variant.name}" for variant in VARIANTS]
ROUNDING = 1e-5  # relative to the deviation of the logits
IMAGE, VIDEO = 61, 62
IMAGE_GRIDS, VIDEO_GRIDS = [(1, 4, 4), (1, 2, 4)], [(2, 2, 4)]
BEHIND = [11, 12, 13]


@pytest.fixture(scope="module", params=VARIANTS, ids=IDS)
def model(request: pytest.FixtureRequest) -> Any:
    return request.param.build(seed=3)


def prompt_tokens(model: Any) -> list[int]:
    video = [VIDEO, VIDEO, 8, VIDEO, VIDEO] if model.visual.frames_apart else [VIDEO] * 4
    return [1, 2, *[IMAGE] * 4, 3, *video, 4, *[IMAGE] * 2, 5]


def images(model: Any, seed: int = 0) -> Images:
    def pixels(grids: list[tuple[int, int, int]], key: int) -> mx.array:
        count = sum(t * h * w for t, h, w in grids)
        return mx.random.normal((count, model.config.vision.patch_pixels), key=mx.random.key(key))

    return Images(pixels(IMAGE_GRIDS, seed), IMAGE_GRIDS, pixels(VIDEO_GRIDS, seed + 1), mx.array(VIDEO_GRIDS))


@pytest.fixture(scope="module")
def prompt(model: Any) -> Prompt:
    read: Prompt = model.read(mx.array([prompt_tokens(model)]), images(model))
    return read


def run(model: Any, prompt: Prompt | None, *cuts: int, tokens: list[int] | None = None) -> np.ndarray:
    tokens = prompt_tokens(model) + BEHIND if tokens is None else tokens
    caches = model.make_caches()
    edges = (0, *cuts, len(tokens))
    return np.concatenate(
        [np.array(model(mx.array([tokens[a:b]]), caches, prompt=prompt))[0] for a, b in itertools.pairwise(edges)]
    )


def difference(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b).max() / b.std())


def test_any_cut_of_the_prompt_gives_the_one_shot_logits(model: Any, prompt: Prompt) -> None:
    """Also cuts inside an image, and chunks that reach behind the end of the prompt."""
    one_shot = run(model, prompt)
    assert one_shot.shape == (prompt.length + 3, 64)
    for cut in range(1, prompt.length + 3):
        assert difference(run(model, prompt, cut), one_shot) <= ROUNDING, cut
    assert difference(run(model, prompt, 4, 5, 9, 10, prompt.length + 1), one_shot) <= ROUNDING
    assert difference(run(model, prompt, *range(1, prompt.length + 3)), one_shot) <= ROUNDING


def test_images_matter_and_so_does_their_place(model: Any, prompt: Prompt) -> None:
    other = model.read(prompt.tokens, images(model, seed=5))
    moved = np.abs(run(model, prompt) - run(model, other)).max(axis=1)
    assert (moved[:2] == 0).all() and (moved[2:] > 1e-3).all()
    as_text = np.abs(run(model, prompt) - run(model, None)).max(axis=1)
    assert (as_text[:2] == 0).all() and (as_text[2:] > 1e-3).all()


def test_a_prompt_of_text_is_the_text_path_to_the_byte(model: Any) -> None:
    tokens = [1, 2, 3, 4, 5]
    read = model.read(mx.array([tokens]))
    assert (read.rope_delta, read.deepstack) == (0, ())
    assert run(model, read, 2, tokens=[*tokens, 6]).tobytes() == run(model, None, 2, tokens=[*tokens, 6]).tobytes()
    text_only = registry.variants("qwen2_vl")[0].build(3)
    read = text_only.read(mx.array([tokens]))  # type: ignore[attr-defined]
    assert run(text_only, read, tokens=tokens).tobytes() == run(text_only, None, tokens=tokens).tobytes()


def test_deepstack_stands_at_the_features_and_nowhere_else(model: Any, prompt: Prompt) -> None:
    wanted = (
        0
        if model.config.vision.__class__.__module__.endswith("qwen2_vision")
        else (len(model.config.vision.deepstack_visual_indexes))
    )
    assert len(prompt.deepstack) == wanted
    visual = np.isin(np.array(prompt.tokens)[0], (IMAGE, VIDEO))
    for rows in prompt.deepstack:
        np.testing.assert_array_equal(np.array(rows)[0].any(axis=-1), visual)
    embedded = np.array(model.model.embed_tokens(prompt.tokens))[0]
    np.testing.assert_array_equal((np.array(prompt.embeddings)[0] == embedded).all(axis=-1), ~visual)


def test_the_nth_feature_is_added_to_the_output_of_layer_n(
    model: Any, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[np.ndarray, np.ndarray]] = []
    original = layers.Block.__call__

    def noted(self: Any, x: mx.array, *rest: Any) -> mx.array:
        out = original(self, x, *rest)
        seen.append((np.array(x), np.array(out)))
        return out

    monkeypatch.setattr(layers.Block, "__call__", noted)
    first, last = 3, prompt.length + 2  # from inside an image to behind the prompt
    caches = model.make_caches()
    tokens = mx.array([prompt_tokens(model) + BEHIND])
    model(tokens[:, :first], caches, prompt=prompt)
    seen.clear()
    model(tokens[:, first:last], caches, prompt=prompt)
    added = [after[0] - before[1] for before, after in itertools.pairwise(seen)]
    for index, step in enumerate(added):
        expected = np.zeros_like(step)
        if index < len(prompt.deepstack):
            expected[:, : prompt.length - first] = np.array(prompt.deepstack[index])[:, first:]
        np.testing.assert_allclose(step, expected, atol=1e-5)


def test_a_chunk_takes_the_rows_of_its_positions(model: Any, prompt: Prompt) -> None:
    """Deepstack, embeddings and ids of every chunk, aligned to absolute positions; text behind the prompt."""
    tokens = mx.array([prompt_tokens(model) + BEHIND])
    text = model.model.embed_tokens(tokens)
    for offset, length in itertools.product(range(prompt.length + 2), (1, 3, 5)):
        chunk = tokens[:, offset : offset + length]
        plain = rope.text_position_ids(offset, prompt.rope_delta, 1, chunk.shape[1])
        x, ids, deepstack = prompt.lay_over(offset, chunk, text[:, offset : offset + length], plain)
        inside = max(min(prompt.length - offset, chunk.shape[1]), 0)
        assert x.shape == (1, chunk.shape[1], 32) and ids.shape == (3, 1, chunk.shape[1])
        for got, whole, behind in (
            (x, prompt.embeddings, text[:, offset + inside : offset + length]),
            *(
                (got, whole, mx.zeros_like(x[:, inside:]))
                for got, whole in zip(deepstack, prompt.deepstack, strict=False)
            ),
        ):
            assert mx.array_equal(got[:, :inside], whole[:, offset : offset + inside]).item()
            assert mx.array_equal(got[:, inside:], behind).item()
        assert mx.array_equal(ids[..., :inside], prompt.position_ids[..., offset : offset + inside]).item()
        assert mx.array_equal(ids[..., inside:], plain[..., inside:]).item()
        assert len(deepstack) == (len(prompt.deepstack) if inside else 0)


def test_vision_runs_in_read_and_a_forward_asks_once(
    model: Any, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: Counter[str] = Counter()

    def count(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)

    count(mx.fast, "scaled_dot_product_attention")
    count(rope, "mrope_angles")
    count(rope, "text_position_ids")
    count(masks, "chunk_mask")
    depth = model.config.vision.depth
    model.read(prompt.tokens, images(model))
    assert calls == {"scaled_dot_product_attention": depth * (len(IMAGE_GRIDS) + len(VIDEO_GRIDS))}
    calls.clear()
    model(prompt.tokens[:, :5], model.make_caches(), prompt=prompt)
    assert calls == {
        "scaled_dot_product_attention": len(model.attention_layers),
        "mrope_angles": 1,
        "text_position_ids": 1,
        "chunk_mask": 1,
    }


def test_trims_after_images_keep_positions_absolute(
    model: Any, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A front trim that cuts an image, a chunk that goes on in the prompt, one behind it, a decode; against one forward
    with the visibility matrix."""
    seen: list[Any] = []
    angles = rope.mrope_angles
    monkeypatch.setattr(
        rope, "mrope_angles", lambda ids, *a, **k: seen.append(np.array(ids)[:, 0]) or angles(ids, *a, **k)
    )
    tokens = prompt_tokens(model) + BEHIND
    end = prompt.length
    caches = model.make_caches()
    pieces = [np.array(model(mx.array([tokens[:9]]), caches, prompt=prompt))[0]]
    for cache in caches:
        assert cache.trim_front(4) == 4
    for first, last in ((9, end), (end, end + 2), (end + 2, end + 3)):
        pieces.append(np.array(model(mx.array([tokens[first:last]]), caches, prompt=prompt))[0])
    behind = np.arange(end, end + 3) + prompt.rope_delta
    expected = np.concatenate([np.array(prompt.position_ids)[:, 0], np.broadcast_to(behind, (3, 3))], axis=1)
    np.testing.assert_array_equal(np.concatenate(seen, axis=1), expected)

    query, key = np.arange(len(tokens))[:, None], np.arange(len(tokens))[None]
    visible = mx.array((key <= query) & ((query < 9) | (key >= 4)))
    monkeypatch.setattr(masks, "chunk_mask", lambda *_: visible)
    assert difference(np.concatenate(pieces), run(model, prompt)) <= ROUNDING


def test_a_rollback_into_the_prompt_reads_the_same_rows_again(model: Any, prompt: Prompt) -> None:
    caches = model.make_caches()
    tokens = mx.array([prompt_tokens(model)])
    first = np.array(model(tokens, caches, prompt=prompt))[0]
    for cache in caches:
        assert cache.rollback(prompt.length - 4) == prompt.length - 4
    again = np.array(model(tokens[:, 4:], caches, prompt=prompt))[0]
    assert difference(again, first[4:]) <= ROUNDING


def test_other_tokens_after_a_rollback_need_a_cut_prompt(model: Any, prompt: Prompt) -> None:
    caches = model.make_caches()
    tokens = prompt_tokens(model)
    model(mx.array([tokens]), caches, prompt=prompt)
    for cache in caches:
        cache.rollback(prompt.length - 7)
    with pytest.raises(ValueError, match=r"positions 7\.\.8 are not those that were read"):
        model(mx.array([[21, 22]]), caches, prompt=prompt)
    assert caches[0].offset == 7
    left = prompt.cut(7)
    rolled_back = np.array(model(mx.array([[21, 22]]), caches, prompt=left))[0]
    grids = Images(images(model).pixel_values[:16], IMAGE_GRIDS[:1])  # type: ignore[index]
    fresh = model.read(mx.array([tokens[:7]]), grids)
    assert left.rope_delta == fresh.rope_delta == -2
    assert mx.array_equal(left.position_ids, fresh.position_ids).item()
    assert difference(rolled_back, run(model, fresh, tokens=[*tokens[:7], 21, 22])[7:]) <= ROUNDING
    for length in (0, prompt.length + 1):
        with pytest.raises(ValueError, match="cannot be cut"):
            prompt.cut(length)


def test_what_does_not_fit_is_refused(model: Any, prompt: Prompt) -> None:
    tokens, given = prompt.tokens, images(model)
    with pytest.raises(ValueError, match=r"2 runs of image tokens .* 0 image grids"):
        model.read(tokens)
    with pytest.raises(ValueError, match=r"pixel_values must be \[24, "):
        model.read(tokens, Images(given.pixel_values[:-1], IMAGE_GRIDS, given.pixel_values_videos, VIDEO_GRIDS))  # type: ignore[index]
    with pytest.raises(ValueError, match="come together"):
        Images(given.pixel_values)
    for shape in ((2, 3), (1, 0), (3,)):
        with pytest.raises(ValueError, match="one sequence"):
            model.read(mx.zeros(shape, dtype=mx.int32))
    with pytest.raises(ValueError, match="batch of 2"):
        model(mx.concatenate([tokens, tokens]), model.make_caches(), prompt=prompt)
    text_only = registry.variants("qwen3_vl")[0].build(3)
    with pytest.raises(ValueError, match="without a vision tower"):
        text_only.read(tokens, given)  # type: ignore[attr-defined]
