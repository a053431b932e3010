"""`recap reproduce` and `recap report`: the paper's tables, and all of them on one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from recap.cli.console import show_notice
from recap.cli.options import Device, Dtype, Flow
from recap.errors import refuse
from recap.tables.imported import import_table
from recap.tables.recipes import DEFAULT_PROMPTS, Ask
from recap.tables.report import write_report
from recap.tables.reproduce import reproduce
from recap.tables.status import Status

FrameJudge = Annotated[
    str | None,
    typer.Option(
        help="Who judges whole frames: auto, dinov2, clip, mobilenetv2 or hsv; NAME=FOLDER says where its weights "
        "are [default: auto]."
    ),
]
MotionFlow = Annotated[
    str | None,
    typer.Option(
        help="Flow by which motion is judged: classical, raft-small or auto; figures of two judges do not compare "
        "[default: classical]."
    ),
]
SubjectFinder = Annotated[
    str,
    typer.Option(
        help="Who finds the subject: qwen2.5-vl (=FOLDER), or nobody; the embedded world has its own probe."
    ),
]
Import = Annotated[
    Path | None,
    typer.Option(
        "--import", help="A results.jsonl.gz of batches: nothing is drawn, the table is made of it."
    ),
]


def reproduce_command(
    table: Annotated[str, typer.Argument(help="Which table or figure; a wrong name lists them.")],
    backbone: Annotated[
        str | None, typer.Option(help="Which model draws; see `recap list` [default: embedded].")
    ] = None,
    prompts: Annotated[
        int | None, typer.Option(help="How many of the recipe's prompts [default: 20].")
    ] = None,
    seeds: Annotated[int | None, typer.Option(help="Seeds of each [default: the recipe's].")] = None,
    seconds: Annotated[float | None, typer.Option(help="Length of a video [default: the recipe's].")] = None,
    flow: Flow = None,
    judge_flow: MotionFlow = None,
    embedder: FrameJudge = None,
    detector: SubjectFinder = "",
    workers: Annotated[
        int | None,
        typer.Option(help="Processes that draw beside each other [default: one per core, or per GPU]."),
    ] = None,
    ray: Annotated[str, typer.Option(help="Address of a Ray cluster to draw on; 'local' starts one.")] = "",
    device: Device = None,
    dtype: Dtype = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the result [default: results/TABLE].")] = None,
    taken: Import = None,
) -> None:
    """Draw, score and write down one table of the paper; the same command goes on with a stopped one."""
    folder = out or Path("results") / table
    if taken is not None:
        _refuse_any({"--backbone": backbone, "--seconds": seconds, "--flow": flow, "--embedder": embedder,
                     "--judge-flow": judge_flow, "--detector": detector, "--workers": workers, "--ray": ray,
                     "--device": device, "--dtype": dtype})  # fmt: skip
        typer.echo(import_table(table, taken, folder, prompts, seeds, show_notice).page)
        return
    ask = Ask(
        backbone=backbone or "embedded",
        prompts=DEFAULT_PROMPTS if prompts is None else prompts,
        seeds=seeds,
        seconds=seconds,
        flow=flow or "auto",
        device=device or "cpu",
        dtype=dtype or "float32",
        judge_flow=judge_flow or "classical",
    )
    done = reproduce(
        table,
        ask,
        folder,
        workers=workers,
        embedder=embedder or "auto",
        detector=detector,
        ray=ray,
        tell=_Teller(),
        notice=show_notice,
    )
    typer.echo(done.page)


def _refuse_any(given: dict[str, object]) -> None:
    for name, value in given.items():
        if value:
            raise refuse(name, value, "with --import nothing is drawn or judged", "leave it out")


def report_command(
    folder: Annotated[Path, typer.Argument(help="Folder of results, one folder per table.")] = Path(
        "results"
    ),
    markdown: Annotated[
        Path | None, typer.Option(help="Also write the tables as Markdown, as docs/results.md.")
    ] = None,
) -> None:
    """All finished tables of a folder on one page, report.html in it."""
    typer.echo(write_report(folder, markdown))


class _Teller:
    """Says a line when something has changed."""

    def __init__(self) -> None:
        self._last = -1

    def __call__(self, status: Status) -> None:
        if status.counts.done != self._last:
            self._last = status.counts.done
            show_notice(status.line())
