"""Generates the videos that VBench judges: every prompt of a suite, every seed, under the names that `run` looks for.

VIDEOS holds the finished videos and nothing else of ours, since scoring refuses what belongs to no prompt. All the
rest is next to it in VIDEOS-work: record.json (what was asked), the store of results and a folder per run. A video
comes to VIDEOS in one step when its run is finished, and never over a file that is there.
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
from recap.config import RunConfig, read_record
from recap.errors import refuse
from recap.eval.judged import EMBEDDED
from recap.flow import FLOWS, resolve_flow
from recap.io.files import LOCK, alone_in, read_json, remove_strays, sha256_of, staged_file, write_whole
from recap.io.record import versions
from recap.io.report import SILENT, Notice
from recap.run import generate, resume
from recap.tables.executors import Processes
from recap.tables.folder import RECORD, VERSIONS, cores
from recap.tables.preflight import find_missing_weights, looks_at_flow
from recap.tables.runner import Job, Progress, Result, ResultStore, run_jobs
from recap_vbench.environment import installed
from recap_vbench.suites import Entry, Suite, digest, find_suite, find_videos, load_entries, video_name


@dataclass(frozen=True, slots=True)
class Order:
    """Says what is to be generated."""

    suite: str
    template: RunConfig
    """The settings of every video, except for prompt and seed."""
    prompts: Path | None = None
    """A file of the prompts, where VBench does not have them."""
    num: int | None = None
    """It takes only the first so many prompts."""
    seeds: int | None = None
    """The videos per prompt; None takes the suite's own number."""


def work_folder(videos: Path) -> Path:
    """Return the folder of everything that VBench is not to see."""
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
) -> tuple[int, bool]:
    """Generate the videos of a suite into `out`; the same call resumes what was stopped.

    Without a number of workers, there is one per processor of this machine, or one on a GPU. Returns the number of
    videos and whether these are all that the suite has.
    """
    suite = find_suite(order.suite)
    entries = load_entries(suite, order.prompts, installed(environment).info if suite.official else "")
    # VBench lists two of its own prompts twice.
    all_texts = {entry.stem: entry.text for entry in entries}
    num = _counted("--num", order.num, len(all_texts), f"{suite.name} has {len(all_texts)} prompts")
    seeds = _counted("--seeds", order.seeds, suite.seeds, f"{suite.name} has {suite.seeds}")
    texts = dict(list(all_texts.items())[:num])
    videos, work = out.expanduser().resolve(), work_folder(out)
    template = _settled(order.template, work, list(texts.values()), notice)
    for reason in find_missing_weights({template.memory.name: template}, notice).values():
        raise refuse("admission", template.admission.name, f"cannot be had here ({reason})", "choose another")
    if workers is not None and workers < 1:
        raise refuse("--workers", workers, "must be 1 or more", "1 does the videos one by one")
    if videos.exists() and not videos.is_dir():
        raise refuse("--out", str(videos), "it is a file, and videos are a folder", "choose another --out")
    jobs, wanted = _jobs(template, texts, seeds), _wanted(suite, entries, template)
    numbers = {"prompts": num, "seeds": seeds}
    _check_record(out, work, wanted, numbers)
    work.mkdir(parents=True, exist_ok=True)
    with alone_in(work, "--out", "another process makes these videos", "wait for it, or end it first"):
        store = ResultStore(work)
        if videos.is_dir():
            # What VBench would refuse afterwards is refused before the hours of generating.
            remove_strays(videos)
            if any(videos.glob("*.mp4")):
                find_videos(videos, suite, all_texts.keys())
        for job in jobs:
            _check_own(videos / job.name, store.results.get(job.key))
        write_whole(work / RECORD, json.dumps({**wanted, **numbers}, indent=2).encode())

        def put(job: Job) -> None:
            _put(videos / job.name, work / "jobs" / job.key, store.results[job.key])

        for job in jobs:
            if store.has(job):
                put(job)
        executor = Processes(
            generate_video, work / "jobs", workers or (cores() if template.device == "cpu" else 1)
        )
        _check_done(jobs, store, run_jobs(jobs, store, executor, notice=report, on_result=put))
    return len(jobs), num == len(all_texts) and seeds == suite.seeds


def _check_done(jobs: Sequence[Job], store: ResultStore, progress: Progress) -> None:
    """Refuse to go on if a video is missing."""
    if missing := [job for job in jobs if not store.has(job)]:
        why = progress.errors.get(missing[0].name, "not done yet")
        limit = f"{len(missing)} of {len(jobs)} jobs have no result; the first: {missing[0].name}: {why}"
        remedy = "mend what is wrong and run it again: the rest is kept"
        raise refuse("folder", str(store.folder), limit, remedy)


def generate_video(job: Job, run: Path) -> Result:
    """Generate one video, or resume it; returns its file and the digest by which it is recognised."""
    config = job.data["config"]
    if (run / "run.json").is_file():
        resume(run, reporter=SILENT, trust_code=read_record(run, trust_code=True)["config"] == config)
    else:
        generate(RunConfig.from_dict(config), run, reporter=SILENT)
    # Those of a suite's minutes are tens of gigabytes.
    for name in ("latents.safetensors", "state.safetensors"):
        (run / name).unlink(missing_ok=True)
    return {"video": "video.mp4", "sha256": sha256_of(run / "video.mp4", lambda size: None)}


def _counted(option: str, wanted: int | None, most: int, limit: str) -> int:
    """Return how many are asked for, by default all; refuse none, or more than there are."""
    if wanted is not None and not 1 <= wanted <= most:
        raise refuse(option, wanted, limit, "leave it out for all of them")
    return wanted or most


def _jobs(template: RunConfig, texts: Mapping[str, str], seeds: int) -> list[Job]:
    """Make a job per video, named after its file. Noise depends on prompt and seed alone: memories are paired."""
    jobs = []
    for number, (stem, text) in enumerate(texts.items()):
        for seed in range(seeds):
            shots = (replace(template.shots[0], prompt=text),)
            config = replace(template, shots=shots, seeds=(1000 * number + seed,))
            jobs.append(Job(video_name(stem, seed), {"config": config.to_dict()}))
    return jobs


def _settled(template: RunConfig, work: Path, texts: Sequence[str], notice: Notice) -> RunConfig:
    """Replace the flow `auto` by what it means here, or meant when the folder was begun."""
    if template.backbone.name == EMBEDDED:
        _check_words(texts)
    found = read_json(work / RECORD) if (work / RECORD).is_file() else {}
    begun = found.get("flow") if isinstance(found, dict) else None
    if template.flow == "auto" and begun in FLOWS:
        template = replace(template, flow=begun)
    if not looks_at_flow(template):
        return template
    return replace(template, flow=resolve_flow(template.flow, notice))


def _check_words(texts: Sequence[str]) -> None:
    """Refuse prompts that the embedded model cannot read."""
    foreign = []
    for text in texts:
        try:
            parse_prompt(text)
        except ValueError:
            foreign.append(text)
    if foreign:
        count = f"{len(foreign)} of {len(texts)} prompts are not in its words, the first {foreign[0]!r}"
        remedy = (
            "take self-forcing, longlive or another public model (`recap list`), or untrained for a trial"
        )
        raise refuse("--backbone", EMBEDDED, f"it has a small world of its own, and {count}", remedy)


def _wanted(suite: Suite, entries: Sequence[Entry], template: RunConfig) -> dict[str, Any]:
    """Return what a folder is begun with, without the numbers that may grow."""
    config = {name: value for name, value in template.to_dict().items() if name not in ("shots", "seeds")}
    made_by = {name: versions()[name] for name in VERSIONS}
    seconds = template.shots[0].seconds
    return {"suite": suite.name, "prompts_sha256": digest(entries), "seconds": seconds, **config, **made_by}


def _check_record(out: Path, work: Path, wanted: Mapping[str, Any], numbers: Mapping[str, int]) -> None:
    """Refuse a folder that was begun with something else, or with larger numbers; smaller ones may grow."""
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
    """Show a part by its name, unless the other has the same one."""
    if isinstance(value, dict) and isinstance(other, dict) and value.get("name") != other.get("name"):
        return repr(value.get("name"))
    return repr(value)


def _put(goal: Path, run: Path, result: Result) -> None:
    """Put a finished video where it is judged."""
    source = run / result["video"]
    if not goal.exists() and not source.is_file():
        limit = "it was generated, and is in neither folder"
        raise refuse("video", goal.name, limit, f"put it back, or delete {run.parents[1]} to start again")
    goal.parent.mkdir(parents=True, exist_ok=True)
    try:
        # Whole at once, for no space, and refused by the system if the file is there.
        os.link(source, goal)
    except OSError:
        _check_own(goal, result)
        if not goal.exists():
            # A file system without such links, or another one.
            with staged_file(goal) as staged:
                shutil.copyfile(source, staged)


def _check_own(path: Path, result: Result | None) -> None:
    """Refuse a file that has the name of one of ours and was not made by us."""
    if path.exists() and (result is None or sha256_of(path, lambda size: None) != result["sha256"]):
        limit = "it is there and was not made by this command"
        raise refuse("video", str(path), limit, "move it away, or choose another --out")
