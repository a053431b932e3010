"""What a folder of scores holds: a file per finished dimension, and `scores.json`, which is made of them.

A dimension that was judged on all its videos is never replaced: neither by one with videos missing, nor by one of
other videos or asked otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from recap.errors import refuse
from recap.eval.metrics.vbench import group_score, missing, total_score
from recap.eval.vbench.suites import Suite
from recap.io.files import write_whole

Record = dict[str, Any]
"""key, complete, suite, settings, versions, score, sources (SHA-256 of every video), clips, fast."""

ELSEWHERE = "choose another --out, or move it away"


def read_records(folder: Path, suite: Suite, digest: str) -> dict[str, Record]:
    """The finished dimensions of a folder; those of another suite or other prompts are refused."""
    found = {}
    for name in suite.dimensions:
        path = _path(folder, name)
        if not path.exists():
            continue
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            other, prompts = record["suite"], record["prompts_sha256"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise refuse("--out", str(path), "not a record of ours", ELSEWHERE) from error
        if other != suite.name:
            limit = f"it holds scores of {other}, which do not compare with {suite.name}"
            raise refuse("--out", str(folder), limit, ELSEWHERE)
        if prompts != digest:
            raise refuse("--out", str(folder), f"it holds scores of another list of {other}", ELSEWHERE)
        found[name] = record
    return found


def check_videos(folder: Path, records: Mapping[str, Record], sources: Mapping[str, str]) -> None:
    """Refuse videos that are not those of the complete dimensions already there."""
    for name, record in records.items():
        if record["complete"]:
            for video, source in record["sources"].items():
                if sources.get(video, source) != source:
                    limit = f"its {name} is of another {video!r}"
                    raise refuse("--out", str(folder), limit, ELSEWHERE)


def to_do(folder: Path, records: Mapping[str, Record], asked: Mapping[str, tuple[str, bool]]) -> list[str]:
    """The dimensions still to be judged; `asked` has key and completeness of each."""
    rest = []
    for name, (key, complete) in asked.items():
        old = records.get(name)
        if old is not None and old["key"] == key:
            continue
        if old is not None and old["complete"]:
            limit = f"its {name} is complete, and of " + ("other settings" if complete else "more videos")
            raise refuse("--out", str(folder), limit, ELSEWHERE)
        rest.append(name)
    return rest


def write_record(folder: Path, suite: Suite, name: str, record: Record) -> None:
    """Write down a finished dimension; looks once more, as another run may have finished it on all its videos."""
    others = read_records(folder, suite, record["prompts_sha256"])
    to_do(folder, others, {name: (record["key"], record["complete"])})
    write_whole(_path(folder, name), json.dumps(record, ensure_ascii=False).encode())


def write_scores(folder: Path, suite: Suite, digest: str) -> dict[str, Any]:
    """Write `scores.json` of what is on disk now, as two runs may share a folder, some dimensions each.

    Quality, Semantic and Total rest on complete dimensions only, or are not there.
    """
    records = read_records(folder, suite, digest)
    whole = {name: record["score"]["value"] for name, record in records.items() if record["complete"]}
    lacking = [name for names in missing(whole) for name in names]
    scores: dict[str, Any] = {
        "suite": suite.name,
        "prompts_sha256": digest,
        "backend": sorted({record["score"]["backend"] for record in records.values()}),
        "versions": _shared(record["versions"] for record in records.values()),
        "complete": all(name in whole for name in suite.dimensions),
        "not_complete": lacking,
        "dimensions": {name: _line(record) for name, record in records.items()},
    }
    for group in ("quality", "semantic"):
        if not getattr(missing(whole), group):
            scores[group] = group_score(whole, group)
    if not lacking:
        scores["total"] = total_score(whole)
    write_whole(folder / "scores.json", json.dumps(scores, indent=1, ensure_ascii=False).encode())
    return scores


def _path(folder: Path, dimension: str) -> Path:
    return folder / "dimensions" / f"{dimension}.json"


def _line(record: Record) -> dict[str, Any]:
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


def _shared(several: Iterable[dict[str, str]]) -> dict[str, str]:
    """Versions of all records; where two differ, both are named."""
    found: dict[str, set[str]] = {}
    for versions in several:
        for name, version in versions.items():
            found.setdefault(name, set()).add(version)
    return {name: " and ".join(sorted(values)) for name, values in sorted(found.items())}
