"""Clips that are written can be read, parts join without loss, and messages name what is wrong with bad files."""

from __future__ import annotations

import wave
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from torch import Tensor

from recap.io.video import ClipWriter, Picture, join_clips, open_clip

SIZE = (48, 64)


def pixels(count: int, seed: int = 0) -> Tensor:
    coarse = torch.rand(count, 3, 6, 8, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.interpolate(coarse, size=SIZE, mode="bilinear")


def make(path: Path, count: int = 20, seed: int = 0, fps: float = 16) -> Path:
    with ClipWriter(path, SIZE, fps) as clip:
        clip.write(pixels(count, seed))
    return path


def read(path: Path) -> np.ndarray:
    return np.stack(list(open_clip(path).pictures()))


@pytest.mark.parametrize("fps", [16, 24, 29.97, 30000 / 1001, 60])
def test_round_trip(tmp_path: Path, fps: float) -> None:
    path = make(tmp_path / "a.mp4", fps=fps)
    clip = open_clip(path)
    assert (clip.height, clip.width) == SIZE and clip.num_pictures == 20
    assert clip.fps == pytest.approx(fps, rel=1e-6)
    shown = pixels(20).permute(0, 2, 3, 1).numpy()
    error = np.abs(read(path) / 255 - shown)
    assert error.mean() < 0.04 and error.max() < 0.35  # unrelated pictures, the hardest case
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.mp4"]


def test_bytes_and_floats_are_the_same(tmp_path: Path) -> None:
    make(tmp_path / "floats.mp4")
    with ClipWriter(tmp_path / "bytes.mp4", SIZE, 16) as clip:
        clip.write((pixels(20) * 255).round().to(torch.uint8))
    assert (tmp_path / "floats.mp4").read_bytes() == (tmp_path / "bytes.mp4").read_bytes()


def test_saturated_colours_survive(tmp_path: Path) -> None:
    colours = torch.eye(3)
    with ClipWriter(tmp_path / "a.mp4", SIZE, 16) as clip:
        clip.write(colours[:, :, None, None].expand(-1, -1, *SIZE))
    seen = read(tmp_path / "a.mp4")[:, 24, 32] / 255
    assert np.abs(seen - colours.numpy()).max() < 0.03


def test_no_b_pictures(tmp_path: Path) -> None:
    with av.open(str(make(tmp_path / "a.mp4", 40))) as container:
        packets = [packet for packet in container.demux(video=0) if packet.dts is not None]
    assert all(packet.pts == packet.dts for packet in packets)
    assert sum(packet.is_keyframe for packet in packets) >= 3  # one a second


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_bad_pixels_are_named_and_nothing_is_left(tmp_path: Path, bad: float) -> None:
    good, broken = pixels(5), pixels(5)
    broken[3, 1, 7, 7] = bad

    def written() -> None:
        with ClipWriter(tmp_path / "a.mp4", SIZE, 16) as clip:
            clip.write(good)
            clip.write(broken)

    with pytest.raises(ValueError, match="picture 8"):
        written()
    assert list(tmp_path.iterdir()) == []


def test_failure_keeps_the_old_clip(tmp_path: Path) -> None:
    old = make(tmp_path / "a.mp4").read_bytes()

    def interrupted() -> None:
        with ClipWriter(tmp_path / "a.mp4", SIZE, 16) as clip:
            clip.write(pixels(30))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert (tmp_path / "a.mp4").read_bytes() == old and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("size", [(47, 64), (48, 63), (0, 0)])
def test_odd_sizes_are_refused(tmp_path: Path, size: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="even"):
        ClipWriter(tmp_path / "a.mp4", size, 16)


@pytest.mark.parametrize("fps", [0, -1, float("nan"), float("inf")])
def test_bad_rates_are_refused(tmp_path: Path, fps: float) -> None:
    with pytest.raises(ValueError, match="clip fps"):
        ClipWriter(tmp_path / "a.mp4", SIZE, fps)


def test_wrong_shapes_and_empty_clips_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="T 3 48 64"), ClipWriter(tmp_path / "a.mp4", SIZE, 16) as clip:
        clip.write(torch.zeros(2, 3, 64, 48))
    with pytest.raises(ValueError, match="no picture"), ClipWriter(tmp_path / "a.mp4", SIZE, 16):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("counts", "fps"), [((9, 12, 12, 4), 16), ((1, 1, 30), 16), ((5, 5), 30000 / 1001)])
def test_joined_clip_shows_the_pictures_of_its_parts(
    tmp_path: Path, counts: tuple[int, ...], fps: float
) -> None:
    parts = [make(tmp_path / f"{i}.mp4", count, seed=i, fps=fps) for i, count in enumerate(counts)]
    assert join_clips(parts, tmp_path / "joined.mp4") == sum(counts)
    expected = np.concatenate([read(part) for part in parts])
    joined = open_clip(tmp_path / "joined.mp4")
    assert joined.num_pictures == sum(counts) and joined.fps == pytest.approx(fps)
    assert np.array_equal(read(joined.path), expected)
    with av.open(str(joined.path)) as container:
        times = [float(frame.time) for frame in container.decode(video=0)]
    assert times == pytest.approx([index / fps for index in range(sum(counts))], abs=1e-3)


def test_joining_clips_of_other_settings_is_refused(tmp_path: Path) -> None:
    first = make(tmp_path / "a.mp4")
    other = make(tmp_path / "b.mp4", fps=25)
    with pytest.raises(ValueError, match=r"b\.mp4"):
        join_clips([first, other], tmp_path / "joined.mp4")
    with pytest.raises(ValueError, match="nothing to join"):
        join_clips([], tmp_path / "joined.mp4")
    assert not (tmp_path / "joined.mp4").exists() and len(list(tmp_path.iterdir())) == 2


def test_truncated_with_index_in_front_counts_what_is_readable(tmp_path: Path) -> None:
    whole = make(tmp_path / "a.mp4", 60).read_bytes()
    (tmp_path / "cut.mp4").write_bytes(whole[: len(whole) * 6 // 10])
    clip = open_clip(tmp_path / "cut.mp4")
    seen: list[Picture] = []
    with pytest.raises(ValueError, match="cut off") as refusal:
        seen.extend(clip.pictures())
    assert 10 < len(seen) < 60 and f"after {len(seen)} readable" in str(refusal.value)


def test_truncated_before_its_index(tmp_path: Path) -> None:
    path = tmp_path / "a.mp4"
    with av.open(str(path), "w") as container:  # the index of a plain MP4 is at its end
        stream = container.add_stream("libx264", rate=16)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for _ in range(20):
            noise = np.random.default_rng(0).integers(0, 255, (48, 64, 3), np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(noise, format="rgb24")))
        container.mux(stream.encode(None))
    whole = path.read_bytes()
    index = whole.index(b"moov")
    for end in (index // 5, index - 9, index + 40, whole.index(b"stsd") + 20):
        path.write_bytes(whole[:end])
        with pytest.raises(ValueError, match="cut off"):
            open_clip(path)


def test_files_that_are_no_video(tmp_path: Path) -> None:
    text, noise, empty, song = (tmp_path / name for name in ("a.txt", "noise.mp4", "empty.mp4", "a.wav"))
    text.write_text("hello\n" * 100)
    noise.write_bytes(np.random.default_rng(0).bytes(4000))
    empty.touch()
    with wave.open(str(song), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(8000)
        file.writeframes(bytes(16000))
    for path, word in (
        (tmp_path / "none.mp4", "no such file"),
        (tmp_path, "folder"),
        (text, "text file"),
        (noise, "not a video"),
        (empty, "empty"),
        (song, "no video stream"),
    ):
        with pytest.raises(ValueError, match=word):
            open_clip(path)


def test_portrait_clips_of_telephones_are_upright(tmp_path: Path) -> None:
    path = make(tmp_path / "a.mp4")
    matrix = bytes.fromhex("00010000000000000000000000000000000100000000000000000000000000004000" + "0000")
    quarter = bytes.fromhex("0000000000010000000000 00ffff00000000000000000000".replace(" ", "")) + bytes(8)
    quarter = quarter + bytes.fromhex("40000000")
    whole = path.read_bytes()
    assert len(matrix) == len(quarter) == 36 and whole.count(matrix) >= 1
    track = whole.index(b"tkhd")
    where = whole.index(matrix, track)
    path.write_bytes(whole[:where] + quarter + whole[where + 36 :])
    clip = open_clip(path)
    assert (clip.height, clip.width) == SIZE[::-1]
    first = next(clip.pictures())
    upright = np.rot90((pixels(1)[0].permute(1, 2, 0).numpy() * 255), -1)  # stored lying to the left
    assert np.abs(first.astype(float) - upright).mean() < 8


def test_a_clip_with_pictures_out_of_order_is_not_joined(tmp_path: Path) -> None:
    with av.open(str(tmp_path / "b.mp4"), "w") as container:
        stream = container.add_stream("libx264", rate=16)
        stream.height, stream.width = SIZE
        stream.options = {"bf": "3"}
        for picture in pixels(12).mul(255).byte().permute(0, 2, 3, 1).contiguous().numpy():
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode(None))
    with pytest.raises(ValueError, match="B-pictures"):
        join_clips([tmp_path / "b.mp4"], tmp_path / "joined.mp4")
