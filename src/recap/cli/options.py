"""This module defines the options that several commands share."""

from __future__ import annotations

from typing import Annotated, Any

import typer

Backbone = Annotated[
    str | None, typer.Option(help="Which model generates; see `recap list backbones` [default: embedded].")
]
Memory = Annotated[
    str | None, typer.Option(help="Which memory the model gets; see `recap list memories` [default: recap].")
]
Flow = Annotated[
    str | None,
    typer.Option(help="Optical flow for the novelty bank; see `recap list flows` [default: auto]."),
]
Setting = Annotated[
    list[str] | None, typer.Option("--set", help="A setting, e.g. memory.reinforcement=5; repeatable.")
]
Device = Annotated[
    str | None,
    typer.Option(help="cpu, cuda, mps (Apple) or auto, which is cuda where there is one [default: auto]."),
]
Devices = Annotated[
    str | None,
    typer.Option(
        metavar="DEVICE,DEVICE",
        help="Two devices instead of --device: the second decodes and estimates flow, e.g. cuda:0,cuda:1.",
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        help="float32, bfloat16, float16 or auto, which is bfloat16 for public models on a GPU [default: auto]."
    ),
]
Precision = Annotated[
    str | None,
    typer.Option(
        help="full, or the transformer in 8 bits: int8 (half of its memory) or fp8 (also faster, on RTX 40, H100 "
        "and later) [default: full]."
    ),
]
TrustCode = Annotated[
    bool,
    typer.Option("--trust-code", help="Import the code (package.module:Name) that a run's files name."),
]
Eager = Annotated[
    bool, typer.Option("--eager", help="Use the readable code, also where there is a fast path.")
]
LowMemory = Annotated[
    str | None,
    typer.Option(
        help="auto: the slower, readable path where the fast one does not fit the card; on: whatever needs least "
        "memory; off: never [default: auto]."
    ),
]
Loras = Annotated[
    list[str] | None,
    typer.Option(
        metavar="FILE[:STRENGTH]",
        help="A LoRA for a public Wan model, merged into it; FILE:1:alpha=16 where it does not say its alpha.",
    ),
]
ModelName = Annotated[str, typer.Argument(help="Which model; see `recap list backbones`.")]
RandomWeights = Annotated[
    bool,
    typer.Option(
        "--random-weights", help="Take a public model at its real size with random weights; needs no files."
    ),
]
Port = Annotated[int, typer.Option(help="Port; 0 takes a free one.")]
Host = Annotated[
    str, typer.Option(help="Address to listen on; another than this machine's own needs --token.")
]
Token = Annotated[str, typer.Option(help="Requests without it are refused; 12 or more characters.")]
OpenPage = Annotated[bool, typer.Option("--open/--no-open", help="Open the page in a browser.")]
DecoderName = Annotated[str | None, typer.Option(help="full or tiny, of the public models [default: full].")]


def used(**options: str | None) -> dict[str, Any]:
    """Return the options that were used; the others stay at the defaults of whatever takes them."""
    return {name: value for name, value in options.items() if value is not None}
