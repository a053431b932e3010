"""This module finds the videos of a study: of runs, comparisons and folders with runs, of tables, and plain ones."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from recap.config import read_record
from recap.errors import refuse
from recap.io.files import read_json
from recap.io.run_folder import SUMMARY
from recap.run import is_finished
from recap.show.comparison import RECORD
from recap.show.run_page import read_summary
from recap.tables.folder import TABLE
from recap.tables.generating import CLIP
from recap.tables.reproduce import SHOWN
from recap.tables.runner import canonical

RUN = "run.json"
MOST_RUNS = 5000
# What two runs of a pair have in common; what else differs is the memory's own, or how it was computed.
SHARED = ("backbone", "shots", "opening", "cast")


class StudyVideo(NamedTuple):
    """Describes a video that may be shown: whose it is, and by what it is paired."""

    method: str
    prompt: str
    seed: int
    path: Path
    # Equal for the two videos of a pair; of one prompt and seed there may be several, of other models.
    match: str


def find_videos(folders: Sequence[Path]) -> list[StudyVideo]:
    """Find all videos in folders of runs or tables; refuses folders without any, and two of one memory that match."""
    found: list[tuple[dict[str, Any], StudyVideo]] = []
    videos: list[StudyVideo] = []
    runs: dict[Path, None] = {}
    for folder in folders:
        if (folder / TABLE).is_file():
            videos += _of_table(folder)
        elif any(folder.glob("*.mp4")) and not any((folder / name).is_file() for name in (RUN, RECORD)):
            videos += _of_plain(folder)
        else:
            runs |= dict.fromkeys(path.resolve() for path in _runs_in(folder))
    for run in runs:
        found += _of_run(run)
    names = _names([memory for memory, _ in found])
    videos += [video._replace(method=name) for name, (_, video) in zip(names, found, strict=True)]
    seen: dict[tuple[str, str], Path] = {}
    for video in videos:
        other = seen.setdefault((video.method, video.match), video.path)
        if other != video.path:
            limit = f"is of the same memory, prompt and seed as {other}"
            raise refuse("video", str(video.path), limit, "leave one of them out")
    return videos


def _runs_in(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise refuse("runs", str(folder), "there is no such folder", "name folders of runs")
    if (folder / RUN).is_file():
        return [folder]
    found = sorted(path.parent for path in folder.rglob(RUN))[: MOST_RUNS + 1]
    if not found:
        limit = "holds no run and no finished table"
        remedy = "name folders that `recap generate` or `recap compare` wrote"
        raise refuse("runs", str(folder), limit, remedy)
    if len(found) > MOST_RUNS:
        raise refuse("runs", str(folder), f"holds more than {MOST_RUNS} runs", "name fewer folders")
    return found


def _of_run(folder: Path) -> list[tuple[dict[str, Any], StudyVideo]]:
    """Return the memory's settings and the video of every row of a finished run."""
    config = read_record(folder, "runs", trust_code=True)["config"]
    try:
        if not (folder / SUMMARY).is_file() or not is_finished(folder):
            limit = "the run is not finished"
            raise refuse("runs", str(folder), limit, f"finish it with `recap generate --resume {folder}`")
        shots, seeds = config["shots"], config["seeds"]
        prompt = " → ".join(shot["prompt"] for shot in shots)
        memory = {"memory": config["memory"], "admission": config.get("admission")}
        name = config["memory"]["name"]
        shared = {field: config.get(field) for field in SHARED}
        videos = [folder / file for file in read_summary(folder)["videos"]]
        return [
            (memory, StudyVideo(name, prompt, seed, path, canonical({**shared, "seed": seed})))
            for seed, path in zip(seeds, videos, strict=True)
        ]
    except (KeyError, TypeError) as error:
        remedy = "generate the run again"
        raise refuse("runs", str(folder), "its run.json is not as this version writes it", remedy) from error


def _names(memories: Sequence[Mapping[str, Any]]) -> list[str]:
    """Name every run by its memory, with those settings by which memories of one name differ."""
    flat = {canonical(memory): _flat(memory) for memory in memories}
    names = {}
    for kind, own in flat.items():
        alike = [each for each in flat.values() if each["memory.name"] == own["memory.name"]]
        differing = sorted({key for each in alike for key in {*own, *each} if own.get(key) != each.get(key)})
        settings = [f"{key.removeprefix('memory.')}={own.get(key)}" for key in differing]
        names[kind] = ", ".join([str(own["memory.name"]), *settings])
    return [names[canonical(memory)] for memory in memories]


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    if not isinstance(value, Mapping):
        return {name: value}
    return {
        key: inner
        for part, own in value.items()
        for key, inner in _flat(own, f"{name}.{part}" if name else part).items()
    }


def _of_plain(folder: Path) -> list[StudyVideo]:
    """Return the videos of a folder that is named after their memory, as `recap vbench draw` writes them."""
    found = []
    for path in sorted(folder.glob("*.mp4")):
        prompt, dash, seed = path.stem.rpartition("-")
        if not (dash and prompt and seed.isdecimal()):
            limit = "its name is not <prompt>-<seed>.mp4"
            raise refuse("video", str(path), limit, "name videos of one prompt and seed alike in all folders")
        match = canonical({"prompt": prompt, "seed": int(seed)})
        found.append(StudyVideo(folder.resolve().name, prompt, int(seed), path, match))
    return found


def _of_table(folder: Path) -> list[StudyVideo]:
    """Return the videos that a finished table of `recap reproduce` kept: those of its first prompt and seed."""
    about = read_json(folder / TABLE)
    name = about.get("table") if isinstance(about, dict) else None
    found = []
    try:
        for line in (folder / "results.jsonl").read_text(encoding="utf-8").splitlines():
            run = json.loads(line)
            # The last part of the name alone: a stranger's table shows no file from elsewhere.
            path = folder.parent / SHOWN / Path(run["key"]).name / CLIP
            if path.is_file():
                match = canonical({"table": str(name), "prompt": run["prompt"], "seed": run["seed"]})
                found.append(StudyVideo(run["row"], run["prompt"], int(run["seed"]), path, match))
    except (OSError, ValueError, KeyError, TypeError) as error:
        limit = "its results.jsonl is missing or damaged"
        remedy = "`recap reproduce`, asked as before, writes it again"
        raise refuse("runs", str(folder), limit, remedy) from error
    if not found:
        limit = f"none of its videos is in {folder.parent / SHOWN}"
        raise refuse("runs", str(folder), limit, "generate runs with `recap generate` or `recap compare`")
    return found
