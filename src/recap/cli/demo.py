"""`make demo`: render a clip in which actors enter, hide and return, and show what novelty notices in it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from recap.cli.console import progress_bar, show_notice
from recap.cli.main import run_safely
from recap.flow import build_flow
from recap.inspection import inspect_clip
from recap.novelty.flow_novelty import FlowNoveltyConfig
from recap.scenes import draw, make_scene
from recap.show.png import write_png
from recap.video import ClipWriter, open_clip

FOLDER = Path("demo")


def demo() -> None:
    """Leave demo/clip.mp4, demo/figure.png and demo/inspection/index.html."""
    scene = make_scene("demo")
    clip = FOLDER / "clip.mp4"
    FOLDER.mkdir(exist_ok=True)
    with progress_bar("rendering", "pictures") as report, ClipWriter(clip, scene.size, scene.fps) as writer:
        for index in range(scene.num_pictures):
            writer.write(draw(scene, index)[0][None])
            report(index + 1, scene.num_pictures, 0.0)
    with progress_bar("noticing", "pictures") as report:
        flow = build_flow("auto", notice=show_notice)
        out = FOLDER / "inspection"
        summary = inspect_clip(
            clip, out, flow=flow, config=FlowNoveltyConfig(), progress=report, notice=show_notice
        )
    _write_figure(out / "overlay.mp4", FOLDER / "figure.png")
    print(f"\nLook at {summary.page}")


def _write_figure(overlay: Path, figure: Path) -> None:
    """Four moments of the overlay in one picture: hiding, panning, something new beyond the border, returning."""
    moments = [p for index, p in enumerate(open_clip(overlay).pictures()) if index in (20, 50, 80, 110)]
    write_png(figure, np.vstack([np.hstack(moments[:2]), np.hstack(moments[2:])]))


if __name__ == "__main__":
    run_safely(demo)
