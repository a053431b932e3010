"""The sheet shows every patch, in order, with its second."""

from __future__ import annotations

import io
from pathlib import Path

import av
import numpy as np
import pytest

from recap.io.video import Picture
from recap.show.png import png_bytes, write_png
from recap.show.sheet import Patches, contact_sheet, sprite
from recap.show.timeline import Timeline, draw_timeline


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


def test_every_patch_is_on_the_sheet_in_order() -> None:
    patches = some_patches(30)
    sheet = contact_sheet(patches, scale=1)
    columns = (sheet.shape[1] - 4) // 20
    for index in range(30):
        top, left = 4 + index // columns * 30, 4 + index % columns * 20
        assert np.array_equal(sheet[top : top + 16, left : left + 16], patches.pixels[index])
        label = sheet[top + 18 : top + 23, left : left + 16]
        assert (label.max(axis=2) > 100).sum() >= 10


def test_equal_seconds_have_equal_labels_and_others_do_not() -> None:
    patches = some_patches(8)
    sheet = contact_sheet(patches, scale=3)
    labels = [sheet[54:64, 4 + index * 52 : 4 + index * 52 + 32].tobytes() for index in range(8)]
    assert len(set(labels)) == len({f"{second:.1f}" for second in patches.seconds})


@pytest.mark.parametrize("count", [0, 1, 1560, 8000])
def test_any_number_of_patches(count: int) -> None:
    patches = some_patches(count)
    assert contact_sheet(patches).shape[2] == 3
    pieces = sprite(patches, 32)
    assert pieces.shape[1] == 32 * 16
    if count:
        row, column = (count - 1) // 32 * 16, (count - 1) % 32 * 16
        assert np.array_equal(pieces[row : row + 16, column : column + 16], patches.pixels[-1])


def test_long_labels_stay_under_their_patch() -> None:
    patches = some_patches(2)
    late = Patches(patches.pixels, patches.seconds + 123456.0, *(getattr(patches, name) for name in
                   ("frames", "rows", "columns", "scores")))  # fmt: skip
    sheet = contact_sheet(late, scale=1)
    assert (sheet[22:27, 20:24] == sheet[0, 0]).all()  # the gap before the second patch


@pytest.mark.parametrize("duration", [0.3, 1.0, 2.73, 60.0, 600.0, 36000.0])
def test_timeline_of_any_length(duration: float) -> None:
    times = [duration * step / 50 for step in range(51)]
    drawing = draw_timeline(
        Timeline(duration, [(time, 3) for time in times], [(time, 0.5, 0.25) for time in times])
    )
    assert drawing.startswith("<svg") and drawing.endswith("</svg>")
    assert 0 < drawing.count('class="bar"') <= 131 and "nan" not in drawing


def test_timeline_of_nothing() -> None:
    drawing = draw_timeline(Timeline(5.0, [(0.0, 0)], []))
    assert 'class="bar"' not in drawing
