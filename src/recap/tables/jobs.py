"""This module defines a job and keeps results; both are plain data.

The key of a job is a digest of its data, so the same job is the same in every table, with any number of workers and
in any order; its result must depend on its data alone. Results are the lines of one file that is only ever added to,
by one process at a time. Whoever is killed while writing leaves half a line at the end, which the next writer cuts
off. Several lines may have the same key: their entries add up, and the last one counts.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from recap.errors import refuse

FILE = "runs.jsonl"
Result = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """Holds the plain data that a function turns into a result.

    `wants` are the entries of the result that are asked for (a result may be added to, entry by entry), `options`
    what else the function has to know, `size` is the length of the work in any unit. The name is for messages.
    """

    name: str
    data: Mapping[str, Any]
    wants: frozenset[str] = frozenset()
    options: Mapping[str, Any] = field(default_factory=dict)
    size: float = 1.0

    @cached_property
    def key(self) -> str:
        return hashlib.sha256(canonical(dict(self.data)).encode()).hexdigest()[:24]


def canonical(value: Any) -> str:
    """Return JSON with one way to write a thing, so that equal data are equal bytes."""
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        limit = f"must be plain JSON data without nan ({error})"
        remedy = "use numbers, texts, lists and tables; None for nan"
        raise refuse("job", str(value)[:80], limit, remedy) from error


class ResultStore:
    """Keeps the results of a folder. To add to them, hold the folder's lock (`recap.io.files.alone_in`)."""

    def __init__(self, folder: Path, made_by: Mapping[str, str] | None = None):
        self.folder, self.file = folder, folder / FILE
        self._made_by = dict(made_by or {})
        self.results: dict[str, Result] = {}
        # By key: what made each part of the result (versions, hardware, commit).
        self.makers: dict[str, list[dict[str, str]]] = {}
        data = self.file.read_bytes() if self.file.is_file() else b""
        self._whole = data.rfind(b"\n") + 1
        for number, line in enumerate(data[: self._whole].splitlines(), 1):
            self._read(line, number)

    def _read(self, line: bytes, number: int) -> None:
        try:
            found = json.loads(line)
            key, result, made_by = found["key"], found["result"], found["made_by"]
            if not (isinstance(key, str) and isinstance(result, dict) and isinstance(made_by, dict)):
                raise TypeError
        except (ValueError, KeyError, TypeError) as error:
            limit = f"line {number} is damaged or is not a result"
            remedy = "copy it again, or move it away to start again"
            raise refuse("file", str(self.file), limit, remedy) from error
        self.results.setdefault(key, {}).update(result)
        self.makers.setdefault(key, []).append(made_by)

    def has(self, job: Job) -> bool:
        return job.key in self.results and not self.lacks(job)

    def lacks(self, job: Job) -> frozenset[str]:
        """Return the entries that are asked for and not there yet."""
        return job.wants - self.results.get(job.key, {}).keys()

    def add(self, key: str, result: Result) -> None:
        """Write a result down; it survives the end of this process from here on."""
        line = canonical({"key": key, "result": result, "made_by": self._made_by}).encode() + b"\n"
        self.folder.mkdir(parents=True, exist_ok=True)
        with self.file.open("ab") as out:
            if out.tell() > self._whole:
                os.truncate(self.file, self._whole)
            out.write(line)
            out.flush()
        self._whole += len(line)
        self._read(line, 0)

    def makers_of(self, keys: Iterable[str]) -> list[dict[str, str]]:
        """Return what made the results of these keys, each maker once."""
        found = {canonical(maker): maker for key in keys for maker in self.makers.get(key, [])}
        return [found[text] for text in sorted(found)]
