"""Keeps a folder of scores: one file per finished dimension, and `scores.json`, which is computed from them.

A dimension that was scored on all its videos is never replaced: not by one with videos missing, and not by one of
other videos or other settings.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recap.errors import refuse
from recap.io.files import write_whole
from recap_vbench.scores import QUALITY, SEMANTIC, group_score, missing, total_score
from recap_vbench.suites import Suite

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


def to_do(
    folder: Path,
    records: Mapping[str, Record],
    wanted: Mapping[str, tuple[str, bool]],
    sources: Mapping[str, str],
) -> list[str]:
    """List the dimensions still to be scored; `wanted` has the key of each and whether it would be complete.

    Videos (`sources` has their SHA-256) that differ from those of a complete dimension are refused.
    """
    finished = {name: record for name, record in records.items() if record["complete"]}
    for name, record in finished.items():
        for video, source in record["sources"].items():
            if sources.get(video, source) != source:
                raise refuse("--out", str(folder), f"its {name} is of another {video!r}", ELSEWHERE)
    rest = [name for name, (key, _) in wanted.items() if name not in records or records[name]["key"] != key]
    for name in rest:
        if name in finished:
            limit = f"its {name} is complete, and of " + (
                "other settings" if wanted[name][1] else "more videos"
            )
            raise refuse("--out", str(folder), limit, ELSEWHERE)
    return rest


def write_record(folder: Path, suite: Suite, name: str, record: Record) -> None:
    """Write a finished dimension, unless another run has meanwhile finished it on all its videos."""
    others = read_records(folder, suite, record["prompts_sha256"])
    to_do(folder, others, {name: (record["key"], record["complete"])}, {})
    write_whole(_path(folder, name), json.dumps(record, ensure_ascii=False).encode())


def write_scores(folder: Path, suite: Suite, digest: str) -> dict[str, Any]:
    """Write `scores.json` from the files on disk, because two runs may share a folder, each with some dimensions.

    Quality, Semantic and Total are left out unless all their dimensions are complete.
    """
    records = read_records(folder, suite, digest)
    complete = {name: record["score"]["value"] for name, record in records.items() if record["complete"]}
    # Where two dimensions were scored by different versions, both are named.
    versions = {(n, v) for record in records.values() for n, v in record["versions"].items()}
    names = sorted({name for name, _ in versions})
    scores: dict[str, Any] = {
        "suite": suite.name,
        "prompts_sha256": digest,
        "backend": sorted({record["score"]["backend"] for record in records.values()}),
        "versions": {name: " and ".join(sorted(v for n, v in versions if n == name)) for name in names},
        "complete": all(name in complete for name in suite.dimensions),
        "not_complete": missing(complete),
        "dimensions": {name: _summary(record) for name, record in records.items()},
    }
    for group, own in (("quality", QUALITY), ("semantic", SEMANTIC)):
        if not missing(complete, own):
            scores[group] = group_score(complete, group)
    if not scores["not_complete"]:
        scores["total"] = total_score(complete)
    write_whole(folder / "scores.json", json.dumps(scores, indent=1, ensure_ascii=False).encode())
    return scores


def _path(folder: Path, dimension: str) -> Path:
    return folder / "dimensions" / f"{dimension}.json"


def _summary(record: Record) -> dict[str, Any]:
    score = record["score"]
    details = dict(score["details"])
    return {
        "value": score["value"],
        "complete": record["complete"],
        "num_clips": score["n"],
        "num_videos": len(details.pop("videos")),
        "num_videos_of_suite": record["num_videos_of_suite"],
        **details,
        **record["settings"],
    }
