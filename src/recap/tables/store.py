"""The results of jobs: one file of JSON lines that is only ever added to, by one process at a time.

Whoever is killed while writing leaves half a line at the end, which the next writer cuts off. Several lines may have
the same key: their entries add up, and the last one counts.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recap.errors import refuse
from recap.tables.jobs import Job, Result, canonical

FILE = "runs.jsonl"


class Store:
    """The results of a folder. To add to them, hold the folder's lock (`recap.io.files.alone_in`)."""

    def __init__(self, folder: Path, made_by: Mapping[str, str] | None = None):
        self.folder, self.file = folder, folder / FILE
        self._made_by = dict(made_by or {})
        self.results: dict[str, Result] = {}
        self.makers: dict[str, list[dict[str, str]]] = {}
        """By key: what made each part of the result (versions, hardware, commit)."""
        data = self.file.read_bytes() if self.file.is_file() else b""
        self._whole = data.rfind(b"\n") + 1
        for number, line in enumerate(data[: self._whole].splitlines(), 1):
            self._take(*self._read(line, number))

    def _read(self, line: bytes, number: int) -> tuple[str, Result, dict[str, str]]:
        try:
            found = json.loads(line)
            key, result, made_by = found["key"], found["result"], found["made_by"]
            if isinstance(key, str) and isinstance(result, dict) and isinstance(made_by, dict):
                return key, result, made_by
        except (ValueError, KeyError, TypeError):
            pass
        limit = f"line {number} is damaged or is not a result"
        raise refuse("file", str(self.file), limit, "copy it again, or move it away to start again")

    def _take(self, key: str, result: Result, made_by: dict[str, str]) -> None:
        self.results.setdefault(key, {}).update(result)
        self.makers.setdefault(key, []).append(made_by)

    def has(self, job: Job) -> bool:
        return job.key in self.results and job.wants <= self.results[job.key].keys()

    def lacks(self, job: Job) -> frozenset[str]:
        """The entries that are asked for and not there yet."""
        return job.wants - self.results.get(job.key, {}).keys()

    def add(self, key: str, result: Result) -> None:
        """Write a result down; it survives the end of this process from here on."""
        line = canonical({"key": key, "result": result, "made_by": self._made_by}) + "\n"
        self.folder.mkdir(parents=True, exist_ok=True)
        with self.file.open("ab") as out:
            if out.tell() > self._whole:
                os.truncate(self.file, self._whole)
            out.write(line.encode())
            out.flush()
            self._whole += len(line.encode())
        self._take(key, json.loads(line)["result"], self._made_by)


def makers_of(store: Store, keys: Mapping[str, Any] | list[str]) -> list[dict[str, str]]:
    """What made the results of these keys, each maker once."""
    found = {canonical(maker): maker for key in keys for maker in store.makers.get(key, [])}
    return [found[text] for text in sorted(found)]
