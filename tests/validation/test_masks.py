"""The first wrong mask of every side of a validation is in its record, and drawn on its page."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from harness.cells import Cells
from harness.cli import main
from harness.reporting.checkpoint import MASKS, load_checkpoint_schema
from tests.validation.conftest import Synth, Validate

VALIDATOR = jsonschema.Draft202012Validator(load_checkpoint_schema())


def test_the_before_side_has_a_picture(synth: Synth, validate: Validate, tmp_path: Path) -> None:
    seen = validate(synth("nemotron_nas"), "--before", "offset")
    assert seen.code == 0 and seen.record is not None and seen.markdown is not None
    VALIDATOR.validate(seen.record)
    (mask,) = seen.record["masks"]
    assert (mask["side"], mask["program"], mask["operation"]) == ("before", "bounded", "Chunk(8)")
    cells = Cells.from_json(mask["cells"])
    assert (cells.queries, cells.keys, cells.wide, cells.beyond) == (8, 24, 32, 8 * 8)
    assert f"## {MASKS}\n\n- before, program bounded, Chunk(8), layer " in seen.markdown
    assert "mask (8, 32) over 24 keys, 28 entries wrong, 64 beyond the keys" in seen.markdown
    (page,) = (tmp_path / "reports" / "checkpoints").glob("*.html")
    text = page.read_text()
    assert text.count("<svg") == 1 and text.index(MASKS) < text.index("<svg") < text.index("could not show")
    assert main(["report", "--out", str(tmp_path / "reports")]) == 0  # which makes the pages again
    assert page.read_text() == text


def test_the_control_and_the_judged_side_have_one_each(synth: Synth, validate: Validate) -> None:
    sides = {}
    for options in ((), ("--after", "offset")):
        record = validate(synth("qwen2_vl"), *options).record
        assert record is not None
        VALIDATOR.validate(record)
        sides |= {mask["side"]: mask["cells"] for mask in record["masks"]}
    assert set(sides) == {"control", "after"} and sides["control"] == sides["after"]


def test_large_masks_make_no_large_page(synth: Synth, validate: Validate, tmp_path: Path) -> None:
    large = ("--max-kv-size", "256", "--prefill-chunk-size", "128", "--tokens", "512", "--decode", "0")
    seen = validate(synth("nemotron_nas"), *large, "--before", "offset")
    assert seen.record is not None
    VALIDATOR.validate(seen.record)
    (mask,) = seen.record["masks"]
    assert mask["mask_shape"][-2:] == [128, 512] and mask["cells"]["beyond"] == 128 * 128
    (page,) = (tmp_path / "reports" / "checkpoints").glob("*.html")
    text = page.read_text()
    assert len(text) < 300_000 and "a cell is 2 queries by 3 keys, at most" in text and "(128, 512)" in text


def test_a_page_says_where_there_is_no_picture(synth: Synth, validate: Validate, tmp_path: Path) -> None:
    """Not every engine tells what its masks show, and some are refused before attention is given them."""
    seen = validate(synth("nemotron_nas"), "--before", "offset")
    assert seen.record is not None
    (file,) = (tmp_path / "reports" / "checkpoints").glob("*.json")
    for change, words in (
        ({"cells": None}, "mask (8, 32); the engine does not tell what it shows, so that there is no picture"),
        ({"cells": None, "layer": None, "mask_shape": None}, "before attention was given it, so that there is no"),
    ):
        record = seen.record | {"masks": [seen.record["masks"][0] | change]}
        VALIDATOR.validate(record)
        file.write_text(json.dumps(record))
        assert main(["report", "--out", str(tmp_path / "reports")]) == 0
        assert words in file.with_suffix(".md").read_text() and "<svg" not in file.with_suffix(".html").read_text()


def test_cells_that_are_none_are_refused(
    synth: Synth, validate: Validate, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = validate(synth("nemotron_nas"), "--before", "offset")
    assert seen.record is not None
    (file,) = (tmp_path / "reports" / "checkpoints").glob("*.json")
    mask = seen.record["masks"][0]
    file.write_text(json.dumps(seen.record | {"masks": [mask | {"cells": mask["cells"] | {"keys": 10**9}}]}))
    assert main(["report", "--out", str(tmp_path / "reports")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
