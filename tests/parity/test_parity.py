"""Live: every family, peer and kind of prompt, over configurations that Hypothesis draws and shrinks.

``KV_HARNESS_PARITY_EXAMPLES`` sets how many a row gets (5, always the same ones, when it is not set). ``make parity``
does the same with a table at its end; what a peer cannot do is in ``limitations``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reference_models import registry, rope
from tests.parity.cases import Case, draw_case
from tests.parity.comparing import Disagreement, Outcome, compare
from tests.parity.limitations import limitations_of
from tests.parity.peers import PEERS, Peer, missing, version
from tests.parity.routing import UnexplainedFlip
from tests.parity.running import seeded_case, try_known

EXAMPLES = os.environ.get("KV_HARNESS_PARITY_EXAMPLES")
SETTINGS = settings(
    max_examples=int(EXAMPLES or 5),
    derandomize=EXAMPLES is None,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
ROWS = [
    (peer, family, modality) for peer in PEERS for family in registry.FAMILIES for modality in peer.modalities(family)
]
BY_NAME = {peer.name: peer for peer in PEERS}


def need(peer: Peer) -> str:
    """Skip the test without the peer; else its version."""
    if absent := missing(peer):
        pytest.skip(f"not installed: {', '.join(absent)} (pip install 'mlx-kv-harness[peers]')")
    if "transformers" in peer.needs:
        from transformers.utils import logging

        logging.disable_progress_bar()
    found = version(peer.needs[0])
    assert found is not None
    return found


@pytest.mark.parametrize(("peer", "family", "modality"), ROWS, ids=[f"{p.name}-{f}-{m}" for p, f, m in ROWS])
def test_a_drawn_configuration_agrees(peer: Peer, family: str, modality: str) -> None:
    installed = need(peer)
    total = Outcome()
    known = []

    @SETTINGS
    @given(data=st.data())
    def run(data: st.DataObject) -> None:
        def choose(options: Sequence[Any]) -> Any:
            return data.draw(st.sampled_from(options))

        case = peer.adapt(draw_case(family, modality, choose))
        if entries := limitations_of(peer, installed, case):
            known.extend(entries)
            if any(entry.seen(case) for entry in entries):
                wrong = try_known(peer, case, entries).wrong
                assert wrong is None, wrong
        else:
            total.add(compare(peer, case))

    run()
    assert total.logits or known
    print(
        f"\n{family}, {peer.name}, {modality}: worst {total.worst:.1e}, {total.equal} of {total.greedy} greedy tokens"
    )


def _chosen_case(family: str, name: str, config: Any, options: dict[str, str]) -> Case:
    case = seeded_case(family, "text", 1, len(name))
    tokens = tuple(token % config.vocab_size for token in (*case.tokens, *range(20)))[:20]
    return Case(family, "text", config, options, tokens, (), chunk=6, bare=False, seed=5)


@pytest.mark.parametrize(
    ("peer", "variant"),
    [
        pytest.param(peer, variant, id=f"{peer.name}-{variant.family}-{variant.name}")
        for peer in PEERS
        for family in registry.FAMILIES
        if "text" in peer.modalities(family)
        for variant in registry.variants(family)
    ],
)
def test_the_configurations_that_campaigns_use_agree(peer: Peer, variant: registry.Variant) -> None:
    installed = need(peer)
    if getattr(variant.config, "vision", None) is not None and peer.name == "mlx-lm":
        pytest.skip("mlx-lm has no vision tower: the variant without one is the same to it")
    case = peer.adapt(_chosen_case(variant.family, variant.name, variant.config, dict(variant.options)))
    if entries := limitations_of(peer, installed, case):
        wrong = try_known(peer, case, entries).wrong
        assert wrong is None, wrong
    else:
        assert compare(peer, case).greedy == 4


def _found(peer: Peer, family: str, modality: str) -> bool:
    """Whether one of a few configurations shows a difference."""
    for number in range(12):
        case = peer.adapt(seeded_case(family, modality, 3, number))
        if limitations_of(peer, version(peer.needs[0]) or "", case):
            continue
        try:
            compare(peer, case)
        except (Disagreement, UnexplainedFlip):
            return True
    return False


def test_a_planted_query_scale_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    need(BY_NAME["mlx-lm"])
    assert not _found(BY_NAME["mlx-lm"], "mistral4", "text")
    right = rope.absolute_query_scale
    monkeypatch.setattr(rope, "absolute_query_scale", lambda positions, beta, most: right(positions * 0, beta, most))
    assert _found(BY_NAME["mlx-lm"], "mistral4", "text")


def test_a_planted_rope_band_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    need(BY_NAME["mlx-lm"])
    monkeypatch.setattr(rope, "llama3_freqs", lambda dims, theta, scaling: rope.standard_freqs(dims, theta))
    assert _found(BY_NAME["mlx-lm"], "nemotron_nas", "text")


def test_planted_mrope_sections_are_found_by_images_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Text has the same T, H and W ids, so it cannot tell."""
    peer = BY_NAME["transformers"]
    need(peer)
    assert not _found(peer, "qwen3_vl", "image")
    monkeypatch.setattr(rope, "mrope_axes", lambda sections, interleaved: [0] * sum(sections))
    assert not _found(peer, "qwen3_vl", "text")
    assert _found(peer, "qwen3_vl", "image")


def test_a_planted_chunk_error_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the side in chunks can tell: a mask that forgets what is behind the chunk."""
    need(BY_NAME["mlx-lm"])
    from reference_models.engine import masks

    right = masks.chunk_mask

    def wrong(length: int, cache: Any, policy: Any = "live", window: Any = None) -> Any:
        mask = right(length, cache, policy, window)
        if mask is None or not cache.offset:
            return mask
        return mask & (mask.shape[-1] - length <= mx.arange(mask.shape[-1]))

    monkeypatch.setattr(masks, "chunk_mask", wrong)
    assert _found(BY_NAME["mlx-lm"], "qwen2_vl", "text")


def test_both_sides_load_the_same_directory(tmp_path: Path) -> None:
    """What transformers wrote is what we load: a change of one weight on the disk shows."""
    peer = BY_NAME["transformers"]
    need(peer)
    from tests.parity import checkpoints
    from tests.parity.comparing import Ours

    case = seeded_case("qwen3_vl", "text", 0, 0)
    engine = peer.open(case, tmp_path / "saved")
    right = Ours(case, checkpoints.load(case, tmp_path / "saved")).run([len(case.tokens)])
    assert abs(right - engine.prefill()).max() < 1e-3
    file = tmp_path / "saved" / "model.safetensors"
    weights = dict(mx.load(str(file)))
    name = next(name for name in weights if name.endswith("layers.0.self_attn.v_proj.weight"))
    weights[name] = weights[name] * 2
    mx.save_safetensors(str(file), weights, metadata={"format": "pt"})
    other = Ours(case, checkpoints.load(case, tmp_path / "saved")).run([len(case.tokens)])
    assert abs(right - other).max() > 1e-2
