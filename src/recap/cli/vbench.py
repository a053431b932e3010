"""`recap vbench setup` and `recap vbench run`: VBench-Long in its own environment."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from recap.cli.console import show_notice
from recap.eval.vbench.environment import describe, set_up, vbench_folder
from recap.eval.vbench.judge import Question, judge
from recap.eval.vbench.suites import SUITES

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="VBench-Long by VBench's own models, in its own environment.",
)

Folder = Annotated[
    Path | None, typer.Option(help="Where VBench's environment lies [default: vbench in $RECAP_HOME].")
]


@app.command("setup")
def setup_command(
    folder: Folder = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print packages, size and licences, and install nothing.")
    ] = False,
) -> None:
    """Install VBench into an environment of its own; a finished one is left as it is."""
    place = vbench_folder(folder)
    for line in describe(place):
        show_notice(line)
    if not dry_run:
        typer.echo(set_up(place, show_notice).python)


@app.command("run")
def run_command(
    videos: Annotated[Path, typer.Argument(help="Folder of the videos, named <prompt>-<seed>.mp4.")],
    suite: Annotated[str, typer.Option(help=f"Which prompts they are of: {', '.join(SUITES)}.")],
    dimension: Annotated[
        list[str] | None, typer.Option(help="What to measure; may be repeated [default: all of the suite].")
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="File of the prompts, a line each, where VBench has not got them.")
    ] = None,
    static_filter: Annotated[
        bool,
        typer.Option("--static-filter", help="Flickering on still clips only, as VBench's own lists ask."),
    ] = False,
    partial: Annotated[
        bool, typer.Option("--partial", help="Score what there is where videos are missing.")
    ] = False,
    device: Annotated[str, typer.Option(help="cpu or cuda [default: cuda where it is].")] = "",
    out: Annotated[
        Path | None, typer.Option(help="Folder of scores and clips [default: VIDEOS-vbench].")
    ] = None,
    folder: Folder = None,
) -> None:
    """Judge a folder of videos; the same command goes on with a stopped one."""
    question = Question(videos, suite, tuple(dimension or ()), prompts, static_filter, partial, device)
    goal = out or videos.resolve().with_name(f"{videos.resolve().name}-vbench")
    scores = judge(question, vbench_folder(folder), goal, show_notice)
    for line in _lines(scores):
        show_notice(line)
    typer.echo(goal / "scores.json")


def _lines(scores: dict[str, Any]) -> list[str]:
    lines = [f"suite {scores['suite']}, {', '.join(scores['backend'])}"]
    for name, row in scores["dimensions"].items():
        count = f"{row['num_clips']} clips of {row['num_videos']} of {row['num_videos_of_suite']} videos"
        lines.append(f"{name}: {row['value']:.4f} ({count})")
    lines += [f"{name}: {scores[name]:.4f}" for name in ("quality", "semantic", "total") if name in scores]
    if scores["not_complete"]:
        lines.append(f"no Total: not complete are {', '.join(scores['not_complete'])}")
    return lines
