"""This module imports packages that only some machines have."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from recap.errors import refuse


def import_extra(package: str, user: str = "the public Wan models", extra: str = "wan") -> Any:
    """Import a package that `user` needs and that `pip install recap-forcing[extra]` brings."""
    try:
        return import_module(package)
    except ImportError as missing:
        limit = f"needed for {user}, and it cannot be imported ({missing})"
        raise refuse("package", package, limit, f"pip install recap-forcing[{extra}]") from missing
