"""`recap vbench` generates the videos of a suite, has VBench-Long judge them, and makes tables of them."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from recap.cli.console import show_notice
from recap.cli.examples import as_epilog
from recap.cli.options import Backbone, Device, Dtype, Flow, Memory, Setting
from recap.cli.settings import full_config
from recap.errors import refuse
from recap.io.files import staged_file
from recap_vbench.environment import describe, installed, python_of, set_up, vbench_folder
from recap_vbench.judge import Question, judge
from recap_vbench.suites import SUITES, find_suite, load_entries
from recap_vbench.table import table_of_folders, write_vbench_table
from recap_vbench.videos import Order, generate_suite
from recap_vbench.whole import SCORED, SuiteTables, make_tables

app = typer.Typer(
    no_args_is_help=True, add_completion=False, rich_markup_mode=None, help="Score videos with VBench-Long."
)
EXAMPLES = {
    "setup": "recap vbench setup --dry-run",
    "prompts": "recap vbench prompts --suite vbench128 --out vbench128.txt",
    "draw": "recap vbench draw --suite vbench946 --out videos --num 2",
    "run": "recap vbench run videos --suite vbench946 --partial",
    "table": "recap vbench table none=videos/none recap=videos/recap --paper Self-Forcing --paper Self-Forcing+Ours",
    "reproduce": "recap vbench reproduce main --suite vbench128 --backbone self-forcing",
}

Folder = Annotated[
    Path | None, typer.Option(help="Folder of VBench's environment [default: vbench in $RECAP_HOME].")
]
SuiteName = Annotated[str, typer.Option("--suite", help=f"Which prompts: {', '.join(SUITES)}.")]
Prompts = Annotated[
    Path | None, typer.Option(help="File of the prompts, a line each, if VBench does not have them.")
]
Seconds = Annotated[float, typer.Option(help="Length of a video; the paper uses 60.")]
Seeds = Annotated[int | None, typer.Option(help="Videos per prompt [default: the suite's 5].")]
First = Annotated[int | None, typer.Option(help="Only the first NUM prompts, for a trial.")]
Workers = Annotated[
    int | None, typer.Option(help="Processes that generate in parallel [default: one per core, or per GPU].")
]
PAPERS_SECONDS = 60.0


@app.command("setup", epilog=as_epilog(EXAMPLES["setup"]))
def setup_command(
    folder: Folder = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print packages, size and licences, and install nothing.")
    ] = False,
) -> None:
    """Install VBench into an environment of its own.

    A finished one is left as it is.
    """
    goal = vbench_folder(folder)
    for line in describe(goal):
        show_notice(line)
    if not dry_run:
        set_up(goal, show_notice)
        typer.echo(python_of(goal))


@app.command("prompts", epilog=as_epilog(EXAMPLES["prompts"]))
def prompts_command(
    suite: SuiteName,
    out: Annotated[Path, typer.Option(help="Text file to write, a prompt a line.")],
    prompts: Prompts = None,
    folder: Folder = None,
) -> None:
    """Write the prompts of a suite, for `recap reproduce --prompt-file`."""
    chosen = find_suite(suite)
    info = installed(vbench_folder(folder)).info if chosen.official else ""
    lines = [f"{entry.text}\n" for entry in load_entries(chosen, prompts, info)]
    with staged_file(out) as file:
        file.write_text("".join(lines), encoding="utf-8")
    typer.echo(out)


@app.command("draw", epilog=as_epilog(EXAMPLES["draw"]))
def draw_command(
    suite: SuiteName,
    out: Annotated[
        Path,
        typer.Option(help="Folder of the videos; all other files of the work go to VIDEOS-work next to it."),
    ],
    prompts: Prompts = None,
    backbone: Backbone = None,
    memory: Memory = None,
    settings: Setting = None,
    flow: Flow = None,
    seconds: Seconds = PAPERS_SECONDS,
    seeds: Seeds = None,
    num: First = None,
    workers: Workers = None,
    device: Device = None,
    dtype: Dtype = None,
    folder: Folder = None,
) -> None:
    """Generate the videos of a suite.

    They have the names that `run` looks for. The same command resumes a stopped one.
    """
    chosen = {"backbone": backbone, "memory": memory, "flow": flow, "device": device, "dtype": dtype}
    for text in settings or []:
        if text.partition("=")[0] in ("shots", "seeds", "opening"):
            raise refuse("--set", text, "the suite determines it", "leave it out")
    template = full_config({"shots": [{"prompt": "", "seconds": seconds}], **chosen}, settings or [])
    order = Order(suite, template, prompts, num, seeds)
    count, complete = generate_suite(
        order,
        vbench_folder(folder),
        out,
        workers=workers,
        report=show_notice,
        notice=show_notice,
    )
    following = ["recap", "vbench", "run", str(out), "--suite", suite]
    following += ["--prompts", str(prompts)] if prompts else []
    following += ["--folder", str(folder)] if folder else []
    following += [] if complete else ["--partial"]
    show_notice(f"{count} videos are there; next: {shlex.join(following)}")
    typer.echo(out)


@app.command("run", epilog=as_epilog(EXAMPLES["run"]))
def run_command(
    videos: Annotated[Path, typer.Argument(help="Folder of the videos, named <prompt>-<seed>.mp4.")],
    suite: SuiteName,
    dimension: Annotated[
        list[str] | None, typer.Option(help="Dimension to measure; repeatable [default: all of the suite].")
    ] = None,
    prompts: Prompts = None,
    static_filter: Annotated[
        bool,
        typer.Option("--static-filter", help="Score flickering on still clips only, as VBench's lists ask."),
    ] = False,
    partial: Annotated[
        bool, typer.Option("--partial", help="Score the videos that exist, though others are missing.")
    ] = False,
    device: Annotated[str, typer.Option(help="cpu or cuda [default: cuda if there is one].")] = "",
    out: Annotated[
        Path | None, typer.Option(help="Folder of scores and clips [default: VIDEOS-vbench].")
    ] = None,
    folder: Folder = None,
) -> None:
    """Judge a folder of videos.

    The same command resumes a stopped one.
    """
    question = Question(videos, suite, tuple(dimension or ()), prompts, static_filter, partial, device)
    goal = out or videos.resolve().with_name(f"{videos.resolve().name}-vbench")
    scores = judge(question, vbench_folder(folder), goal, show_notice)
    for line in _lines(scores):
        show_notice(line)
    typer.echo(goal / "scores.json")


@app.command("table", epilog=as_epilog(EXAMPLES["table"]))
def table_command(
    folders: Annotated[
        list[str], typer.Argument(help="Folders of videos or of their scores, as NAME=FOLDER or FOLDER.")
    ],
    ours: Annotated[
        str, typer.Option(help="Row that the others are compared with, pair by pair [default: the last].")
    ] = "",
    paper: Annotated[
        list[str] | None, typer.Option(help="Row of the paper's main table for each folder, in order.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of the table.")] = Path("results/vbench"),
) -> None:
    """Put scored folders side by side, paired by prompt and seed."""
    named: dict[str, Path] = {}
    for text in folders:
        name, equals, path = text.partition("=")
        name, path = (name, path) if equals else (Path(text).name.removesuffix("-vbench"), text)
        if name in named:
            raise refuse("folder", text, f"there is a row {name!r} already", "name it: NAME=FOLDER")
        named[name] = Path(path)
    recipe, found = table_of_folders(named, paper or [], ours or list(named)[-1])
    typer.echo(write_vbench_table(out, recipe, found, command="recap vbench table"))


@app.command("reproduce", epilog=as_epilog(EXAMPLES["reproduce"]))
def reproduce_command(
    tables: Annotated[list[str], typer.Argument(help=f"Tables that are VBench's: {', '.join(SCORED)}.")],
    suite: SuiteName,
    prompts: Prompts = None,
    backbone: Backbone = None,
    flow: Flow = None,
    seconds: Seconds = PAPERS_SECONDS,
    seeds: Seeds = None,
    num: First = None,
    workers: Workers = None,
    device: Device = None,
    dtype: Dtype = None,
    out: Annotated[Path, typer.Option(help="Folder of videos, scores and tables.")] = Path("results"),
    folder: Folder = None,
) -> None:
    """Generate, judge and table in one go, as `recap reproduce TABLE --suite SUITE`; the same command resumes."""
    place = {"flow": flow or "auto", "device": device or "auto", "dtype": dtype or "auto"}
    asked = SuiteTables(
        tuple(tables), suite, backbone or "embedded", **place, seconds=seconds, prompts=prompts, num=num, seeds=seeds,
        workers=workers,
    )  # fmt: skip
    for page in make_tables(asked, vbench_folder(folder), out, show_notice):
        typer.echo(page)


def _lines(scores: dict[str, Any]) -> list[str]:
    lines = [f"suite {scores['suite']}, {', '.join(scores['backend'])}"]
    for name, score in scores["dimensions"].items():
        count = (
            f"{score['num_clips']} clips of {score['num_videos']} of {score['num_videos_of_suite']} videos"
        )
        lines.append(f"{name}: {score['value']:.4f} ({count})")
    lines += [f"{name}: {scores[name]:.4f}" for name in ("quality", "semantic", "total") if name in scores]
    if scores["not_complete"]:
        lines.append(f"no Total: {', '.join(scores['not_complete'])} not complete")
    return lines
