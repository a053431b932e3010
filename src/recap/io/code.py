"""This module tells whether code outside the package is still the same, by digests of the files it is in."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from recap.io.lookup import look_up


def code_of(config: Mapping[str, Any]) -> dict[str, str]:
    """Return, by name, the digests of the parts of a run's config that are outside the package."""
    parts = [part.get("name") for part in config.values() if isinstance(part, Mapping)]
    return digest_code(str(name) for name in (*parts, config.get("flow")))


def digest_code(names: Iterable[str]) -> dict[str, str]:
    """Return, by name, a digest of the file of every "package.module:Name"; what it imports is not looked at."""
    return {name: _digest(name) for name in names if ":" in name}


def changed_code(recorded: Any, config: Mapping[str, Any]) -> list[str]:
    """Name the parts of a config whose code is not what was recorded; older records have none."""
    if not isinstance(recorded, Mapping):
        return []
    return [name for name, digest in code_of(config).items() if recorded.get(name, digest) != digest]


# Of every module what it was loaded by, which reloading replaces, and its digest then: of a file that is edited while
# it is used, the code that runs is the older one.
_known: dict[str, tuple[object, str]] = {}


def _digest(name: str) -> str:
    look_up("code", name, {})
    module = sys.modules[name.partition(":")[0]]
    loaded = module.__spec__ or module
    known, digest = _known.get(module.__name__, (None, ""))
    if known is not loaded:
        # What was typed into a session has no file, and what is in an archive none of its own.
        file = Path(getattr(module, "__file__", None) or "")
        digest = hashlib.sha256(file.read_bytes()).hexdigest()[:16] if file.is_file() else ""
        _known[module.__name__] = loaded, digest
    return digest
