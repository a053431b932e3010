"""The same script, seed and backbone with several memories, and one page to look at.

A comparison is a folder of runs. Finished runs are kept and stopped ones continued, so a comparison that was
stopped goes on when it is asked for again, and a memory can be added to a finished one.
"""

from __future__ import annotations

import dataclasses
import json
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from recap.config import DTYPES, RunConfig, read_json
from recap.errors import refuse
from recap.files import remove_strays, write_whole
from recap.flow import resolve_flow
from recap.plan import Plan, make_plan
from recap.registry import load_backbone
from recap.run import LOCK, Notice, Progress, build_memory, generate, no_progress, resume, versions
from recap.show.compare_page import Comparison, Method, Scene, build_compare_page
from recap.show.measures import COLOURS, Judge, contrast
from recap.show.preview import EMBED_LIMIT, embed
from recap.show.sheet import Patches
from recap.show.side_by_side import write_side_by_side
from recap.trace import read_lines
from recap.types import BackboneSpec
from recap.video import Picture, open_clip

RECORD = "comparison.json"
SAMPLES_PER_SECOND = 2

Held = dict[tuple[int, int, int], float]
"""What a bank holds: (frame, row, column) -> score."""


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
    judge: Judge = COLOURS,
) -> ComparisonSummary:
    """Draw the config's script once with each memory (its own is not used) and write `out/`.

    It holds a run's folder per memory, side-by-side.mp4 and index.html. Progress counts the blocks of all runs.
    """
    configs = _configs(config, memories)
    spec = _checked(configs.values())
    plan = make_plan([config.shots], spec)
    runs = {name: out / name for name in configs}
    _claim(out, configs)
    for number, (name, own) in enumerate(configs.items()):
        _finish(own, runs[name], _counted(progress, number, len(configs), len(plan.blocks)), notice)
    write_side_by_side(out / "side-by-side.mp4", {name: run / "video.mp4" for name, run in runs.items()})
    page = _page(configs, runs, plan, spec, judge)
    write_whole(out / "index.html", page.encode())
    pictures = spec.num_pictures(len(plan.blocks) * spec.frames_per_block)
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


def _checked(configs: Iterable[RunConfig]) -> BackboneSpec:
    """The spec of the backbone; refuses what any of the runs would refuse, before the first of them begins."""
    configs = list(configs)
    first = configs[0]
    backbone = load_backbone(first.backbone, device=first.device, dtype=DTYPES[first.dtype])
    for shot in first.shots:
        backbone.condition((shot.prompt,))
    for config in configs:
        build_memory(config, backbone.spec, notice=lambda _: None)
    return backbone.spec


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
    plain = replace(config, flow=resolve_flow(config.flow)).to_dict()
    return {key: json.loads(json.dumps(value)) for key, value in plain.items()}


def _refuse_other(folder: Path, found: Any, wanted: dict[str, Any]) -> None:
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


def _finish(config: RunConfig, folder: Path, progress: Progress, notice: Notice) -> None:
    if (folder / "summary.json").is_file():
        return
    if (folder / "run.json").is_file():
        resume(folder, progress=progress, notice=notice)
        return
    if folder.is_dir():  # stopped before it was a run
        remove_strays(folder)
        (folder / LOCK).unlink(missing_ok=True)
    generate(config, folder, progress=progress, notice=notice)


def replay_bank(trace: Sequence[Mapping[str, Any]]) -> Held | None:
    """What the bank of row 0 holds after the last block of a trace; None of a memory that has no bank."""
    if not any("admitted" in line for line in trace):
        return None
    held: Held = {}
    for line in trace:
        for frame, row, column, _ in line.get("evicted", [[]])[0]:
            del held[frame, row, column]
        held |= {(frame, row, column): score for frame, row, column, score in line.get("admitted", [[]])[0]}
    return held


def _page(
    configs: Mapping[str, RunConfig],
    runs: Mapping[str, Path],
    plan: Plan,
    spec: BackboneSpec,
    judge: Judge,
) -> str:
    remarks: list[str] = []
    methods: list[Method] = []
    for name, run in runs.items():
        link = f"{name}/video.mp4"
        video, remark = embed(run / "video.mp4", EMBED_LIMIT // len(runs), link)
        remarks += [f"{name}: {remark}"] if remark else []
        methods.append(_method(name, configs[name], run, spec, judge, video))
    first = next(iter(configs.values()))
    settings = {key: value for key, value in _as_written(first).items() if key not in ("shots", "memory")}
    scenes = list(_scenes(plan, spec))
    seed = first.seeds[0]
    comparison = Comparison(
        title=scenes[0].prompt or "(no prompt)",
        subtitle=f"{', '.join(runs)}: the same script and seed {seed}, drawn by {spec.name}; only the memory differs",
        duration_s=_second(spec, len(plan.blocks)),
        scenes=scenes,
        block_starts_s=[_second(spec, block.index) for block in plan.blocks],
        sample_s=1 / SAMPLES_PER_SECOND,
        judge=judge,
        grid=spec.grid,
        methods=methods,
        remarks=remarks,
        settings={**settings, **versions()},
    )
    return build_compare_page(comparison)


def _second(spec: BackboneSpec, block: int) -> float:
    """Where a block begins."""
    return spec.num_pictures(block * spec.frames_per_block) / spec.pictures_per_second


def _scenes(plan: Plan, spec: BackboneSpec) -> Iterator[Scene]:
    prompt: str | None = None
    for block in plan.blocks:
        if block.prompts[0] != prompt or block.clears_prior:
            prompt = block.prompts[0]
            yield Scene(_second(spec, block.index), prompt, block.clears_prior)


def _method(name: str, config: RunConfig, run: Path, spec: BackboneSpec, judge: Judge, video: str) -> Method:
    trace = read_lines(run / "trace.jsonl")
    held = replay_bank(trace)
    new = {place: score for place, score in (held or {}).items() if score > 0}
    likeness, contrasts, cut = _look(run / "video.mp4", spec, judge, list(new))
    fired = [sum(line["fired_tokens"][0]) if "fired_tokens" in line else 0 for line in trace]
    settings = dataclasses.asdict(config.memory.settings)
    return Method(
        name=name,
        about=", ".join(
            f"{key} {value:g}" if isinstance(value, float) else f"{key} {value}"
            for key, value in settings.items()
        ),
        video=video,
        likeness=likeness,
        contrast=contrasts,
        shares=[{role: share[0] for role, share in line["attention_share"].items()} for line in trace],
        tokens=trace[-1]["attended_tokens"],
        block_s=statistics.median(line["seconds"] for line in read_lines(run / "timing.jsonl")),
        fired=fired if any("fired_tokens" in line for line in trace) else None,
        bank=None if held is None else _patches(new, cut, spec),
    )


def _look(
    video: Path, spec: BackboneSpec, judge: Judge, places: Sequence[tuple[int, int, int]]
) -> tuple[list[float], list[float], dict[tuple[int, int, int], Picture]]:
    """Likeness and contrast at every sample, and the pixels of the tokens at these places, in one pass."""
    clip, side = open_clip(video), spec.token_pixels
    wanted: dict[int, list[tuple[int, int, int]]] = {}
    for place in places:
        wanted.setdefault(place[0] * spec.pictures_per_frame, []).append(place)
    likeness: list[float] = []
    contrasts: list[float] = []
    cut: dict[tuple[int, int, int], Picture] = {}
    opening: Picture | None = None
    for index, picture in enumerate(clip.pictures()):
        opening = picture if opening is None else opening
        if index == round(len(likeness) * clip.fps / SAMPLES_PER_SECOND):
            likeness.append(judge.likeness(opening, picture))
            contrasts.append(contrast(picture))
        for frame, row, column in wanted.get(index, ()):
            top, left = row * side, column * side
            cut[frame, row, column] = picture[top : top + side, left : left + side].copy()
    return likeness, contrasts, cut


def _patches(held: Held, cut: Mapping[tuple[int, int, int], Picture], spec: BackboneSpec) -> Patches:
    """What the bank holds and was new, in order of first appearance."""
    side, places = spec.token_pixels, sorted(held)
    frames, rows, columns = np.array(places, np.int64).reshape(-1, 3).T
    return Patches(
        pixels=np.array([cut[place] for place in places], np.uint8).reshape(-1, side, side, 3),
        seconds=frames * spec.pictures_per_frame / spec.pictures_per_second,
        frames=frames,
        rows=rows,
        columns=columns,
        scores=np.array([held[place] for place in places], np.float32),
    )
