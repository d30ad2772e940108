"""Bad checkpoints: each gets one line on stderr that names file and key, exit code 2, and no traceback."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from harness import cli
from tests.checkpoints.conftest import Synth

FAMILY = "qwen3_vl"
ONE, INDEX = "model.safetensors", "model.safetensors.index.json"
NORM = "model.language_model.norm.weight"
Header = dict[str, Any]


@pytest.fixture
def single(synth: Synth, tmp_path: Path) -> Path:
    return Path(shutil.copytree(synth(FAMILY), tmp_path / "bad"))


@pytest.fixture
def sharded(synth: Synth, tmp_path: Path) -> Path:
    return Path(shutil.copytree(synth(FAMILY, shard_bytes=60_000), tmp_path / "bad"))


def error(capsys: pytest.CaptureFixture[str], folder: Path) -> str:
    """What ``identify`` says; the same must stop ``logits``."""
    assert cli.main(["identify", str(folder)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    lines = said.err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("kv-harness: error: "), said.err
    ids = folder.parent / "ids.npz"
    np.savez(ids, ids=np.arange(4)[None])
    assert cli.main(["logits", str(folder), "--input", str(ids), "--output", str(folder.parent / "out.npz")]) == 2
    assert capsys.readouterr().err == said.err
    return lines[0]


def change_header(file: Path, change: Callable[[Header], object], data: Callable[[bytes], bytes] = bytes) -> None:
    raw = file.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data(raw[8 + length :]))


def change_json(file: Path, change: Callable[[Header], object]) -> None:
    value = json.loads(file.read_text())
    change(value)
    file.write_text(json.dumps(value))


def text_field(name: str, value: object) -> Callable[[Header], object]:
    return lambda config: config["text_config"].update({name: value})


def vision_field(name: str, value: object) -> Callable[[Header], object]:
    return lambda config: config["vision_config"].update({name: value})


def reload(folder: Path, change: Callable[[dict[str, mx.array]], object], file: str = ONE) -> None:
    weights = dict(mx.load(str(folder / file)))
    mx.eval(weights)
    change(weights)
    mx.save_safetensors(str(folder / file), weights)


def test_missing_shard(capsys: pytest.CaptureFixture[str], sharded: Path) -> None:
    name = sorted(path.name for path in sharded.glob("*.safetensors"))[1]
    (sharded / name).unlink()
    said = error(capsys, sharded)
    assert f"{name}: missing shard" in said and "first 'model.language_model." in said
    (sharded / INDEX).unlink()
    assert f"{name}: missing shard" in error(capsys, sharded)


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_truncated_file(capsys: pytest.CaptureFixture[str], single: Path, keep: int) -> None:
    raw = (single / ONE).read_bytes()
    (single / ONE).write_bytes(raw[:keep])
    said = error(capsys, single)
    assert f"{ONE}: " in said
    assert ("truncated: key 'model." if keep == -1 else "truncated" if keep < 8 else "header claims") in said


def test_header_that_claims_more_than_the_file(capsys: pytest.CaptureFixture[str], single: Path) -> None:
    raw = (single / ONE).read_bytes()
    (single / ONE).write_bytes(struct.pack("<Q", 1 << 62) + raw[8:])
    assert f"{ONE}: the header claims 4,611,686,018,427,387,904 bytes" in error(capsys, single)


HEADERS: dict[str, tuple[Callable[[Header], object], str]] = {
    "unknown dtype": (lambda h: h[NORM].update(dtype="F31"), f"key '{NORM}': unknown dtype 'F31'"),
    "dtype of no number": (lambda h: h[NORM].update(dtype=["F32"]), f"key '{NORM}': unknown dtype"),
    "negative size": (lambda h: h[NORM].update(shape=[-64]), f"key '{NORM}': shape [-64] has a negative"),
    "absurd size": (lambda h: h[NORM].update(shape=[1 << 40]), f"key '{NORM}': shape [1099511627776]"),
    "shape against bytes": (lambda h: h[NORM].update(shape=[63]), f"key '{NORM}': F32 [63] needs 252 bytes"),
    "shape of text": (lambda h: h[NORM].update(shape="64"), f"key '{NORM}': shape must be"),
    "no offsets": (lambda h: h[NORM].pop("data_offsets"), f"key '{NORM}': needs dtype"),
    "offsets backwards": (lambda h: h[NORM].update(data_offsets=[8, 0]), f"key '{NORM}': data_offsets"),
    "overlap": (
        lambda h: h[NORM].update(data_offsets=[n - 4 for n in h[NORM]["data_offsets"]]),
        "begins at byte",
    ),
}


@pytest.mark.parametrize("case", HEADERS)
def test_header(capsys: pytest.CaptureFixture[str], single: Path, case: str) -> None:
    change, expected = HEADERS[case]
    change_header(single / ONE, change)
    said = error(capsys, single)
    assert f"{single / ONE}: " in said and expected in said


def test_header_that_is_not_json_or_repeats_a_key(capsys: pytest.CaptureFixture[str], single: Path) -> None:
    for text, expected in ((b"{", "is not JSON"), (b"[]", "JSON object"), (b'{"a":1,"a":2}', "duplicate key 'a'")):
        (single / ONE).write_bytes(struct.pack("<Q", len(text)) + text)
        assert expected in error(capsys, single)


def test_bytes_behind_the_last_tensor(capsys: pytest.CaptureFixture[str], single: Path) -> None:
    change_header(single / ONE, lambda h: None, lambda data: data + b"1234")
    assert "4 bytes follow the last tensor" in error(capsys, single)


def test_missing_key(capsys: pytest.CaptureFixture[str], single: Path) -> None:
    reload(single, lambda weights: weights.pop(NORM))
    said = error(capsys, single)
    assert ONE in said and "missing key 'model.norm.weight'" in said


def test_key_that_the_index_places_and_the_shard_lacks(capsys: pytest.CaptureFixture[str], sharded: Path) -> None:
    file = json.loads((sharded / INDEX).read_text())["weight_map"][NORM]
    reload(sharded, lambda weights: weights.pop(NORM), file)
    said = error(capsys, sharded)
    assert f"{file}: missing key '{NORM}'" in said


def test_unexpected_key(capsys: pytest.CaptureFixture[str], single: Path) -> None:
    reload(single, lambda weights: weights.update({"model.language_model.extra.weight": mx.zeros((2,))}))
    said = error(capsys, single)
    assert ONE in said and "unexpected key 'model.language_model.extra.weight'" in said


def test_wrong_shape(capsys: pytest.CaptureFixture[str], single: Path) -> None:
    reload(single, lambda weights: weights.update({NORM: mx.zeros((63,))}))
    said = error(capsys, single)
    assert f"{ONE}: key '{NORM}' has the wrong shape [63]; the config makes it [64]" in said


def test_integers_where_floats_belong(capsys: pytest.CaptureFixture[str], single: Path) -> None:
    reload(single, lambda weights: weights.update({NORM: mx.zeros((64,), dtype=mx.int32)}))
    assert f"key '{NORM}' is I32" in error(capsys, single)


def test_duplicate_key_across_shards(capsys: pytest.CaptureFixture[str], sharded: Path) -> None:
    placed = json.loads((sharded / INDEX).read_text())["weight_map"]
    other = next(file for file in placed.values() if file != placed[NORM])
    reload(sharded, lambda weights: weights.update({NORM: mx.zeros((64,))}), other)
    said = error(capsys, sharded)
    assert f"duplicate key '{NORM}'" in said and other in said and placed[NORM] in said


def test_one_weight_under_the_names_of_two_layouts(capsys: pytest.CaptureFixture[str], single: Path) -> None:
    reload(single, lambda weights: weights.update({"language_model.model.norm.weight": mx.zeros((64,))}))
    assert "duplicate key" in (said := error(capsys, single)) and "is the same weight" in said


@pytest.mark.parametrize("name", ["../other.safetensors", "/etc/passwd", "a/../../x", "C:\\x", "..\\x", ""])
def test_index_that_leads_out_of_the_directory(capsys: pytest.CaptureFixture[str], sharded: Path, name: str) -> None:
    change_json(sharded / INDEX, lambda index: index["weight_map"].update({NORM: name}))
    said = error(capsys, sharded)
    assert f"{INDEX}: file name {name!r} leads out" in said


def test_link_that_leads_out_of_the_directory(capsys: pytest.CaptureFixture[str], sharded: Path) -> None:
    file = json.loads((sharded / INDEX).read_text())["weight_map"][NORM]
    (sharded / file).rename(sharded.parent / file)
    (sharded / file).symlink_to(sharded.parent / file)
    assert f"{INDEX}: file {file!r} is a link that leads out" in error(capsys, sharded)
    (sharded / file).unlink()
    (sharded / file).symlink_to(file)
    assert "cannot be followed" in (said := error(capsys, sharded)) or "missing shard" in said


@pytest.mark.parametrize("text", ["{", "[1]", "", "\xff", '{"a": 1, "a": 1}', "[" * 100_000, "{}"])
def test_config_that_is_no_config(capsys: pytest.CaptureFixture[str], single: Path, text: str) -> None:
    (single / "config.json").write_bytes(text.encode("latin-1"))
    assert f"{single / 'config.json'}: " in error(capsys, single)


@pytest.mark.parametrize("value", [-1, 0, 1 << 40, 2.5, "64", True, [64], 1e300])
@pytest.mark.parametrize("name", ["hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads", "head_dim"])
def test_negative_and_absurd_sizes(capsys: pytest.CaptureFixture[str], single: Path, name: str, value: object) -> None:
    change_json(single / "config.json", text_field(name, value))
    before = mx.get_active_memory()
    said = error(capsys, single)
    assert "config.json: " in said and name in said
    assert mx.get_active_memory() <= before + (1 << 20)


@pytest.mark.parametrize("name", ["hidden_size", "vocab_size", "intermediate_size"])
def test_sizes_that_only_the_weights_refute(capsys: pytest.CaptureFixture[str], single: Path, name: str) -> None:
    change_json(single / "config.json", text_field(name, 1 << 20))
    if name == "hidden_size":
        change_json(single / "config.json", vision_field("out_hidden_size", 1 << 20))
    mx.reset_peak_memory()
    assert "wrong shape" in error(capsys, single)
    assert mx.get_peak_memory() < 64 << 20


def test_unknown_model_type_names_the_nearest(capsys: pytest.CaptureFixture[str], single: Path) -> None:
    change_json(single / "config.json", lambda config: config.update(model_type="qwen3_vll", text_config={}))
    said = error(capsys, single)
    assert "unknown model type 'qwen3_vll'; nearest known: qwen3_vl" in said


def test_an_unreadable_directory_has_one_line_too(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "config.json: missing" in error(capsys, tmp_path)
    assert "is not a directory" in error(capsys, _file(tmp_path))


def _file(folder: Path) -> Path:
    (folder / "x.txt").write_text("")
    return folder / "x.txt"


def test_nan_weights_are_a_warning(capsys: pytest.CaptureFixture[str], single: Path, tmp_path: Path) -> None:
    def spoil(weights: dict[str, mx.array]) -> None:
        weights[NORM] = mx.where(mx.arange(64) == 3, mx.nan, weights[NORM])

    reload(single, spoil)
    np.savez(tmp_path / "ids.npz", ids=np.arange(4)[None])
    out = tmp_path / "out.npz"
    assert cli.main(["logits", str(single), "--input", str(tmp_path / "ids.npz"), "--output", str(out)]) == 0
    assert "warning: " in (said := capsys.readouterr().err) and "model.norm.weight holds NaN" in said
    assert np.isnan(np.load(out)["logits"]).all()


def test_code_in_a_checkpoint_is_never_run(capsys: pytest.CaptureFixture[str], single: Path, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    (single / "modeling_evil.py").write_text(f"open({str(mark)!r}, 'w')\n")
    change_json(
        single / "config.json",
        lambda config: config.update(
            auto_map={"AutoModelForCausalLM": "modeling_evil.Model"}, model_file="modeling_evil.py"
        ),
    )
    assert cli.main(["identify", str(single)]) == 0
    said = capsys.readouterr()
    assert "auto_map asks for code from the checkpoint: it is never executed" in said.err and FAMILY in said.out
    assert not mark.exists()
