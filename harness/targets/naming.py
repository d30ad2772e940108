"""What a name of ``--target`` stands for (``reference:qwen2_vl``, ``mlx_lm:llama``, ``wire:COMMAND``), and a trace's.

A kind is a module with two functions: ``subject(rest, asked)``, what the part behind the colon names, and
``target_from_identity(data, asked)``, the target of a trace. Both raise TargetError, with one line. Of some there is a
list, ``names()``.
"""

from __future__ import annotations

import difflib
import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, cast

from harness.target import Path, Target

#: Kind -> its module.
KINDS = {
    "reference": "harness.targets.reference",
    "checkpoint": "harness.targets.checkpoint",
    "mlx_lm": "harness.targets.mlx_lm",
    "mlx_vlm": "harness.targets.mlx_vlm",
    "wire": "harness.targets.wire",
}
JUDGED = tuple(kind for kind in KINDS if kind != "checkpoint")
"""Those that ``--target`` takes: a checkpoint on our models is judged by ``kv-harness validate``."""
ALL = "all"
"""``KIND:all`` stands for all that a kind lists."""
LIMIT = 60.0
"""Seconds that an engine in another process has for an answer, unless somebody says otherwise."""
MOST = 86_400.0
"""And at most."""


class TargetError(ValueError):
    """A target that does not exist or cannot be used; the message names it and says why, in one line."""


@dataclass(frozen=True)
class Asked:
    """How a run wants its targets. ``configurations``: how many are drawn from ``seed``, by kinds that can;
    ``limit``: seconds for an answer of another process; ``run_command``: a command that a trace names may be run;
    ``far``: also those that only programs far from small can judge."""

    policy: Literal["live", "offset"] = "live"
    seed: int = 0
    configurations: int = 0
    limit: float = LIMIT
    run_command: bool = False
    far: bool = False


@dataclass(frozen=True)
class Subject:
    """What is judged and reported together: the ``targets`` of one kind, family and path, simplest first.

    ``limits``: what a run on them cannot show, one phrase each; ``device``: where they compute, for the report;
    ``close``: ends what was started for them.
    """

    kind: str
    family: str
    targets: tuple[Target, ...]
    device: str
    path: Path = "text"
    limits: tuple[str, ...] = ()
    close: Callable[[], None] = lambda: None

    @property
    def file_name(self) -> str:
        """Of its report in ``reports/targets``: ``reference-qwen2_vl``, ``wire-toy``."""
        path = "" if self.path == "text" else f"-{self.path}"
        return re.sub(r"[^A-Za-z0-9._-]+", "-", f"{self.kind}-{self.family[:80]}{path}")


def split_names(text: str) -> list[str]:
    """The names of one ``--target``: what is behind a comma is a name of its own if it begins with a kind, so that
    commands may hold commas."""
    return [name.strip() for name in re.split(rf",(?=\s*(?:{'|'.join(KINDS)}):)", text) if name.strip()]


def listed(name: str) -> tuple[str, ...]:
    """What ``KIND:all`` stands for: every name that the kind has in a list, whether or not the installed release can
    make something of it; nothing for another name. TargetError for a kind without a list."""
    kind, _, rest = name.partition(":")
    if kind not in KINDS or rest.strip() != ALL:
        return ()
    names = getattr(_module(kind), "names", None)
    if names is None:
        raise TargetError(f"{kind} has no list of targets: {name!r:.40} stands for nothing")
    return tuple(names())


def resolve(name: str, asked: Asked) -> Subject:
    """The subject of a name. Raises TargetError."""
    kind, colon, rest = name.partition(":")
    if not colon or kind not in KINDS:
        said = f"a target is named {', '.join(f'{known}:...' for known in JUDGED)}, not {name!r:.80}"
        meant = difflib.get_close_matches(kind, JUDGED, n=1) if colon else []
        raise TargetError(f"{said}; did you mean {f'{meant[0]}:{rest}'!r:.80}?" if meant else said)
    if not rest.strip():
        raise TargetError(f"the target {name!r:.80} names nothing behind its colon")
    return cast(Subject, _module(kind).subject(rest.strip(), asked))


def target_from_identity(data: object, asked: Asked) -> Target:
    """Rebuild the target that a trace names. Raises TargetError."""
    kind = data.get("kind") if isinstance(data, dict) else None
    if not isinstance(kind, str) or kind not in KINDS:
        raise TargetError(f"unknown kind of target {kind!r:.60}; this version knows {', '.join(KINDS)}")
    return cast(Target, _module(kind).target_from_identity(data, asked))


def _module(kind: str) -> Any:
    return importlib.import_module(KINDS[kind])
