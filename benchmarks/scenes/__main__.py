"""Write a clip for `recap inspect` in which actors enter, hide and return: `python -m benchmarks.scenes clip.mp4`."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.scenes import draw, make_scene
from recap.io.video import ClipWriter


def main(arguments: list[str]) -> None:
    if len(arguments) != 1:
        sys.exit("usage: python -m benchmarks.scenes CLIP.mp4")
    scene = make_scene("demo")
    with ClipWriter(Path(arguments[0]), scene.size, scene.fps) as writer:
        for index in range(scene.num_pictures):
            writer.write(draw(scene, index)[0][None])


if __name__ == "__main__":
    main(sys.argv[1:])
