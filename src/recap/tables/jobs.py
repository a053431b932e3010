"""A job: one row of a recipe, one prompt, one seed, as plain data and the name of a function that takes it.

A job's key is a digest of its data. The same job is therefore the same job in every sweep, with any number of workers
and in any order; its result must depend on its data alone.
"""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from recap.errors import refuse

Result = dict[str, Any]
Work = Callable[[dict[str, Any], str], Result]
"""Takes a job's data and the folder of its files, gives its result, both as JSON knows them."""


@dataclass(frozen=True, slots=True)
class Job:
    row: str
    prompt: str
    seed: int
    data: Mapping[str, Any]  # all that the result depends on, beside the three above

    @property
    def payload(self) -> str:
        return canonical({"row": self.row, "prompt": self.prompt, "seed": self.seed, "data": dict(self.data)})

    @property
    def key(self) -> str:
        return hashlib.sha256(self.payload.encode()).hexdigest()[:24]


def canonical(value: Any) -> str:
    """JSON with one way to say a thing, so that equal data are equal bytes."""
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        limit = f"must be plain JSON data without nan ({error})"
        raise refuse(
            "job", str(value)[:80], limit, "use numbers, texts, lists and tables; None for nan"
        ) from error


def find_work(name: str) -> Work:
    """The function that "package.module:name" points at; workers find it by that name in their own process."""
    module, colon, attribute = name.partition(":")
    try:
        work = getattr(importlib.import_module(module), attribute) if colon else None
    except (ImportError, AttributeError) as error:
        raise refuse(
            "work", name, f"cannot be imported ({error})", "write it as package.module:name"
        ) from error
    if not callable(work):
        raise refuse("work", name, "is no function", "write it as package.module:name")
    found: Work = work
    return found
