"""What holds for every family, every variant: caches change the cost of an answer, never the answer."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from reference_models import registry, rope
from reference_models.engine import masks

VARIANTS = [variant for family in registry.FAMILIES for variant in registry.variants(family)]
IDS = [f"{variant.family}-{variant.name}" for variant in VARIANTS]
TOKENS = np.random.default_rng(7).integers(0, 64, (2, 12))
ROUNDING = 1e-5  # relative to the deviation of the logits

_models: dict[str, Any] = {}


@pytest.fixture(params=VARIANTS, ids=IDS)
def model(request: pytest.FixtureRequest) -> Any:
    """A built variant; built once per test run because building costs more than a forward."""
    variant = request.param
    key = f"{variant.family}/{variant.name}"
    if key not in _models:
        _models[key] = variant.build(seed=3)
    return _models[key]


def forward(model: Any, caches: Any, first: int, last: int, policy: str = "live", tokens: Any = TOKENS) -> Any:
    return np.array(model(mx.array(tokens[:, first:last]), caches, mask_policy=policy))


def in_pieces(model: Any, *cuts: int, policy: str = "live", tokens: Any = TOKENS) -> Any:
    caches = model.make_caches()
    pieces = zip((0, *cuts), (*cuts, tokens.shape[1]), strict=True)
    return np.concatenate([forward(model, caches, a, b, policy, tokens) for a, b in pieces], axis=1)


def windows(model: Any) -> tuple[int | None, ...]:
    return getattr(model, "windows", (None,) * len(model.attention_layers))


def difference(a: Any, b: Any) -> float:
    return float(np.abs(a - b).max() / b.std())


def spy(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, note: Callable[..., object]) -> list[Any]:
    """Record ``note(arguments)`` of every call of ``owner.name``."""
    seen: list[Any] = []
    original = getattr(owner, name)

    def watched(*args: Any, **kwargs: Any) -> Any:
        seen.append(note(*args, **kwargs))
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, watched)
    return seen


def test_chunks_and_single_tokens_give_the_one_shot_logits(model: Any) -> None:
    one_shot = in_pieces(model)
    assert one_shot.shape == (2, 12, 64)
    assert difference(in_pieces(model, 5, 6), one_shot) <= ROUNDING
    assert difference(in_pieces(model, *range(1, 12)), one_shot) <= ROUNDING


def test_mask_policies_agree_to_the_byte_while_nothing_was_trimmed(model: Any) -> None:
    live, offset = in_pieces(model, 5, 8), in_pieces(model, 5, 8, policy="offset")
    assert live.tobytes() == offset.tobytes()


def test_an_early_token_changes_the_last_logits(model: Any) -> None:
    changed = TOKENS.copy()
    changed[:, 1] = (changed[:, 1] + 1) % 64
    moved = np.abs(in_pieces(model, tokens=changed) - in_pieces(model))[:, -1].max(axis=-1)
    # A layer passes a token on by its window less itself; what lies further back changes no bit.
    reach = sum(11 if window is None else window - 1 for window in windows(model))
    assert (moved > 1e-3).all() if reach >= 10 else not moved.any()


@pytest.mark.parametrize("storage", ["rows", "int8"])
def test_after_a_front_trim_only_the_live_mask_fits(model: Any, storage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def trimmed() -> Any:
        caches = model.make_caches(storage)
        mx.eval(model(mx.array(TOKENS[:, :8]), caches))
        assert [cache.trim_front(3) for cache in caches] == [3] * len(caches)
        return caches

    calls = spy(
        monkeypatch,
        mx.fast,
        "scaled_dot_product_attention",
        lambda q, k, v, scale, mask: (k.shape[-2], v.shape[-2], mask.dtype, tuple(mask.shape)),
    )
    caches = trimmed()
    calls.clear()
    assert np.isfinite(forward(model, caches, 8, 12)).all()
    assert calls == [(9, 9, mx.bool_, (4, 9))] * len(model.attention_layers)
    assert [(cache.offset, cache.live_len) for cache in caches] == [(12, 9)] * len(caches)

    caches = trimmed()
    calls.clear()
    with pytest.raises(ValueError, match="broadcast"):
        forward(model, caches, 8, 12, "offset")
    assert calls == [(9, 9, mx.bool_, (4, 12))]


def test_trimmed_chunks_equal_one_forward_with_the_visibility_matrix(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    caches = model.make_caches()
    pieces = [forward(model, caches, 0, 8)]
    for cache in caches:
        cache.trim_front(3)
    pieces += [forward(model, caches, 8, 11), forward(model, caches, 11, 12)]
    query, key = np.arange(12)[:, None], np.arange(12)[None]
    visible = mx.array((key <= query) & ((query < 8) | (key >= 3)))
    monkeypatch.setattr(
        masks, "chunk_mask", lambda l, cache, policy, window=None: visible & mx.array(query - key < (window or 12))
    )
    assert difference(np.concatenate(pieces, axis=1), in_pieces(model)) <= ROUNDING


def test_positions_stay_absolute_after_a_front_trim(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rotations = spy(monkeypatch, mx.fast, "rope", lambda *_, offset, **__: offset)
    angles = spy(monkeypatch, rope, "mrope_angles", lambda ids, *_, **__: np.array(ids))
    scales = spy(monkeypatch, rope, "absolute_query_scale", lambda positions, *_: positions.tolist())
    caches = model.make_caches()
    forward(model, caches, 0, 8)
    for cache in caches:
        cache.trim_front(6)
    for seen in (rotations, angles, scales):
        seen.clear()
    forward(model, caches, 8, 11)
    if "qwen" in type(model).__module__:
        assert not rotations and len(angles) == 1  # once per forward
        np.testing.assert_array_equal(angles[0], np.broadcast_to([8, 9, 10], (3, 2, 3)))
    elif "cohere2" in type(model).__module__:
        assert rotations == [8, 8] * sum(window is not None for window in windows(model))
    else:
        assert rotations == [8, 8] * len(model.attention_layers)
    assert scales == ([[8, 9, 10]] if "mistral4" in type(model).__module__ else [])


def test_single_tokens_never_take_a_boolean_mask(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    given = spy(monkeypatch, mx.fast, "scaled_dot_product_attention", lambda *_, mask, **__: mask)
    caches = model.make_caches()
    forward(model, caches, 0, 1)
    forward(model, caches, 1, 2)
    assert len(given) == 2 * len(model.attention_layers)
    if 1 in windows(model):
        given = given[: len(given) // 2]  # the second token must not see the first there, which takes a mask
    # The absorbed form of MLA passes its rope scores where a mask goes: numbers, and nothing hidden.
    assert all(mask is None or mask.dtype == mx.float32 for mask in given)


def test_wrong_arguments_are_refused(model: Any) -> None:
    caches = model.make_caches()
    with pytest.raises(ValueError, match="caches for"):
        model(mx.array(TOKENS), [*caches, *caches])
    for tokens in (TOKENS[0], TOKENS[:, :0]):
        with pytest.raises(ValueError, match=r"tokens must be \[B, L\]"):
            model(mx.array(tokens), caches)


FORMS = sorted({(v.family, v.name.rsplit("-", 1)[0]) for v in VARIANTS if "cache_form" in v.options})


@pytest.mark.parametrize(("family", "name"), FORMS)
def test_both_cache_forms_agree(family: str, name: str) -> None:
    latent, decompressed = (
        variant.build(seed=3) for variant in registry.variants(family) if variant.name.startswith(name + "-")
    )
    cuts = (8, 9, 10)
    assert difference(in_pieces(latent, *cuts), in_pieces(decompressed, *cuts)) <= ROUNDING
    caches, form = latent.make_caches(), latent.config
    rows: list[Any] = []
    update = caches[0].update_and_fetch
    caches[0].update_and_fetch = lambda k, v: rows.append((k.shape, v.shape)) or update(k, v)  # type: ignore[method-assign, func-returns-value]
    forward(latent, caches, 0, 5)
    assert rows == [((2, 1, 5, form.kv_lora_rank), (2, 1, 5, form.qk_rope_head_dim))]
