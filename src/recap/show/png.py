"""Pictures as PNG files."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import av
import numpy as np

from recap.io.files import write_whole
from recap.io.video import Picture


def png_bytes(picture: Picture) -> bytes:
    """Encode a picture Y X 3 (or Y X 4, with opacity) as PNG."""
    layout = {3: "rgb24", 4: "rgba"}[picture.shape[2]]
    encoder = av.VideoCodecContext.create("png", "w")
    encoder.height, encoder.width = picture.shape[:2]
    encoder.pix_fmt, encoder.time_base = layout, Fraction(1, 1)
    frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format=layout)
    return b"".join(bytes(packet) for packet in (*encoder.encode(frame), *encoder.encode(None)))


def write_png(path: Path | str, picture: Picture) -> None:
    write_whole(Path(path), png_bytes(picture))
