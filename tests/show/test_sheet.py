"""Sheets show every patch and every moment in its place, with its label."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path

import av
import numpy as np
import pytest
import torch

from recap.io.video import ClipWriter, Picture
from recap.show.palette import MEMORY_COLOURS
from recap.show.sheet import Patches, contact_sheet, lay_out, moments_sheet, png_bytes, write_png


def some_patches(count: int) -> Patches:
    noise = np.random.default_rng(0)
    index = np.arange(count)
    pixels = noise.integers(0, 256, (count, 16, 16, 3)).astype(np.uint8)
    scores = noise.random(count).astype(np.float32)
    return Patches(pixels, index / 4, index, index % 5, index % 7, scores)


def decoded(data: bytes) -> Picture:
    with av.open(io.BytesIO(data), "r") as container:
        frame = next(container.decode(video=0))
        return np.asarray(frame.to_ndarray(format="rgb24"), np.uint8)


@pytest.mark.parametrize("shape", [(1, 1, 3), (17, 5, 3), (40, 64, 3)])
def test_png_is_lossless(tmp_path: Path, shape: tuple[int, ...]) -> None:
    picture = np.random.default_rng(1).integers(0, 256, shape).astype(np.uint8)
    assert np.array_equal(decoded(png_bytes(picture)), picture)
    write_png(tmp_path / "a.png", picture)
    assert (tmp_path / "a.png").read_bytes() == png_bytes(picture)


def test_every_patch_is_on_the_sheet_in_order_with_its_second_below() -> None:
    patches = some_patches(30)
    sheet = contact_sheet(patches, scale=2)
    columns = (sheet.shape[1] + 4) // 36
    for index in range(30):
        top, left = index // columns * 48, index % columns * 36
        assert np.array_equal(sheet[top : top + 32 : 2, left : left + 32 : 2], patches.pixels[index])
        label = sheet[top + 32 : top + 44, left : left + 32]
        assert (label.max(axis=2) > 80).sum() >= 10


def test_equal_seconds_have_equal_labels_and_others_do_not() -> None:
    patches = some_patches(8)
    sheet = contact_sheet(patches, scale=3)
    labels = [sheet[48:66, index * 52 : index * 52 + 48].tobytes() for index in range(8)]
    assert len(set(labels)) == len({f"{second:.1f}" for second in patches.seconds})


@pytest.mark.parametrize("count", [0, 1, 1560, 8000])
def test_any_number_of_patches(count: int) -> None:
    patches = some_patches(count)
    assert contact_sheet(patches).shape[2] == 3
    if count:
        pieces = lay_out(list(patches.pixels), 32)
        assert pieces.shape[1] == 32 * 16
        row, column = (count - 1) // 32 * 16, (count - 1) % 32 * 16
        assert np.array_equal(pieces[row : row + 16, column : column + 16], patches.pixels[-1])


def test_long_labels_stay_under_their_patch() -> None:
    patches = some_patches(2)
    late = dataclasses.replace(patches, seconds=patches.seconds + 123456.0)
    sheet = contact_sheet(late, scale=2)
    # The gap before the second patch.
    assert (sheet[:, 32:36] == sheet[-1, -1]).all()


SIZE, FPS = (32, 64), 8


def clip(path: Path, offset: int) -> Path:
    """Brighter by 10 levels a second."""
    grey = (offset + 10.0 * torch.arange(24).div(FPS, rounding_mode="floor")) / 255
    with ClipWriter(path, SIZE, FPS, quality=1) as writer:
        writer.write(grey.view(-1, 1, 1, 1).expand(-1, 3, *SIZE))
    return path


def test_a_line_per_clip_and_a_column_per_moment(tmp_path: Path) -> None:
    clips = {"none": clip(tmp_path / "a.mp4", 50), "recap": clip(tmp_path / "b.mp4", 150)}
    sheet = moments_sheet(clips, {0.5: "0.5s", 1.5: "1.5s", 2.5: ""})
    assert sheet.shape == (22 + 2 * (22 + 32), 3 * 64 + 2 * 6, 3)
    for row, (name, level) in enumerate((("none", 50), ("recap", 150))):
        top = 22 + row * 54
        assert sheet[top, 0].tolist() == list(bytes.fromhex(MEMORY_COLOURS[name][1:]))
        assert (sheet[top : top + 22] > 240).all(axis=-1).any()  # its name
        for column in range(3):
            shown = sheet[top + 22 : top + 54, column * 70 : column * 70 + 64].astype(np.int64)
            assert np.abs(shown - (level + 10 * column)).max() <= 3
    written = [(sheet[:22, column * 70 : column * 70 + 64] > 150).any() for column in range(3)]
    assert written == [True, True, False]


def test_a_moment_past_the_end_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"a\.mp4 ends before"):
        moments_sheet({"none": clip(tmp_path / "a.mp4", 50)}, {1.0: "", 3.0: ""})
