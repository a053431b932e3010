"""A folder of videos through VBench: check all, cut, let VBench judge dimension by dimension, write down.

A dimension is one process in VBench's environment, so its models leave with it, and a stopped run goes on with the
dimensions that are not finished.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recap.errors import refuse
from recap.eval.vbench.averages import FUSED, MAY_DROP, dimension_score
from recap.eval.vbench.cutter import CRF, Cut, clip_label, cut_video
from recap.eval.vbench.environment import Installed, installed
from recap.eval.vbench.records import (
    Record,
    check_videos,
    read_records,
    to_do,
    write_record,
    write_scores,
)
from recap.eval.vbench.suites import (
    Entry,
    Suite,
    check_dimensions,
    check_names,
    clip_seconds,
    digest,
    find_suite,
    find_videos,
    for_static_filter,
    load_entries,
    missing_videos,
)
from recap.io.files import sha256_of
from recap.io.video import open_clip

STATIC_CLIPS = 5
"""The static filter keeps no more of a prompt."""


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked of a folder of videos."""

    videos: Path
    suite: str
    dimensions: tuple[str, ...] = ()  # all of the suite
    prompts: Path | None = None
    static_filter: bool = False
    partial: bool = False  # judge what there is where videos are missing
    device: str = ""  # cuda where VBench's torch has it


@dataclass(frozen=True, slots=True)
class _Material:
    suite: Suite
    entries: list[Entry]
    digest: str
    found: dict[tuple[str, int], Path]
    sources: dict[str, str]  # SHA-256 by file name
    seconds: dict[tuple[str, str], int]
    clips: Path


def judge(
    question: Question, environment: Path, out: Path, notice: Callable[[str], None] = print
) -> dict[str, Any]:
    """Judge the videos and write `scores.json` in `out`; returns what it holds."""
    out = out.expanduser().resolve()  # VBench runs in a folder of its own
    suite = find_suite(question.suite)
    names = check_dimensions(suite, question.dimensions, question.static_filter)
    check_names(question.videos, suite, question.prompts)
    # The environment is gigabytes: asked for when nothing more can be said without it.
    info = installed(environment).info if suite.official else None
    entries = load_entries(suite, question.prompts, info)
    prompts = digest(entries)
    if question.static_filter:
        entries = for_static_filter(entries)
    found = find_videos(question.videos, suite, entries)
    lacking = {name: missing_videos(suite, entries, name, found) for name in names}
    _check_missing(suite, lacking, question.partial)
    inside = installed(environment)
    if not inside.current:
        notice("VBench's environment was made with other pins; `recap vbench setup` renews it")
    names = _with_videos(names, entries, found, notice)
    sources = {path.name: _checked(path) for path in found.values()}
    material = _Material(suite, entries, prompts, found, sources, clip_seconds(suite, entries), out / "clips")
    records = read_records(out, suite, material.digest)
    check_videos(out, records, sources)
    settings = {name: _settings(name, question, material) for name in names}
    keys = {name: (_key(name, settings[name], material, inside), not lacking[name]) for name in names}
    failed = {}
    for name in (rest := to_do(out, records, keys)):
        notice(f"{name}: cutting and judging ({rest.index(name) + 1} of {len(rest)})")
        try:
            record = _measure(name, settings[name], material, question, inside, out / "logs" / f"{name}.log")
        except ValueError as error:
            failed[name] = str(error)
            notice(f"{name}: {error}")
            continue
        write_record(out, suite, name, {"key": keys[name][0], "complete": keys[name][1], **record})
        write_scores(out, suite, material.digest)
    if failed:
        limit = f"{len(failed)} of {len(rest)} dimensions failed: {next(iter(failed.values()))}"
        remedy = f"the others are in {out}; mend that and the same command goes on"
        raise refuse("vbench run", ", ".join(failed), limit, remedy)
    return write_scores(out, suite, material.digest)


def _check_missing(suite: Suite, lacking: Mapping[str, Sequence[str]], partial: bool) -> None:
    for name, files in lacking.items():
        if files and not partial:
            limit = f"{len(files)} videos of {suite.name} are missing, the first {files[0]!r}"
            remedy = "draw them, name other dimensions, or score what there is by --partial"
            raise refuse("videos", name, limit, remedy)


def _with_videos(
    names: Sequence[str],
    entries: Sequence[Entry],
    found: Mapping[tuple[str, int], Path],
    notice: Callable[[str], None],
) -> tuple[str, ...]:
    stems = {stem for stem, _ in found}
    kept = tuple(n for n in names if any(n in e.dimensions and e.stem in stems for e in entries))
    if left := [name for name in names if name not in kept]:
        notice(f"no video of {', '.join(left)}: left out")
    return kept


def _checked(path: Path) -> str:
    open_clip(path)  # refuses what is no video, before the hours and not after
    return sha256_of(path, lambda size: None)


def _settings(name: str, question: Question, material: _Material) -> dict[str, Any]:
    lengths = sorted({s for (_, dimension), s in material.seconds.items() if dimension == name})
    static = question.static_filter and name == "temporal_flickering"
    return {"clip_seconds": lengths, "clip_crf": CRF, "static_filter": static}


def _key(name: str, settings: dict[str, Any], material: _Material, inside: Installed) -> str:
    needed = {entry.stem for entry in material.entries if name in entry.dimensions}
    own = sorted(
        (path.name, material.sources[path.name])
        for (stem, _), path in material.found.items()
        if stem in needed
    )
    asked = [material.suite.name, material.digest, name, settings, own, inside.versions]
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()


def _measure(
    name: str,
    settings: dict[str, Any],
    material: _Material,
    question: Question,
    inside: Installed,
    log: Path,
) -> Record:
    static = settings["static_filter"]
    rows, cuts = _cut_all(name, material)
    with tempfile.TemporaryDirectory() as folder:
        info = Path(folder) / "info.json"
        info.write_text(json.dumps(rows), encoding="utf-8")
        firsts = [str(cut.firsts) for cut in cuts.values() if cut.firsts] if name in FUSED else []
        result = inside.call(
            {
                "do": "score",
                "dimension": name,
                "info": str(info),
                "device": question.device,
                "firsts": firsts,
                "static": {"at_most": STATIC_CLIPS} if static else None,
            },
            log,
        )
    if "error" in result:
        raise refuse(name, result["error"], "VBench failed", _remedy(result.get("module"), inside, log))
    clips, fast = _sorted_out(name, cuts, result, static)
    score = dimension_score(name, f"vbench {result['versions']['vbench']}", clips, fast, over_videos=static)
    return {
        "suite": material.suite.name,
        "prompts_sha256": material.digest,
        "settings": settings,
        "num_videos_of_suite": material.suite.seeds
        * len({entry.stem for entry in material.entries if name in entry.dimensions}),
        "versions": result["versions"],
        "device": result["device"],
        "seconds": result["seconds"],
        "overall_by_vbench": result["overall"],
        "score": score.as_dict(),
        "sources": {video: material.sources[video] for video in cuts},
        "clips": clips,
        "fast": fast,
    }


def _remedy(module: str | None, inside: Installed, log: Path) -> str:
    if module == "detectron2":
        return f"it is not on PyPI: build it from its source, with {inside.python} -m pip"
    if module:  # packages are not always called like their modules, so none is named
        return f"mend the environment with {inside.python} -m pip, or delete it and run `recap vbench setup`"
    return f"see {log}"


def _cut_all(name: str, material: _Material) -> tuple[list[dict[str, Any]], dict[str, Cut]]:
    """The dimension's rows as VBench's functions read them, and the clips of every video by its name."""
    rows, cuts = [], {}
    for entry in material.entries:
        if name not in entry.dimensions:
            continue
        clips: list[str] = []
        for seed in range(material.suite.seeds):
            path = material.found.get((entry.stem, seed))
            if path is None:
                continue
            length = material.seconds[entry.text, name]
            label = clip_label(entry.text, seed)
            cuts[path.name] = cut_video(path, material.clips, label, length, material.sources[path.name])
            clips += [str(clip) for clip in cuts[path.name].clips]
        row: dict[str, Any] = {"prompt_en": entry.text, "dimension": [name], "video_list": clips}
        if name in entry.labels:
            row["auxiliary_info"] = {name: entry.labels[name]}
        if clips:
            rows.append(row)
    return rows, cuts


def _sorted_out(
    name: str, cuts: Mapping[str, Cut], result: dict[str, Any], static: bool
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """VBench's values by video, in the order of clips; a clip without one is refused, unless VBench may drop it."""
    values: dict[str, float] = dict(result["clips"])
    missing = [str(clip) for cut in cuts.values() for clip in cut.clips if str(clip) not in values]
    if missing and name not in MAY_DROP and not static:
        limit = f"{len(missing)} clips have no value, the first {missing[0]!r}"
        raise refuse(name, f"{len(values)} values", limit, "look whether these clips can be played")
    if static and not values:
        limit = "the static filter left no clip"
        raise refuse(name, "no clip", limit, "leave --static-filter out")
    clips = {
        video: [values[str(clip)] for clip in cut.clips if str(clip) in values] for video, cut in cuts.items()
    }
    fast_values: dict[str, float] = dict(result["fast"])
    fast = {
        video: fast_values[str(cut.firsts)] for video, cut in cuts.items() if str(cut.firsts) in fast_values
    }
    if name in FUSED and len(fast) != sum(cut.firsts is not None for cut in cuts.values()):
        limit = "a video of several clips has no fast value"
        raise refuse(name, f"{len(fast)} fast values", limit, "look at the log")
    return clips, fast
