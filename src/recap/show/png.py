"""Pictures as PNG files, without an image library."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np

from recap.io.files import write_whole
from recap.io.video import Picture


def png_bytes(picture: Picture) -> bytes:
    """Encode a picture Y X 3 (or Y X 4, with opacity) as PNG."""
    rows, columns, channels = picture.shape
    colour_type = {3: 2, 4: 6}[channels]
    header = struct.pack(">IIBBBBB", columns, rows, 8, colour_type, 0, 0, 0)
    # Each row is stored as its difference to the row above (filter 2), which packs better than plain values.
    above = np.concatenate([np.zeros_like(picture[:1]), picture[:-1]])
    lines = np.full((rows, 1 + columns * channels), 2, np.uint8)
    lines[:, 1:] = (picture - above).reshape(rows, -1)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes(), 6)), (b"IEND", b"")]
    body = b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + body


def write_png(path: Path | str, picture: Picture) -> None:
    write_whole(Path(path), png_bytes(picture))
