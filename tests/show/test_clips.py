"""Clips that pages show: marks lie on the marked tokens and nowhere else, excerpts become a GIF."""

from __future__ import annotations

from pathlib import Path

import av
import pytest
import torch

from recap.errors import RecapError
from recap.io.video import ClipWriter
from recap.show.clips import GREEN, Badge, Excerpt, tint, write_gif


def test_only_marked_tokens_change() -> None:
    pictures = torch.randint(0, 256, (2, 3, 64, 96), dtype=torch.uint8)
    marked = torch.zeros(2, 4, 6, dtype=torch.bool)
    marked[1, 2, 3:5] = True
    shown = tint(pictures, marked)
    assert torch.equal(shown[0], pictures[0])
    changed = (shown[1] != pictures[1]).any(dim=0)
    assert bool(changed[32:48, 48:80].float().mean() > 0.9)
    changed[32:48, 48:80] = False
    assert not bool(changed.any())


def test_neighbours_share_one_outline() -> None:
    pictures = torch.zeros(1, 3, 64, 96, dtype=torch.uint8)
    marked = torch.zeros(1, 4, 6, dtype=torch.bool)
    marked[0, 2, 3:5] = True
    shown = tint(pictures, marked)[0]
    assert shown[:, 32, 60].tolist() == list(GREEN)  # the outline
    inner = shown[:, 40, 63].tolist()  # between the two tokens
    assert 0 < inner[1] < GREEN[1] / 2


def test_tint_lets_the_picture_through() -> None:
    pictures = torch.full((1, 3, 64, 64), 200, dtype=torch.uint8)
    shown = tint(pictures, torch.ones(1, 4, 4, dtype=torch.bool))
    assert int(shown[0, 1, 32, 32]) > 200 and 100 < int(shown[0, 0, 32, 32]) < 200


def test_a_gif_shows_the_excerpts_next_to_each_other_and_how_they_ended(tmp_path: Path) -> None:
    clips: dict[str, list[Path]] = {"none": [], "recap": []}
    for name, shades in (("none", (0.2, 0.4)), ("recap", (0.6, 0.8))):
        for row, shade in enumerate(shades):
            with ClipWriter(tmp_path / f"{name}-{row}.mp4", (16, 48), 16) as writer:
                writer.write(torch.full((32, 3, 16, 48), shade))
            clips[name].append(tmp_path / f"{name}-{row}.mp4")
    badges = {"none": [Badge("x", False)] * 2, "recap": [Badge("x", False), Badge("x", True)]}
    write_gif(tmp_path / "a.gif", clips, [Excerpt(0.0, 0.5, "here"), Excerpt(1.0, 2.0, "again")], badges)
    with av.open(tmp_path / "a.gif") as made:
        pictures = [frame.to_ndarray(format="rgb24") for frame in made.decode(video=0)]
    # Every second picture of half a second and of one.
    assert len(pictures) == 4 + 8
    for (top, left), shade in {(0, 0): 0.2, (0, 56): 0.6, (44, 0): 0.4, (44, 56): 0.8}.items():
        cell = pictures[-1][32 + top + 4 : 32 + top + 12, left : left + 48]
        assert abs(cell.mean() - 255 * shade) < 8
    # Badges are below their clips, in the last excerpt alone; a good one is green.
    corners = [picture[32 + 44 + 16 + 18, 56 + 44].astype(int) for picture in (pictures[0], pictures[-1])]
    assert corners[0].max() < 40 and corners[1][1] > corners[1][[0, 2]].max() + 60
    with pytest.raises(RecapError, match=r"excerpts.*show no picture"):
        write_gif(tmp_path / "b.gif", clips, [Excerpt(5.0, 6.0, "later")], badges)
    assert not (tmp_path / "b.gif").exists()
