"""`recap bench` measures how fast this machine generates with a memory on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from recap.cli.options import DecoderName, Device, Dtype, Eager, Precision
from recap.config import choose, resolve_device, resolve_dtype
from recap.fast.speed import SpeedSettings, run, table


def bench_command(
    backbone: Annotated[
        str | None, typer.Option(help="Which model generates [default: self-forcing, on a CPU embedded].")
    ] = None,
    memory: Annotated[str, typer.Option(help="Which memory is on; `sink` is measured next to it.")] = "recap",
    admission: Annotated[
        str, typer.Option(help="What fills its bank, e.g. keys; auto is its usual one.")
    ] = "auto",
    decoder: DecoderName = None,
    blocks: Annotated[
        int | None, typer.Option(help="Blocks generated; 400 show growth [default: 30, on a CPU 12].")
    ] = None,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare",
            help="Also compute the same blocks on the readable path (8 bits: in float32); print the largest error.",
        ),
    ] = False,
    profile: Annotated[
        bool,
        typer.Option("--profile", help="Also show how long parts of the bank and the slowest kernels take."),
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="Write time and memory per block here, as SVG.")] = None,
    device: Device = None,
    dtype: Dtype = None,
    precision: Precision = None,
    eager: Eager = False,
) -> None:
    """Measure the speed of every stage of a block.

    The first block is cold, the others are steady; the last line printed is JSON. Public models are measured at
    their real size with random weights: speed does not depend on values.
    """
    # Only None means the default: an empty word is refused by name.
    chosen = resolve_device("auto" if device is None else device)
    cuda = chosen.startswith("cuda")
    name = ("self-forcing" if cuda else "embedded") if backbone is None else backbone
    settings = SpeedSettings(
        backbone=name,
        memory=memory,
        decoder="full" if decoder is None else decoder,
        device=chosen,
        dtype=resolve_dtype(
            "auto" if dtype is None else dtype, chosen, type(choose("backbone", name).settings)
        ),
        blocks=blocks if blocks is not None else (30 if cuda else 12),
        eager=eager,
        admission=admission,
        precision="full" if precision is None else precision,
    )
    result = run(settings, compare=compare, plot=plot, profile=profile)
    typer.echo(table(result))
    if not cuda and not eager:
        typer.echo("The fast path was measured; on a CPU, where it gains little, runs use the readable one.")
    typer.echo(json.dumps(result))
