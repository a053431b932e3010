"""The same script, seed and backbone with several memories, and one page to look at.

A comparison is a folder of runs. Finished runs are kept and stopped ones continued, so a comparison that was
stopped goes on when it is asked for again, and a memory can be added to a finished one.
"""

from __future__ import annotations

import dataclasses
import json
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from recap.config import RunConfig, read_json
from recap.contracts import Curve, Judge, Sample
from recap.errors import refuse
from recap.flow import FLOWS
from recap.io.files import LOCK, remove_strays, write_whole
from recap.io.opening import read_opening
from recap.io.video import Picture, open_clip
from recap.plan import Plan, make_plan
from recap.registry import JUDGES
from recap.run import (
    Notice,
    Progress,
    build_backbone,
    build_memory,
    each_once,
    generate,
    no_progress,
    resume,
    settle_flow,
    versions,
)
from recap.show.compare_page import Comparison, Method, Scene, build_compare_page
from recap.show.measures import ColourJudge, contrast
from recap.show.preview import EMBED_LIMIT, embed
from recap.show.sheet import Patches
from recap.show.side_by_side import write_side_by_side
from recap.trace import Bank, Position, bank_before, has_bank, pictures_of_frames, read_seconds, read_trace
from recap.types import BackboneSpec

RECORD = "comparison.json"
SAMPLES_PER_SECOND = 2


@dataclass(frozen=True, slots=True)
class ComparisonSummary:
    """A finished comparison on disk."""

    out: Path
    runs: dict[str, Path]  # name of the memory -> folder of its run
    num_blocks: int
    num_pictures: int

    @property
    def page(self) -> Path:
        return self.out / "index.html"

    @property
    def video(self) -> Path:
        return self.out / "side-by-side.mp4"


def compare(
    config: RunConfig,
    memories: Sequence[str | Mapping[str, Any]],
    out: Path,
    progress: Progress = no_progress,
    notice: Notice = print,
    *,
    showing: Progress = no_progress,
    judge: Judge | None = None,
) -> ComparisonSummary:
    """Draw the config's script once with each memory (its own is not used) and write `out/`.

    It holds a run's folder per memory, side-by-side.mp4 and index.html. `progress` counts the blocks of all runs,
    `showing` the pictures that are then put side by side and judged: by `judge`, or by the backbone's own.
    """
    notice = each_once(notice)
    configs = _configs(_as_begun(config, out), memories)
    configs, spec = _checked(configs, notice)
    judge = judge or JUDGES.get(config.backbone.name, ColourJudge)()
    plan = make_plan([config.shots], spec, _given_frames(config, spec))
    runs = {name: out / name for name in configs}
    _claim(out, configs)
    for number, (name, own) in enumerate(configs.items()):
        blocks = _counted(progress, number, len(configs), len(plan.blocks))
        if (runs[name] / "summary.json").is_file():
            blocks(len(plan.blocks), len(plan.blocks), 0.0)
        else:
            _finish(own, runs[name], blocks, notice)
    pictures = spec.num_pictures(plan.blocks[-1].end_frame)
    shown = _ticking(showing, (1 + len(runs)) * pictures)
    clips = {name: run / "video.mp4" for name, run in runs.items()}
    write_side_by_side(out / "side-by-side.mp4", clips, shown)
    write_whole(out / "index.html", _page(configs, runs, plan, spec, judge, shown).encode())
    return ComparisonSummary(out, runs, len(plan.blocks), pictures)


def _configs(config: RunConfig, memories: Sequence[str | Mapping[str, Any]]) -> dict[str, RunConfig]:
    """A config per memory, by a name that serves as a folder's; settings are named where names alone are equal."""
    if not memories:
        raise refuse("memories", list(memories), "at least 1 is needed", "for example none,sink,recap")
    if len(config.seeds) != 1:
        limit = "a comparison draws one row per memory"
        raise refuse("seeds", list(config.seeds), limit, "give one seed")
    plain = config.to_dict()
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


def _as_begun(config: RunConfig, out: Path) -> RunConfig:
    """With the flow of a comparison that was begun, where none is asked for: weights may have come since then."""
    if config.flow == "auto" and (out / RECORD).is_file():
        begun = read_json(out / RECORD)
        if isinstance(begun, dict) and begun.get("flow") in FLOWS:
            return replace(config, flow=begun["flow"])
    return config


def _checked(configs: Mapping[str, RunConfig], notice: Notice) -> tuple[dict[str, RunConfig], BackboneSpec]:
    """All runs with one flow, and the backbone's spec; refuses what any would refuse, before the first begins."""
    first = next(iter(configs.values()))
    backbone = build_backbone(first, notice)
    for shot in first.shots:
        backbone.condition((shot.prompt,))
    flow = first.flow
    for config in configs.values():  # up to the first that needs flow, so that one notice is all
        flow = settle_flow(replace(config, flow=flow), backbone.spec, notice).flow
    settled = {name: replace(config, flow=flow) for name, config in configs.items()}
    for config in settled.values():
        build_memory(config, backbone.spec, notice=lambda _: None)
    return settled, backbone.spec


def _given_frames(config: RunConfig, spec: BackboneSpec) -> int:
    """Frames of the pictures that all runs go on from."""
    if not config.opening:
        return 0
    return spec.num_frames(read_opening(config.opening, spec, notice=lambda _: None).shape[1])


def _claim(out: Path, configs: Mapping[str, RunConfig]) -> None:
    """Make the folder, or see that it is one of this comparison."""
    if out.exists() and not out.is_dir():
        raise refuse("--out", str(out), "it is a file, and results are a folder", "choose another folder")
    if out.is_dir() and any(out.iterdir()) and not (out / RECORD).is_file():
        raise refuse("--out", str(out), "holds something that is no comparison", "choose another folder")
    for name, config in configs.items():
        begun = out / name / "run.json"
        if begun.is_file():
            about = read_json(begun)
            found = about.get("config") if isinstance(about, dict) else None
            _refuse_other(out / name, found, _as_written(config))
    shared = {
        key: value for key, value in _as_written(next(iter(configs.values()))).items() if key != "memory"
    }
    if (out / RECORD).is_file():
        remove_strays(out)
        _refuse_other(out, read_json(out / RECORD), shared)
    out.mkdir(parents=True, exist_ok=True)
    write_whole(out / RECORD, json.dumps(shared, indent=2).encode())


def _as_written(config: RunConfig) -> dict[str, Any]:
    """The config as a run's record has it."""
    return {key: json.loads(json.dumps(value)) for key, value in config.to_dict().items()}


def _refuse_other(folder: Path, found: Any, wanted: dict[str, Any]) -> None:
    if isinstance(found, dict) and found.get("flow") == "auto":
        found = {**found, "flow": wanted["flow"]}  # it never looked at flow, so any will do
    if found != wanted:
        found = found if isinstance(found, dict) else {}
        other = next((key for key in wanted if found.get(key) != wanted[key]), "config")
        limit = f"its runs were begun with other settings ({other})"
        raise refuse("--out", str(folder), limit, "choose another folder, or give the settings it began with")


def _counted(progress: Progress, number: int, runs: int, blocks: int) -> Progress:
    """Progress of one run of several, counted over all of them."""

    def report(done: int, total: int, rate: float) -> None:
        progress(number * blocks + done, runs * blocks, rate)

    return report


def _ticking(progress: Progress, total: int) -> Callable[[], None]:
    """Something to call once per picture; tells of every sixteenth, and of the last."""
    done, began = 0, time.perf_counter()

    def tick() -> None:
        nonlocal done
        done += 1
        if done % 16 == 0 or done == total:
            progress(done, total, done / (time.perf_counter() - began))

    return tick


def _finish(config: RunConfig, folder: Path, progress: Progress, notice: Notice) -> None:
    if (folder / "run.json").is_file():
        resume(folder, progress=progress, notice=notice)
        return
    if folder.is_dir():  # stopped before it was a run
        remove_strays(folder)
        (folder / LOCK).unlink(missing_ok=True)
    generate(config, folder, progress=progress, notice=notice)


def _page(
    configs: Mapping[str, RunConfig],
    runs: Mapping[str, Path],
    plan: Plan,
    spec: BackboneSpec,
    judge: Judge,
    shown: Callable[[], None],
) -> str:
    remarks: list[str] = []
    methods: list[Method] = []
    for name, run in runs.items():
        link = f"{name}/video.mp4"
        video, remark = embed(run / "video.mp4", EMBED_LIMIT // len(runs), link)
        remarks += [f"{name}: {remark}"] if remark else []
        look = _look(run, plan, spec, judge, shown)
        methods.append(_method(name, configs[name], run, spec, look, video))
    first = next(iter(configs.values()))
    settings = {key: value for key, value in _as_written(first).items() if key not in ("shots", "memory")}
    scenes = list(_scenes(plan, spec))
    seed = first.seeds[0]
    comparison = Comparison(
        title=scenes[0].prompt or "(no prompt)",
        subtitle=f"{', '.join(runs)}: the same script and seed {seed}, drawn by {spec.name}; only the memory differs",
        duration_s=_second(spec, plan.blocks[-1].end_frame),
        scenes=scenes,
        block_starts_s=[_second(spec, block.first_frame) for block in plan.blocks],
        sample_s=1 / SAMPLES_PER_SECOND,
        judge=judge,
        grid=spec.grid,
        methods=methods,
        remarks=remarks,
        settings={**settings, **versions()},
    )
    return build_compare_page(comparison)


def _second(spec: BackboneSpec, frame: int) -> float:
    """Where a frame begins."""
    return spec.num_pictures(frame) / spec.pictures_per_second


def _scenes(plan: Plan, spec: BackboneSpec) -> Iterator[Scene]:
    prompt: str | None = None
    for block in plan.blocks:
        if block.prompts[0] != prompt or block.clears_prior:
            prompt = block.prompts[0]
            yield Scene(_second(spec, block.first_frame), prompt, block.clears_prior)


def _method(name: str, config: RunConfig, run: Path, spec: BackboneSpec, look: _Look, video: str) -> Method:
    trace = read_trace(run / "trace.jsonl")
    fired = [sum(line.fired[0]) if line.fired else 0 for line in trace]
    settings = dataclasses.asdict(config.memory.settings)
    return Method(
        name=name,
        about=", ".join(
            f"{key} {value:g}" if isinstance(value, float) else f"{key} {value}"
            for key, value in settings.items()
        ),
        video=video,
        curves=look.curves,
        contrast=look.contrast,
        shares=[{role: share[0] for role, share in line.shares.items() if share} for line in trace],
        tokens={role.value: count for role, count in trace[-1].tokens.items()},
        block_s=statistics.median(read_seconds(run / "timing.jsonl")),
        fired=fired if any(line.fired for line in trace) else None,
        bank=look.bank,
        bank_about="" if look.bank is None else _about_bank(look.bank, look.subject_share, spec),
    )


def _about_bank(bank: Patches, subject_share: float | None, spec: BackboneSpec) -> str:
    """A bank of border columns is one that a camera's sway has filled; a good one shows subjects."""
    if not len(bank):
        return "Nothing in it was new."
    last = spec.grid[1] - 1
    edge = float(np.mean((bank.columns == 0) | (bank.columns == last)))
    area = 2 / spec.grid[1]
    words = f"{len(bank)} patches were new; {edge:.0%} of them lie in the first or last column ({area:.0%} by area)"
    return words + ("." if subject_share is None else f", {subject_share:.0%} show a subject.")


@dataclass(frozen=True, slots=True)
class _Look:
    """What one pass over a run's video shows."""

    curves: list[Curve]
    contrast: list[float]  # a value per sample
    bank: Patches | None
    subject_share: float | None = None  # of the bank's patches; None where nobody tells what is a subject


def _look(run: Path, plan: Plan, spec: BackboneSpec, judge: Judge, shown: Callable[[], None]) -> _Look:
    trace = read_trace(run / "trace.jsonl")
    new = {position: score for position, score in bank_before(trace, len(trace)).items() if score > 0}
    last = {frame: pictures[-1] for frame, pictures in pictures_of_frames(trace).items()}
    wanted: dict[int, list[Position]] = {}
    for position in new:
        wanted.setdefault(last[position[0]], []).append(position)
    clip, side, scenes = open_clip(run / "video.mp4"), spec.token_pixels, list(_scenes(plan, spec))
    contrasts: list[float] = []
    cut: dict[Position, Picture] = {}
    on_subject: list[bool] = []

    def samples() -> Iterator[Sample]:
        for index, picture in enumerate(clip.pictures()):
            shown()
            places = wanted.get(index, ())
            subjects = judge.subjects(torch.from_numpy(picture)) if places else None
            for frame, row, column in places:
                if subjects is not None:
                    on_subject.append(bool(subjects[row, column]))
                top, left = row * side, column * side
                cut[frame, row, column] = picture[top : top + side, left : left + side].copy()
            if index == round(len(contrasts) * clip.fps / SAMPLES_PER_SECOND):
                contrasts.append(contrast(picture))
                second = index / clip.fps
                prompt = next(s.prompt for s in reversed(scenes) if s.start_s <= second)
                yield Sample(second, prompt, torch.from_numpy(picture))

    curves = judge.curves(samples())
    share = sum(on_subject) / len(on_subject) if on_subject else None
    bank = _patches(new, cut, last, spec) if has_bank(trace) else None
    return _Look(curves, contrasts, bank, share)


def _patches(
    new: Bank, cut: Mapping[Position, Picture], last: Mapping[int, int], spec: BackboneSpec
) -> Patches:
    """The bank's tokens that were new, in order of first appearance."""
    side, positions = spec.token_pixels, sorted(new)
    frames, rows, columns = np.array(positions, np.int64).reshape(-1, 3).T
    return Patches(
        pixels=np.array([cut[position] for position in positions], np.uint8).reshape(-1, side, side, 3),
        seconds=np.array([last[int(frame)] for frame in frames]) / spec.pictures_per_second,
        frames=frames,
        rows=rows,
        columns=columns,
        scores=np.array([new[position] for position in positions], np.float32),
    )
