"""This module generates one script, seed and backbone with several memories, and writes a page to look at.

A comparison is a folder of runs. Finished runs are kept and stopped ones resumed, so the same call resumes a
comparison that was stopped, and a memory can be added to a finished one.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from recap.config import DEFAULT_MEMORY, RunConfig, choose
from recap.contracts import Judge
from recap.errors import refuse
from recap.fast.fitting import fit_card
from recap.flow import FLOWS
from recap.io.code import changed_code
from recap.io.files import read_json, remove_strays, write_whole
from recap.io.opening import read_opening
from recap.io.report import SILENT, Notice, Progress, Reporter, each_once, no_progress
from recap.io.video import open_clip
from recap.plan import make_plan
from recap.run import build_backbone, build_memory, generate, is_finished, resume, settle_flow
from recap.show.clips import write_side_by_side
from recap.show.run_page import PAGE, judge_of, read_summary, write_runs_page

RECORD = "comparison.json"


@dataclass(frozen=True, slots=True)
class ComparisonSummary:
    """Names the files of a finished comparison; `runs` maps the name of a memory to the folder of its run."""

    out: Path
    runs: dict[str, Path]

    @property
    def page(self) -> Path:
        """Return the page of the first row."""
        return self.out / PAGE


def compare(
    config: RunConfig,
    memories: Sequence[str | Mapping[str, Any]],
    out: Path,
    *,
    reporter: Reporter = Reporter(),
    showing: Progress = no_progress,
    judge: Judge | None = None,
) -> ComparisonSummary:
    """Generate the config's script once with each memory (its own is not used) and write `out/`.

    It holds a run's folder per memory, side-by-side.mp4 and index.html; of a batch, also side-by-side-1.mp4 and
    row-1.html of row 1, and so on. The reporter's progress counts the blocks of all runs, `showing` the pictures that
    are then put side by side and judged: by `judge`, or by the backbone's own.
    """
    reporter = Reporter(each_once(reporter.notice), reporter.progress)
    configs = _checked(_named(_with_recorded_flow(config, out), memories), reporter.notice)
    judge = judge or judge_of(config)
    summary = ComparisonSummary(out, {name: out / name for name in configs})
    _claim(out, configs)
    for number, (name, own) in enumerate(configs.items()):
        _finish(own, summary.runs[name], reporter, number, len(configs))
    videos = {
        name: [run / video for video in read_summary(run)["videos"]] for name, run in summary.runs.items()
    }
    rows, pictures = len(config.seeds), open_clip(next(iter(videos.values()))[0]).num_pictures or 0
    advance = Reporter(progress=showing).counter((1 + len(videos)) * rows * pictures)
    # The first row last: its page is the sign that all is complete.
    for row in reversed(range(rows)):
        joined, page = (f"side-by-side-{row}.mp4", f"row-{row}.html") if row else ("side-by-side.mp4", PAGE)
        write_side_by_side(out / joined, {name: clips[row] for name, clips in videos.items()}, advance)
        write_runs_page(out / page, summary.runs, row, judge, advance, trust_code=True)
    return summary


def _named(config: RunConfig, memories: Sequence[str | Mapping[str, Any]]) -> dict[str, RunConfig]:
    """Make a config per memory, by a name that serves as a folder's; equal names are distinguished by settings."""
    if not memories:
        raise refuse("memories", list(memories), "at least 1 is needed", "for example none,sink,recap")
    plain = config.to_dict()
    if config.admission.usual:
        # Every memory has its own.
        del plain["admission"]
    configs = [RunConfig.from_dict({**plain, "memory": memory}) for memory in memories]
    short = [each.memory.name.rpartition(":")[2] for each in configs]
    named: dict[str, RunConfig] = {}
    for name, own in zip(short, configs, strict=True):
        if short.count(name) > 1:
            settings = dataclasses.asdict(own.memory.settings)
            name = "-".join([name, *(f"{key}={value}" for key, value in settings.items())])
        name = re.sub(r"[^\w.=+-]", "_", name)
        if name in named:
            raise refuse("memories", own.memory.name, "is listed twice", "list each memory once")
        named[name] = own
    return named


def _with_recorded_flow(config: RunConfig, out: Path) -> RunConfig:
    """Use the flow of a comparison that was begun, where none is chosen: weights may have been installed since."""
    if config.flow == "auto" and (out / RECORD).is_file():
        begun = read_json(out / RECORD)
        if isinstance(begun, dict) and begun.get("flow") in list(FLOWS):
            return replace(config, flow=begun["flow"])
    return config


def _checked(configs: Mapping[str, RunConfig], notice: Notice) -> dict[str, RunConfig]:
    """Set one path and one flow for all runs, and refuse what any of them would refuse, before the first begins."""
    fitted = [fit_card(config, notice) for config in configs.values()]
    eager = any(config.eager for config in fitted)
    configs = {name: replace(config, eager=eager) for name, config in zip(configs, fitted, strict=True)}
    first = next(iter(configs.values()))
    backbone = build_backbone(first, notice)
    make_plan([first.shots], backbone.spec)
    for shot in first.shots:
        backbone.condition((shot.prompt,))
    if first.opening:
        read_opening(first.opening, backbone.spec, notice=SILENT.notice)
    flow = first.flow
    # Up to the first that needs flow, so that there is one notice.
    for config in configs.values():
        flow = settle_flow(replace(config, flow=flow), backbone.spec, notice).flow
    settled = {name: replace(config, flow=flow) for name, config in configs.items()}
    for config in settled.values():
        build_memory(config, backbone.spec, notice=SILENT.notice)
    return settled


def _claim(out: Path, configs: Mapping[str, RunConfig]) -> None:
    """Make the folder, or check that it is one of this comparison."""
    record = out / RECORD
    if out.exists() and not out.is_dir():
        raise refuse("--out", str(out), "it is a file, and results are a folder", "choose another folder")
    if out.is_dir() and any(out.iterdir()) and not record.is_file():
        raise refuse("--out", str(out), "holds something that is no comparison", "choose another folder")
    written = {name: json.loads(json.dumps(config.to_dict())) for name, config in configs.items()}
    for name, wanted in written.items():
        if (out / name / "run.json").is_file():
            about = read_json(out / name / "run.json")
            about = about if isinstance(about, dict) else {}
            _refuse_other(out / name, about.get("config"), wanted)
            if changed := changed_code(about.get("code"), wanted):
                limit = f"{' and '.join(changed)} changed since its run began"
                raise refuse("--out", str(out / name), limit, "choose another folder, or put the code back")
    # Whichever memory comes first: an admission that goes with it is recorded as the default memory's.
    first = replace(next(iter(configs.values())), memory=choose("memory", DEFAULT_MEMORY))
    shared = {key: value for key, value in json.loads(json.dumps(first.to_dict())).items() if key != "memory"}
    if record.is_file():
        remove_strays(out)
        _refuse_other(out, read_json(record), shared)
    write_whole(record, json.dumps(shared, indent=2).encode())


def _refuse_other(folder: Path, recorded: Any, wanted: dict[str, Any]) -> None:
    """Refuse to resume what was begun with other settings."""
    found = recorded if isinstance(recorded, dict) else {}
    if found.get("flow") == "auto":
        # It never looked at flow, so any will do.
        found = {**found, "flow": wanted["flow"]}
    if found != wanted:
        other = next((key for key in wanted if found.get(key) != wanted[key]), "config")
        limit = f"its runs were begun with other settings ({other})"
        raise refuse("--out", str(folder), limit, "choose another folder, or use the settings it began with")


def _finish(config: RunConfig, folder: Path, reporter: Reporter, number: int, runs: int) -> None:
    """Generate a run, the first of which has number 0, or what is missing of it; report the progress of all runs."""

    def report(done: int, total: int | None, rate: float) -> None:
        reporter.progress(number * (total or 0) + done, runs * (total or 0), rate)

    begun = (folder / "run.json").is_file()
    if begun and is_finished(folder):
        blocks = read_summary(folder)["blocks"]
        report(blocks, blocks, 0.0)
    elif begun:
        # Its config was found to be this call's own.
        resume(folder, reporter=Reporter(reporter.notice, report), trust_code=True)
    else:
        generate(config, folder, reporter=Reporter(reporter.notice, report))
