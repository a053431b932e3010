"""Scores a folder of videos with VBench: checks, cuts clips, scores one dimension after another, writes results.

Each dimension runs as one process in VBench's environment, so its models are freed with it, and a stopped run resumes
with the dimensions that are not finished.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from recap.errors import refuse
from recap.io.files import sha256_of
from recap.io.video import open_clip
from recap_vbench import suites
from recap_vbench.cutter import CRF, Cut, clip_label, cut_video
from recap_vbench.environment import call, installed, is_current, pins, python_of
from recap_vbench.records import Record, read_records, to_do, write_record, write_scores
from recap_vbench.scores import FUSED, MAY_DROP, dimension_score
from recap_vbench.suites import Entry, Suite

STATIC_CLIPS = 5
"""The static filter keeps at most this many clips of a prompt."""


@dataclass(frozen=True, slots=True)
class Question:
    """Says which scores a user wants of a folder of videos.

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


def judge(
    question: Question, environment: Path, out: Path, notice: Callable[[str], None] = print
) -> dict[str, Any]:
    """Score the videos, write `scores.json` in `out` and return its contents."""
    # VBench runs in a working folder of its own, so a relative path would not be found.
    out = out.expanduser().resolve()
    suite = suites.find_suite(question.suite)
    names = suites.check_dimensions(suite, question.dimensions, question.static_filter)
    # The environment takes gigabytes, so it is required only after everything else has been checked.
    suites.find_videos(question.videos, suite, suites.own_choice(suite, question.prompts))
    entries = suites.load_entries(
        suite, question.prompts, installed(environment).info if suite.official else ""
    )
    prompts = suites.digest(entries)
    if question.static_filter:
        entries = suites.for_static_filter(entries)
    found = suites.find_videos(question.videos, suite, {entry.stem for entry in entries})
    lacking = {name: suites.missing_videos(suite, entries, name, found) for name in names}
    _check_missing(suite, lacking, question.partial)
    versions = installed(environment).versions
    if not is_current(environment, pins()):
        notice("VBench's environment was made with other pins; `recap vbench setup` renews it")
    stems = {stem for stem, _ in found}
    shown = {name for entry in entries if entry.stem in stems for name in entry.dimensions}
    if left := [name for name in names if name not in shown]:
        notice(f"no video of {', '.join(left)}: left out")
    sources = {path.name: _checked(path) for path in found.values()}
    work = _Work(question, environment, suite, entries, prompts, found, sources, out)
    records = read_records(out, suite, prompts)
    keys = {name: (work.key(name, versions), not lacking[name]) for name in names if name in shown}
    failed = {}
    for number, name in enumerate(rest := to_do(out, records, keys, sources), start=1):
        notice(f"{name}: cutting and scoring ({number} of {len(rest)})")
        try:
            record = work.measure(name)
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


def _checked(path: Path) -> str:
    # A file that is not a video is refused now and not after hours of scoring.
    open_clip(path)
    return sha256_of(path, lambda size: None)


@dataclass(frozen=True)
class _Work:
    """Scores dimensions of one folder of videos; `sources` has the SHA-256 of each file."""

    question: Question
    environment: Path
    suite: Suite
    entries: list[Entry]
    digest: str
    found: Mapping[tuple[str, int], Path]
    sources: Mapping[str, str]
    out: Path

    @cached_property
    def seconds(self) -> dict[tuple[str, str], int]:
        return suites.clip_seconds(self.suite, self.entries)

    def entries_of(self, dimension: str) -> list[Entry]:
        return [entry for entry in self.entries if dimension in entry.dimensions]

    def settings(self, name: str) -> dict[str, Any]:
        """Return what the scores of a dimension depend on besides videos and versions."""
        lengths = sorted({s for (_, dimension), s in self.seconds.items() if dimension == name})
        static = self.question.static_filter and name == "temporal_flickering"
        return {"clip_seconds": lengths, "clip_crf": CRF, "static_filter": static}

    def key(self, name: str, versions: dict[str, str]) -> str:
        """Return the digest of everything that the scores of a dimension depend on."""
        stems = {entry.stem for entry in self.entries_of(name)}
        files = [path.name for (stem, _), path in self.found.items() if stem in stems]
        own = sorted((file, self.sources[file]) for file in files)
        content = [self.suite.name, self.digest, name, self.settings(name), own, versions]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def measure(self, name: str) -> Record:
        """Cut the videos of a dimension and have VBench score the clips."""
        settings, log = self.settings(name), self.out / "logs" / f"{name}.log"
        static = settings["static_filter"]
        lines, cuts = self._cut_all(name)
        with tempfile.TemporaryDirectory() as folder:
            info = Path(folder) / "info.json"
            info.write_text(json.dumps(lines), encoding="utf-8")
            firsts = [str(cut.firsts) for cut in cuts.values() if cut.firsts] if name in FUSED else []
            job = {"do": "score", "dimension": name, "info": str(info), "device": self.question.device}
            more = {"firsts": firsts, "at_most": STATIC_CLIPS if static else 0}
            result = call(self.environment, {**job, **more}, log)
        if "error" in result:
            raise refuse(name, result["error"], "VBench failed", self._remedy(result.get("module"), log))
        clips, fast = _by_video(name, cuts, result, static)
        backend = f"vbench {result['versions']['vbench']}"
        return {
            "suite": self.suite.name,
            "prompts_sha256": self.digest,
            "settings": settings,
            "num_videos_of_suite": self.suite.seeds * len({entry.stem for entry in self.entries_of(name)}),
            "versions": result["versions"],
            "device": result["device"],
            "seconds": result["seconds"],
            "overall_by_vbench": result["overall"],
            "score": dimension_score(name, backend, clips, fast, over_videos=static).as_dict(),
            "sources": {video: self.sources[video] for video in cuts},
            "clips": clips,
            "fast": fast,
        }

    def _remedy(self, module: str | None, log: Path) -> str:
        pip = f"{python_of(self.environment)} -m pip"
        if module == "detectron2":
            return f"it is not on PyPI: build it from its source, with {pip}"
        # A package may have another name than its module, so the message names none.
        repair = f"repair the environment with {pip}, or delete it and run `recap vbench setup`"
        return repair if module else f"see {log}"

    def _cut_all(self, name: str) -> tuple[list[dict[str, Any]], dict[str, Cut]]:
        """Cut the dimension's videos; return its prompts in VBench's format and the clips by video name."""
        lines, cuts = [], {}
        for entry in self.entries_of(name):
            clips: list[str] = []
            for seed in range(self.suite.seeds):
                if path := self.found.get((entry.stem, seed)):
                    label, length = clip_label(entry.text, seed), self.seconds[entry.text, name]
                    cut = cut_video(path, self.out / "clips", label, length, self.sources[path.name])
                    cuts[path.name] = cut
                    clips += map(str, cut.clips)
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
