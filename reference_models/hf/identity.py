"""What a set of weight names is: traits that only some architectures have.

A checkpoint is what its config and its weights say, both; one that calls itself one thing and holds another must be
refused before it is "validated" as something it is not.
"""

import re
from collections.abc import Iterable, Mapping

#: Trait -> the weight names (with either layout's prefixes) that have it.
TRAITS: Mapping[str, re.Pattern[str]] = {
    name: re.compile(pattern)
    for name, pattern in {
        "state-space or recurrent layers": r"\.(A_log|dt_bias|conv1d\.weight|in_proj_qkvz?\.weight|ssm|mamba)(\.|$)",
        "latent attention": r"\.self_attn\.(kv_a_proj_with_mqa|kv_b_proj|embed_q|unembed_out)\.",
        "norms on q and k": r"\.self_attn\.(q_norm|k_norm)\.weight$",
        "a bias on q": r"\.self_attn\.q_proj\.bias$",
        "routed experts": r"\.mlp\.(experts|switch_mlp)\.",
        "routers with a correction bias": r"\.mlp\.gate\.e_score_correction_bias$",
        "a second norm in their layers": r"\.post_attention_layernorm\.weight$",
        "norms behind the feed-forward": r"\.post_feedforward_layernorm\.weight$",
        "linear replacements": r"\.(self_attn\.linear(_attn)?|mlp\.linear(_mlp)?)\.weight$",
    }.items()
}
_RECURRENT, _LATENT, _NORMS, _BIAS, _EXPERTS, _CORRECTION, _SECOND, _BEHIND, _LINEAR = TRAITS

#: Family -> traits its weights must have, and traits that none of them has. A trait in neither may come or not.
EXPECTED: Mapping[str, tuple[frozenset[str], frozenset[str]]] = {
    "cohere2": (frozenset(), frozenset({_RECURRENT, _LATENT, _NORMS, _BIAS, _EXPERTS, _CORRECTION, _SECOND, _LINEAR})),
    "glm4_moe_lite": (
        frozenset({_LATENT, _EXPERTS, _CORRECTION, _SECOND}),
        frozenset({_RECURRENT, _NORMS, _BIAS, _BEHIND, _LINEAR}),
    ),
    "minicpm3": (frozenset({_LATENT, _SECOND}), frozenset({_RECURRENT, _NORMS, _BIAS, _EXPERTS, _BEHIND, _LINEAR})),
    "mistral4": (frozenset({_LATENT}), frozenset({_RECURRENT, _NORMS, _CORRECTION, _LINEAR})),
    "nemotron_nas": (frozenset(), frozenset({_RECURRENT, _LATENT, _NORMS, _EXPERTS})),
    "olmo3": (frozenset({_NORMS, _SECOND, _BEHIND}), frozenset({_RECURRENT, _LATENT, _EXPERTS, _LINEAR})),
    "qwen2_vl": (frozenset({_BIAS}), frozenset({_RECURRENT, _LATENT, _NORMS, _EXPERTS, _LINEAR})),
    "qwen3_vl": (frozenset({_NORMS}), frozenset({_RECURRENT, _LATENT, _EXPERTS, _BEHIND, _LINEAR})),
    "qwen3_vl_moe": (frozenset({_NORMS, _EXPERTS}), frozenset({_RECURRENT, _LATENT, _BEHIND, _LINEAR})),
}

#: Names that a folder or a repository may carry, punctuation removed -> the families that may be inside.
ALIASES: Mapping[str, tuple[str, ...]] = {
    "cohere2": ("cohere2",),
    "commandr7b": ("cohere2",),
    "glm4moelite": ("glm4_moe_lite",),
    "glm47flash": ("glm4_moe_lite",),
    "minicpm3": ("minicpm3",),
    "mistral4": ("mistral4",),
    "nemotronnas": ("nemotron_nas",),
    "decilm": ("nemotron_nas",),
    "olmo3": ("olmo3",),
    "qwen2vl": ("qwen2_vl",),
    "qwen3vlmoe": ("qwen3_vl_moe",),
    "qwen3vl": ("qwen3_vl", "qwen3_vl_moe"),  # published names of the mixture say only the size, "30B-A3B"
}


def traits_of(names: Iterable[str]) -> dict[str, str]:
    """Every trait that the names show, with the first name that shows it."""
    found: dict[str, str] = {}
    for name in sorted(names):
        for trait, pattern in TRAITS.items():
            if trait not in found and pattern.search(name):
                found[trait] = name
    return found


def contradiction(family: str, names: Iterable[str]) -> str | None:
    """Why these weights cannot be of ``family``, in one line; None if they can."""
    found = traits_of(names)
    required, forbidden = EXPECTED[family]
    wrong = [f"they have {trait} ({found[trait]})" for trait in TRAITS if trait in found and trait in forbidden]
    wrong += [f"they have no {trait}" for trait in TRAITS if trait in required and trait not in found]
    if not wrong:
        return None
    fitting = [
        other
        for other, (needs, refuses) in EXPECTED.items()
        if needs <= set(found) and not refuses & set(found) and (needs or _LINEAR in found)
    ]
    instead = f"; weights like these belong to {' or '.join(fitting)}" if fitting else "; no family here fits them"
    return f"the config says {family}, but the weights are of another model: {', '.join(wrong)}{instead}"


def claimed_families(name: str) -> tuple[str, ...]:
    """The families that a folder's name claims; empty if it claims none. Never decides what a checkpoint is."""
    plain = re.sub(r"[^a-z0-9]", "", name.lower())
    claims = [alias for alias in ALIASES if alias in plain]
    return ALIASES[max(claims, key=len)] if claims else ()
