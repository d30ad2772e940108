"""The mask: its width and its content."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from harness.execution import Execution, Step
from harness.findings import Violation
from harness.judging import Judgement, Property, attention_calls
from harness.oracle import key_positions, visible_set
from harness.target import Capability


class MaskKeyAxisEqualsLiveKeys(Property):
    id = "mask_key_axis_equals_live_keys"
    sentence = "The last axis of every explicit mask is as long as the keys that attention receives."
    decisive_when = "an explicit mask for a chunk (l > 1) behind keys whose number differs from the offset"
    needs: ClassVar = frozenset({Capability.ATTENTION})

    def judge_step(self, run: Execution, step: Step) -> Judgement:
        steps = decisive = 0
        for forward in step.forwards:
            held, start = len(forward.append.held), forward.append.positions.start
            chunk = len(forward.append.positions)
            found = deciding = False
            for layer, call in attention_calls(run, forward):
                if call.mask_keys is None or call.kind != "fast":
                    continue  # by hand, mask and keys are seen as one array of scores: their widths cannot differ
                found = True
                deciding |= call.explicit and chunk > 1 and held != start
                if call.mask_keys != call.key_len:
                    return Judgement(
                        steps + 1,
                        decisive + 1,
                        violation=Violation(
                            step.index,
                            f"layer {layer}: the mask has {call.mask_keys} keys, attention received {call.key_len} "
                            f"(offset {start}, live_start {start - held}, chunk of {chunk})",
                        ),
                    )
            steps += found
            decisive += deciding
        return Judgement(steps, decisive)


class MaskShowsExactlyTheVisibleSet(Property):
    id = "mask_shows_exactly_the_visible_set"
    sentence = "An explicit mask shows each new token exactly the keys held, those before it in its chunk, and itself."
    decisive_when = "an explicit mask for a chunk (l > 1), or a boolean mask for one token"
    needs: ClassVar = frozenset({Capability.ATTENTION})

    def judge_step(self, run: Execution, step: Step) -> Judgement:
        steps = decisive = 0
        for forward in step.forwards:
            keys = key_positions(forward.append)
            visible = visible_set(forward.append)
            found = deciding = False
            for layer, call in attention_calls(run, forward):
                if call.shown is None or not call.explicit or call.mask_keys not in (None, len(keys)):
                    continue  # a wrong width is the other property's finding; content cannot be compared
                if call.key_len != len(keys):
                    continue  # the keys themselves are wrong: keys_equal_ledger_live_length says so
                found = True
                deciding |= call.query_len > 1 or call.mask == "bool"
                if call.shown.shape[-2] not in (1, len(visible)):
                    return Judgement(
                        steps + 1,
                        decisive + 1,
                        violation=Violation(
                            step.index,
                            f"layer {layer}: the mask has {call.shown.shape[-2]} rows for a chunk of {len(visible)}",
                        ),
                    )
                wrong = np.argwhere(call.shown != visible[None, None])
                if len(wrong):
                    *_, query, key = (int(i) for i in wrong[0])
                    verb = "hides" if visible[query, key] else "shows"
                    return Judgement(
                        steps + 1,
                        decisive + 1,
                        violation=Violation(
                            step.index,
                            f"layer {layer}: the mask {verb} the key at position {keys[key]} (slot {key}) to the token "
                            f"at position {forward.append.positions[query]}; {len(wrong)} of {call.shown.size} "
                            f"entries are wrong (offset {forward.append.positions.start}, "
                            f"{len(forward.append.held)} keys held, chunk of {len(visible)})",
                        ),
                    )
            steps += found
            decisive += deciding
        return Judgement(steps, decisive)
