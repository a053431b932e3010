"""The videos that VBench judges: every prompt of a suite, every seed, under the names that `recap vbench run` wants.

VIDEOS holds the finished videos and nothing else of ours, since whoever judges it refuses what belongs to no prompt.
All the rest lies next to it in VIDEOS-work: record.json (what was asked), the store of results and a folder per run.
A video comes to VIDEOS in one step when its run is finished, and never over a file that is there.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from recap.backbones.tiny.vocabulary import parse_prompt
from recap.config import RunConfig, read_json
from recap.errors import refuse
from recap.eval.judged import EMBEDDED
from recap.eval.vbench.environment import installed
from recap.eval.vbench.suites import Entry, Suite, digest, find_suite, find_videos, load_entries, video_name
from recap.flow import FLOWS, resolve_flow
from recap.io.files import LOCK, alone_in, remove_strays, sha256_of, staged_file, write_whole
from recap.run import Notice, generate, resume, versions
from recap.tables.executors import Processes
from recap.tables.folder import RECORD, VERSIONS, cores
from recap.tables.preflight import find_missing_weights, looks_at_flow
from recap.tables.runner import Job, Result, ResultStore, collect, run_jobs

WORK = "recap.tables.suite_videos:generate_video"


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be generated."""

    suite: str
    template: RunConfig  # of every video, but for prompt and seed
    prompts: Path | None = None  # file of the prompts, where VBench does not have them
    num: int | None = None  # only the first so many prompts
    seeds: int | None = None  # of each prompt; None takes the suite's own number


@dataclass(frozen=True, slots=True)
class SuiteVideos:
    videos: Path
    num_videos: int
    complete: bool  # all that the suite has


def work_folder(videos: Path) -> Path:
    """Where everything lies that VBench is not to see."""
    goal = videos.expanduser().resolve()
    return goal.with_name(f"{goal.name}-work")


def generate_suite(
    order: Order,
    environment: Path,
    out: Path,
    *,
    workers: int | None = None,
    report: Notice = lambda line: None,
    notice: Notice = print,
) -> SuiteVideos:
    """Generate the videos of a suite into `out`; the same call resumes what was stopped.

    Without a number of workers, there is one per processor of this machine, or one on a GPU.
    """
    suite = find_suite(order.suite)
    entries = load_entries(suite, order.prompts, installed(environment).info if suite.official else None)
    texts, seeds = _asked(order, suite, entries)
    videos, work = out.expanduser().resolve(), work_folder(out)
    template = _settled(order.template, work, texts, notice)
    for reason in find_missing_weights({template.memory.name: template}, notice).values():
        raise refuse("admission", template.admission.name, f"cannot be had here ({reason})", "choose another")
    if workers is not None and workers < 1:
        raise refuse("--workers", workers, "must be 1 or more", "1 does the videos one by one")
    jobs = _jobs(template, texts, seeds)
    wanted = _wanted(suite, entries, template)
    numbers = {"prompts": len(texts), "seeds": seeds}
    if videos.exists() and not videos.is_dir():
        raise refuse("--out", str(videos), "it is a file, and videos are a folder", "choose another --out")
    _check_record(out, work, wanted, numbers)
    work.mkdir(parents=True, exist_ok=True)
    with alone_in(work, "--out", "another process makes these videos", "wait for it, or end it first"):
        store = ResultStore(work)
        if videos.is_dir():
            # What VBench would refuse afterwards is refused before the hours of generating.
            remove_strays(videos)
            if any(videos.glob("*.mp4")):
                find_videos(videos, suite, entries)
        for job in jobs:
            _check_own(videos / job.name, store.results.get(job.key))
        write_whole(work / RECORD, json.dumps({**wanted, **numbers}, indent=2).encode())

        def put(job: Job) -> None:
            _put(videos / job.name, work / "jobs" / job.key, store.results[job.key])

        for job in jobs:
            if store.has(job):
                put(job)
        executor = Processes(WORK, work / "jobs", workers or (cores() if template.device == "cpu" else 1))
        collect(jobs, store, run_jobs(jobs, store, executor, notice=report, on_result=put))
    complete = len(texts) == len({entry.stem for entry in entries}) and seeds == suite.seeds
    return SuiteVideos(out, len(jobs), complete)


def generate_video(job: Job, place: Path) -> Result:
    """The work of a process: one video, resumed where it was begun, and the digest by which it is known again."""
    if (place / "run.json").is_file():
        resume(place, notice=lambda _: None)
    else:
        if place.is_dir():
            # It was stopped before it was a run.
            remove_strays(place)
            (place / LOCK).unlink(missing_ok=True)
        generate(RunConfig.from_dict(job.data["config"]), place, notice=lambda _: None)
    # Those of a suite's minutes are tens of gigabytes.
    for name in ("latents.safetensors", "state.safetensors"):
        (place / name).unlink(missing_ok=True)
    return {"video": "video.mp4", "sha256": sha256_of(place / "video.mp4", lambda size: None)}


def _asked(order: Order, suite: Suite, entries: Sequence[Entry]) -> tuple[dict[str, str], int]:
    """The prompts by the stem of their files, and how many seeds of each."""
    texts = {entry.stem: entry.text for entry in entries}  # VBench lists two of its own twice
    num = len(texts) if order.num is None else order.num
    seeds = suite.seeds if order.seeds is None else order.seeds
    if not 1 <= num <= len(texts):
        raise refuse("--num", num, f"{suite.name} has {len(texts)} prompts", "leave it out for all of them")
    if not 1 <= seeds <= suite.seeds:
        raise refuse("--seeds", seeds, f"{suite.name} has {suite.seeds}", "leave it out for all of them")
    return dict(list(texts.items())[:num]), seeds


def _jobs(template: RunConfig, texts: Mapping[str, str], seeds: int) -> list[Job]:
    """A job per video, named after its file. Noise depends on prompt and seed alone: memories are paired."""
    jobs = []
    for number, (stem, text) in enumerate(texts.items()):
        for seed in range(seeds):
            shots = (replace(template.shots[0], prompt=text),)
            config = replace(template, shots=shots, seeds=(1000 * number + seed,))
            jobs.append(Job(video_name(stem, seed), {"config": config.to_dict()}))
    return jobs


def _settled(template: RunConfig, work: Path, texts: Mapping[str, str], notice: Notice) -> RunConfig:
    """With `auto` as what it means here, or meant when the folder was begun."""
    if template.backbone.name == EMBEDDED:
        _check_words(list(texts.values()))
    found = read_json(work / RECORD) if (work / RECORD).is_file() else {}
    begun = found.get("flow") if isinstance(found, dict) else None
    if template.flow == "auto" and begun in FLOWS:
        template = replace(template, flow=begun)
    return (
        replace(template, flow=resolve_flow(template.flow, notice)) if looks_at_flow(template) else template
    )


def _check_words(texts: Sequence[str]) -> None:
    """Refuse prompts that the embedded model cannot read."""
    foreign = [text for text in texts if not _is_known(text)]
    if foreign:
        limit = (f"it has a small world of its own, and {len(foreign)} of {len(texts)} prompts are not in its words, "
                 f"the first {foreign[0]!r}")  # fmt: skip
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


def _wanted(suite: Suite, entries: Sequence[Entry], template: RunConfig) -> dict[str, Any]:
    """What a folder is begun with, without the numbers that may grow."""
    config = {name: value for name, value in template.to_dict().items() if name not in ("shots", "seeds")}
    made_by = {name: versions()[name] for name in VERSIONS}
    seconds = template.shots[0].seconds
    return {"suite": suite.name, "prompts_sha256": digest(entries), "seconds": seconds, **config, **made_by}


def _check_record(out: Path, work: Path, wanted: Mapping[str, Any], numbers: Mapping[str, int]) -> None:
    """See that a folder is of these videos, and of no more of them: larger numbers resume it."""
    record = work / RECORD
    if not record.is_file():
        if work.exists() and (not work.is_dir() or any(path.name != LOCK for path in work.iterdir())):
            raise refuse("--out", str(out), f"{work} holds something else", "choose another --out")
        return
    found = read_json(record)
    if not isinstance(found, dict) or not found.keys() >= {*wanted, *numbers}:
        raise refuse("file", str(record), "is not the record of a suite's videos", "choose another --out")
    for name, value in wanted.items():
        if found[name] != value:
            limit = f"it was begun with {name} {_shown(found[name], value)}, not {_shown(value, found[name])}"
            raise refuse("--out", str(out), limit, "choose another folder, or ask as it was begun")
    for name, number in numbers.items():
        if found[name] > number:
            limit = f"it was begun with {found[name]} {name}, not {number}"
            raise refuse("--out", str(out), limit, "ask for as many or more, or choose another folder")


def _shown(value: Any, other: Any) -> str:
    """A part by its name, unless the other has the same one."""
    if isinstance(value, dict) and isinstance(other, dict) and value.get("name") != other.get("name"):
        return repr(value.get("name"))
    return repr(value)


def _put(goal: Path, run: Path, result: Result) -> None:
    """A finished video goes where it is judged."""
    source = run / result["video"]
    if goal.exists():
        _check_own(goal, result)
        return
    if not source.is_file():
        limit = "it was generated, and is in neither folder"
        raise refuse("video", goal.name, limit, f"put it back, or delete {run.parents[1]} to start again")
    goal.parent.mkdir(parents=True, exist_ok=True)
    try:
        # Whole at once, for no space, and refused by the system if somebody was faster.
        os.link(source, goal)
    except FileExistsError:
        _check_own(goal, result)
    except OSError:
        # A file system without such links, or another one.
        with staged_file(goal) as staged:
            shutil.copyfile(source, staged)


def _check_own(path: Path, result: Result | None) -> None:
    """Refuse a file that has the name of one of ours and was not made by us."""
    if path.exists() and (result is None or sha256_of(path, lambda size: None) != result["sha256"]):
        limit = "it is there and was not made by this command"
        raise refuse("video", str(path), limit, "move it away, or choose another --out")
