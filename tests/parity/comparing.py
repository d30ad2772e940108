"""One case on both sides: one-shot, in chunks, and a few greedy tokens behind."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from reference_models.prompt import Images, Prompt
from tests.parity import checkpoints, routing
from tests.parity.cases import Case, chunks
from tests.parity.peers import Engine, Peer

TOLERANCE = 5e-5  # of the standard deviation of the peer's logits
DECODES = 4


class Disagreement(AssertionError):
    """The sides differ by more than rounding. ``off``: by how many standard deviations of the logits."""

    def __init__(self, message: str, off: float):
        super().__init__(message)
        self.off = off


class Refusal(Exception):
    """The peer raised; the message is what it said."""


@dataclass
class Outcome:
    """What one or several comparisons measured. ``worst``: in standard deviations of the logits; ``flips`` and
    ``ties``: experts, and greedy tokens, that both sides rank equal but for rounding, each shown to be so."""

    worst: float = 0.0
    logits: int = 0
    greedy: int = 0
    equal: int = 0
    flips: list[routing.Flip] = field(default_factory=list)
    ties: list[float] = field(default_factory=list)

    def add(self, other: Outcome) -> None:
        """Take another one's measurements."""
        self.worst = max(self.worst, other.worst)
        self.logits += other.logits
        self.greedy += other.greedy
        self.equal += other.equal
        self.flips += other.flips
        self.ties += other.ties


class Ours:
    """Our model with one sequence, loaded from the directory."""

    def __init__(self, case: Case, model: Any):
        self.case, self.model = case, model
        self.prompt: Prompt | None = None
        if case.pictures:
            given = {}
            for kind, pixels_name, grid_name in (
                ("image", "pixel_values", "image_grid_thw"),
                ("video", "pixel_values_videos", "video_grid_thw"),
            ):
                pixels = case.pixels(kind)
                if pixels is not None:
                    given |= {pixels_name: mx.array(pixels), grid_name: mx.array(case.grids(kind))}
            self.prompt = model.read(mx.array([list(case.tokens)]), Images(**given))
        self.caches: Any = None

    def run(self, lengths: Sequence[int]) -> np.ndarray:
        """Logits ``[S, V]`` of the prompt in forwards of these lengths, over fresh caches."""
        self.caches = self.model.make_caches()
        parts, start = [], 0
        for length in lengths:
            parts.append(self._forward(self.case.tokens[start : start + length]))
            start += length
        return np.concatenate(parts)

    def step(self, token: int) -> np.ndarray:
        """Logits ``[V]`` behind one more token."""
        return self._forward((token,))[0]

    def _forward(self, tokens: Sequence[int]) -> np.ndarray:
        more = {} if self.prompt is None else {"prompt": self.prompt}
        return np.array(self.model(mx.array([list(tokens)]), self.caches, **more)[0])


def compare(peer: Peer, case: Case) -> Outcome:
    """Raises Refusal, Disagreement, or UnexplainedFlip; a broken side of ours raises as it is."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "checkpoint"
        engine, first = _ask(peer, case, folder)
        ours = Ours(case, checkpoints.load(case, folder))
    return _follow(case, ours, engine, first)


def _ask(peer: Peer, case: Case, folder: Path) -> tuple[Engine, np.ndarray]:
    try:
        engine = peer.open(case, folder)
        return engine, engine.prefill()
    except Exception as error:
        said = str(error).replace(str(folder), folder.name)  # a scratch path is another one in every run
        raise Refusal(f"{type(error).__name__}: {said}") from error


def _follow(case: Case, ours: Ours, engine: Engine, theirs: np.ndarray) -> Outcome:
    outcome = Outcome()
    rule = routing.routing_of(case.config)
    routed = _take(engine.routed)
    scale = float(theirs.std())
    judged = True
    for name, lengths in (("in chunks", chunks(case)), ("one-shot", [len(case.tokens)])):
        with routing.our_routers() as seen:
            mine = ours.run(lengths)
        judged = _judge(name, mine, theirs, scale, _joined(seen, len(lengths)), routed, rule, outcome)
    for number in range(DECODES if judged else 0):
        best, other = int(mine[-1].argmax()), int(theirs[-1].argmax())
        outcome.greedy += 1
        outcome.equal += best == other
        if best != other:  # the logits agree, so these two are within twice the tolerance of each other
            outcome.ties.append(float(theirs[-1, other] - theirs[-1, best]) / scale)
        with routing.our_routers() as seen:
            mine = ours.step(other)[None]
        try:
            theirs = engine.step(other)[None]
        except Exception as error:
            raise Refusal(f"{type(error).__name__}: {error}") from error
        if not _judge(f"greedy step {number}", mine, theirs, scale, seen, _take(engine.routed), rule, outcome):
            break
    return outcome


def _judge(
    name: str,
    mine: np.ndarray,
    theirs: np.ndarray,
    scale: float,
    here: list[np.ndarray],
    there: list[np.ndarray],
    rule: routing.Routing | None,
    outcome: Outcome,
) -> bool:
    """Whether the logits ``[L, V]`` agree to the last; False when a routing tie, which is recorded, parts them."""
    if mine.shape != theirs.shape:
        raise Disagreement(f"{name}: logits {mine.shape} here, {theirs.shape} there", float("inf"))
    off = np.abs(mine - theirs).max(axis=-1) / scale
    off = np.where(np.isfinite(off), off, np.inf)
    good = len(off)
    if off.max() > TOLERANCE and rule is not None:
        try:
            flip = routing.first_flip(here, there, rule)
        except routing.UnexplainedFlip as error:
            error.off = float(off.max())
            raise
        if flip is not None:
            outcome.flips.append(flip)
            good = flip.token
    if good and off[:good].max() > TOLERANCE:
        where = int(off[:good].argmax())
        apart = float(off[where])
        raise Disagreement(f"{name}: token {where} is off by {apart:.1e} deviations of the logits", apart)
    outcome.worst = max(outcome.worst, float(off[:good].max(initial=0.0)))
    outcome.logits += good * mine.shape[-1]
    return good == len(off)


def _take(routed: list[np.ndarray]) -> list[np.ndarray]:
    taken = list(routed)
    routed.clear()
    return taken


def _joined(seen: list[np.ndarray], forwards: int) -> list[np.ndarray]:
    """Router logits of several forwards as those of one: per layer, the tokens behind each other."""
    layers = len(seen) // forwards
    return [np.concatenate(seen[layer::layers]) for layer in range(layers)]
