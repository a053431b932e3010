"""`recap verify` checks a model whose weights are installed, and writes a page about it to publish."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from recap.cli import options
from recap.cli.console import byte_bar, progress_bar
from recap.cli.settings import check_options, spell_loras
from recap.config import override
from recap.errors import refuse
from recap.show.models import ModelChoice
from recap.show.verification import VerifySettings
from recap.show.verification_page import PAGE, describe, write_verification

USUAL = VerifySettings()


def verify_command(
    name: options.ModelName = "embedded",
    out: Annotated[Path | None, typer.Option(help="Folder of the result [default: verify-NAME].")] = None,
    prompts: Annotated[
        list[str] | None, typer.Option("--prompt", help="A prompt; repeatable [default: three usual ones].")
    ] = None,
    seconds: Annotated[float, typer.Option(help="Length of every video.")] = USUAL.seconds,
    memories: Annotated[str, typer.Option(help="Which memories, separated by commas.")] = ",".join(
        USUAL.memories
    ),
    seed: Annotated[int, typer.Option(help="Seed of the noise.")] = USUAL.seed,
    random_weights: options.RandomWeights = False,
    decoder: options.DecoderName = None,
    lora: options.Loras = None,
    settings: options.Setting = None,
    flow: options.Flow = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    precision: options.Precision = None,
    eager: options.Eager = False,
    low_memory: options.LowMemory = None,
) -> None:
    """Verify a model: hashes, a first block, and videos with three memories.

    Times and peak memory are measured. A page to publish and its record, verify.json, are written to a folder.
    """
    wanted = VerifySettings(
        prompts=tuple(prompts) if prompts else USUAL.prompts,
        memories=tuple(word.strip() for word in memories.split(",")),
        seconds=seconds,
        seed=seed,
    )
    for text in settings or []:
        if not text.startswith("backbone."):
            limit = "only the model has settings here"
            raise refuse("--set", text, limit, "for example backbone.checkpoint=FILE")
    loras = spell_loras(lora)
    if loras and random_weights:
        raise refuse("--lora", loras, "random weights take none", "leave out one of the two")
    used = {option: value for option, value in (("decoder", decoder), ("loras", loras)) if value}
    check_options(name, used)
    if random_weights:
        # Their decoder is no setting of theirs.
        used = {}
    backbone = override({"backbone": {"name": name, **used}}, settings or [])["backbone"]
    choice = ModelChoice.of(
        backbone, random_weights=random_weights, decoder="full" if decoder is None else decoder, flow=flow,
        device=device, dtype=dtype, precision=precision, eager=eager, low_memory=low_memory,
    )  # fmt: skip
    folder = out or Path(f"verify-{name.replace(':', '-')}")
    with (
        byte_bar("hashing") as hashing,
        progress_bar("verifying", "pictures", "loading the model") as reporter,
    ):
        record = write_verification(choice, wanted, folder, reporter, hashing)
    typer.echo(describe(record))
    typer.echo(folder / PAGE)
    if not record["passed"]:
        raise typer.Exit(1)
