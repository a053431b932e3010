"""The sheet of moments: the right picture in the right place."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from recap.io.video import ClipWriter
from recap.show.moments import moments_sheet
from recap.show.palette import MEMORY_COLOURS

SIZE, FPS = (32, 64), 8


def clip(path, offset):
    """Brighter by 10 levels a second."""
    grey = (offset + 10.0 * torch.arange(24).div(FPS, rounding_mode="floor")) / 255
    with ClipWriter(path, SIZE, FPS, quality=1) as writer:
        writer.write(grey.view(-1, 1, 1, 1).expand(-1, 3, *SIZE))
    return path


def test_a_row_per_clip_and_a_column_per_moment(tmp_path):
    clips = {"none": clip(tmp_path / "a.mp4", 50), "recap": clip(tmp_path / "b.mp4", 150)}
    sheet = moments_sheet(clips, {0.5: "0.5s", 1.5: "1.5s", 2.5: ""})
    assert sheet.shape == (22 + 2 * (22 + 32 + 6), 3 * 64 + 2 * 6, 3)
    for row, (name, level) in enumerate((("none", 50), ("recap", 150))):
        top = 22 + row * 60
        assert sheet[top, 0].tolist() == list(bytes.fromhex(MEMORY_COLOURS[name][1:]))
        assert (sheet[top : top + 22] == 255).all(axis=-1).any()  # its name
        for column in range(3):
            shown = sheet[top + 22 : top + 54, column * 70 : column * 70 + 64].astype(np.int64)
            assert np.abs(shown - (level + 10 * column)).max() <= 3
    written = [(sheet[:22, column * 70 : column * 70 + 64] > 150).any() for column in range(3)]
    assert written == [True, True, False]


def test_a_moment_past_the_end_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"a\.mp4 ends before"):
        moments_sheet({"none": clip(tmp_path / "a.mp4", 50)}, {1.0: "", 3.0: ""})
