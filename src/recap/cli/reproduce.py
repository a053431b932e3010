"""`recap reproduce` makes the paper's tables, `recap report` puts all of them on one page."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from recap.cli.console import show_notice
from recap.cli.options import Dtype, Flow
from recap.cli.plug_ins import find_plug_in
from recap.cli.stopping import stoppable
from recap.errors import refuse
from recap.tables.ask import Ask
from recap.tables.report import write_report
from recap.tables.reproduce import SOME_LEFT, How, reproduce
from recap.tables.scripts import read_lines

FrameJudge = Annotated[
    str,
    typer.Option(
        help="What judges whole frames: auto, dinov2, clip, mobilenetv2 or hsv; NAME=FOLDER names its weights."
    ),
]
MotionFlow = Annotated[
    str,
    typer.Option(
        help="Flow by which motion is judged: classical, raft-small, auto, or both, in columns of their own."
    ),
]
SubjectFinder = Annotated[
    str,
    typer.Option(
        help="What finds the subject: qwen2.5-vl (=FOLDER), or nobody; the embedded world has its own probe."
    ),
]
SeeingJudge = Annotated[
    str,
    typer.Option(
        help="A model that also judges, in words, whether two are the same: qwen2.5-vl (=FOLDER), or nobody."
    ),
]

Schedules = Annotated[
    str,
    typer.Option(
        help="JSON file of schedules to use instead of ours; EntityBench's and StoryMem's are read, too."
    ),
]
Stored = Annotated[
    bool, typer.Option("--stored", help="Generate nothing: leave out rows that lack runs, and name them.")
]
PromptFile = Annotated[
    str, typer.Option(help="Text file of prompts, one a line, to use instead of ours in tables of one scene.")
]


def reproduce_command(
    context: typer.Context,
    tables: Annotated[
        list[str], typer.Argument(help="Tables or figures; a wrong name lists them. They share their runs.")
    ],
    backbone: Annotated[str, typer.Option(help="Which model generates; see `recap list`.")] = Ask.backbone,
    suite: Annotated[
        str, typer.Option(help="Suite of VBench, e.g. vbench128: its prompts and judges, as in the paper.")
    ] = "",
    prompts: Annotated[
        int | None,
        typer.Option(help=f"How many prompts [default: {Ask.prompts}, or all of a suite or file]."),
    ] = None,
    seeds: Annotated[int | None, typer.Option(help="Seeds of each [default: the recipe's].")] = None,
    half: Annotated[
        str, typer.Option(help="search: the first half of the prompts; confirm: the other, with fresh seeds.")
    ] = "",
    seconds: Annotated[float | None, typer.Option(help="Length of a video [default: the recipe's].")] = None,
    flow: Flow = None,
    judge_flow: MotionFlow = Ask.judge_flow,
    embedder: FrameJudge = Ask.embedder,
    detector: SubjectFinder = Ask.detector,
    judge: SeeingJudge = Ask.judge,
    schedules: Schedules = Ask.schedules,
    prompt_file: PromptFile = Ask.prompt_file,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto: a GPU if there is one.")] = Ask.device,
    dtype: Dtype = None,
    workers: Annotated[int | None, typer.Option(help="Processes on CPUs [default: one per core].")] = None,
    rows: Annotated[
        int | None, typer.Option(help="Runs in a batch [default: all that fit; on CPUs 1].")
    ] = None,
    scorers: Annotated[
        int | None, typer.Option(help="Processes that judge batches [default: most cores].")
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(help="Start no run that would end later than so many minutes from now.")
    ] = None,
    ray: Annotated[str, typer.Option(help="Address of a Ray cluster; 'local' starts one.")] = "",
    commit: Annotated[str, typer.Option(help="Commit of the code, where git does not know it.")] = "",
    stored: Stored = False,
    out: Annotated[Path, typer.Option(help="Folder of the results: runs, and tables.")] = Path("results"),
) -> None:
    """Make tables of the paper: generate videos, judge them, write the tables. The same command resumes."""
    if suite:
        _reproduce_suite(context.params)
        return
    flow, dtype = flow or Ask.flow, dtype or Ask.dtype
    if prompts is None:
        prompts = len(read_lines(Path(prompt_file))) if prompt_file else Ask.prompts
    judges = (judge_flow, embedder, detector, judge)
    ask = Ask(backbone, prompts, seeds, seconds, flow, device, dtype, *judges, schedules, half, prompt_file)
    how = How(workers, rows, scorers, math.inf if minutes is None else minutes, ray, commit, stored)
    with stoppable(lambda: "the same command continues; runs that are done are kept"):
        done = reproduce(tables, ask, out, how, notice=show_notice)
    for line in done.summary():
        show_notice(line)
    for page in done.pages:
        typer.echo(page)
    if done.left:
        raise typer.Exit(SOME_LEFT)


def _reproduce_suite(asked: Mapping[str, Any]) -> None:
    """Let the plug-in of VBench make the tables; refuse options of our own runs and judges."""
    own = ("judge_flow", "embedder", "detector", "half", "judge", "schedules", "prompt_file")
    usual = {name: getattr(Ask, name) for name in own} | {"ray": "", "commit": "", "stored": False}
    for name, default in {**usual, "rows": None, "scorers": None, "minutes": None}.items():
        if asked[name] != default:
            limit = "VBench judges a suite, and each of its videos is a run by itself"
            raise refuse(f"--{name.replace('_', '-')}", asked[name], limit, "leave it out")
    names = ("suite", "backbone", "seeds", "seconds", "flow", "device", "dtype", "workers", "out")
    options = {**{name: asked[name] for name in names}, "num": asked["prompts"]}
    words = [
        word for name, value in options.items() if value is not None for word in (f"--{name}", str(value))
    ]
    find_plug_in("vbench").main(
        ["reproduce", *asked["tables"], *words], "recap vbench", standalone_mode=False
    )


def report_command(
    folders: Annotated[
        list[Path] | None, typer.Argument(help="Folders of results [default: results].")
    ] = None,
    markdown: Annotated[Path | None, typer.Option(help="Also write the tables as Markdown.")] = None,
) -> None:
    """Write report.html into the first folder: what all finished tables found, with charts, videos and the tables."""
    typer.echo(write_report(folders or [Path("results")], markdown))
