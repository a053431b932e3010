"""This module finds an object by its name in a table, or by the module and name that a user wrote."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from recap.errors import refuse, unknown_name


def look_up(field: str, name: str, table: Mapping[str, Any]) -> Any:
    """Return the table's entry, or what a "package.module:Name" names; the module may be in the current folder."""
    if name in table:
        return table[name]
    if ":" not in name:
        raise unknown_name(field, name, table)
    module, _, attribute = name.partition(":")
    try:
        with _current_folder():
            return getattr(importlib.import_module(module), attribute)
    # Importing a user's module runs it, so any error is possible.
    except Exception as error:
        why = f"cannot be imported ({type(error).__name__}: {error})"
        raise refuse(field, name, why, "write it as package.module:Name") from error


@contextmanager
def _current_folder() -> Iterator[None]:
    """Let modules be imported from the current folder; last on the path, so that it cannot hide an installed one."""
    folder = str(Path.cwd())
    added = folder not in sys.path
    if added:
        sys.path.append(folder)
    try:
        yield
    finally:
        if added and folder in sys.path:
            sys.path.remove(folder)
