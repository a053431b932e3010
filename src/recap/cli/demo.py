"""`make demo` generates two short stories in which a subject returns, with three memories, and counts the returns."""

from __future__ import annotations

import dataclasses
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from recap.cli.console import progress_bar, show_notice
from recap.cli.main import run_safely
from recap.config import RunConfig
from recap.io.files import read_json, write_whole
from recap.io.record import versions
from recap.io.run_folder import STATE
from recap.plan import Shot
from recap.show.clips import Badge, Excerpt, write_gif
from recap.show.comparison import RECORD, compare
from recap.show.run_page import PAGE, read_summary
from recap.show.sheet import moments_sheet, write_png
from recap.show.story_page import build_story_page
from recap.tables.stories import MEASURED, JudgedStory, StoryScript, judge_story

SCENE, FIRST, SECOND = "a beach by day", "fox", "bus"
# The subject is in no opening frame and the recent frames are dropped at every cut: only a bank can bring it back.
RETURN = StoryScript(
    name="return",
    title="With cuts: empty, a fox, empty, a fox again",
    subject=FIRST,
    shots=(
        Shot(SCENE, 2.0625),
        Shot(f"a {FIRST} on {SCENE}", 4.5),
        Shot(SCENE, 3.75),
        Shot(f"a {FIRST} on {SCENE}", 4.5),
    ),
    labels=("empty", "a fox", "empty again", "a fox again"),
    seeds=(0, 1, 2),
    about="The opening frame is empty and every cut drops the recent frames, so only a bank can bring the fox back. "
    "The first three seeds, unpicked. The videos begin just before the return.",
)
# There is no cut: subjects enter and leave in one long take, as far as the memory can see.
ENTERING = StoryScript(
    name="entering",
    title="In one take: a bus joins a fox, leaves and is asked back",
    subject=SECOND,
    shots=(
        Shot(f"a {FIRST} on {SCENE}", 5.8125, cut=False),
        Shot(f"a {FIRST} and a {SECOND} on {SCENE}", 7.5, cut=False),
        Shot(f"a {FIRST} on {SCENE}", 6.0, cut=False),
        Shot(f"a {FIRST} and a {SECOND} on {SCENE}", 6.0, cut=False),
    ),
    labels=("a fox", "a bus joins", "the bus leaves", "a bus again"),
    seeds=(0,),
    about="Nothing is cut, so the recent frames stay, and the fox is in the opening that sink and recap keep. "
    "One seed, the first: an anecdote.",
)
TALES = (RETURN, ENTERING)
MEMORIES = ("none", "sink", "recap")
BACKBONE = "embedded"
FOLDER = Path("demo")
GIF = "demo.gif"


def demo(flow: str = "auto") -> None:
    """Write demo/index.html, a GIF and a figure, and below them a comparison per story."""
    _make_room()
    judged = []
    for script in TALES:
        runs = _generate(script, flow)
        judged.append(judge_story(script, runs, FOLDER))
        if script is TALES[0]:
            _write_pictures(script, judged[0], runs)
    for state in FOLDER.glob(f"*/*/{STATE}"):
        # Four fifths of the folder, and of use only to a run that is not finished.
        state.unlink()
    words = "the same scripts and seeds on the model that comes with the package; only the memory differs"
    page = build_story_page(
        judged[0].story.verdict,
        f"{', '.join(MEMORIES)}: {words}",
        [each.story for each in judged],
        [MEASURED],
        {"flow": judged[0].flow, **versions()},
    )
    # Last: the page is the sign that all is complete.
    write_whole(FOLDER / PAGE, page.encode())
    print("\n".join(["", *(each.story.verdict for each in judged)]))
    print(f"\nIn one picture: {FOLDER / 'figure.png'}; moving: {FOLDER / GIF}\nLook at {FOLDER / PAGE}")


def _generate(script: StoryScript, flow: str) -> dict[str, Path]:
    """Generate what is missing of a script; returns the folders of its runs by memory."""
    shots = [dataclasses.asdict(shot) for shot in script.shots]
    config = RunConfig.from_dict({"shots": shots, "seeds": script.seeds, "flow": flow, "backbone": BACKBONE})
    with (
        progress_bar("generating", "blocks", "loading the model") as generating,
        progress_bar("showing", "pictures") as showing,
    ):
        out = FOLDER / script.name
        return compare(config, MEMORIES, out, reporter=generating, showing=showing.progress).runs


def _write_pictures(script: StoryScript, judged: JudgedStory, runs: Mapping[str, Path]) -> None:
    """Write the GIF of all seeds of a story and the sheet of its first."""
    clips = {name: [run / video for video in read_summary(run)["videos"]] for name, run in runs.items()}
    screens = [screen for _, _, line in judged.story.rows for screen in line]
    badges = {
        name: [Badge(screen.badge, screen.good) for screen in screens if screen.memory == name]
        for name in clips
    }
    _, first, gone, back = judged.starts_s
    end = judged.story.duration_s
    _, visit, left, again = script.labels
    excerpts = [
        Excerpt(max(first, gone - 2.5), gone, visit),
        Excerpt(max(gone, back - 1.25), back, left),
        Excerpt(back, end, again),
    ]
    write_gif(FOLDER / GIF, clips, excerpts, badges)
    ends = [*judged.starts_s[1:], end]
    moments = {
        (start + stop) / 2: label
        for start, stop, label in zip(judged.starts_s, ends, script.labels, strict=True)
    }
    write_png(FOLDER / "figure.png", moments_sheet({name: own[0] for name, own in clips.items()}, moments))


def _make_room() -> None:
    """Delete a finished demo, or one of another script; a stopped one is kept, to be resumed."""
    begun = [script for script in TALES if (FOLDER / script.name / RECORD).is_file()]
    if not begun:
        return
    finished, same = (FOLDER / PAGE).is_file(), all(map(_is_same, begun))
    stopped = "a stopped demo" if same else "a stopped demo of another script"
    resumed = same and not finished
    state, next_step = "a finished demo" if finished else stopped, "resumed" if resumed else "generated again"
    show_notice(f"{FOLDER} holds {state}: it is {next_step}")
    if not resumed:
        (FOLDER / PAGE).unlink(missing_ok=True)
        for script in begun:
            shutil.rmtree(FOLDER / script.name)


def _is_same(script: StoryScript) -> bool:
    """Tell whether a script was begun as it is now."""
    found = read_json(FOLDER / script.name / RECORD)
    begun = (found.get("shots"), found.get("seeds")) if isinstance(found, dict) else None
    return begun == ([dataclasses.asdict(shot) for shot in script.shots], list(script.seeds))


if __name__ == "__main__":
    try:
        run_safely(demo)
    except KeyboardInterrupt:
        show_notice("stopped; the same command resumes it")
        sys.exit(130)
