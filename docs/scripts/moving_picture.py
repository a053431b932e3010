"""Turns the side-by-side video of a comparison into the moving picture of the README (animated WebP).

recap compare --script docs/scripts/return.json --set memory.reinforcement=5 --out return
python docs/scripts/moving_picture.py return/side-by-side.mp4 docs/images/return.webp
"""

from __future__ import annotations

import sys
from fractions import Fraction

import av

WIDTH = 948
PICTURES_PER_SECOND = 8


def moving_picture(video: str, out: str) -> None:
    """Keeps every n-th picture of the video, smaller, and repeats for ever."""
    with av.open(video) as source, av.open(out, "w", format="webp", options={"loop": "0"}) as target:
        clip = source.streams.video[0]
        every = round(clip.average_rate / PICTURES_PER_SECOND)
        stream = target.add_stream("libwebp_anim", rate=PICTURES_PER_SECOND, options={"quality": "55"})
        stream.width, stream.height = WIDTH, WIDTH * clip.height // clip.width // 2 * 2
        stream.pix_fmt = "yuv420p"
        for index, picture in enumerate(source.decode(clip)):
            if index % every == 0:
                smaller = picture.reformat(stream.width, stream.height, "yuv420p")
                smaller.pts, smaller.time_base = index // every, Fraction(1, PICTURES_PER_SECOND)
                target.mux(stream.encode(smaller))
        target.mux(stream.encode())


if __name__ == "__main__":
    moving_picture(*sys.argv[1:])
