"""Consistency of subject and background, within clips, between clips and fused, and the clips it is measured on."""

from __future__ import annotations

import numpy as np
import pytest
from made_clips import still, write

from recap.eval.metrics.consistency import consistency, fused, mapped, sequence_consistency
from recap.eval.sampling import InMemoryClip, cut_clips
from recap.io.video import open_clip


def test_the_fusion_table():
    """The table maps known similarities to known values, with linear interpolation between."""
    assert mapped(0.5, "subject") == pytest.approx(0.9327, abs=1e-4)
    assert mapped(0.5, "background") == pytest.approx(0.9461, abs=1e-4)
    assert mapped(1, "subject") == 1 and mapped(0, "subject") == 0
    assert mapped(0.505, "subject") == pytest.approx((0.932675 + 0.933939) / 2)
    assert fused(0.9, 0.0, "subject") == 0.9 and fused(0.9, 1.0, "subject") == pytest.approx(0.95)
    points = [mapped(x / 100, "background") for x in range(101)]
    assert points == sorted(points)


class FirstPixel:
    """This embedder maps a bright corner to one vector and a dark corner to an orthogonal one."""

    backend = "corner"

    def embed(self, pictures):
        return np.array([(1, 0) if p[0, 0].mean() > 127 else (0, 1) for p in pictures], np.float32)


def test_consistency_within_and_between_clips(tmp_path):
    assert sequence_consistency(np.array([[1, 0]] * 5, np.float32)) == 1
    assert sequence_consistency(np.array([[1, 0], [0, 1], [0, 1]], np.float32)) == 0.25
    pictures = still(96).copy()
    pictures[:, :16, :16] = 255
    same = consistency(open_clip(write(tmp_path / "a.mp4", pictures)), "subject", FirstPixel())
    assert same.value == 1 and same.n == 3 and same.backend == "corner"
    pictures[32:, :16, :16] = 0
    other = consistency(open_clip(write(tmp_path / "b.mp4", pictures)), "subject", FirstPixel())
    # Each clip is consistent in itself; two of the three first pictures differ from the very first.
    assert other.details["slow"] == 1 and other.details["fast_raw"] == 0.25
    assert other.value == pytest.approx((1 + mapped(0.25, "subject")) / 2)


def cuts(num_pictures, seconds):
    """The first and the last picture of each clip, by their numbers, at 16 pictures per second."""
    clip = InMemoryClip(np.arange(num_pictures), 16)
    return [(int(part[0]), int(part[-1])) for part in cut_clips(clip, seconds)]


def test_cuts_are_those_of_vbench():
    """The counts and last starts are those of VBench's own cutter."""
    table = {
        (81, 2): (3, 49), (81, 10): (1, 0), (957, 2): (30, 925), (957, 10): (6, 797), (4797, 2): (150, 4765),
        (4797, 10): (30, 4637), (64, 2): (2, 32), (32, 2): (1, 0), (31, 2): (1, 0),
    }  # fmt: skip
    for (count, seconds), (clips, last) in table.items():
        found = cuts(count, seconds)
        assert (len(found), found[-1]) == (clips, (last, count - 1))
    assert cuts(81, 2) == [(0, 31), (32, 63), (49, 80)]
    with pytest.raises(ValueError, match="at least 1 picture"):
        cuts(0, 2)
    with pytest.raises(ValueError, match="at least 1 s"):
        cuts(9, 0)
