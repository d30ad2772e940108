"""What names of mlx-lm's models stand for.

``mlx_lm:<model type>`` is a family with the caches of ``make_prompt_cache``, ``mlx_lm:<folder>`` a checkpoint, which
the library loads; with ``@live-window`` behind it the same model on our caches, whose front can be trimmed (is what the
model makes of its masks right then?), with ``@max-kv-size=N`` on those that the library bounds to N keys, and with
``@batch-generator``, ``@batch-generator-in-pieces`` (each also with ``@max-kv-size=N`` behind it) or ``@speculative``
in generation of the library as a whole.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any, cast, get_args

from harness.targets.device import device
from harness.targets.mlx_lm_caches import NO_KEYS
from harness.targets.mlx_lm_catalogue import FAMILIES
from harness.targets.mlx_lm_checkpoints import Checkpoint, find, load
from harness.targets.mlx_lm_generator import SETTINGS, GeneratorTarget
from harness.targets.mlx_lm_models import NotInstalled, UnknownFamily, build, check_forward, variants, version
from harness.targets.mlx_lm_session import LibrarySession
from harness.targets.mlx_lm_speculative import LIMITS, SPECULATIVE, SpeculativeTarget
from harness.targets.mlx_lm_target import BOUNDED, KIND, LIVE_WINDOW, OWN, MlxLmTarget
from harness.targets.naming import Asked, Subject, TargetError
from reference_models.engine import MaskPolicy

#: Generation of the library as a whole, by what stands behind the @ of a name.
GENERATION: dict[str, type[MlxLmTarget]] = {**dict.fromkeys(SETTINGS, GeneratorTarget), SPECULATIVE: SpeculativeTarget}
_CACHES = ", ".join(
    f"@{name}" for name in (LIVE_WINDOW, f"{BOUNDED}N", *(f"{each}[@{BOUNDED}N]" for each in SETTINGS), SPECULATIVE)
)
TRIMS_ITSELF = "its chunked caches drop their own fronts, and its masks begin at their start_position, not at our keys"


def _parts(rest: str) -> tuple[str, str]:
    """What stands before the @ that says whose caches, and what behind it. A folder may have an @ in its name."""
    bounded = rf"{BOUNDED}(?:0|[1-9][0-9]{{0,8}})"  # one name for one number
    named = "|".join((LIVE_WINDOW, bounded, SPECULATIVE, *(rf"{each}(?:@{bounded})?" for each in SETTINGS)))
    behind = re.fullmatch(rf"(.*?)@({named})", rest, re.DOTALL)
    return (behind[1], behind[2]) if behind else (rest, OWN)


def _is_folder(name: str) -> bool:
    return "/" in name or (Path(name) / "config.json").is_file()


def resolve(name: str) -> tuple[MlxLmTarget, ...]:
    """The targets that ``mlx_lm:<model type>`` or ``mlx_lm:<folder>`` names, with whose caches behind an @: of a model
    type one for every variant.

    Raises UnknownFamily, NotInstalled or TargetError, with one line.
    """
    kind, _, rest = name.partition(":")
    named, caches = _parts(rest)
    if kind == KIND and _is_folder(named):
        return (of_checkpoint(find(named), caches),)
    if kind != KIND or not named or "@" in named:
        raise UnknownFamily(
            f"{name!r:.60} is not {KIND}:<model type or folder>, or that with one of these behind it: {_CACHES}"
        )
    made = tuple(_kind(caches)(named, family.variant, caches) for family in variants(named))
    for target in made:
        build(named, target.variant, target.weights_seed)
    return tuple(map(_heeded, made))


def names() -> tuple[str, ...]:
    """Of all families of the catalogue."""
    return tuple(f"{KIND}:{family}" for family in FAMILIES)


def of_checkpoint(checkpoint: Checkpoint, caches: str) -> MlxLmTarget:
    """A checkpoint that was found, loaded, on these caches. Raises TargetError, NotInstalled or UnknownFamily."""
    model_type, name = load(checkpoint).model_type, Path(checkpoint.path).name
    return _heeded(_kind(caches)(model_type, name, caches, checkpoint=checkpoint))


def _kind(caches: str) -> type[MlxLmTarget]:
    return GENERATION.get(caches.partition("@")[0], MlxLmTarget)


def _heeded(target: MlxLmTarget) -> MlxLmTarget:
    """The target. UnknownFamily if caches are asked for that the library, or the model, would not heed."""
    bound = target.max_kv_size
    if target.checkpoint is None:
        check_forward(target.family, target.model_type, target.first_forward, target.calls)
    if target.caches != OWN and not target.has_keys:
        raise UnknownFamily(f"{KIND}:{target.model_type}@{target.caches} cannot be judged: {NO_KEYS}")
    if target.ours and target.trims_itself:
        raise UnknownFamily(f"{KIND}:{target.model_type}@{LIVE_WINDOW} cannot be judged: {TRIMS_ITSELF}")
    if isinstance(target, (GeneratorTarget, SpeculativeTarget)):
        target.check()
    if bound is not None and target.makes_caches:
        raise UnknownFamily(f"{KIND}:{target.model_type} makes its caches itself: max_kv_size changes nothing there")
    sinks = max((rule.sinks for rule in target.rules if rule is not None), default=0)
    if bound is not None and bound <= sinks:
        raise UnknownFamily(f"max-kv-size must be more than the {sinks} keys that stay for good, not {bound}")
    return target


def subject(rest: str, asked: Asked) -> Subject:
    """``MODEL_TYPE`` or ``FOLDER`` on the caches of the library, as they are or bounded (``@max-kv-size=N``), or on
    ours (``@live-window``). Raises TargetError."""
    name = f"{KIND}:{rest}"
    try:
        found = resolve(name)
        said = limits_of(found[0])
    except (UnknownFamily, NotInstalled) as error:
        raise TargetError(str(error)) from error
    first = found[0]
    if not first.has_keys:
        raise TargetError(f"{name} cannot be judged: {NO_KEYS}")
    if asked.policy != "live" and not first.ours:
        raise TargetError(f"{name}: the masks of the library's own caches have no other policy: ask for @{LIVE_WINDOW}")
    if first.checkpoint is None:
        found, family = tuple(dataclasses.replace(one, weights_seed=asked.seed) for one in found), rest
    else:
        family = f"{first.model_type}-{first.identity.variant}"
    ours = tuple(dataclasses.replace(one, policy=asked.policy) for one in found)
    return Subject(KIND, family, ours, f"{device()}, mlx-lm {version()}", limits=said)


def target_from_identity(data: dict[str, Any], asked: Asked | None = None) -> MlxLmTarget:
    """Rebuild the target that a trace names. Raises TargetError, with one line."""
    family, policy, seed = data.get("family"), data.get("policy"), data.get("weights_seed")
    variant, caches = _parts(str(data.get("variant")))
    try:
        if "checkpoint" in data:
            named: tuple[MlxLmTarget, ...] = (_of_trace(data["checkpoint"], caches),)
        else:
            named = resolve(f"{KIND}:{family}" + (f"@{caches}" if caches else ""))
    except (UnknownFamily, NotInstalled) as error:
        raise TargetError(str(error)) from error
    found = [target for target in named if (target.model_type, target.variant) == (family, variant)]
    if not found or policy not in ("library", *get_args(MaskPolicy)) or type(seed) is not int:
        raise TargetError(f"no variant, policy and seed of {KIND}:{family} are {data!r:.80}")
    policy = "live" if policy == "library" else policy
    return dataclasses.replace(found[0], policy=cast(MaskPolicy, policy), weights_seed=seed)


def _of_trace(told: object, caches: str) -> MlxLmTarget:
    """The checkpoint that a trace tells of, if it still lies there: ``load`` looks."""
    names = [field.name for field in dataclasses.fields(Checkpoint)]
    texts = isinstance(told, dict) and all(type(value) is str for value in told.values())
    if not isinstance(told, dict) or not texts or sorted(told) != sorted(names):
        raise TargetError(f"a checkpoint must be an object with the texts {', '.join(names)}, got {told!r:.80}")
    return of_checkpoint(Checkpoint(**told), caches)


def limits(name: str) -> tuple[str, ...]:
    """What a run of this target cannot show, one phrase each. Raises as ``resolve``."""
    return limits_of(resolve(name)[0])


def limits_of(target: MlxLmTarget) -> tuple[str, ...]:
    """The same, of a target."""
    said = [] if target.checkpoint else ["tiny configurations of ours with random float32 weights"]
    said.append("no independent witness in float64")
    if not target.ours:
        said.append("the caches of the library have no front trim")
        if isinstance(target, GeneratorTarget):
            said += target.settings.limits
        said += LIMITS if isinstance(target, SpeculativeTarget) else ()
        if target.has_states:
            said.append("recurrent states cannot go back, so every rollback must be refused")
    elif target.has_states:
        said.append("a state has no keys to trim: what it remembers of trimmed tokens is not judged, attention is")
    return (*said, *target.family.limits)


__all__ = [
    "LIVE_WINDOW",
    "NO_KEYS",
    "LibrarySession",
    "MlxLmTarget",
    "NotInstalled",
    "UnknownFamily",
    "find",
    "limits",
    "limits_of",
    "names",
    "of_checkpoint",
    "resolve",
    "subject",
    "target_from_identity",
    "version",
]
