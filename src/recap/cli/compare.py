"""`recap compare`: the same script with several memories, next to each other on one page."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from recap.cli.console import progress_bar, show_notice
from recap.cli.options import (
    AsReleased,
    Backbone,
    Continued,
    DecoderName,
    Device,
    Dtype,
    Eager,
    Flow,
    Image,
    Prompt,
    PromptEmbeds,
    Script,
    Seconds,
)
from recap.cli.settings import backbone_choice, full_config, opening_path, script_shots
from recap.config import RunConfig, override
from recap.errors import refuse, unknown_name
from recap.run import new_folder
from recap.show.comparison import compare


def compare_command(
    prompt: Prompt = None,
    memories: Annotated[
        str, typer.Option(help="Which memories, separated by commas; see `recap list memories`.")
    ] = "none,sink,recap",
    seconds: Seconds = None,
    script: Script = None,
    backbone: Backbone = None,
    flow: Flow = None,
    seed: Annotated[int, typer.Option(help="The seed of every run.")] = 0,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="A setting; memory.x=... is set in every memory that has an x. Repeatable."
        ),
    ] = None,
    as_released: AsReleased = False,
    decoder: DecoderName = None,
    prompt_embeds: PromptEmbeds = None,
    continued: Continued = None,
    image: Image = None,
    device: Device = None,
    dtype: Dtype = None,
    eager: Eager = False,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the result, new or of this comparison [default: runs/<time>-<prompt>-compare]."
        ),
    ] = None,
) -> None:
    """Generate one script with several memories.

    One page compares them. The same command with the folder of a stopped comparison resumes it.
    """
    values: dict[str, Any] = {
        "shots": script_shots(prompt, seconds, script),
        "seeds": [seed],
        "backbone": backbone_choice(backbone, decoder, prompt_embeds, as_released=as_released),
        "flow": flow,
        "device": device,
        "dtype": dtype,
        "opening": opening_path(continued, image),
        "eager": eager or None,
    }
    names = [name.strip() for name in memories.split(",")]
    if not all(names):
        raise refuse("--memories", memories, "a name is missing", "for example none,sink,recap")
    shared = [text for text in settings or [] if text.partition("=")[0].partition(".")[0] != "memory"]
    own = [text for text in settings or [] if text not in shared]
    config = full_config(values, shared)
    tables = _memory_tables(config, names, own)
    with (
        progress_bar("generating", "blocks", "loading the model") as generating,
        progress_bar("showing", "pictures") as showing,
    ):
        folder = out or new_folder(config, "compare")
        summary = compare(config, tables, folder, generating, show_notice, showing=showing)
    typer.echo(summary.page)


def _memory_tables(config: RunConfig, names: Sequence[str], settings: Sequence[str]) -> list[dict[str, Any]]:
    """Make a table of settings per memory; each assignment is applied to all memories that have the setting."""
    plain = config.to_dict()
    kinds = [RunConfig.from_dict({**plain, "memory": name}).memory.settings for name in names]
    known = [{field.name for field in dataclasses.fields(kind)} for kind in kinds]
    own: list[list[str]] = [[] for _ in names]
    for text in settings:
        setting = text.partition("=")[0].partition(".")[2]
        if not setting:
            limit = "the memories of a comparison are those of --memories"
            raise refuse("--set", text, limit, "for example --set memory.reinforcement=3")
        if not any(setting in fields for fields in known):
            raise unknown_name("memory setting", setting, set().union(*known))
        for assignments, fields in zip(own, known, strict=True):
            assignments += [text] if setting in fields else []
    return [
        override({"memory": {"name": name}}, texts)["memory"] for name, texts in zip(names, own, strict=True)
    ]
