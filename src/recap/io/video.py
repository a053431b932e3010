"""This module reads and writes clips.

Clips are read one picture at a time, so their length does not matter. They are written as H.264 in MP4 without
B-pictures and with closed groups of pictures, so that separately written parts can be joined by copying. Equal
pictures make equal files, byte for byte.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recap.errors import refuse
from recap.io.files import staged_file
from recap.io.older import Self

try:
    import av
except ImportError:
    # Only clips need PyAV; everything else works without it.
    av = None  # type: ignore[assignment]

# SMPTE 170M, in the numbering of ITU-T H.273.
_BT601 = 6

REPEATABLE = {
    "preset": "veryfast",
    "bf": "0",
    "flags": "+cgop",
    # x264's AVX-512 version of the macroblock tree sometimes computes another result for the same pictures
    # (benchmarks/encoder.py counts it); this option selects the portable version on every processor.
    "x264-params": "cpu-independent=1",
}
"""The settings under which x264's result is a function of the pictures alone."""

Picture = NDArray[np.uint8]
"""Y X 3, RGB."""


def can_encode() -> bool:
    """Tell whether PyAV is installed, so that clips can be read and written."""
    return av is not None


@dataclass(frozen=True, slots=True)
class Clip:
    """Describes a readable video file. `num_pictures` is what the file claims, or None."""

    path: Path
    width: int
    height: int
    fps: float
    num_pictures: int | None

    def pictures(self) -> Iterator[Picture]:
        """Yield every picture, upright; only the few that the decoder buffers are in memory at a time."""
        for index, picture in enumerate(_decode(self.path)):
            if picture.shape != (self.height, self.width, 3):
                limit = f"the size changes from {self.width}x{self.height} at picture {index}"
                raise refuse("clip", str(self.path), limit, "re-encode it at one size")
            yield picture


def open_clip(path: Path | str) -> Clip:
    """Check that a file is a video with at least one readable picture, and return its size and rate."""
    path = Path(path)
    if not path.exists():
        raise refuse("clip", str(path), "no such file", "check the path")
    if path.is_dir():
        raise refuse("clip", str(path), "it is a folder", "name a video file in it")
    if path.stat().st_size == 0:
        raise refuse("clip", str(path), "the file is empty", "copy or download it again")
    with _container(path) as container:
        stream = _video_stream(container, path)
        rate = stream.average_rate or stream.guessed_rate
        claimed = int(stream.frames) or None
    if not rate:
        raise refuse("clip", str(path), "it states no picture rate", "re-encode it as MP4")
    decoding = _decode(path)
    first = next(decoding, None)
    decoding.close()
    if first is None:
        limit = "no readable picture in it, perhaps cut off"
        raise refuse("clip", str(path), limit, "copy or download it again")
    return Clip(path, first.shape[1], first.shape[0], float(rate), claimed)


def _container(path: Path) -> Any:
    if av is None:
        raise refuse("clip", str(path), "PyAV, which reads clips, is not installed", "pip install av")
    try:
        # As an absolute path, because FFmpeg takes "a:b.mp4" for a protocol "a".
        container = av.open(str(path.resolve()))
    except (av.error.FFmpegError, UnicodeDecodeError) as error:
        # Missing permission, for example, is not a fault of the clip; texts in it that are no UTF-8 are.
        if isinstance(error, OSError):
            raise
        limit = "not a video, or cut off before its index (0 pictures readable)"
        raise refuse("clip", str(path), limit, "copy or download it again, or convert it to MP4") from error
    # FFmpeg takes any text file for terminal art.
    if container.format.name == "tty":
        container.close()
        raise refuse("clip", str(path), "it is a text file", "name a video file")
    return container


def _video_stream(container: Any, path: Path) -> Any:
    from av.stream import Disposition

    for stream in container.streams.video:
        # The cover of a song is not a video.
        if not stream.disposition & Disposition.attached_pic:
            return stream
    kinds = ", ".join(sorted({stream.type for stream in container.streams})) or "nothing readable"
    limit = f"no video stream in it (it contains {kinds}), or cut off"
    raise refuse("clip", str(path), limit, "name a file with pictures, or copy it again")


def _decode(path: Path) -> Generator[Picture, None, None]:
    count = 0
    with _container(path) as container:
        stream = _video_stream(container, path)
        stream.thread_type = "AUTO"
        failure: str | None = None
        packets = container.demux(stream)
        while True:
            try:
                packet = next(packets, None)
                if packet is None:
                    break
                # The demuxer marks a packet that ends with the file as corrupt.
                if packet.is_corrupt:
                    failure = "cut off"
                else:
                    frames = packet.decode()
            except av.error.FFmpegError as error:
                if isinstance(error, OSError):
                    raise
                failure = "damaged, cut off or in an unknown encoding"
            if failure is not None:
                frames = _drain(stream)
            for frame in frames:
                yield _upright(frame)
                count += 1
            if failure is not None:
                remedy = "copy or download it again, or cut it there"
                raise refuse("clip", str(path), f"{failure}, after {count} readable pictures", remedy)


def _drain(stream: Any) -> list[Any]:
    # Decoder threads buffer a few finished pictures, which are readable and counted.
    try:
        return list(stream.decode(None))
    except av.error.FFmpegError:
        return []


def _upright(frame: Any) -> Picture:
    picture: Picture = frame.to_ndarray(format="rgb24")
    # Telephones store portrait clips sideways, with a rotation that counts counterclockwise.
    quarter_turns = round(frame.rotation / 90) % 4
    return np.ascontiguousarray(np.rot90(picture, quarter_turns)) if quarter_turns else picture


class ClipWriter:
    """Writes one clip, picture by picture; the complete file appears when the `with` block ends, or none at all.

    `size` is (rows, columns), both even, because 4:2:0 video halves the colour planes. A smaller `quality`
    (x264's CRF) means better pictures and a larger file.
    """

    def __init__(self, path: Path | str, size: tuple[int, int], fps: float, quality: int = 18) -> None:
        rows, columns = size
        if rows % 2 or columns % 2 or rows < 2 or columns < 2:
            limit = "H.264 needs even width and height"
            raise refuse("clip size", f"{columns}x{rows}", limit, "crop or rescale by one pixel")
        if not 0 < fps <= 1000:
            raise refuse("clip fps", fps, "must be above 0 and at most 1000", "use the rate of the pictures")
        self.path = Path(path)
        self.size = size
        self.fps = fps
        self.count = 0
        self._quality = quality
        self._open = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            staged = stack.enter_context(staged_file(self.path))
            self._container = stack.enter_context(new_container(staged))
            self._stream: Any = self._container.add_stream("libx264", rate=_as_fraction(self.fps))
            self._stream.height, self._stream.width = self.size
            self._stream.pix_fmt = "yuv420p"
            # The conversion from RGB uses this; without the tag large pictures would be shown with other colours.
            self._stream.codec_context.colorspace = _BT601
            self._stream.options = {"crf": str(self._quality), **REPEATABLE}
            # The result of several threads depends on their number, and so on the machine.
            self._stream.codec_context.thread_count = 1
            # One group of pictures per second, so that seeking to a second is exact and quick.
            self._stream.codec_context.gop_size = max(1, round(self.fps))
            stack.push(self._finish)
            self._open = stack.pop_all()
        return self

    def write(self, pixels: Tensor) -> None:
        """Append pictures T 3 Y X: floats in 0..1, which are clamped, or uint8."""
        if pixels.ndim != 4 or tuple(pixels.shape[1:]) != (3, *self.size):
            remedy = f"pass T 3 {self.size[0]} {self.size[1]}"
            raise refuse("pixels", tuple(pixels.shape), "not the shape of this clip", remedy)
        if pixels.dtype != torch.uint8:
            finite = torch.isfinite(pixels).flatten(1).all(1)
            if not bool(finite.all()):
                bad = self.count + int((~finite).nonzero()[0])
                limit = "contains NaN or infinity"
                raise refuse("pixels", f"picture {bad}", limit, "look for the step that made it")
            pixels = pixels.clamp(0, 1).mul(255).round().to(torch.uint8)
        for picture in pixels.permute(0, 2, 3, 1).contiguous().cpu().numpy():
            self._encode(av.VideoFrame.from_ndarray(picture, format="rgb24"))
            self.count += 1

    def _encode(self, frame: Any) -> None:
        for packet in self._stream.encode(frame):
            self._container.mux(packet)

    def _finish(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        if kind is None:
            if self.count == 0:
                raise refuse("clip", str(self.path), "no picture was written", "write at least one")
            self._encode(None)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.__exit__(kind, error, trace)


def new_container(path: Path) -> Any:
    """Open an MP4 file to write to."""
    # The index goes to the front, so that a browser can start and seek before it has the whole file.
    return av.open(str(path), "w", format="mp4", options={"movflags": "+faststart"})


def _as_fraction(fps: float) -> Fraction:
    # 29.97 and similar rates are n/1001; floats are precise enough to recover them.
    return Fraction(fps).limit_denominator(1001)


def join_clips(parts: Sequence[Path | str], out: Path | str) -> int:
    """Join clips of equal settings without encoding them again; return the number of pictures."""
    if not parts:
        raise refuse("parts", list(parts), "nothing to join", "name at least one clip")
    count = 0
    with staged_file(Path(out)) as staged, ExitStack() as opened:
        joined = opened.enter_context(new_container(staged))
        target: Any = None
        settings: tuple[object, ...] = ()
        for path in map(Path, parts):
            open_clip(path)
            with _container(path) as container:
                source = _video_stream(container, path)
                if target is None:
                    target, settings = joined.add_stream_from_template(source), _settings(source)
                    picture_time = 1 / (source.average_rate * source.time_base)
                if source.codec_context.has_b_frames:
                    limit = "its pictures are stored out of their order (B-pictures)"
                    remedy = "encode it without, as `ffmpeg -i IN -bf 0 OUT` does"
                    raise refuse("part", str(path), limit, remedy)
                if _settings(source) != settings:
                    limit = f"its size, rate or encoder settings differ from {parts[0]}"
                    raise refuse("part", str(path), limit, "join only clips with the same writer settings")
                for packet in container.demux(source):
                    # The demuxer's last packet is an empty mark.
                    if packet.dts is None:
                        continue
                    packet.pts = packet.dts = round(count * picture_time)
                    packet.stream = target
                    joined.mux(packet)
                    count += 1
    return count


def _settings(stream: Any) -> tuple[object, ...]:
    context = stream.codec_context
    name, size = context.name, (context.width, context.height)
    return name, size, context.pix_fmt, stream.average_rate, stream.time_base, bytes(context.extradata or b"")
