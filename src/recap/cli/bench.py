"""`recap bench`: how fast this machine draws with a memory on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import torch
import typer

from recap.cli.options import DecoderName, Eager
from recap.fast.parts import SpeedSettings
from recap.fast.speed import run, table


def bench_command(
    backbone: Annotated[
        str | None, typer.Option(help="Which model draws [default: self-forcing, on a CPU embedded].")
    ] = None,
    memory: Annotated[str, typer.Option(help="Which memory is on; `sink` is measured beside it.")] = "recap",
    decoder: DecoderName = None,
    blocks: Annotated[
        int | None, typer.Option(help="Blocks drawn; 400 show growth [default: 30, on a CPU 12].")
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Also draw the same inputs by the readable path: largest error.")
    ] = False,
    profile: Annotated[
        bool, typer.Option("--profile", help="Also name the kernels that take longest.")
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="Write time and memory per block here, as SVG.")] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda [default: cuda where there is one].")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16 [default: bfloat16, on a CPU float32].")
    ] = None,
    eager: Eager = False,
) -> None:
    """Measure every stage of a block, cold and steady; the last line is JSON.

    Public models are measured at their real size with random weights: speed does not depend on values.
    """
    where = _chosen(device, "cuda" if torch.cuda.is_available() else "cpu")
    cuda = where.startswith("cuda")
    settings = SpeedSettings(
        backbone=_chosen(backbone, "self-forcing" if cuda else "embedded"),
        memory=memory,
        decoder=_chosen(decoder, "full"),
        device=where,
        dtype=_chosen(dtype, "bfloat16" if cuda else "float32"),
        blocks=blocks if blocks is not None else (30 if cuda else 12),
        eager=eager,
    )
    result = run(settings, compare=compare, plot=plot, profile=profile)
    typer.echo(table(result))
    typer.echo(json.dumps(result))


def _chosen(given: str | None, default: str) -> str:
    """An empty word is a slip, not a default."""
    return default if given is None else given
