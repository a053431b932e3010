"""The same pictures give the same clip, byte for byte: in one process, in others, and with a busy heap in between."""

from __future__ import annotations

import hashlib
import multiprocessing
from pathlib import Path

import pytest

from benchmarks.encoder import moving_pictures, stir_the_heap
from recap.io.video import ClipWriter

# The untrained and the embedded model's pictures, and sizes that are no multiple of 16.
SIZES = [(64, 96), (64, 104), (128, 208), (62, 90)]


def clip_digests(path: Path, size: tuple[int, int], times: int, seed: int = 0) -> set[str]:
    pixels, stirred, seen = moving_pictures(48, size), [], set()
    for index in range(times):
        stirred = [*stirred[-2:], stir_the_heap(seed + index)]
        with ClipWriter(path, size, 16) as clip:
            clip.write(pixels)
        seen.add(hashlib.sha256(path.read_bytes()).hexdigest())
    return seen


def test_a_clip_repeats(tmp_path: Path) -> None:
    assert len(clip_digests(tmp_path / "a.mp4", (64, 104), 25)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_a_thousand_clips_are_one(tmp_path: Path, size: tuple[int, int]) -> None:
    seen = clip_digests(tmp_path / "a.mp4", size, 700)
    # Threads of the libraries may not outlive a fork, so new processes are tried both ways.
    for method in ("fork", "spawn"):
        with multiprocessing.get_context(method).Pool(2) as pool:
            work = [(tmp_path / f"{method}{part}.mp4", size, 50, 1000 * part) for part in range(3)]
            for digests in pool.starmap(clip_digests, work):
                seen |= digests
    assert len(seen) == 1
