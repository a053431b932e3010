"""`recap list` shows everything that can be chosen by name."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from recap.backbones.helios.spec import ROWS as HELIOS
from recap.backbones.tiny.vocabulary import known_words
from recap.backbones.wan.spec import ROWS as WAN
from recap.config import RunConfig
from recap.errors import unknown_name
from recap.flow import FLOWS
from recap.plan import Shot
from recap.registry import ADMISSIONS, BACKBONES, MEMORIES

KINDS = ("backbones", "memories", "admissions", "flows")
# The model whose frames the tokens of a memory are counted in.
SIZED_BY = "self-forcing"


def list_command(
    what: Annotated[
        str, typer.Argument(help=f"everything, or one of: {', '.join(KINDS)}; `memories` shows more of each.")
    ] = "everything",
) -> None:
    """List everything that can be chosen by name.

    These are the backbones, memories, admission rules and flow estimators.
    """
    if what not in ("everything", *KINDS):
        raise unknown_name("list", what, ("everything", *KINDS))
    if what == "memories":
        _list_memories()
        return
    default = RunConfig(shots=(Shot("", 1.0),))
    chosen = {default.backbone.name, default.memory.name, default.admission.name, default.flow}
    table = Table("kind", "name", "what it is")
    groups = (
        {name: _about_backbone(name) for name in BACKBONES},
        {name: _first_line(kind) for name, kind in MEMORIES.items()},
        {name: _about_admission(kind) for name, kind in ADMISSIONS.items()},
        FLOWS,
    )
    for kind, names in zip(KINDS, groups, strict=True):
        if what in ("everything", kind):
            for name, about in names.items():
                table.add_row(kind, f"{name} (default)" if name in chosen else name, about)
            table.add_section()
    Console().print(table)
    if what in ("everything", "backbones"):
        typer.echo(f"Prompts of embedded: {known_words()}. The other backbones take any prompt.")
    typer.echo('Wherever a name goes, "package.module:Name" does too.')


def _list_memories() -> None:
    """Print a card per memory, with its default settings."""
    spec = WAN[SIZED_BY].backbone_spec()
    for name, kind in MEMORIES.items():
        card, frames = kind.card, kind().attended_frames(spec)
        tokens = " / ".join(f"{count * spec.frame_tokens:,.0f}" for count in frames)
        table = Table.grid(padding=(0, 2))
        for label, text in (
            ("what it is", _first_line(kind)),
            ("keeps", card.keeps),
            ("attends to", f"{' / '.join(f'{n:g}' for n in frames)} frames, {tokens} tokens ({SIZED_BY})"),
            ("extra memory", card.extra_memory),
            ("training-free", "yes" if card.training_free else "no"),
            ("paper", card.paper),
            ("its code", card.licence),
        ):
            table.add_row(f"  {label}", text)
        console = Console()
        console.print(name, style="bold", highlight=False)
        console.print(table)


def _first_line(thing: object) -> str:
    return (thing.__doc__ or "").strip().splitlines()[0]


def _about_backbone(name: str) -> str:
    spec = HELIOS[name].backbone_spec() if name in HELIOS else WAN[name].backbone_spec()
    rows, columns = spec.picture_size
    return (
        f"{_first_line(BACKBONES[name])} {columns}x{rows} at {spec.pictures_per_second}/s, "
        f"{spec.layers} layers, {spec.frame_tokens} tokens a frame, window {spec.window_frames}"
    )


def _about_admission(kind: object) -> str:
    texts = {word: getattr(kind, word, "") for word in ("keeps", "needs")}
    return "\n".join([_first_line(kind), *(f"{word}: {text}" for word, text in texts.items() if text)])
