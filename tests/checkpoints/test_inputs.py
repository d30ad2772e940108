"""What ``kv-harness logits`` is given: every array is checked before work, each error names it."""

from __future__ import annotations

import dataclasses
import io
import zipfile
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from harness import cli
from harness.checkpoints import CheckpointError, Inputs, greedy, load_model, logits, open_checkpoint
from tests.checkpoints.conftest import Synth
from tests.checkpoints.prompts import PROMPTS, prompt

FAMILIES = ("qwen2_vl", "qwen3_vl", "qwen3_vl_moe")
IMAGE, VIDEO = 261, 262


def arrays_of(inputs: Inputs) -> dict[str, Any]:
    return {name: array for name, array in vars(inputs).items() if array is not None}


def command(folder: Path, tmp_path: Path, arrays: dict[str, Any]) -> int:
    np.savez(tmp_path / "in.npz", **arrays)
    return cli.main(["logits", str(folder), "--input", str(tmp_path / "in.npz"), "--output", str(tmp_path / "out.npz")])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", PROMPTS)
def test_the_command_gives_each_row_its_images(
    family: str, name: str, synth: Synth, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A batch has the logits of its rows alone, and different images change what stands behind them."""
    checkpoint = open_checkpoint(synth(family))
    inputs = prompt(checkpoint.model_config, name)
    assert command(synth(family), tmp_path, arrays_of(inputs)) == 0, capsys.readouterr().err
    made = np.load(tmp_path / "out.npz")["logits"]
    assert made.shape == (*inputs.ids.shape, 320) and made.dtype == np.float32
    model = load_model(checkpoint)
    np.testing.assert_array_equal(made, logits(model, inputs))
    if name == "batch":
        # Two images of 2 x 2 and 2 x 1 blocks of 2 x 2 patches in the first row, one of 2 x 3 in the second.
        shares = ((slice(0, 2), slice(0, 24)), (slice(2, 3), slice(24, 48)))
        for row, (grids, patches) in enumerate(shares):
            alone = Inputs(
                inputs.ids[row : row + 1],
                inputs.pixel_values[patches],  # type: ignore[index]
                inputs.image_grid_thw[grids],  # type: ignore[index]
            )
            np.testing.assert_array_equal(logits(model, alone)[0], made[row])


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_continues_behind_images(family: str, synth: Synth) -> None:
    model = load_model(open_checkpoint(synth(family)))
    inputs = prompt(model.config, "batch")
    said = greedy(model, inputs, 4)
    for step in range(4):
        ids = np.concatenate([inputs.ids, said[:, :step]], axis=1)
        longer = dataclasses.replace(inputs, ids=ids, attention_mask=None, mm_token_type_ids=None)
        np.testing.assert_array_equal(logits(model, longer)[:, -1].argmax(-1), said[:, step])


def test_half_precision_pixels_and_small_integers_will_do(synth: Synth) -> None:
    model = load_model(open_checkpoint(synth("qwen3_vl")))
    inputs = prompt(model.config, "image")
    half = inputs.pixel_values.astype(np.float16)  # type: ignore[union-attr]
    first = dataclasses.replace(inputs, pixel_values=half, image_grid_thw=inputs.image_grid_thw.astype(np.uint8))  # type: ignore[union-attr]
    other = dataclasses.replace(inputs, pixel_values=half.astype(np.float64))
    np.testing.assert_array_equal(logits(model, first), logits(model, other))


def grid(*rows: tuple[int, int, int]) -> dict[str, Any]:
    return {"image_grid_thw": np.array(rows)}


def pixels(count: int, columns: int = 96, fill: float = 0.5) -> dict[str, Any]:
    return {"pixel_values": np.full((count, columns), fill, dtype=np.float32)}


def ids(*rows: list[int]) -> dict[str, Any]:
    return {"ids": np.array(rows)}


ROW = [1, 2, *[IMAGE] * 6, 3]  # one image of 4 x 6 patches
GOOD = ids(ROW) | pixels(24) | grid((1, 4, 6))
VIDEOS = {"pixel_values_videos": np.ones((32, 96), np.float32), "video_grid_thw": np.array([[2, 4, 4]])}

CASES: dict[str, tuple[dict[str, Any], str]] = {
    "no grid": ({"image_grid_thw": None}, "pixel_values: comes without image_grid_thw"),
    "no pixels": ({"pixel_values": None}, "image_grid_thw: comes without pixel_values"),
    "pixels of integers": (
        {"pixel_values": np.zeros((24, 96), int)},
        "pixel_values must be floats [patches, 96], not int64",
    ),
    "pixels of another shape": ({"pixel_values": np.zeros((24, 3, 2, 4, 4))}, "pixel_values must be floats [patches"),
    "patches of another size": (pixels(24, 95), "pixel_values must be floats [patches, 96], not float32 [24, 95]"),
    "too few patches": (pixels(23), "pixel_values has 23 patches; image_grid_thw makes 24"),
    "too many patches": (pixels(48), "pixel_values has 48 patches; image_grid_thw makes 24"),
    "NaN": (pixels(24, fill=np.nan), "pixel_values holds NaN or infinity"),
    "grid of floats": ({"image_grid_thw": np.array([[1.0, 4, 6]])}, "image_grid_thw must be whole numbers [n, 3]"),
    "grid of two": ({"image_grid_thw": np.array([[4, 6]])}, "image_grid_thw must be whole numbers [n, 3]"),
    "flat grid": ({"image_grid_thw": np.array([1, 4, 6])}, "image_grid_thw must be whole numbers [n, 3]"),
    "empty grid": ({"image_grid_thw": np.zeros((0, 3), int)}, "image_grid_thw must be whole numbers [n, 3]"),
    "odd grid": (grid((1, 3, 8)), "image_grid_thw[0] is [1, 3, 8]"),
    "negative grid": (grid((-1, -4, 6)), "image_grid_thw[0] is [-1, -4, 6]"),
    "no frames": (grid((0, 4, 6)), "image_grid_thw[0] is [0, 4, 6]"),
    "huge side": (grid((1, 1 << 40, 2)), "image_grid_thw[0] is [1, 1099511627776, 2]"),
    "huge product": (grid((1 << 20, 1 << 20, 1 << 20)), "image_grid_thw makes 1,152,921,504,606,846,976"),
    "swapped grid of the same size": (grid((1, 2, 12)), ""),
    "too few tokens": (ids(ROW[:4]), "ids: row 0 has 2 image tokens (id 261) at position 2; image_grid_thw[0]"),
    "no tokens": (ids([1, 2]), "image_grid_thw has 1 rows; the runs of image tokens in ids take 0"),
    "a run too many": (
        ids([*ROW, IMAGE]),
        "ids: row 0 has a run of image tokens (id 261) at position 9, but image_grid_thw has only 1 rows",
    ),
    "a run too many in another row": (ids(ROW, ROW), "ids: row 1 has a run of image tokens (id 261) at position 2"),
    "a grid too many": (pixels(48) | grid((1, 4, 6), (1, 4, 6)), "image_grid_thw has 2 rows; the runs of image"),
    "tokens without images": (
        {"pixel_values": None, "image_grid_thw": None},
        "ids: row 0 has a run of image tokens (id 261) at position 2, but there is no image_grid_thw",
    ),
    "video tokens without videos": (ids([*ROW, VIDEO]), "but there is no video_grid_thw"),
    "a video cut by the end of a row": (
        VIDEOS | ids([*ROW, *[VIDEO] * 4]),
        "ids: row 0 has 0 video tokens (id 262) at position 13; frame 1 of video_grid_thw[0] = [2, 4, 4] makes 4",
    ),
    "video frames that are one run": (VIDEOS | ids([*ROW, *[VIDEO] * 8]), "ids: row 0 has 8 video tokens"),
    "padding": (
        {"attention_mask": np.array([[0, *[1] * 8]])},
        "attention_mask: padding is not handled",
    ),
    "mask of another shape": ({"attention_mask": np.ones((1, 8))}, "attention_mask must be [1, 9]"),
    "types": ({"mm_token_type_ids": np.zeros((1, 9))}, "mm_token_type_ids: does not say where the placeholders"),
    "another array": ({"position_ids": np.zeros((3, 1, 9))}, "position_ids: unknown array; known are ids, pixel"),
}


@pytest.mark.parametrize("case", CASES)
def test_arrays_that_do_not_fit(
    case: str, synth: Synth, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    change, expected = CASES[case]
    arrays = {name: array for name, array in (GOOD | change).items() if array is not None}
    mx.reset_peak_memory()
    if not expected:  # as good as the first: the pixels alone do not say how they lie
        assert command(synth("qwen3_vl"), tmp_path, arrays) == 0
        return
    from harness.checkpoints import loading

    monkeypatch.setattr(loading, "_assign", None)  # an error must come before a weight is read
    assert command(synth("qwen3_vl"), tmp_path, arrays) == 2
    said = capsys.readouterr().err
    assert expected in said and said.count("\n") == 1 and f"{tmp_path / 'in.npz'}: " in said, said


def test_a_run_of_frames_is_one_video_for_qwen2(synth: Synth) -> None:
    """Where ``video frames that are one run`` is an error of qwen3_vl, frames apart are one of qwen2_vl."""
    model = load_model(open_checkpoint(synth("qwen2_vl")))
    logits(model, Inputs(np.array([[1, *[VIDEO] * 8, 2]]), **VIDEOS))
    with pytest.raises(CheckpointError, match=r"row 0 has 4 video tokens .* makes 8 in a run"):
        logits(model, Inputs(np.array([[1, *[VIDEO] * 4, 3, *[VIDEO] * 4, 2]]), **VIDEOS))


@pytest.mark.parametrize("family", ["mistral4", "nemotron_nas"])
def test_a_family_without_a_tower(
    family: str, synth: Synth, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(synth(family), tmp_path, GOOD) == 2
    assert "pixel_values: this checkpoint has no vision tower that we read" in capsys.readouterr().err


def test_a_file_that_is_no_npz(synth: Synth, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw = tmp_path / "in.npz"
    words = ["logits", str(synth("qwen3_vl")), "--input", str(raw), "--output", str(tmp_path / "o")]
    np.savez(raw, ids=np.arange(4)[None])
    for content in (raw.read_bytes()[:40], b"", b"PK\3\4", b"x" * 99):
        raw.write_bytes(content)
        assert cli.main(words) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and "in.npz: is not an .npz file" in said


@pytest.mark.parametrize("shape", [(1 << 50, 96), (1 << 62, 1 << 62), (-5, 3), (24, 96)])
def test_arrays_that_cannot_be_read(
    shape: tuple[int, int], synth: Synth, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A header may claim more than there is, and more than there can be."""
    made = io.BytesIO()
    np.lib.format.write_array_header_1_0(made, {"descr": "<f4", "fortran_order": False, "shape": shape})  # type: ignore[arg-type]
    np.savez(tmp_path / "in.npz", **ids(ROW))
    with zipfile.ZipFile(tmp_path / "in.npz", "a") as file:
        file.writestr("pixel_values.npy", made.getvalue() + bytes(64))
    words = ["logits", str(synth("qwen3_vl")), "--input", str(tmp_path / "in.npz"), "--output", str(tmp_path / "o")]
    assert cli.main(words) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "in.npz: pixel_values: is no array that can be read: " in said


def test_arrays_of_objects_are_not_unpickled(synth: Synth, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(synth("qwen3_vl"), tmp_path, {"ids": np.array([[object()]])}) == 2
    assert "in.npz: ids: is no array that can be read: Object arrays" in capsys.readouterr().err
