"""A job: plain data that a function turns into a result, also plain data.

The key of a job is a digest of its data, so the same job is the same in every table, with any number of workers and
in any order; its result must depend on its data alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from recap.errors import refuse
from recap.io.lookup import look_up

Result = dict[str, Any]
Work = Callable[[dict[str, Any], str], Result]
"""Takes the payload of a job and the folder for its files; returns its result."""


@dataclass(frozen=True)
class Job:
    name: str  # for messages
    data: Mapping[str, Any]
    wants: frozenset[str] = frozenset()
    """Entries of the result that are asked for; a result may be added to, entry by entry."""
    options: Mapping[str, Any] = field(default_factory=dict)  # what else the work has to know
    size: float = 1.0  # of the work, in any unit

    @cached_property
    def key(self) -> str:
        return hashlib.sha256(canonical(dict(self.data)).encode()).hexdigest()[:24]

    @property
    def payload(self) -> dict[str, Any]:
        return {
            "key": self.key, "data": dict(self.data), "wants": sorted(self.wants), "options": dict(self.options)
        }  # fmt: skip


def canonical(value: Any) -> str:
    """JSON with one way to write a thing, so that equal data are equal bytes."""
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        limit = f"must be plain JSON data without nan ({error})"
        raise refuse(
            "job", str(value)[:80], limit, "use numbers, texts, lists and tables; None for nan"
        ) from error


def find_work(name: str) -> Work:
    """The function that "package.module:name" points at; workers find it by that name in their own process."""
    work: Work = look_up("work", name, {})
    return work
