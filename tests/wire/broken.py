"""A worker that serves a target of this package with a bug: ``broken.py BUG NAME``.

``blind``: a prompt is read as if its pictures showed nothing; ``wide``: the mask of a prompt with images is sized by
the offset; ``whole-ids``, ``not-kept``: of old releases of mlx-vlm, planted in the one that is installed; ``none``: no
bug.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np

from harness.faults import OFFSET_MASK_WITH_IMAGES
from harness.target import ForwardObservation, PromptInput
from harness.targets.naming import Asked, resolve
from harness.targets.reference_session import ReferenceSession
from harness.wire.serve import serve


def blind() -> None:
    forward = ReferenceSession.forward

    def without(
        session: ReferenceSession, sequence: int, tokens: Sequence[int], prompt: PromptInput | None = None
    ) -> ForwardObservation:
        if prompt is not None and prompt.pixel_values is not None:
            prompt = replace(prompt, pixel_values=np.zeros_like(prompt.pixel_values))
        return forward(session, sequence, tokens, prompt)

    ReferenceSession.forward = without  # type: ignore[method-assign]


def of_mlx_vlm(bug: str, target: Any) -> None:
    """As in the releases that slice no ids (0.6.4 to 0.6.7) and that keep no delta (0.6.4)."""
    kind: Any = type(target._model.language_model)
    call = kind.__call__

    def whole_ids(model: Any, ids: Any, **given: Any) -> Any:
        if given.get("position_ids") is not None:
            given["position_ids"] = given["position_ids"][..., : ids.shape[1]]
        return call(model, ids, **given)

    def not_kept(model: Any, ids: Any, **given: Any) -> Any:
        kept = model._rope_deltas
        out = call(model, ids, **given)
        if given.get("rope_deltas") is not None:
            model._rope_deltas = kept
        return out

    kind.__call__ = {"whole-ids": whole_ids, "not-kept": not_kept}[bug]


def main(bug: str, name: str) -> None:
    target: Any = resolve(name, Asked()).targets[0]
    with ExitStack() as planted:
        if bug == "blind":
            blind()
        elif bug == "wide":
            planted.enter_context(OFFSET_MASK_WITH_IMAGES.plant())
        elif bug != "none":
            of_mlx_vlm(bug, target)
        serve(target)


if __name__ == "__main__":
    main(*sys.argv[1:])
