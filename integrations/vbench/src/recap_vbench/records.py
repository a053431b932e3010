"""A folder of scores: one file per finished dimension, and `scores.json`, which is computed from them.

A dimension that was scored on all its videos is never replaced: not by one with videos missing, and not by one of
other videos or other settings.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from recap.errors import refuse
from recap.io.files import write_whole
from recap_vbench.suites import Suite
from recap_vbench.totals import group_score, missing, total_score

Record = dict[str, Any]
"""A record has key, complete, suite, settings, versions, score, sources (SHA-256 of each video), clips and fast."""

ELSEWHERE = "choose another --out, or move it away"


def read_records(folder: Path, suite: Suite, digest: str) -> dict[str, Record]:
    """Read the finished dimensions of a folder; refuse those of another suite or of other prompts."""
    found = {}
    for name in suite.dimensions:
        path = _path(folder, name)
        if not path.exists():
            continue
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            other, prompts = record["suite"], record["prompts_sha256"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise refuse("--out", str(path), "not a record of recap", ELSEWHERE) from error
        if other != suite.name:
            limit = f"it holds scores of {other}, which do not compare with {suite.name}"
            raise refuse("--out", str(folder), limit, ELSEWHERE)
        if prompts != digest:
            raise refuse("--out", str(folder), f"it holds scores of another list of {other}", ELSEWHERE)
        found[name] = record
    return found


def check_videos(folder: Path, records: Mapping[str, Record], sources: Mapping[str, str]) -> None:
    """Refuse videos that differ from those of the complete dimensions in the folder."""
    for name, record in records.items():
        for video, source in record["sources"].items():
            if record["complete"] and sources.get(video, source) != source:
                raise refuse("--out", str(folder), f"its {name} is of another {video!r}", ELSEWHERE)


def to_do(folder: Path, records: Mapping[str, Record], wanted: Mapping[str, tuple[str, bool]]) -> list[str]:
    """List the dimensions still to be scored; `wanted` has the key of each and whether it would be complete."""
    rest = []
    for name, (key, complete) in wanted.items():
        old = records.get(name)
        if old is not None and old["key"] == key:
            continue
        if old is not None and old["complete"]:
            limit = f"its {name} is complete, and of " + ("other settings" if complete else "more videos")
            raise refuse("--out", str(folder), limit, ELSEWHERE)
        rest.append(name)
    return rest


def write_record(folder: Path, suite: Suite, name: str, record: Record) -> None:
    """Write a finished dimension, unless another run has meanwhile finished it on all its videos."""
    others = read_records(folder, suite, record["prompts_sha256"])
    to_do(folder, others, {name: (record["key"], record["complete"])})
    write_whole(_path(folder, name), json.dumps(record, ensure_ascii=False).encode())


def write_scores(folder: Path, suite: Suite, digest: str) -> dict[str, Any]:
    """Write `scores.json` from the files on disk, because two runs may share a folder, each with some dimensions.

    Quality, Semantic and Total are left out unless all their dimensions are complete.
    """
    records = read_records(folder, suite, digest)
    complete = {name: record["score"]["value"] for name, record in records.items() if record["complete"]}
    lacking = missing(complete)
    scores: dict[str, Any] = {
        "suite": suite.name,
        "prompts_sha256": digest,
        "backend": sorted({record["score"]["backend"] for record in records.values()}),
        "versions": _merged(record["versions"] for record in records.values()),
        "complete": all(name in complete for name in suite.dimensions),
        "not_complete": [*lacking.quality, *lacking.semantic],
        "dimensions": {name: _summary(record) for name, record in records.items()},
    }
    for group in ("quality", "semantic"):
        if not getattr(lacking, group):
            scores[group] = group_score(complete, group)
    if not scores["not_complete"]:
        scores["total"] = total_score(complete)
    write_whole(folder / "scores.json", json.dumps(scores, indent=1, ensure_ascii=False).encode())
    return scores


def _path(folder: Path, dimension: str) -> Path:
    return folder / "dimensions" / f"{dimension}.json"


def _summary(record: Record) -> dict[str, Any]:
    score = record["score"]
    details = {name: value for name, value in score["details"].items() if name != "videos"}
    return {
        "value": score["value"],
        "complete": record["complete"],
        "num_clips": score["n"],
        "num_videos": len(score["details"]["videos"]),
        "num_videos_of_suite": record["num_videos_of_suite"],
        **details,
        **record["settings"],
    }


def _merged(several: Iterable[dict[str, str]]) -> dict[str, str]:
    """Merge the versions of all records; where two differ, name both."""
    found: dict[str, set[str]] = {}
    for versions in several:
        for name, version in versions.items():
            found.setdefault(name, set()).add(version)
    return {name: " and ".join(sorted(values)) for name, values in sorted(found.items())}
