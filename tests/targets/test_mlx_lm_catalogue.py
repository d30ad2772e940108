"""Files of the catalogue that are broken: each is named, and none breaks another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.targets.mlx_lm_catalogue import FAMILIES, FOLDER, WITHOUT_ENTRY, Family, catalogue, unknown

GOOD = (FOLDER / "llama.toml").read_text()


def test_no_file_is_broken() -> None:
    assert len(FAMILIES) > 110 and [why for why in WITHOUT_ENTRY.values() if ".toml: " in why] == []


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("x = ", "Invalid value"),
        (b"\xff", "utf-8"),
        (GOOD.replace("[config]", "[other]"), "unknown field 'other'"),
        ('attention = "grouped"\n', "it has no table [config]"),
        (GOOD.replace('"grouped"', '"banana"'), "attention must be one of 'grouped'"),
        (GOOD.replace("vocab_size = 40\n", ""), "config.vocab_size must be a whole number above 0, not None"),
        (GOOD.replace("vocab_size = 40", "vocab_size = -1"), "not -1"),
        (f"windows = 4\n{GOOD}", "windows must be a list of whole numbers"),
        (f"windows = [-4, 4]\n{GOOD}", "windows must be a list of whole numbers"),
        (f'windows = ["a", true]\n{GOOD}', "windows must be a list of whole numbers"),
        (f"calls = [[0]]\n{GOOD}", "calls must be a list of pairs"),
        (f"calls = [[0, -1]]\n{GOOD}", "calls must be a list of pairs"),
        (f"limits = 5\n{GOOD}", "not iterable"),
    ],
)
def test_a_broken_file_is_told_and_the_others_are_there(text: str | bytes, why: str, tmp_path: Path) -> None:
    (tmp_path / "llama.toml").write_text(GOOD)
    (tmp_path / "odd.toml").write_bytes(text if isinstance(text, bytes) else text.encode())
    families, without = catalogue(tmp_path, Family)
    assert list(families) == ["llama"] and list(without) == ["odd"]
    assert without["odd"].startswith("odd.toml: ") and why in without["odd"] and "\n" not in without["odd"]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"windows": (4,)}, "windows has 1 numbers for 3 attention calls"),
        ({"calls": ((0, 0), (1, 1), (2, 7))}, "calls names a cache beyond the 3 with keys"),
        ({"config": {"num_hidden_layers": -2}}, "mlx-lm .* cannot build it|a forward of two tokens raised"),
        ({"config": {"num_attention_heads": 3}}, "a forward of two tokens raised|cannot build it"),
        ({"config": {"hidden_size": -32}}, "cannot build it|a forward of two tokens raised"),
        ({"module": "nomodule"}, "has no model nomodule"),
    ],
)
def test_what_cannot_be_built_is_one_line(change: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlx_lm", reason="mlx-lm is not installed: pip install 'mlx-kv-harness[mlx-lm]'")
    import dataclasses

    from harness.targets import mlx_lm_models
    from harness.targets.mlx_lm import subject
    from harness.targets.naming import Asked, TargetError

    (llama, *_) = FAMILIES["llama"]
    config = llama.config | change.get("config", {})
    odd = dataclasses.replace(llama, **{**change, "config": config})
    monkeypatch.setitem(mlx_lm_models.FAMILIES, "llama", (odd,))
    mlx_lm_models.build.cache_clear()
    try:
        with pytest.raises(TargetError, match=why) as caught:
            subject("llama", Asked("live", 0, 0, None))
    finally:
        mlx_lm_models.build.cache_clear()
    assert "\n" not in str(caught.value)


def test_every_entry_is_found_by_what_the_library_calls_its_module() -> None:
    """A ``config.json`` says ``model_type``, by which the library finds the module: ``nemotron-nas``."""
    pytest.importorskip("mlx_lm", reason="mlx-lm is not installed: pip install 'mlx-kv-harness[mlx-lm]'")
    from mlx_lm.utils import MODEL_REMAPPING

    from harness.targets.mlx_lm_models import named_by

    others = {one.module: name for name, entries in FAMILIES.items() for one in entries if one.module}
    assert others == {"nemotron-nas": "nemotron_nas"}  # a new one needs a checkpoint in test_mlx_lm_checkpoints
    assert {module: named_by(module) for module in others} == others
    assert [name for name in FAMILIES if named_by(name) != name or name in MODEL_REMAPPING] == []
    assert named_by("mistral") == "llama" and named_by("nothing-like-it") == "nothing-like-it"


def test_a_name_that_is_not_there_is_answered_by_the_nearest() -> None:
    assert unknown("nemotron-nas", FAMILIES, "mlx_lm") == (
        "mlx_lm has no family 'nemotron-nas' in the catalogue; nearest: nemotron_nas, nemotron, nemotron_h; "
        "kv-harness families --kind mlx_lm lists them"
    )
    assert "nearest" not in unknown("&", FAMILIES, "mlx_lm")
