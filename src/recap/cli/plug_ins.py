"""This module finds the commands that other distributions add."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

import typer

from recap.errors import refuse

PLUG_INS = "recap.commands"
"""The entry points by which other distributions add a command: a name, and a Typer app."""


def find_plug_in(name: str) -> Any:
    """Return the command that another distribution adds under this name, or None."""
    for point in entry_points(group=PLUG_INS, name=name):
        try:
            return typer.main.get_command(point.load())
        except Exception as error:
            limit = f"its plug-in {point.value} cannot be loaded ({error})"
            raise refuse("command", name, limit, "install that plug-in again, or remove it") from error
    if name == "vbench":
        remedy = "run `pip install ./integrations/vbench` in a checkout of recap"
        raise refuse("command", name, "it is a plug-in that is not installed", remedy)
    return None
