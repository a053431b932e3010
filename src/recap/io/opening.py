"""This module reads the pictures from which a video continues, from any clip or single picture."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from recap.errors import refuse
from recap.io.framing import cover
from recap.io.video import open_clip
from recap.types import BackboneSpec

LONGEST_S = 300


def read_opening(path: Path | str, spec: BackboneSpec, notice: Callable[[str], None]) -> Tensor:
    """Read 1 T 3 Y X in 0..1 at the backbone's size and rate; pictures that fill no whole frame are left out."""
    clip = open_clip(path)
    lens = cover(clip, spec.picture_size, spec.token_pixels)
    rate = clip.fps / spec.pictures_per_second
    pictures: list[Tensor] = []
    for index, picture in enumerate(clip.pictures()):
        # At another rate, the picture nearest to each moment is read: some twice, some never.
        while round(len(pictures) * rate) == index:
            pictures.append(lens(picture))
            # Checked for each picture: one of a file with a tiny rate would be repeated without end.
            if len(pictures) > LONGEST_S * spec.pictures_per_second:
                limit = f"longer than {LONGEST_S} s"
                raise refuse("opening", str(path), limit, "cut out the part that matters")
    for line in lens.notices:
        notice(f"opening: {line}")
    whole = 1 + (len(pictures) - 1) // spec.pictures_per_frame * spec.pictures_per_frame
    if whole < len(pictures):
        notice(f"opening: the last {len(pictures) - whole} pictures fill no whole frame and are left out")
    return torch.stack(pictures[:whole])[None].float() / 255
