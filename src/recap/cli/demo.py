"""`make demo` generates one minute with three memories, in which one actor joins another, leaves and comes back."""

from __future__ import annotations

import dataclasses
import shutil
import sys
from pathlib import Path

from recap.cli.console import progress_bar, show_notice
from recap.cli.main import run_safely
from recap.config import RunConfig, read_json
from recap.io.run_folder import STATE
from recap.plan import Shot
from recap.show.comparison import RECORD, compare
from recap.show.sheet import moments_sheet, write_png

FIRST, SECOND = "a fox", "a bus"
SCENE = "on a beach by day"
BOTH = f"{FIRST} and {SECOND}"
# No cut anywhere: whoever enters or leaves does so in one long take, as far as the memory can tell.
SHOTS = (
    Shot(f"{FIRST} {SCENE}", 15.0, cut=False),
    Shot(f"{BOTH} {SCENE}", 15.0, cut=False),
    Shot(f"{SECOND} {SCENE}", 12.0, cut=False),
    Shot(f"{BOTH} {SCENE}", 18.0, cut=False),
)
MOMENTS = {1.0: FIRST, 20.0: BOTH, 35.0: SECOND, 45.0: BOTH, 58.0: BOTH}
MEMORIES = ("none", "sink", "recap")
SEED = 0
FOLDER = Path("demo")


def demo() -> None:
    """Write demo/comparison/ with its page, and demo/figure.png."""
    out = FOLDER / "comparison"
    _make_room(out)
    config = RunConfig(shots=SHOTS, seeds=(SEED,))
    with (
        progress_bar("generating", "blocks", "loading the model") as generating,
        progress_bar("showing", "pictures") as showing,
    ):
        summary = compare(config, MEMORIES, out, reporter=generating, showing=showing.progress)
    for run in summary.runs.values():
        # Four fifths of the folder, and of use only to a run that is not finished.
        (run / STATE).unlink(missing_ok=True)
    clips = {name: run / "video.mp4" for name, run in summary.runs.items()}
    labels = {second: f"{second:g} s: {who}" for second, who in MOMENTS.items()}
    write_png(FOLDER / "figure.png", moments_sheet(clips, labels))
    print(f"\nIn one picture: {FOLDER / 'figure.png'}\nLook at {summary.page}")


def _make_room(out: Path) -> None:
    """Delete a finished demo, or one of another script; a stopped one is kept, to be resumed."""
    if not (out / RECORD).is_file():
        return
    finished = (out / "index.html").is_file()
    same = read_json(out / RECORD).get("shots") == [dataclasses.asdict(shot) for shot in SHOTS]
    state = (
        "a finished demo" if finished else "a stopped demo" if same else "a stopped demo of another script"
    )
    resumed = same and not finished
    show_notice(f"{out} holds {state}: it is {'resumed' if resumed else 'generated again'}")
    if not resumed:
        shutil.rmtree(out)


if __name__ == "__main__":
    try:
        run_safely(demo)
    except KeyboardInterrupt:
        show_notice("stopped; the same command resumes it")
        sys.exit(130)
