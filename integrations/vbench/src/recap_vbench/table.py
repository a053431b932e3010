"""Puts scored folders side by side: a row per folder, paired by prompt and seed, next to the paper's column.

Every video gets a share of Quality, Semantic and Total, such that the mean of the shares is the score: norms and sums
are linear, so a share is the video's own norms, each times (all videos / videos that the dimension is scored on).
Differences, their intervals and p then come from whole prompts, as in all tables of recap.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from recap.errors import refuse
from recap.eval.judged import JudgedRun, Measure
from recap.eval.metrics.dynamics import VISIBLE
from recap.eval.scores import Score
from recap.show.page import Section
from recap.tables.folder import LEFT_OUT, begin_folder, begun_with, check_folder, write_table
from recap.tables.page import figures_of
from recap.tables.paper_numbers import paper_table
from recap.tables.recipes import Recipe
from recap.tables.rows import Row
from recap.tables.table import Cell, ScoredRun, build_cells, measured_of, remarks
from recap_vbench.records import read_records
from recap_vbench.scores import DIMENSIONS, QUALITY, SEMANTIC
from recap_vbench.suites import find_suite

GROUPS = {"quality": QUALITY, "semantic": SEMANTIC}
TOTALS = {"total": "Total", "quality": "Q", "semantic": "Sem"}
# The paper's columns are in the order of VBench's dimensions.
COLUMNS = dict(zip(DIMENSIONS, list(paper_table("main")[0])[1:], strict=False)) | TOTALS
NOTE = (
    "Scored by VBench's own models. Quality, Semantic and Total are there for rows whose dimensions are complete; "
    "the paper does not name its prompts, so compare differences."
)


def _not_here(run: JudgedRun) -> list[Score]:
    raise refuse(
        "measure", "vbench", "VBench scores videos in an environment of its own", "recap vbench run VIDEOS"
    )


MEASURE = Measure(
    "vbench",
    _not_here,
    headlines=(*TOTALS, *DIMENSIONS),
    paper={name: (column, 0.01) for name, column in COLUMNS.items()},
    visible=VISIBLE,
)
"""The entry by which tables find names, order and the paper's columns of VBench's scores."""


@dataclass(frozen=True, slots=True)
class ScoredFolder:
    """Holds what `recap vbench run` wrote: the value of each video by dimension, and which sums are complete."""

    path: Path
    suite: str
    digest: str
    backend: str
    values: Mapping[str, Mapping[str, float]]
    complete: tuple[str, ...]

    @property
    def videos(self) -> list[str]:
        return sorted({video for videos in self.values.values() for video in videos})


def scores_folder(path: Path) -> Path:
    """Return the folder of scores that a user means: itself, or the one next to its videos."""
    path = path.expanduser().resolve()
    sibling = path.with_name(f"{path.name}-vbench")
    return sibling if not (path / "scores.json").is_file() and (sibling / "scores.json").is_file() else path


def read_scored(path: Path) -> ScoredFolder:
    """Read a folder of scores; `path` may also be the folder of the videos."""
    folder = scores_folder(path)
    if not (folder / "scores.json").is_file():
        limit = "it has no scores.json, nor has a folder next to it with -vbench"
        raise refuse("folder", str(path), limit, f"score it first: recap vbench run {path} --suite SUITE")
    try:
        scores = json.loads((folder / "scores.json").read_text(encoding="utf-8"))
        records = read_records(folder, find_suite(scores["suite"]), scores["prompts_sha256"])
        values = {name: _video_values(record) for name, record in records.items()}
        done = [name for name, record in records.items() if record["complete"]]
        complete = [group for group, own in GROUPS.items() if set(own) <= set(done)]
        backends = {record["score"]["backend"] for record in records.values()}
    except (AttributeError, KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        limit = "is not what `recap vbench run` writes"
        raise refuse("file", str(folder / "scores.json"), limit, "run it again on these videos") from error
    if not any(values.values()):
        raise refuse("folder", str(folder), "it has no finished dimension", "recap vbench run resumes it")
    if len(backends) > 1:
        limit = f"its dimensions were judged by {' and '.join(sorted(backends))}"
        raise refuse("folder", str(folder), limit, "score all dimensions with one version of VBench")
    digest = scores["prompts_sha256"]
    return ScoredFolder(folder, scores["suite"], digest, backends.pop(), values, tuple(complete))


def _video_values(record: Mapping[str, Any]) -> dict[str, float]:
    """Return a value per video whose mean is the score of the dimension, which is a mean over clips."""
    means: dict[str, float] = record["score"]["details"]["videos"]
    if record["settings"]["static_filter"]:
        return means
    counts = {video: len(record["clips"][video]) for video in means}
    usual = sum(counts.values()) / len(counts)
    return {video: mean * counts[video] / usual for video, mean in means.items()}


def shares(folder: ScoredFolder) -> dict[str, dict[str, float]]:
    """Return, by sum and video, shares whose mean over all videos is Quality, Semantic or Total."""
    videos, found = folder.videos, {}
    for group in folder.complete:
        weights = sum(DIMENSIONS[name].weight for name in GROUPS[group])
        own = dict.fromkeys(videos, 0.0)
        for name in GROUPS[group]:
            values, dimension = folder.values[name], DIMENSIONS[name]
            for video, value in values.items():
                own[video] += dimension.weight / weights * dimension.norm(value) * len(videos) / len(values)
        found[group] = own
    if len(found) == len(GROUPS):
        found["total"] = {v: (4 * found["quality"][v] + found["semantic"][v]) / 5 for v in videos}
    return found


def scored_runs(row: str, folder: ScoredFolder) -> list[ScoredRun]:
    """Return the videos of a folder as the runs of a row of a table."""
    by_video: dict[str, dict[str, Any]] = {}
    for name, values in {**shares(folder), **folder.values}.items():
        for video, value in values.items():
            by_video.setdefault(video, {})[name] = Score(name, value, folder.backend, 1).as_dict()
    runs = []
    for video, scores in sorted(by_video.items()):
        stem, _, seed = video.removesuffix(".mp4").rpartition("-")
        runs.append(ScoredRun(row, stem, int(seed), scores))
    return runs


def check_alike(folders: Mapping[str, ScoredFolder]) -> ScoredFolder:
    """Refuse folders whose numbers do not compare; return the first."""
    first = next(iter(folders.values()))
    for folder in folders.values():
        for what in ("suite", "digest", "backend"):
            one, other = getattr(first, what), getattr(folder, what)
            if one != other:
                name = "list of prompts" if what == "digest" else what
                limit = f"its {name} is {other}, and that of {first.path} is {one}"
                raise refuse(
                    "folder", str(folder.path), limit, "put folders of one suite and one judge side by side"
                )
    return first


def write_vbench_table(
    goal: Path,
    recipe: Recipe,
    folders: Mapping[str, ScoredFolder],
    *,
    command: str,
    backbone: str = "",
    about: Mapping[str, Any] = MappingProxyType({}),
    left_out: Sequence[str] = (),
) -> Path:
    """Write the folder of a table of scored folders, by row; return its page."""
    first = check_alike(folders)
    rows = tuple(row for row in recipe.rows if row.name in folders)
    recipe = replace(recipe, rows=rows, measures=("recap_vbench.table:MEASURE",), note=NOTE, plane=None)
    runs = [run for name, folder in folders.items() for run in scored_runs(name, folder)]
    cells = [_without_wins(cell) for cell in build_cells(recipe, runs, backbone or "self-forcing")]
    seeds = {run.seed for run in runs}
    numbers = {"prompts": len({run.prompt for run in runs}), "seeds": len(seeds)}
    made = {
        "suite": f"{first.suite}, prompts_sha256 {first.digest[:12]}",
        "backbone": backbone or "unknown",
        **numbers,
        "runs": len(runs),
        **about,
        "judged": first.backend,
    }
    record = {
        "table": recipe.name,
        "suite": first.suite,
        "prompts_sha256": first.digest,
        **about,
        **numbers,
        LEFT_OUT: list(left_out),
    }
    check_folder(goal, record, folders)
    places = {name: os.path.relpath(folder.path, goal) for name, folder in folders.items()}
    for name, place in begun_with(goal).get("folders", {}).items():
        if places.get(name, place) != place:
            limit = f"its row {name} is of {place}, not of {places[name]}"
            raise refuse("--out", str(goal), limit, "choose another --out, or another name for the row")
    begin_folder(goal, {**record, "folders": places})
    section = Section(
        recipe.title,
        remarks(recipe.note, left_out),
        measured_of(recipe.ours, cells),
        figures_of(recipe, cells, runs),
    )
    write_table(goal, recipe, runs, cells, section, made, left_out, command=command)
    return goal / "index.html"


def _without_wins(cell: Cell) -> Cell:
    """Leave out how many pairs a sum wins: a video has its share of it, and no sum of its own."""
    return replace(cell, wins=None) if cell.measure in TOTALS else cell


def table_of_folders(
    named: Mapping[str, Path], papers: Sequence[str], ours: str
) -> tuple[Recipe, dict[str, ScoredFolder]]:
    """Return what `recap vbench table` shows: a row per folder, and the paper's method of each where it is named."""
    if papers and len(papers) != len(named):
        limit = f"there are {len(named)} folders"
        raise refuse(
            "--paper", ", ".join(papers), limit, "name a method for each folder in order, '' for none"
        )
    methods = [row["method"] for row in paper_table("main")]
    for paper in papers:
        if paper and paper not in methods:
            raise refuse(
                "--paper", paper, "the paper's main table has no such row", f"it has {', '.join(methods)}"
            )
    if ours not in named:
        raise refuse("--ours", ours, "is none of the rows", f"these are {', '.join(named)}")
    folders = {name: read_scored(path) for name, path in named.items()}
    check_alike(folders)
    columns = papers or [""] * len(named)
    # Folders say nothing of memories; a row needs the name of one and is never generated.
    rows = tuple(Row(name, {"name": "none"}, paper=paper) for name, paper in zip(named, columns, strict=True))
    return Recipe(
        "vbench", "VBench-Long, folders side by side", rows, (), ours=ours, paper_table="main"
    ), folders
