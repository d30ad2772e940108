"""The mask: its width and its content."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from harness.execution import Execution
from harness.findings import Violation
from harness.judging import Judgement, Property, attention_calls, front_stays
from harness.oracle import PADDING, key_positions, of_layer, visible_set
from harness.rules import CacheRule
from harness.steps import ForwardStep, Step
from harness.target import AttentionCall, Capability, Target


class MaskKeyAxisEqualsLiveKeys(Property):
    id = "mask_key_axis_equals_live_keys"
    sentence = "The last axis of every explicit mask is as long as the keys that attention receives."
    decisive_when = "an explicit mask for a chunk (l > 1) behind keys whose number differs from the offset"
    needs: ClassVar = frozenset({Capability.ATTENTION})
    feels: ClassVar = frozenset({"trims"})

    def never_decisive(self, target: Target) -> str | None:
        return front_stays(target)

    def judge_step(self, run: Execution, step: Step) -> Judgement:
        steps = decisive = 0
        for forward in step.forwards:
            held, start = len(forward.append.held), forward.append.positions.start
            chunk = len(forward.append.positions)
            found = deciding = False
            for number, (layer, call) in enumerate(attention_calls(run, forward)):
                if call.mask_keys is None or call.kind != "fast":
                    continue  # by hand, mask and keys are seen as one array of scores: their widths cannot differ
                found = True
                there = len(of_layer(forward.append, run.target.rules[number]).held)
                deciding |= call.explicit and chunk > 1 and there != start
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
    sentence = (
        "Attention shows each new token exactly the keys held, those before it in its chunk, and itself; on a layer "
        "with a sliding window, those of them that are less than the window away."
    )
    decisive_when = (
        "an explicit mask for a chunk (l > 1), or a boolean mask for one token; in a model with sliding windows, where "
        "one of them hides a key"
    )
    needs: ClassVar = frozenset({Capability.ATTENTION})

    def judge_step(self, run: Execution, step: Step) -> Judgement:
        steps = decisive = 0
        for forward in step.forwards:
            found = deciding = False
            hides = not any(run.target.windows) and not any(rule and rule.forgets for rule in run.target.rules)
            for number, (layer, call) in enumerate(attention_calls(run, forward)):
                window, rule = run.target.windows[number], run.target.rules[number]
                judged = self._judge_call(step, forward, layer, call, window, rule)
                if judged is None:
                    continue
                if judged.violation is not None:
                    return Judgement(steps + 1, decisive + 1, violation=judged.violation)
                found = True
                deciding |= call.explicit and (call.query_len > 1 or call.mask == "bool")
                hides |= _hides(forward, call, window, rule)
            steps += found
            decisive += deciding and hides
        return Judgement(steps, decisive)

    @staticmethod
    def _judge_call(
        step: Step, forward: ForwardStep, layer: int, call: AttentionCall, window: int | None, rule: CacheRule | None
    ) -> Judgement | None:
        """None where there is nothing to compare: a wrong width, or wrong keys, are findings of other properties."""
        append = of_layer(forward.append, rule)
        keys, visible = key_positions(append), visible_set(append, window, rule)
        queries = list(append.positions)
        if call.key_len != len(keys) or call.mask_keys not in (None, len(keys)):
            return None
        if call.query_len < len(queries):  # a model may ask for its last tokens only
            visible, queries = visible[-call.query_len :], queries[-call.query_len :]
        longer = call.query_len > len(queries)
        shown = call.shown if longer else _shown(call)  # what no mask shows is not made for any number of queries
        if shown is None and not longer:
            return None
        if longer or shown is None or shown.shape[-2] not in (1, len(visible)):
            rows = call.query_len if shown is None else shown.shape[-2]
            message = f"layer {layer}: {call.query_len} queries and {rows} mask rows for a chunk of {len(queries)}"
            return Judgement(violation=Violation(step.index, message))
        wrong = np.argwhere(shown != visible[None, None])
        if not len(wrong):
            return Judgement()
        *_, query, key = (int(i) for i in wrong[0])
        verb = "hides" if visible[query, key] else "shows"
        what = "the mask" if call.explicit else f"attention ({_WITHOUT[call.mask]})"
        return Judgement(
            violation=Violation(
                step.index,
                f"layer {layer}: {what} {verb} {_key(keys, key)} to the token at position "
                f"{queries[query]}; {len(wrong)} of {max(shown.size, visible.size)} entries are wrong "
                f"(offset {forward.append.positions.start}, {len(forward.append.held)} keys held, chunk of "
                f"{len(forward.append.positions)}{_limits(window, rule)})",
            )
        )


def _limits(window: int | None, rule: CacheRule | None) -> str:
    """What else decides who is seen, behind a comma."""
    words = "" if window is None else f", window of {window}"
    if rule is not None and rule.forgets:
        words += ", cache that keeps "
        words += f"chunks of {rule.chunk}" if rule.chunk else f"{rule.window} keys, {rule.sinks} of them sinks"
    return words


def _key(keys: np.ndarray[Any, Any], slot: int) -> str:
    if keys[slot] == PADDING:
        return f"the padding in slot {slot}"
    return f"the key at position {keys[slot]} (slot {slot})"


def _hides(forward: ForwardStep, call: AttentionCall, window: int | None, rule: CacheRule | None) -> bool:
    """Does this window, or this rule of a cache, hide a key from a query of the call that would see it otherwise?"""
    if window is None and rule is None:
        return False
    append = of_layer(forward.append, rule)
    seen, all_of_them = (visible_set(append, *limits)[-call.query_len :] for limits in ((window, rule), (None, None)))
    return bool((seen != all_of_them).any())


_WITHOUT = {"none": "no mask", "causal": 'the mask "causal"', "bool": "the mask", "additive": "the mask"}


def _shown(call: AttentionCall) -> np.ndarray[Any, Any] | None:
    """What attention shows, [B or 1, H or 1, l or 1, K]: without a mask everything, with "causal" the triangle that
    ends at the last key. None for additive scores of one token, which hide nothing and say nothing."""
    if call.mask == "none":
        return np.ones((1, 1, call.query_len, call.key_len), bool)
    if call.mask == "causal":
        shift = call.key_len - call.query_len
        return np.tri(call.query_len, call.key_len, shift, dtype=bool)[None, None]
    return call.shown if call.explicit else None
