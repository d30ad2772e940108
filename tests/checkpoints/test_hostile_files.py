"""Files that are no files, links, names that no file can have, and disks that are full: one line, and nothing lost."""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import shutil
import signal
import struct
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from harness import cli
from harness.checkpoints import check, fingerprint, open_checkpoint
from harness.checkpoints.fingerprint import cache_file
from tests.checkpoints.conftest import Synth
from tests.checkpoints.test_bad import change_header, change_json
from tests.checkpoints.test_hub_cache import _as_hub

ONE, INDEX = "model.safetensors", "model.safetensors.index.json"
Refused = Callable[..., str]


@pytest.fixture
def folder(synth: Synth, tmp_path: Path) -> Path:
    return Path(shutil.copytree(synth("qwen2_vl"), tmp_path / "bad"))


@pytest.fixture
def ids(tmp_path: Path) -> Path:
    np.savez(tmp_path / "in.npz", ids=np.arange(4)[None])
    return tmp_path / "in.npz"


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refused:
    """Runs a command that must refuse, in a few seconds; what it says."""

    def run(*arguments: object) -> str:
        signal.alarm(30)  # a pipe would wait for ever; the signal ends the process
        code = cli.main([str(argument) for argument in arguments])
        signal.alarm(0)
        said = capsys.readouterr()
        assert code == 2 and said.out == "" and said.err.count("\n") == 1 and len(said.err) < 1000, said
        assert said.err.startswith("kv-harness: error: "), said
        return said.err

    return run


@contextlib.contextmanager
def full_disk(size: int) -> Iterator[None]:
    """No file may grow beyond ``size`` bytes, which fails a write as a disk that is full does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_leaves_the_old_logits(folder: Path, ids: Path, tmp_path: Path, refused: Refused) -> None:
    out = tmp_path / "out.npz"
    out.write_bytes(b"good")
    before = sorted(path.name for path in tmp_path.iterdir())
    with full_disk(1000):
        said = refused("logits", folder, "--input", ids, "--output", out)
    assert f"{out}: cannot be written: File too large" in said
    assert out.read_bytes() == b"good" and sorted(path.name for path in tmp_path.iterdir()) == before


def test_logits_replace_the_old_ones_behind_a_link(folder: Path, ids: Path, tmp_path: Path) -> None:
    (tmp_path / "real.npz").write_bytes(b"old")
    (tmp_path / "out.npz").symlink_to("real.npz")
    assert cli.main(["logits", str(folder), "--input", str(ids), "--output", str(tmp_path / "out.npz")]) == 0
    assert (tmp_path / "out.npz").is_symlink() and np.load(tmp_path / "real.npz")["logits"].shape == (1, 4, 320)


@pytest.mark.parametrize("name", ["in.npz", "bad/../in.npz", "hard.npz", "soft.npz"])
def test_logits_do_not_go_over_their_input(
    name: str, folder: Path, ids: Path, tmp_path: Path, refused: Refused
) -> None:
    os.link(ids, tmp_path / "hard.npz")
    (tmp_path / "soft.npz").symlink_to(ids)
    before = ids.read_bytes()
    assert "is the file of --input" in refused("logits", folder, "--input", ids, "--output", tmp_path / name)
    assert ids.read_bytes() == before


@pytest.mark.parametrize("name", [f"bad/{ONE}", "bad/config.json", "bad/../bad/config.json", "hard", "soft", "target"])
def test_logits_do_not_go_over_the_checkpoint(
    name: str, folder: Path, ids: Path, tmp_path: Path, refused: Refused
) -> None:
    os.link(folder / ONE, tmp_path / "hard")
    (tmp_path / "soft").symlink_to(folder / ONE)
    (tmp_path / "target").write_text("a licence")
    (folder / "LICENSE").symlink_to("../target")
    before = (folder / ONE).read_bytes()
    said = refused("logits", folder, "--input", ids, "--output", tmp_path / name)
    assert "is a file of the checkpoint" in said and (folder / ONE).read_bytes() == before
    assert cli.main(["logits", str(folder), "--input", str(ids), "--output", str(folder / "new.npz")]) == 0


def test_logits_go_into_plain_files_only(folder: Path, ids: Path, tmp_path: Path, refused: Refused) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    for name, why in [
        ("pipe", "not a regular file"),
        ("bad", "a file of the checkpoint"),
        ("loop", "cannot be written"),
        ("none/out.npz", "is not a directory"),
        ("x" * 5000, "cannot be written: File name too long"),
    ]:
        assert why in refused("logits", folder, "--input", ids, "--output", tmp_path / name)
    assert "not a regular file" in refused("logits", folder, "--input", tmp_path / "pipe", "--output", tmp_path / "o")


@pytest.mark.parametrize("size", [1000, 200_000])
@pytest.mark.parametrize("there", [False, True])
def test_a_full_disk_leaves_no_half_of_a_checkpoint(there: bool, size: int, tmp_path: Path, refused: Refused) -> None:
    target = tmp_path / "a" / "b"
    if there:
        target.mkdir(parents=True)
    with full_disk(size):  # the larger one holds some of the files
        assert f"{target}: cannot be written: " in refused("synth", "qwen2_vl", target)
    assert [path.name for path in tmp_path.rglob("*")] == (["a", "b"] if there else [])
    assert cli.main(["synth", "qwen2_vl", str(target)]) == 0


def test_what_another_put_there_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused) -> None:
    from harness.checkpoints import synthesis

    def fail(vocab_size: int) -> object:
        (tmp_path / "new" / "mine.txt").write_text("mine")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(synthesis, "tokenizer_files", fail)
    assert "No space left" in refused("synth", "qwen2_vl", tmp_path / "new")
    assert [path.name for path in tmp_path.rglob("*")] == ["new", "mine.txt"]
    for bad in ("x" * 5000, "mine/\0"):
        assert "cannot be written" in refused("synth", "qwen2_vl", tmp_path / bad)


@pytest.mark.parametrize("name", ["config.json", INDEX])
def test_config_and_index_are_regular_files_of_the_folder(name: str, folder: Path, refused: Refused) -> None:
    outside, path = folder.parent / "outside.json", folder / name
    weights = json.dumps({"weight_map": dict.fromkeys(open_checkpoint(folder).weights.tensors, ONE)})
    outside.write_text(weights if name == INDEX else path.read_text())
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    assert f"{path}: is not a regular file" in refused("identify", folder)
    path.unlink()
    path.mkdir()
    assert f"{path}: is not a regular file" in refused("identify", folder)
    path.rmdir()
    for target in (outside, "/dev/zero", "../outside.json"):
        path.symlink_to(target)
        assert f"file '{name}' is a link that leads out of" in refused("identify", folder)
        path.unlink()
    path.symlink_to(name)
    assert f"file '{name}' cannot be followed: " in refused("identify", folder)
    path.unlink()
    path.symlink_to("nothing")
    assert name in refused("identify", folder)
    path.unlink()
    shutil.copy(outside, folder / "inside.json")
    path.symlink_to("inside.json")
    check(open_checkpoint(folder))


def test_a_file_of_json_has_an_end(folder: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused) -> None:
    monkeypatch.setattr("harness.checkpoints.errors.MOST_JSON_BYTES", 100)
    assert "config.json: is longer than such a file may be (100 bytes)" in refused("identify", folder)


def test_a_digest_cache_that_is_no_file_is_only_slower(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    cache_file().parent.mkdir(parents=True)
    signal.alarm(30)
    os.mkfifo(cache_file())
    digest = fingerprint(checkpoint).digest
    cache_file().unlink()
    cache_file().symlink_to("/dev/zero")
    assert fingerprint(checkpoint).digest == digest
    cache_file().unlink()
    cache_file().write_text("[" * 100_000)
    assert fingerprint(checkpoint).digest == digest
    signal.alarm(0)


@pytest.mark.parametrize("name", ["x" * 5000, "x" * 300, "\ud800", "\udcff.safetensors", "a/" * 3000])
def test_an_index_with_names_that_no_file_has(name: str, folder: Path, refused: Refused) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    assert f"{INDEX}: file" in refused("identify", folder)


def test_a_weight_file_whose_name_is_no_text(folder: Path, refused: Refused) -> None:
    (folder / ONE).rename(os.fsdecode(os.fsencode(folder) + b"/model-\xff.safetensors"))
    assert "is not Unicode; rename the file" in refused("identify", folder)


def test_paths_that_are_none(refused: Refused) -> None:
    assert "the path of the checkpoint is empty" in refused("identify", "")
    for where in ("a" * 5000, "a/" * 3000, "a/" + "b" * 5000, "\0", "~nobody-of-this-name/x"):
        refused("identify", where)


@pytest.mark.parametrize("ref", [b"\xff\xfe", b"../../../x", b"..", b"", b".", b"a/b", b"x" * 300, b"x" * 5000, None])
def test_a_ref_of_the_hub_cache_holds_a_commit(
    ref: bytes | None, synth: Synth, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    _as_hub(synth("qwen2_vl"), tmp_path / "hub", "some/model")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    shutil.copytree(synth("qwen2_vl"), tmp_path / "x")
    path = tmp_path / "hub" / "models--some--model" / "refs" / "main"
    path.unlink()
    if ref is None:
        os.mkfifo(path)
    else:
        path.write_bytes(ref)
    assert f"{path}: " in refused("identify", "some/model")


def _npy(header: str, data: bytes = b"") -> bytes:
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header) + 1) + header.encode() + b"\n" + data


def _zip(content: bytes, name: str = "ids.npy") -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as file:
        file.writestr(name, content)
    return made.getvalue()


def _with(raw: bytes, at: int, value: int) -> bytes:
    return raw[:at] + bytes([value]) + raw[at + 1 :]


_GOOD = _zip(_npy("{'descr': '<i8', 'fortran_order': False, 'shape': (1, 1), }", bytes(8)))
NPZ = {
    "no npy": _zip(b"hello", "ids"),
    "cut header": _zip(_npy("{'descr': '<i8', 'fortran_order': ")),
    "deep header": _zip(_npy("(" * 2000)),
    "long header": _zip(_npy(" " * 60_000)),
    "unknown compression": _with(_GOOD, _GOOD.rfind(b"PK\x01\x02") + 10, 99),
    "encrypted": _with(_GOOD, _GOOD.rfind(b"PK\x01\x02") + 8, 1),
    "truncated": _zip(_npy("{'descr': '<i8', 'fortran_order': False, 'shape': (1, 3), }", b"123")),
}


@pytest.mark.parametrize("case", NPZ)
def test_members_that_are_no_arrays(case: str, folder: Path, tmp_path: Path, refused: Refused) -> None:
    path = tmp_path / "in.npz"
    path.write_bytes(NPZ[case])
    assert f"{path}: ids: is no array" in refused("logits", folder, "--input", path, "--output", tmp_path / "o")


def test_what_overflows_is_said(
    folder: Path, ids: Path, tmp_path: Path, refused: Refused, capsys: pytest.CaptureFixture[str]
) -> None:
    warnings.simplefilter("error")  # pytest restores them
    token = json.loads((folder / "config.json").read_text())["image_token_id"]
    pixels = np.full((8, 96), 1e300)
    np.savez(tmp_path / "big.npz", ids=[[1, token, token]], pixel_values=pixels, image_grid_thw=[[1, 2, 4]])
    said = refused("logits", folder, "--input", tmp_path / "big.npz", "--output", tmp_path / "o")
    assert "pixel_values holds NaN or infinity, or a number too large for float32" in said
    change_header(folder / ONE, lambda header: None, lambda data: np.full(len(data) // 4, 1e38, "<f4").tobytes())
    assert cli.main(["logits", str(folder), "--input", str(ids), "--output", str(tmp_path / "o")]) == 0
    assert capsys.readouterr().err == f"warning: {tmp_path / 'o'}: the logits hold NaN or infinity\n"


@pytest.mark.parametrize("metadata", [[], [1], 0, "pt", {"format": 1}, {"format": None}, {"a": {"b": "c"}}])
def test_metadata_is_text_to_text(metadata: object, folder: Path, refused: Refused) -> None:
    change_header(folder / ONE, lambda header: header.update(__metadata__=metadata))
    assert f"{folder / ONE}: __metadata__" in refused("identify", folder)
    change_header(folder / ONE, lambda header: header.update(__metadata__=None))
    check(open_checkpoint(folder))


@pytest.mark.parametrize("field", ["rope_theta", "rms_norm_eps"])
@pytest.mark.parametrize("value", [0, -1.0, 1e-300, float("nan"), float("inf")])
def test_divisors_are_above_zero(field: str, value: float, folder: Path, refused: Refused) -> None:
    change_json(folder / "config.json", lambda config: config.update({field: value}))
    assert f"{folder / 'config.json'}: " in (said := refused("identify", folder)) and field in said
