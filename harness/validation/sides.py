"""The sides of a validation: which engine each of them runs on, and under which mask policy.

Pure: names alone, of which nothing is opened here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

REFERENCE, MLX_LM, WIRE = "reference", "mlx_lm", "wire:"
NAMES = "reference, mlx_lm or wire:COMMAND"
PLANTED = "offset"
LIBRARY = "library"
"""In the place of a mask policy: the engine's own caches, whose front cannot be trimmed."""
JUDGED = ("live", PLANTED)
"""What the judged side can have; the other one can have LIBRARY as well."""
POLICIES = (*JUDGED, LIBRARY)
_OUTSIDE = "reads no checkpoint here (its models have random weights, and its caches no front trim)"


class EngineError(ValueError):
    """An engine that does not exist or cannot do this; one line that names the option."""


@dataclass(frozen=True)
class Side:
    """``engine``: its name; ``policy``: one of POLICIES."""

    engine: str
    policy: str

    def __str__(self) -> str:
        return f"{self.engine}@{self.policy}"


@dataclass(frozen=True)
class Sides:
    """``after`` is judged; ``before``, if there is one, is what it is compared with. ``option``: which one named the
    engine that is judged."""

    after: Side
    before: Side | None = None
    option: str = "--engine"

    @property
    def other(self) -> str | None:
        """The engine of ``before``, where that is another one."""
        return None if self.before is None or self.before.engine == self.after.engine else self.before.engine


def sides_of(engine: str | None, before: str | None, after: str) -> Sides:
    """What ``--engine ENGINE``, ``--before`` and ``--after`` ask for. The last two take POLICY, ENGINE or
    ENGINE@POLICY: a policy alone is one of the judged engine, an engine alone runs under ``live``, and since a command
    may hold an @, what stands behind the last one counts only if it is a policy. Raises EngineError."""
    named = None if engine is None else _engine("--engine", engine)
    own, policy = _read("--after", after)
    if policy == LIBRARY:
        raise EngineError(f"argument --after: {after!r:.200} has no front trim; judged is {' or '.join(JUDGED)}")
    if own is not None and named is not None and own != named:
        raise EngineError(f"argument --after: {own!r:.200} is judged, and --engine names {named!r:.200}: leave one out")
    judged = Side(own or named or REFERENCE, policy)
    option = "--engine" if own is None or named is not None else "--after"
    if before is None:
        return Sides(judged, None, option)
    own, policy = _read("--before", before)
    compared = Side(own or judged.engine, policy)
    if compared == judged:
        raise EngineError(f"argument --before: {before!r:.200} is --after as well: that compares a side with itself")
    return Sides(judged, compared, option)


def _read(option: str, text: str) -> tuple[str | None, str]:
    """(engine, policy); no engine where a policy stands alone."""
    if text in POLICIES:
        return None, text
    before, at, behind = text.rpartition("@")
    named, policy = (before, behind) if at and behind in POLICIES else (text, "live")
    return _engine(option, named), policy


def _engine(option: str, text: str) -> str:
    """Its name, as it is written in reports."""
    kind, colon, command = text.partition(":")
    if text in (REFERENCE, MLX_LM):
        return text
    if f"{kind}{colon}" == WIRE and command.strip():
        return f"{WIRE}{command.strip()}"
    why = _OUTSIDE if kind == "mlx_vlm" else "is no engine"
    policies = "" if option == "--engine" else f", each also with @POLICY behind it, and the policies {_listed(option)}"
    raise EngineError(f"argument {option}: {text!r:.80} {why}; there are {NAMES}{policies}")


def _listed(option: str) -> str:
    return ", ".join(JUDGED if option == "--after" else POLICIES)


def with_control(
    before: str | None, after: str, policies: Sequence[str] = JUDGED, other: Sequence[str] | None = None
) -> dict[str, str]:
    """The sides and their mask policies: beside those asked for, the planted bug, where no side of the judged engine
    has it and that engine can. ``policies``: of the judged engine; ``other``: of the one that ``before`` runs on, where
    that is another. EngineError for a policy that an engine lacks."""
    sides = {"after": after} | ({} if before is None else {"before": before})
    for side, policy in sides.items():
        able = policies if side == "after" or other is None else other
        if policy not in able:
            raise EngineError(f"argument --{side}: this engine has {', '.join(able)}, not {policy}")
    has = control_side(sides, other is not None) is not None
    return sides if has or PLANTED not in policies else sides | {"control": PLANTED}


def control_side(sides: Mapping[str, str], two_engines: bool = False) -> str | None:
    """The side of the judged engine that has the planted bug, ``after`` itself where that has it; None where there is
    none. What another engine makes of the bug does not show that it would be found in this one."""
    mine = (side for side in sides if not (two_engines and side == "before"))
    return next((side for side in mine if sides[side] == PLANTED), None)
