"""`recap reproduce` makes the paper's tables, `recap report` puts all of them on one page."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from recap.cli.console import show_notice
from recap.cli.options import Dtype, Flow
from recap.tables.page import write_report
from recap.tables.recipes import Ask
from recap.tables.reproduce import SOME_LEFT, How, reproduce

FrameJudge = Annotated[
    str,
    typer.Option(
        help="Who judges whole frames: auto, dinov2, clip, mobilenetv2 or hsv; NAME=FOLDER names its weights."
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
        help="Who finds the subject: qwen2.5-vl (=FOLDER), or nobody; the embedded world has its own probe."
    ),
]
SeeingJudge = Annotated[
    str,
    typer.Option(
        help="Who is asked in words, next to all others, whether two are the same: qwen2.5-vl (=FOLDER), or nobody."
    ),
]


def reproduce_command(
    tables: Annotated[
        list[str], typer.Argument(help="Tables or figures; a wrong name lists them. They share their runs.")
    ],
    backbone: Annotated[str, typer.Option(help="Which model generates; see `recap list`.")] = Ask.backbone,
    prompts: Annotated[int, typer.Option(help="How many of the recipe's prompts.")] = Ask.prompts,
    seeds: Annotated[int | None, typer.Option(help="Seeds of each [default: the recipe's].")] = None,
    seconds: Annotated[float | None, typer.Option(help="Length of a video [default: the recipe's].")] = None,
    flow: Flow = None,
    judge_flow: MotionFlow = Ask.judge_flow,
    embedder: FrameJudge = Ask.embedder,
    detector: SubjectFinder = Ask.detector,
    judge: SeeingJudge = Ask.judge,
    schedules: Annotated[
        str,
        typer.Option(help="JSON file of schedules in place of ours: ours, EntityBench's or StoryMem's form."),
    ] = Ask.schedules,
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
        float | None, typer.Option(help="Begin nothing that would end later than this.")
    ] = None,
    ray: Annotated[str, typer.Option(help="Address of a Ray cluster; 'local' starts one.")] = "",
    commit: Annotated[str, typer.Option(help="Commit of the code, where git cannot tell.")] = "",
    out: Annotated[Path, typer.Option(help="Folder of the results: runs, and tables.")] = Path("results"),
) -> None:
    """Generate, judge and write tables of the paper; the same command resumes, also with results from elsewhere."""
    flow, dtype = flow or Ask.flow, dtype or Ask.dtype
    judges = (judge_flow, embedder, detector, judge)
    ask = Ask(backbone, prompts, seeds, seconds, flow, device, dtype, *judges, schedules)
    how = How(workers, rows, scorers, math.inf if minutes is None else minutes, ray, commit)
    done = reproduce(tables, ask, out, how, notice=show_notice)
    for line in done.summary():
        show_notice(line)
    for page in done.pages:
        typer.echo(page)
    if done.left:
        raise typer.Exit(SOME_LEFT)


def report_command(
    folder: Annotated[Path, typer.Argument(help="Folder of results.")] = Path("results"),
    markdown: Annotated[Path | None, typer.Option(help="Also write the tables as Markdown.")] = None,
) -> None:
    """Put all finished tables of a folder on one page, report.html in it."""
    typer.echo(write_report(folder, markdown))
