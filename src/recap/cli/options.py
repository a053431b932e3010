"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Prompt = Annotated[
    str | None,
    typer.Argument(help="What the video shows (`recap list` has the words of `embedded`); or use --script."),
]
Seconds = Annotated[
    float | None, typer.Option(help="Length of the video, rounded to whole blocks [default: 10].")
]
Script = Annotated[
    Path | None,
    typer.Option(help='JSON list of shots: [{"prompt": ..., "seconds": ..., "cut": true}, ...].'),
]
Backbone = Annotated[
    str | None, typer.Option(help="Which model generates; see `recap list backbones` [default: embedded].")
]
Memory = Annotated[
    str | None, typer.Option(help="Which memory it has; see `recap list memories` [default: recap].")
]
Flow = Annotated[
    str | None,
    typer.Option(help="Optical flow for the novelty bank; see `recap list flows` [default: auto]."),
]
Setting = Annotated[
    list[str] | None, typer.Option("--set", help="A setting, e.g. memory.reinforcement=5; repeatable.")
]
Device = Annotated[
    str | None, typer.Option(help="cpu, cuda or auto, which is a GPU where there is one [default: auto].")
]
Dtype = Annotated[
    str | None,
    typer.Option(
        help="float32, bfloat16, float16 or auto, which is bfloat16 for public models on a GPU [default: auto]."
    ),
]
TrustCode = Annotated[
    bool,
    typer.Option("--trust-code", help="Import the code (package.module:Name) that a run's files name."),
]
Eager = Annotated[
    bool, typer.Option("--eager", help="Use the readable code, also where there is a fast path.")
]
AsReleased = Annotated[
    bool,
    typer.Option(
        "--as-released", help="Window and phases of the public code; and its memory, if none is named."
    ),
]
DecoderName = Annotated[str | None, typer.Option(help="full or tiny, of the public models [default: full].")]
PromptEmbeds = Annotated[
    Path | None, typer.Option(help="File of text embeddings, instead of the public text encoder.")
]
Continued = Annotated[Path | None, typer.Option("--continue", help="A clip that the video continues.")]
Image = Annotated[Path | None, typer.Option(help="A picture that the video continues.")]
