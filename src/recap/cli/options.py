"""Options that commands share, said once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Prompt = Annotated[
    str | None,
    typer.Argument(help="What is drawn (`recap list` has the words of `embedded`); or use --script."),
]
Seconds = Annotated[float | None, typer.Option(help="Length of the video [default: 10].")]
Script = Annotated[
    Path | None,
    typer.Option(help='JSON list of shots: [{"prompt": ..., "seconds": ..., "cut": true}, ...].'),
]
Backbone = Annotated[
    str | None, typer.Option(help="Which model draws; see `recap list` [default: embedded].")
]
Flow = Annotated[
    str | None, typer.Option(help="Optical flow for the novelty bank; see `recap list` [default: auto].")
]
Device = Annotated[str | None, typer.Option(help="cpu or cuda [default: cpu].")]
Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16 or float16 [default: float32].")]
Eager = Annotated[
    bool, typer.Option("--eager", help="Draw by the readable code, also where there is a fast path.")
]
AsReleased = Annotated[
    bool,
    typer.Option("--as-released", help="Window, phases and, if none is named, memory of the public code."),
]
DecoderName = Annotated[str | None, typer.Option(help="full or tiny, of the public models [default: full].")]
PromptEmbeds = Annotated[
    Path | None, typer.Option(help="File of text embeddings, instead of the public text encoder.")
]
GoOn = Annotated[
    Path | None, typer.Option("--continue", help="A clip whose pictures the video goes on from.")
]
Image = Annotated[Path | None, typer.Option(help="A picture that the video goes on from.")]
