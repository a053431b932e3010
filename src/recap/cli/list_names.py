"""`recap list`: everything that can be chosen by name."""

from __future__ import annotations

import typer
from rich.console import Console
from rich.table import Table

from recap.backbones.wan.spec import ROWS
from recap.config import RunConfig
from recap.flow import FLOWS
from recap.plan import Shot
from recap.registry import ADMISSIONS, BACKBONES, MEMORIES


def _first_line(thing: object) -> str:
    return (thing.__doc__ or "").strip().splitlines()[0]


def list_command() -> None:
    """List backbones, memories, admission rules and flow estimators."""
    default = RunConfig(shots=(Shot("", 1.0),))
    chosen = {default.backbone.name, default.memory.name, default.admission.name, default.flow}
    table = Table("kind", "name", "what it is")
    groups = {
        "backbone": {name: _about_backbone(name) for name in BACKBONES},
        "memory": {name: _first_line(kind) for name, kind in MEMORIES.items()},
        "admission": {name: _about_admission(kind) for name, kind in ADMISSIONS.items()},
        "flow": FLOWS,
    }
    for kind, names in groups.items():
        for name, about in names.items():
            table.add_row(kind, f"{name} (default)" if name in chosen else name, about)
        table.add_section()
    Console().print(table)
    typer.echo('Wherever a name goes, "package.module:Name" does too.')


def _about_backbone(name: str) -> str:
    spec = ROWS[name].backbone_spec()
    rows, columns = spec.picture_size
    return (
        f"{_first_line(BACKBONES[name])} {columns}x{rows} at {spec.pictures_per_second}/s, "
        f"{spec.layers} layers, {spec.frame_tokens} tokens a frame, window {spec.window_frames}"
    )


def _about_admission(kind: object) -> str:
    said = {word: getattr(kind, word, "") for word in ("keeps", "needs")}
    return "\n".join([_first_line(kind), *(f"{word}: {text}" for word, text in said.items() if text)])
