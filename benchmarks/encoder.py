"""Counts how many different results x264 gives for the same pictures, under several settings.

    python -m benchmarks.encoder --times 300

The pictures are converted to YUV once, so only x264 is measured; arrays of random sizes are made and dropped between
encodes. On a processor with AVX-512 (EPYC of family 25, x264 build 165) x264's defaults give several results, also
with one thread. Without AVX-512, without the macroblock tree (mbtree), or with its portable version, which
`cpu-independent=1` selects, there is one. So the fault is in x264's AVX-512 version of mbtree. What in the heap
provokes it is not known: random bytes in fresh memory, random registers and signals alone did not.
"""

from __future__ import annotations

import argparse
import hashlib
import random
from collections import Counter
from fractions import Fraction
from typing import Any

import av
import numpy as np
import torch
from torch import Tensor

from recap.io.video import REPEATABLE

COMMON = {"crf": "18", "preset": "veryfast", "bf": "0", "flags": "+cgop"}
SETTINGS = {
    "x264's defaults": {},
    "one thread": {"threads": "1"},
    "one thread, without AVX-512": {"threads": "1", "x264-params": "asm=AVX2"},
    "one thread, without mbtree": {"threads": "1", "mbtree": "0"},
    "what clips are written with": {"threads": "1", **REPEATABLE},
}


def moving_pictures(count: int, size: tuple[int, int]) -> Tensor:
    """Return pictures T 3 Y X of a smooth texture that moves, with a little noise."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(1, 3, 12, 16, generator=generator)
    twice = (size[0] * 2, size[1] * 2)
    texture = torch.nn.functional.interpolate(coarse, size=twice, mode="bicubic")[0]
    moved = []
    for index in range(count):
        row, column = index * 3 % size[0], index * 5 % size[1]
        shown = texture[:, row : row + size[0], column : column + size[1]]
        moved.append(shown + 0.05 * torch.rand(3, *size, generator=generator))
    return torch.stack(moved).clamp(0, 1)


def stir_the_heap(seed: int) -> list[Any]:
    """Make some arrays of random sizes; the caller drops them later."""
    chance = random.Random(seed)
    sizes = [chance.randrange(1, 300_000) for _ in range(chance.randrange(20))]
    return [np.random.default_rng(seed).integers(0, 255, size, np.uint8) for size in sizes]


def encode(frames: list[Any], size: tuple[int, int], settings: dict[str, str]) -> str:
    """Return a digest of what x264 makes of YUV frames."""
    encoder: Any = av.CodecContext.create("libx264", "w")
    encoder.height, encoder.width = size
    encoder.pix_fmt, encoder.time_base, encoder.framerate = "yuv420p", Fraction(1, 16), 16
    encoder.gop_size, encoder.options = 16, {**COMMON, **settings}
    digest = hashlib.sha256()
    for frame in [*frames, None]:
        shown = None if frame is None else av.VideoFrame.from_ndarray(frame, format="yuv420p")
        for packet in encoder.encode(shown):
            digest.update(bytes(packet))
    return digest.hexdigest()


def main() -> None:
    """Print a line for each setting: how many results, and how many encodes differ from the usual one."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--times", type=int, default=300)
    parser.add_argument("--size", type=int, nargs=2, default=(64, 104), metavar=("ROWS", "COLUMNS"))
    options = parser.parse_args()
    size = tuple(options.size)
    levels = (
        moving_pictures(48, size).mul(255).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous().numpy()
    )
    shown = [av.VideoFrame.from_ndarray(picture, format="rgb24") for picture in levels]
    frames = [frame.reformat(format="yuv420p").to_ndarray() for frame in shown]
    for name, settings in SETTINGS.items():
        seen: Counter[str] = Counter()
        stirred: list[Any] = []
        for index in range(options.times):
            stirred = [*stirred[-2:], stir_the_heap(index)]
            seen[encode(frames, size, settings)] += 1
        others = options.times - seen.most_common(1)[0][1]
        print(
            f"{name}: {len(seen)} results, {others} of {options.times} differ from the usual one", flush=True
        )


if __name__ == "__main__":
    main()
