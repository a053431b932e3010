"""Score a folder of videos with VBench: check, cut clips, score one dimension after another, write results.

Each dimension runs as one process in VBench's environment, so its models are freed with it, and a stopped run resumes
with the dimensions that are not finished.
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
from recap.io.files import sha256_of
from recap.io.video import open_clip
from recap_vbench import suites
from recap_vbench.averages import FUSED, MAY_DROP, dimension_score
from recap_vbench.cutter import CRF, Cut, clip_label, cut_video
from recap_vbench.environment import Installed, installed
from recap_vbench.records import (
    Record,
    check_videos,
    read_records,
    to_do,
    write_record,
    write_scores,
)
from recap_vbench.suites import Entry, Suite

STATIC_CLIPS = 5
"""The static filter keeps at most this many clips of a prompt."""


@dataclass(frozen=True, slots=True)
class Question:
    """Which scores a user wants of a folder of videos.

    No dimensions means all of the suite, an empty device means CUDA if VBench's torch has it. With `partial` the
    videos that exist are scored, though others are missing.
    """

    videos: Path
    suite: str
    dimensions: tuple[str, ...] = ()
    prompts: Path | None = None
    static_filter: bool = False
    partial: bool = False
    device: str = ""


@dataclass(frozen=True, slots=True)
class _Material:
    """The videos of a suite; `sources` has the SHA-256 by file name, `seconds` the clip length."""

    suite: Suite
    entries: list[Entry]
    digest: str
    found: dict[tuple[str, int], Path]
    sources: dict[str, str]
    seconds: dict[tuple[str, str], int]
    clips: Path

    def entries_of(self, dimension: str) -> list[Entry]:
        return [entry for entry in self.entries if dimension in entry.dimensions]


def judge(
    question: Question, environment: Path, out: Path, notice: Callable[[str], None] = print
) -> dict[str, Any]:
    """Score the videos, write `scores.json` in `out` and return its contents."""
    # VBench runs in a working folder of its own, so a relative path would not be found.
    out = out.expanduser().resolve()
    suite = suites.find_suite(question.suite)
    names = suites.check_dimensions(suite, question.dimensions, question.static_filter)
    suites.check_names(question.videos, suite, question.prompts)
    # The environment takes gigabytes, so it is required only after everything else has been checked.
    info = installed(environment).info if suite.official else None
    entries = suites.load_entries(suite, question.prompts, info)
    prompts = suites.digest(entries)
    if question.static_filter:
        entries = suites.for_static_filter(entries)
    found = suites.find_videos(question.videos, suite, entries)
    lacking = {name: suites.missing_videos(suite, entries, name, found) for name in names}
    _check_missing(suite, lacking, question.partial)
    inside = installed(environment)
    if not inside.current:
        notice("VBench's environment was made with other pins; `recap vbench setup` renews it")
    names = _with_videos(names, entries, found, notice)
    sources = {path.name: _checked(path) for path in found.values()}
    seconds = suites.clip_seconds(suite, entries)
    material = _Material(suite, entries, prompts, found, sources, seconds, out / "clips")
    records = read_records(out, suite, prompts)
    check_videos(out, records, sources)
    settings = {name: _settings(name, question, material) for name in names}
    keys = {name: (_key(name, settings[name], material, inside), not lacking[name]) for name in names}
    failed = {}
    for number, name in enumerate(rest := to_do(out, records, keys), start=1):
        notice(f"{name}: cutting and scoring ({number} of {len(rest)})")
        try:
            record = _measure(name, settings[name], material, question, inside, out / "logs" / f"{name}.log")
        except ValueError as error:
            failed[name] = str(error)
            notice(f"{name}: {error}")
            continue
        write_record(out, suite, name, {"key": keys[name][0], "complete": keys[name][1], **record})
        write_scores(out, suite, prompts)
    if failed:
        limit = f"{len(failed)} of {len(rest)} dimensions failed: {next(iter(failed.values()))}"
        remedy = f"the others are in {out}; fix that, and the same command resumes"
        raise refuse("vbench run", ", ".join(failed), limit, remedy)
    return write_scores(out, suite, prompts)


def _check_missing(suite: Suite, lacking: Mapping[str, Sequence[str]], partial: bool) -> None:
    for name, files in lacking.items():
        if files and not partial:
            limit = f"{len(files)} videos of {suite.name} are missing, the first {files[0]!r}"
            remedy = "generate them, name other dimensions, or score the existing ones with --partial"
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
    # A file that is not a video is refused now and not after hours of scoring.
    open_clip(path)
    return sha256_of(path, lambda size: None)


def _settings(name: str, question: Question, material: _Material) -> dict[str, Any]:
    lengths = sorted({s for (_, dimension), s in material.seconds.items() if dimension == name})
    static = question.static_filter and name == "temporal_flickering"
    return {"clip_seconds": lengths, "clip_crf": CRF, "static_filter": static}


def _key(name: str, settings: dict[str, Any], material: _Material, inside: Installed) -> str:
    stems = {entry.stem for entry in material.entries_of(name)}
    files = [path.name for (stem, _), path in material.found.items() if stem in stems]
    own = sorted((file, material.sources[file]) for file in files)
    content = [material.suite.name, material.digest, name, settings, own, inside.versions]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _measure(
    name: str,
    settings: dict[str, Any],
    material: _Material,
    question: Question,
    inside: Installed,
    log: Path,
) -> Record:
    static = settings["static_filter"]
    lines, cuts = _cut_all(name, material)
    firsts = [str(cut.firsts) for cut in cuts.values() if cut.firsts] if name in FUSED else []
    with tempfile.TemporaryDirectory() as folder:
        info = Path(folder) / "info.json"
        info.write_text(json.dumps(lines), encoding="utf-8")
        job = {
            "do": "score",
            "dimension": name,
            "info": str(info),
            "device": question.device,
            "firsts": firsts,
        }
        result = inside.call({**job, "static": {"at_most": STATIC_CLIPS} if static else None}, log)
    if "error" in result:
        raise refuse(name, result["error"], "VBench failed", _remedy(result.get("module"), inside, log))
    clips, fast = _by_video(name, cuts, result, static)
    score = dimension_score(name, f"vbench {result['versions']['vbench']}", clips, fast, over_videos=static)
    num_prompts = len({entry.stem for entry in material.entries_of(name)})
    return {
        "suite": material.suite.name,
        "prompts_sha256": material.digest,
        "settings": settings,
        "num_videos_of_suite": material.suite.seeds * num_prompts,
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
    if module:
        # A package may have another name than its module, so the message names none.
        return (
            f"repair the environment with {inside.python} -m pip, or delete it and run `recap vbench setup`"
        )
    return f"see {log}"


def _cut_all(name: str, material: _Material) -> tuple[list[dict[str, Any]], dict[str, Cut]]:
    """Cut the dimension's videos; return its prompts in VBench's format and the clips by video name."""
    lines, cuts = [], {}
    for entry in material.entries_of(name):
        clips: list[str] = []
        for seed in range(material.suite.seeds):
            path = material.found.get((entry.stem, seed))
            if path is None:
                continue
            length = material.seconds[entry.text, name]
            label = clip_label(entry.text, seed)
            cuts[path.name] = cut_video(path, material.clips, label, length, material.sources[path.name])
            clips += [str(clip) for clip in cuts[path.name].clips]
        line: dict[str, Any] = {"prompt_en": entry.text, "dimension": [name], "video_list": clips}
        if name in entry.labels:
            line["auxiliary_info"] = {name: entry.labels[name]}
        if clips:
            lines.append(line)
    return lines, cuts


def _by_video(
    name: str, cuts: Mapping[str, Cut], result: dict[str, Any], static: bool
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Sort VBench's values by video and clip; refuse a clip without one, unless VBench may drop it."""
    values: dict[str, float] = dict(result["clips"])
    missing = [str(clip) for cut in cuts.values() for clip in cut.clips if str(clip) not in values]
    if missing and name not in MAY_DROP and not static:
        limit = f"{len(missing)} clips have no value, the first {missing[0]!r}"
        raise refuse(name, f"{len(values)} values", limit, "check whether these clips can be played")
    if static and not values:
        raise refuse(name, "no clip", "the static filter left no clip", "leave --static-filter out")
    clips = {video: [values[str(c)] for c in cut.clips if str(c) in values] for video, cut in cuts.items()}
    of_firsts: dict[str, float] = dict(result["fast"])
    fast = {video: of_firsts[str(cut.firsts)] for video, cut in cuts.items() if str(cut.firsts) in of_firsts}
    if name in FUSED and len(fast) != sum(cut.firsts is not None for cut in cuts.values()):
        limit = "a video of several clips has no fast value"
        raise refuse(name, f"{len(fast)} fast values", limit, "look at the log")
    return clips, fast
