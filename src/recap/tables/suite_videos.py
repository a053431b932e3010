"""The videos that VBench judges: every prompt of a suite, every seed, under the names that `recap vbench run` wants.

VIDEOS holds the finished videos and nothing else of ours, since whoever judges it refuses what is no prompt's. All
the rest lies beside it in VIDEOS-work: record.json (what was asked), the sweep's state and a run's folder per video.
A video comes to VIDEOS in one step when its run is finished, and never over a file that is there.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from recap.backbones.tiny.vocabulary import parse_prompt
from recap.config import RunConfig, read_json
from recap.errors import refuse
from recap.eval.vbench.environment import installed
from recap.eval.vbench.suites import Entry, Suite, digest, find_suite, find_videos, load_entries, video_name
from recap.flow import FLOWS, resolve_flow
from recap.io.files import LOCK, alone_in, remove_strays, sha256_of, staged_file, write_whole
from recap.run import versions
from recap.tables.about import choose_workers
from recap.tables.folder import RECORD, begun_with
from recap.tables.job import draw_run
from recap.tables.jobs import Job, Result
from recap.tables.pool import Tell, in_silence, run_sweep
from recap.tables.preflight import KEEPS_A_BANK, find_undrawable, needs_flow
from recap.tables.recipes import Planned, Row
from recap.tables.scripts import EMBEDDED, Script
from recap.tables.status import Status
from recap.tables.store import FILE, Store

WORK = "recap.tables.suite_videos:draw_video"


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be drawn."""

    suite: str
    template: RunConfig  # of every video, but for prompt and seed
    prompts: Path | None = None  # file of the prompts, where VBench has not got them
    num: int | None = None  # only the first so many prompts
    seeds: int | None = None  # of each prompt; the suite's own number


@dataclass(frozen=True, slots=True)
class Drawn:
    videos: Path
    num_videos: int
    complete: bool  # all that the suite has


def work_folder(videos: Path) -> Path:
    """Where everything lies that VBench is not to see."""
    goal = videos.expanduser().resolve()
    return goal.with_name(f"{goal.name}-work")


def draw_suite(
    order: Order,
    environment: Path,
    out: Path,
    *,
    workers: int | None = None,
    tell: Tell = in_silence,
    notice: Callable[[str], None] = print,
) -> Drawn:
    """Draw the videos of a suite into `out`; the same call again goes on with what was stopped.

    Without a number of workers, each processor of this machine has one, a GPU one alone.
    """
    suite = find_suite(order.suite)
    entries = load_entries(suite, order.prompts, installed(environment).info if suite.official else None)
    texts, seeds = _asked(order, suite, entries)
    template = _settled(order.template, begun_with(work_folder(out)), texts, notice)
    _check_drawable(template, notice)
    workers = choose_workers(workers, alone=template.device != "cpu")
    jobs = _jobs(template, texts, seeds)
    videos, work = out.expanduser().resolve(), work_folder(out)
    wanted = _wanted(suite, entries, template)
    numbers = {"prompts": len(texts), "seeds": seeds}
    if videos.exists() and not videos.is_dir():
        raise refuse("--out", str(videos), "it is a file, and videos are a folder", "choose another --out")
    _check_record(out, work, wanted, numbers)
    work.mkdir(parents=True, exist_ok=True)
    with alone_in(work, "--out", "another process is drawing these videos", "wait for it, or end it first"):
        shelf = _Shelf(videos, work, jobs, tell)
        _check_videos(videos, suite, entries)
        shelf.check()
        write_whole(work / RECORD, json.dumps({**wanted, **numbers}, indent=2).encode())
        run_sweep(list(jobs.values()), WORK, work, workers=workers, tell=shelf.fill)
    complete = len(texts) == len({entry.stem for entry in entries}) and seeds == suite.seeds
    return Drawn(out, len(jobs), complete)


def draw_video(payload: dict[str, Any], folder: str) -> Result:
    """The work of a sweep: one video, and the digest by which it is known again."""
    place = Path(folder)
    draw_run(RunConfig.from_dict(payload["data"]["config"]), place)
    # Those of a suite's minutes are tens of gigabytes.
    (place / "latents.safetensors").unlink(missing_ok=True)
    return {"video": "video.mp4", "sha256": _sha256(place / "video.mp4")}


def _asked(order: Order, suite: Suite, entries: Sequence[Entry]) -> tuple[dict[str, str], int]:
    """The prompts to draw by the stem of their files, and how many seeds of each."""
    texts = {entry.stem: entry.text for entry in entries}  # VBench lists two of its own twice
    num = len(texts) if order.num is None else order.num
    seeds = suite.seeds if order.seeds is None else order.seeds
    if not 1 <= num <= len(texts):
        raise refuse("--num", num, f"{suite.name} has {len(texts)} prompts", "leave it out for all of them")
    if not 1 <= seeds <= suite.seeds:
        raise refuse("--seeds", seeds, f"{suite.name} has {suite.seeds}", "leave it out for all of them")
    return dict(list(texts.items())[:num]), seeds


def _jobs(template: RunConfig, texts: Mapping[str, str], seeds: int) -> dict[str, Job]:
    """A job per video, by the name of its file. Noise follows from prompt and seed alone: memories are paired."""
    jobs = {}
    for number, (stem, text) in enumerate(texts.items()):
        for seed in range(seeds):
            place = 1000 * number + seed
            config = replace(template, shots=(replace(template.shots[0], prompt=text),), seeds=(place,))
            jobs[video_name(stem, seed)] = Job(
                template.memory.name, stem, place, {"config": config.to_dict()}
            )
    return jobs


def _settled(
    template: RunConfig, begun: Mapping[str, Any], texts: Mapping[str, str], notice: Callable[[str], None]
) -> RunConfig:
    """With `auto` as what it means here or as the folder was begun: a video drawn tomorrow is of the same kind."""
    if template.backbone.name == EMBEDDED:
        _check_words(list(texts.values()))
    if template.flow == "auto" and begun.get("flow") in FLOWS:
        template = replace(template, flow=begun["flow"])
    needed = template.memory.name == KEEPS_A_BANK and needs_flow(template)
    return replace(template, flow=resolve_flow(template.flow, notice)) if needed else template


def _check_drawable(template: RunConfig, notice: Callable[[str], None]) -> None:
    """Hundreds of runs must not find out one by one what is missing here."""
    name = template.memory.name
    asked = Planned(Row(name, {"name": name}), Script(name, "", template.shots), 0, template)
    for reason in find_undrawable([asked], notice).values():
        raise refuse("admission", template.admission.name, f"cannot be had here ({reason})", "choose another")


def _check_words(texts: Sequence[str]) -> None:
    foreign = [text for text in texts if not _is_known(text)]
    if foreign:
        limit = (
            f"it draws a small world of its own, and {len(foreign)} of {len(texts)} prompts are not in its words, "
            f"the first {foreign[0]!r}"
        )
        remedy = (
            "take self-forcing, longlive or another public model (`recap list`), or untrained for a trial"
        )
        raise refuse("--backbone", EMBEDDED, limit, remedy)


def _is_known(text: str) -> bool:
    try:
        parse_prompt(text)
    except ValueError:
        return False
    return True


def _check_videos(videos: Path, suite: Suite, entries: Sequence[Entry]) -> None:
    """What VBench would refuse afterwards is refused before the hours of drawing."""
    if videos.is_dir():
        remove_strays(videos)
        if any(videos.glob("*.mp4")):
            find_videos(videos, suite, entries)


def _wanted(suite: Suite, entries: Sequence[Entry], template: RunConfig) -> dict[str, Any]:
    """What a folder is begun with, beside the numbers that may grow."""
    config = {name: value for name, value in template.to_dict().items() if name not in ("shots", "seeds")}
    made_by = {name: versions()[name] for name in ("recap", "torch")}
    seconds = template.shots[0].seconds
    return {"suite": suite.name, "prompts_sha256": digest(entries), "seconds": seconds, **config, **made_by}


def _check_record(out: Path, work: Path, wanted: Mapping[str, Any], numbers: Mapping[str, int]) -> None:
    """See that a folder is of these videos, and of no more of them: larger numbers go on with it."""
    record = work / RECORD
    if not record.is_file():
        if work.exists() and (not work.is_dir() or any(path.name != LOCK for path in work.iterdir())):
            raise refuse("--out", str(out), f"{work} holds something else", "choose another --out")
        return
    found = read_json(record)
    if not isinstance(found, dict) or not found.keys() >= {*wanted, *numbers}:
        raise refuse("file", str(record), "is no record of a suite's videos", "choose another --out")
    for name, value in wanted.items():
        if found[name] != value:
            limit = f"it was begun with {name} {_said(found[name], value)}, not {_said(value, found[name])}"
            raise refuse("--out", str(out), limit, "choose another folder, or ask as it was begun")
    for name, number in numbers.items():
        if found[name] > number:
            limit = f"it was begun with {found[name]} {name}, not {number}"
            raise refuse("--out", str(out), limit, "ask for as many or more, or choose another folder")


def _said(value: Any, other: Any) -> str:
    """A part by its name, unless the other has the same one."""
    if isinstance(value, dict) and isinstance(other, dict) and value.get("name") != other.get("name"):
        return repr(value.get("name"))
    return repr(value)


class _Shelf:
    """Puts finished videos where they are judged, and tells how the sweep stands when that has changed."""

    def __init__(self, videos: Path, work: Path, jobs: Mapping[str, Job], tell: Tell):
        self._videos, self._work, self._jobs, self._tell = videos, work, jobs, tell
        self._done = -1
        self._there: set[str] = set()

    def check(self) -> None:
        """Refuse files of our names that are not of our drawing."""
        for name, result in self._results().items():
            if (self._videos / name).exists():
                self._check_own(name, result)
                self._there.add(name)

    def fill(self, status: Status) -> None:
        if status.counts.done == self._done:
            return
        self._done = status.counts.done
        for name, result in self._results().items():
            if result is not None and name not in self._there:
                self._put(name, result)
                self._there.add(name)
        self._tell(status)

    def _results(self) -> dict[str, Result | None]:
        if not (self._work / FILE).is_file():  # not begun, and opening one would begin it
            return dict.fromkeys(self._jobs)
        store = Store(self._work)
        try:
            return dict(zip(self._jobs, store.results(list(self._jobs.values())), strict=True))
        finally:
            store.close()

    def _put(self, name: str, result: Result) -> None:
        goal = self._videos / name
        source = self._work / "jobs" / self._jobs[name].key / result["video"]
        if goal.exists():
            self._check_own(name, result)
            return
        if not source.is_file():
            limit = "it was drawn, and is in neither folder"
            raise refuse("video", name, limit, f"put it back, or delete {self._work} to draw anew")
        self._videos.mkdir(parents=True, exist_ok=True)
        try:
            # Whole at once, for no space, and refused by the system if somebody was faster.
            os.link(source, goal)
        except FileExistsError:
            self._check_own(name, result)
        except OSError:  # a file system without such links, or another one
            with staged_file(goal) as staged:
                shutil.copyfile(source, staged)

    def _check_own(self, name: str, result: Result | None) -> None:
        path = self._videos / name
        if result is None or _sha256(path) != result["sha256"]:
            limit = "it is there and was not drawn by this command"
            raise refuse("video", str(path), limit, "move it away, or choose another --out")


def _sha256(path: Path) -> str:
    return sha256_of(path, lambda size: None)
