"""`recap convert` rewrites a published checkpoint as one file that loads fast."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from recap.backbones.wan.convert import DTYPES, FILES, convert
from recap.backbones.wan.lora import read_choice
from recap.cli.console import byte_bar
from recap.cli.options import Loras
from recap.errors import unknown_name


def convert_command(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="IN", help="Wan checkpoint: .pt, .safetensors, an index of shards or a folder."
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write; it must not exist yet.")],
    lora: Loras = None,
    ema: Annotated[
        bool | None,
        typer.Option("--ema/--no-ema", help="Averaged weights or not [default: averaged if they are there]."),
    ] = None,
    dtype: Annotated[str, typer.Option(help=f"One of: {', '.join(DTYPES)}.")] = "bfloat16",
) -> None:
    """Rewrite a public Wan checkpoint as one safetensors file with a manifest."""
    if dtype not in DTYPES:
        raise unknown_name("--dtype", dtype, DTYPES)
    kind = DTYPES[dtype]
    with byte_bar("converting") as reporter:
        loras = [read_choice(text) for text in lora or ()]
        convert(source, out, dtype=kind, ema=ema, loras=loras, reporter=reporter)
    for name in FILES:
        typer.echo(out / name)
