"""This module encodes a block as a piece of fragmented MP4 that a browser can append, and as a strip of JPEG.

Every block is encoded in a container of its own, so nothing waits for the next block. Such a container begins at time
zero; the start (`tfdt`) and the number (`mfhd`) in its bytes are rewritten, so that pieces follow each other.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recap.errors import refuse
from recap.io.files import staged_file
from recap.io.video import REPEATABLE, new_container

try:
    import av
except ImportError:
    # Sessions are also timed on machines without PyAV.
    av = None  # type: ignore[assignment]

QUALITY = "20"
"""x264's CRF: what a stream needs; the run folder of a download is encoded again at the quality of runs."""

Pictures = NDArray[np.uint8]
"""T Y X 3, RGB."""


@dataclass(frozen=True, slots=True)
class EncodedBlock:
    """Holds the encoded pictures of one block. `init` and `codec` are the same for all blocks of a video."""

    init: bytes
    codec: str
    media: bytes


def encode_block(pictures: Pictures, fps: int, first_picture: int, number: int) -> EncodedBlock:
    """Encode the pictures of block `number`, whose first one is `first_picture` of the video."""
    data = _encode(pictures, fps)
    scale = struct.unpack_from(">I", data, _find(data, b"mdhd") + 16)[0]
    start = first_picture * scale // fps
    for piece, (offset, size) in enumerate([box[1:] for box in _boxes(data) if box[0] == b"moof"]):
        # The encoder may begin a second piece, whose time then continues that of the first.
        time = _find(data, b"tfdt", offset, size)
        form = ">Q" if data[time + 4] == 1 else ">I"
        struct.pack_into(form, data, time + 8, start + struct.unpack_from(form, data, time + 8)[0])
        struct.pack_into(">I", data, _find(data, b"mfhd", offset, size) + 8, (number << 8) + piece + 1)
    offset = _find(data, b"avcC")
    codec = "avc1." + data[offset + 5 : offset + 8].hex().upper()
    parts: dict[bool, bytearray] = {True: bytearray(), False: bytearray()}
    for kind, begin, size in _boxes(data):
        if kind != b"mfra":
            parts[kind in (b"ftyp", b"moov")] += data[begin : begin + size]
    return EncodedBlock(bytes(parts[True]), codec, bytes(parts[False]))


def _encode(pictures: Pictures, fps: int) -> bytearray:
    out = io.BytesIO()
    options = {"movflags": "empty_moov+default_base_moof"}
    with av.open(out, "w", format="mp4", options=options) as container:
        stream: Any = container.add_stream("libx264", rate=Fraction(fps))
        stream.height, stream.width = pictures.shape[1:3]
        stream.pix_fmt = "yuv420p"
        stream.options = {"crf": QUALITY, **REPEATABLE}
        # One thread: the result is then the same everywhere, and the model keeps its cores.
        stream.codec_context.thread_count = 1
        stream.codec_context.gop_size = len(pictures)
        for picture in pictures:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode(None))
    return bytearray(out.getvalue())


def _find(data: bytearray, kind: bytes, start: int = 0, size: int | None = None) -> int:
    """Return where the name of a box stands; by default in the header, which comes first."""
    offset = data.find(kind, start, None if size is None else start + size)
    assert offset >= 0, f"the encoder wrote no {kind.decode()}"
    return offset


def _boxes(data: bytearray) -> Iterator[tuple[bytes, int, int]]:
    """Yield the kind, the offset and the size of the outermost boxes."""
    offset = 0
    while offset + 8 <= len(data):
        size, kind = struct.unpack_from(">I4s", data, offset)
        assert size >= 8, "a box of the encoder has no size"
        yield kind, offset, size
        offset += size


def join_segments(init: bytes, media: Sequence[bytes], out: Path) -> None:
    """Join the pieces of a video to one file with its index in front, without encoding them again."""
    if not media:
        raise refuse("video", 0, "nothing of it is generated yet", "wait for the first block")
    with (
        staged_file(out) as staged,
        av.open(io.BytesIO(init + b"".join(media)), "r", format="mp4") as source,
        new_container(staged) as target,
    ):
        video = source.streams.video[0]
        copy = target.add_stream_from_template(video)
        for packet in source.demux(video):
            # The demuxer's last packet is an empty mark.
            if packet.dts is not None:
                packet.stream = copy
                target.mux(packet)


def decode_pictures(init: bytes, media: bytes) -> list[Pictures]:
    """Return the pictures of one piece."""
    with av.open(io.BytesIO(init + media), "r", format="mp4") as source:
        found: list[Any] = [frame.to_ndarray(format="rgb24") for frame in source.decode(video=0)]
        return found


def picture_strip(pictures: Pictures) -> bytes:
    """Encode all pictures of a block next to each other as one JPEG, from which a page cuts patches."""
    return jpeg_of(np.concatenate(list(pictures), axis=1))


def jpeg_of(picture: NDArray[np.uint8]) -> bytes:
    """Encode one picture Y X 3 as JPEG."""
    codec: Any = av.CodecContext.create("mjpeg", "w")
    codec.height, codec.width = picture.shape[:2]
    codec.pix_fmt = "yuvj420p"
    codec.time_base = Fraction(1, 1)
    codec.thread_count = 1
    codec.options = {"qmin": "2", "qmax": "4"}
    frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24")
    packets = [*codec.encode(frame), *codec.encode(None)]
    return b"".join(bytes(packet) for packet in packets)
