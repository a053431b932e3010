"""Clips follow VBench-Long's rule, have safe names, need little memory, and stale ones are never used."""

from __future__ import annotations

import gc
import re
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

from recap.io.video import ClipWriter, open_clip
from recap_vbench import cutter
from recap_vbench.cutter import clip_label, cut_video

# A plug-in of its own: its commands are tested in `make test`, the rest in `make test-slow`.
pytestmark = pytest.mark.slow

SIDE = 32


def numbered(index: int) -> np.ndarray:
    """Make a picture that encodes its own number: a block of 8 x 8 pixels per bit."""
    blocks = np.array([(index >> bit & 1) * 255 for bit in range(16)], np.uint8).reshape(4, 4)
    return np.repeat(np.kron(blocks, np.ones((8, 8), np.uint8))[..., None], 3, axis=2)


def number_of(picture: np.ndarray) -> int:
    bits = picture[4::8, 4::8, 0].reshape(-1) > 127
    return int(sum(1 << index for index, bit in enumerate(bits) if bit))


def numbers(path: Path) -> list[int]:
    return [number_of(picture) for picture in open_clip(path).pictures()]


def video(path: Path, count: int, fps: float = 16) -> Path:
    pictures = torch.from_numpy(np.stack([numbered(index) for index in range(count)]))
    with ClipWriter(path, (SIDE, SIDE), fps, quality=1) as writer:
        writer.write(pictures.permute(0, 3, 1, 2))
    return path


@pytest.mark.parametrize(
    ("count", "seconds", "last"), [(81, 2, 49), (957, 2, 925), (957, 10, 797), (64, 2, 32)]
)
def test_clips_have_the_pictures_of_the_rule(tmp_path, count, seconds, last):
    cut = cut_video(video(tmp_path / "v.mp4", count), tmp_path / "clips", "a boat-0", seconds, "source")
    size = 16 * seconds
    spans = [(start, start + size) for start in [*range(0, count - size, size), count - size]]
    assert [numbers(clip) for clip in cut.clips] == [list(range(*span)) for span in spans]
    assert numbers(cut.clips[-1])[0] == last
    assert [clip.name for clip in cut.clips] == [f"a boat-0-{i:03d}.mp4" for i in range(len(spans))]
    assert numbers(cut.firsts) == [start for start, _ in spans]
    assert open_clip(cut.clips[0]).fps == 16


def test_short_video_is_one_whole_clip(tmp_path):
    cut = cut_video(video(tmp_path / "v.mp4", 81), tmp_path / "clips", "a boat-0", 10, "source")
    assert [clip.name for clip in cut.clips] == ["a boat-0-full.mp4"] and cut.firsts is None
    assert numbers(cut.clips[0]) == list(range(81))
    assert {path.name for path in cut.clips[0].parent.iterdir()} == {"a boat-0-full.mp4", "cut.json"}


def test_broken_rates_are_cut_by_whole_pictures(tmp_path):
    """At 29.97 per second a clip has 29 x 2 pictures and plays at 29, as VBench's own cutter does it."""
    cut = cut_video(video(tmp_path / "v.mp4", 60, 30000 / 1001), tmp_path / "clips", "x-0", 2, "source")
    assert [numbers(clip)[0] for clip in cut.clips] == [0, 2]
    assert len(numbers(cut.clips[0])) == 58 and open_clip(cut.clips[0]).fps == 29


def test_clips_of_no_picture_are_refused(tmp_path):
    with pytest.raises(ValueError, match="clips of at least 1 s"):
        cut_video(video(tmp_path / "v.mp4", 9), tmp_path / "clips", "x-0", 0, "source")
    assert list((tmp_path / "clips").iterdir()) == []


def test_names_avoid_characters_that_vbench_interprets():
    assert clip_label("a_b/c", 3) == "a b c-3"
    long = clip_label("é" * 300, 0)
    assert len(f"{long}-firsts.mp4".encode()) <= 255 and "�" not in long
    action = clip_label("A person is riding a bike", 4) + "-001.mp4"
    assert re.search("person is ([^-_]*)", action)[1] == "riding a bike"


def test_second_call_reuses_the_clips_of_the_first_but_never_stale_ones(tmp_path):
    path, clips = video(tmp_path / "v.mp4", 40), tmp_path / "clips"
    first = cut_video(path, clips, "x-0", 2, "one")
    stamp = first.clips[0].stat().st_mtime_ns
    assert cut_video(path, clips, "x-0", 2, "one") == first and first.clips[0].stat().st_mtime_ns == stamp
    video(path, 72)
    assert len(cut_video(path, clips, "x-0", 2, "two").clips) == 3
    # Somebody deleted a clip, so the video is cut again.
    first.clips[1].unlink()
    again = cut_video(video(path, 40), clips, "x-0", 2, "one")
    assert again == first and numbers(again.clips[1]) == list(range(8, 40))


def test_two_runs_may_cut_the_same_video(tmp_path, monkeypatch):
    """The slower one uses the clips of the faster."""
    path, clips = video(tmp_path / "v.mp4", 40), tmp_path / "clips"
    slow, done = cutter._cut, []

    def overtaken(*arguments):
        if not done:
            done.append(True)
            done.append(cut_video(path, clips, "x-0", 2, "one"))
        return slow(*arguments)

    monkeypatch.setattr(cutter, "_cut", overtaken)
    assert cut_video(path, clips, "x-0", 2, "one") == done[1]
    assert [folder.name for folder in clips.iterdir()] == [done[1].clips[0].parent.name]


def test_damaged_video_leaves_no_clips(tmp_path):
    path = video(tmp_path / "v.mp4", 81)
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(ValueError, match="clip"):
        cut_video(path, tmp_path / "clips", "x-0", 2, "source")
    assert list((tmp_path / "clips").iterdir()) == []


def test_memory_does_not_grow_with_the_video(tmp_path, monkeypatch):
    """Five minutes are 4797 pictures and 150 clips; memory never has more pictures than one clip."""
    alive: weakref.WeakSet = weakref.WeakSet()
    most = 0

    class Long:
        width = height = SIDE
        fps = 16.0

        def pictures(self):
            nonlocal most
            for index in range(4797):
                picture = numbered(index).copy()
                alive.add(_Alive(picture))
                most = max(most, len(alive))
                yield picture

    class _Alive:
        """A token that is discarded with its picture; arrays themselves are not hashable."""

        def __init__(self, picture):
            weakref.finalize(picture, alive.discard, self)

    class Silent:
        def __init__(self, path, size, fps, quality):
            self.path = Path(path)

        def __enter__(self):
            return self

        def __exit__(self, *error):
            self.path.write_bytes(b"clip")

        def write(self, pixels):
            assert pixels.shape == (1, 3, SIDE, SIDE)

    monkeypatch.setattr(cutter, "open_clip", lambda path: Long())
    monkeypatch.setattr(cutter, "ClipWriter", Silent)
    gc.collect()
    cut = cut_video(tmp_path / "v.mp4", tmp_path / "clips", "x-0", 2, "source")
    assert len(cut.clips) == 150
    assert 32 <= most <= 36
