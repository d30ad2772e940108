"""The state machine of programs whose prompts hold images."""

from __future__ import annotations

from dataclasses import replace

from hypothesis.stateful import initialize, rule

from harness import strategies as draw
from harness.machine import ProgramMachine
from harness.operations import Chunk, Owner, Prefill, Reset, Rollback, TrimFront
from harness.program_rules import able
from harness.target import Capability


class ImageMachine(ProgramMachine):
    """The same, and one of the prompts always holds images; beside it there may be text, before it or behind."""

    @initialize(
        owners=draw.owner_layouts,
        first=draw.image_prefills(),
        start=draw.second_starts,
        second=draw.prefills(1),
        frame=draw.frames,
        turn=draw.turns,
        early=draw.early_trims,
        tokens=draw.chunk_sizes,
    )
    def begin(
        self,
        owners: tuple[Owner, ...],
        first: Prefill,
        start: str,
        second: Prefill,
        frame: draw.Frame,
        turn: bool,
        early: int,
        tokens: int,
    ) -> None:
        """``turn``: the second sequence gets its prompt first. ``early``: a bound is met before the first prompt is
        read to its end, and the next chunk brings more of it."""
        self._begin(owners, first, second, start, frame, turn)
        if early and self._ledger(0).offset < len(self._ledger(0).prompt):
            self._apply_able((TrimFront(early),))
            self._apply(Chunk(tokens))

    @able(Capability.RESET)
    @rule(sequence=draw.sequences, prompt=draw.image_prefills())
    def reset_and_look_again(self, sequence: int, prompt: Prefill) -> None:
        """Behind a reset a prompt may hold images again; a sequence that the pool cannot reset goes on with text."""
        index = self._sequence(sequence)
        self._apply(Reset(index))
        begun = self._ledger(index).begun
        self._apply(Chunk(prompt.tokens, index) if begun else replace(prompt, sequence=index))

    @able(Capability.ROLLBACK)
    @rule(sequence=draw.sequences, where=draw.image_positions, tokens=draw.chunk_sizes)
    def roll_back_into_an_image(self, sequence: int, where: int, tokens: int) -> None:
        """Other tokens then stand where the rest of the image stood. Left to chance this would be rare."""
        index = self._sequence(sequence)
        if inside := self._inside_images(index):
            position = inside[where % len(inside)]
            self._apply(Rollback(self._ledger(index).offset - position, index))
        self._apply(Chunk(tokens, index))

    def _inside_images(self, index: int) -> list[int]:
        """Positions behind the first token of an image that were processed and that a rollback can reach."""
        ledger = self._ledger(index)
        return [p for run in ledger.images for p in run[1:] if max(ledger.live_start, 0) <= p < ledger.offset]
