"""What is drawn for a comparison."""

from __future__ import annotations

import pytest

from reference_models import mrope_ids, registry
from tests.parity.cases import MODALITIES, chunks, modalities, special_tokens
from tests.parity.conditions import shortest_window
from tests.parity.running import seeded_case

ROWS = [(family, modality) for family in registry.FAMILIES for modality in modalities(family)]


@pytest.mark.parametrize(("family", "modality"), ROWS)
def test_prompts_fit_their_pictures(family: str, modality: str) -> None:
    """Tokens, grids and pixels agree, which the position ids check; text has no token that means something else."""
    seen = set()
    for number in range(200):
        case = seeded_case(family, modality, 0, number)
        assert case.tokens and max(case.tokens) < case.config.vocab_size and sum(chunks(case)) == len(case.tokens)
        special = {case.config.vocab_size - count for count in range(1, 5)}
        assert special >= set(special_tokens(case.config).values())
        if modality == "text":
            assert not case.pictures and not special & set(case.tokens)
            seen.add(("chunks", len(chunks(case)) > 2))
            continue
        kinds = {picture.kind for picture in case.pictures}
        assert kinds == {"images": {"image"}, "mixed": {"image", "video"}}.get(modality, {modality})
        places = mrope_ids.Placeholders(
            case.config.image_token_id,
            case.config.video_token_id,
            case.config.vision.spatial_merge_size,
            family != "qwen2_vl",
        )
        ids, _ = mrope_ids.position_ids(case.tokens, case.grids("image"), case.grids("video"), places)
        assert ids.shape == (3, 1, len(case.tokens))
        for kind in ("image", "video"):
            pixels = case.pixels(kind)
            assert (pixels is not None) == (kind in kinds)
            assert pixels is None or pixels.shape[1] == case.config.vision.patch_pixels
        inside = {case.config.image_token_id, case.config.video_token_id}
        seen |= {
            ("bare", case.bare),
            ("picture first", case.tokens[0] in inside | special),
            ("picture last", case.tokens[-1] in inside | special),
            ("cut", any(a in inside and b in inside for a, b in _cuts(case.tokens, chunks(case)))),
        }
    assert {(name, True) for name, _ in seen} <= seen and {(name, False) for name, _ in seen} <= seen


def _cuts(tokens: tuple[int, ...], lengths: list[int]) -> list[tuple[int, int]]:
    """The tokens on both sides of every border between chunks."""
    borders = [sum(lengths[: number + 1]) for number in range(len(lengths) - 1)]
    return [(tokens[border - 1], tokens[border]) for border in borders]


def test_windows_come_up_shorter_and_longer_than_the_prompt() -> None:
    cases = [seeded_case("qwen2_vl", "text", 0, number) for number in range(100)]
    windows = [(shortest_window(case), len(case.tokens)) for case in cases]
    assert sum(window < length for window, length in windows) > 20
    assert sum(length <= window < float("inf") for window, length in windows) > 2
    assert sum(window == float("inf") for window, _ in windows) > 20


def test_every_kind_of_prompt_has_a_family() -> None:
    assert {modality for _, modality in ROWS} == set(MODALITIES)


def test_the_same_numbers_give_the_same_case() -> None:
    for family, modality in ROWS:
        first, again = (seeded_case(family, modality, 2, 3) for _ in range(2))
        assert first.text() == again.text() and first.tokens == again.tokens
