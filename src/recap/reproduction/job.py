"""One job of a reproduction: draw a run, or go on with it, and score its files.

The result depends on the job's data alone: which judges look at the video is part of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from recap.backbones.tiny.witness import build_probe_witness
from recap.config import RunConfig
from recap.eval.embedders import build_embedder
from recap.eval.metrics.bank import bank_story, held_before
from recap.eval.metrics.consistency import consistency
from recap.eval.metrics.dynamic_degree import CLIP_S, dynamic_degree
from recap.eval.metrics.flickering import temporal_flickering
from recap.eval.metrics.identity import PER_SECOND, identity
from recap.eval.metrics.motion import motion
from recap.eval.metrics.reappearance import reappearance, slots_from, starts_from_trace
from recap.eval.metrics.retention import retention
from recap.eval.qwen import QwenDetector
from recap.eval.sampling import sample_clip
from recap.eval.scores import Score
from recap.eval.witnesses import CropWitness, FrameWitness, Witness
from recap.files import remove_strays
from recap.flow import build_flow
from recap.recipes.tables import Planned, Recipe
from recap.run import LOCK, generate, resume
from recap.sweep.jobs import Job, Result
from recap.trace import read_lines
from recap.video import Clip, open_clip

LENGTHS_S = (5, 10, 20, 30, 45, 60)
FULL_WINDOW = 3  # blocks after which every part of the window is there


def job_of(planned: Planned, recipe: Recipe, embedder: str, detector: str = "") -> Job:
    data = {
        "config": planned.config.to_dict(),
        "measures": list(recipe.measures),
        "subject": planned.script.subject,
        "embedder": embedder,
        "detector": detector,
    }
    return Job(planned.row.name, planned.script.name, planned.seed, data)


def draw_and_score(payload: dict[str, Any], folder: str) -> Result:
    """The work of a sweep: the scores of one run, by name."""
    data = payload["data"]
    config = RunConfig.from_dict(data["config"])
    place = Path(folder)
    _draw(config, place)
    seen = _Seen(config, place, data["subject"], data["embedder"], data["detector"])
    scores = [score for measure in data["measures"] for score in MEASURES[measure](seen)]
    return {"scores": {score.name: score.as_dict() for score in scores}}


def _draw(config: RunConfig, folder: Path) -> None:
    if (folder / "run.json").is_file():
        resume(folder, notice=lambda _: None)
    else:
        if folder.is_dir():  # stopped before it was a run
            remove_strays(folder)
            (folder / LOCK).unlink(missing_ok=True)
        generate(config, folder, notice=lambda _: None)
    # Only a run that goes on needs its state, and a sweep has hundreds of them.
    (folder / "state.safetensors").unlink(missing_ok=True)


class _Seen:
    """A finished run and who judges it; everything is read when it is asked for."""

    def __init__(self, config: RunConfig, folder: Path, subject: str, embedder: str, detector: str):
        self.config, self.folder, self.subject = config, folder, subject
        self.video = folder / "video.mp4"
        self.frame: Witness = FrameWitness(_embedder(embedder, config.device))
        self.subject_witness = _subject_witness(config, embedder, detector)
        self.embedder = embedder

    @property
    def trace(self) -> list[dict[str, Any]]:
        return read_lines(self.folder / "trace.jsonl")

    @property
    def clip(self) -> Clip:
        return open_clip(self.video)

    @property
    def num_pictures(self) -> int:
        return self.clip.num_pictures or sum(1 for _ in self.clip.pictures())

    @property
    def witnesses(self) -> list[tuple[str, Witness]]:
        own = [("subject", self.subject_witness)] if self.subject_witness is not None else []
        return [*own, ("frame", self.frame)]


@cache
def _embedder(name: str, device: str) -> Any:
    return build_embedder(name, device=device)


@cache
def _probe() -> Witness:
    return build_probe_witness()


@cache
def _qwen(device: str) -> QwenDetector:
    return QwenDetector(device=device)


def _subject_witness(config: RunConfig, embedder: str, detector: str) -> Witness | None:
    """Who looks for the subject alone: the embedded world has its probe, others need a detector."""
    if config.backbone.name == "embedded":
        return _probe()
    return CropWitness(_qwen(config.device), _embedder(embedder, config.device)) if detector else None


def _identity(seen: _Seen) -> list[Score]:
    sampled = sample_clip(seen.video, PER_SECOND)
    return [identity(sampled, w, seen.subject, f"identity_{name}") for name, w in seen.witnesses]


def _retention(seen: _Seen) -> list[Score]:
    sampled = sample_clip(seen.video, 1)
    scores = []
    for name, witness in seen.witnesses:
        whole = retention(sampled, witness, seen.subject)
        for when in ("start", "mid", "end"):
            details = whole.details if when == "end" else {}
            scores.append(
                Score(f"retention_{name}_{when}", whole.details[when], whole.backend, whole.n, details)
            )
    return scores


def _reappearance(seen: _Seen) -> list[Score]:
    sampled, trace = sample_clip(seen.video, PER_SECOND), seen.trace
    frames = [line["first_frame"] for line in trace]
    per_frame = (seen.num_pictures - 1) // (frames[-1] + frames[1] - frames[0] - 1)
    starts = starts_from_trace(trace, seen.clip.fps, per_frame)
    scores = []
    for name, witness in seen.witnesses:
        score = reappearance(
            sampled, witness, seen.subject, starts, f"reappearance_{name}", presence=seen.subject_witness
        )
        scores.append(score)
    if seen.subject_witness is not None:
        details, backend = scores[0].details, scores[0].backend
        for segment in "BCD":
            scores.append(Score(f"found_in_{segment}", details["found_share"][segment], backend))
        scores.append(Score("verified", float(details["verified"]), backend))
        value = scores[0].value if details["verified"] else None
        scores.append(Score("reappearance_subject_verified", value, backend, scores[0].n))
    cuts = [index for index, line in enumerate(trace) if line["clears_prior"]]
    if any("admitted" in line for line in trace):
        held = held_before(trace, cuts[2])
        count = slots_from(held, frames[cuts[0]], frames[cuts[1]])
        scores.append(Score("bank_slots_from_B", float(count), "native", len(held)))
    return scores


def _dynamics(seen: _Seen) -> list[Score]:
    clip, num = seen.clip, seen.num_pictures
    # VBench's own embedders differ for the two; without them, things for the subject and colours for the rest.
    return [
        temporal_flickering(clip, num),
        dynamic_degree(clip, num, build_flow("classical"), "dis"),
        consistency(clip, num, "subject", _embedder(seen.embedder, seen.config.device)),
        consistency(clip, num, "background", _embedder("hsv", "cpu")),
    ]


def _length(seen: _Seen) -> list[Score]:
    whole = dynamic_degree(seen.clip, seen.num_pictures, build_flow("classical"), "dis")
    clips = whole.details["clips"]
    return [
        Score(f"dynamic_degree_{s}s", float(np.mean(clips[: max(1, s // CLIP_S)])), "dis", s // CLIP_S)
        for s in LENGTHS_S
        if s // CLIP_S <= len(clips)
    ]


def _motion(seen: _Seen) -> list[Score]:
    return motion(seen.clip.pictures(), build_flow("classical"), "dis")


def _bank(seen: _Seen) -> list[Score]:
    if not any("admitted" in line for line in seen.trace):
        return []
    story = bank_story(seen.trace)
    details = {"overlap": story.overlap, "ages": story.age_histogram, "complete": story.complete}
    values = (
        ("bank_overlap", story.overlap[-1]), ("bank_overlap_lowest", min(story.overlap)),
        ("bank_mean_age", story.mean_age), ("bank_age_ks", story.uniform_distance),
        ("bank_evicted_below_cutoff", story.evicted_below_cutoff), ("bank_cutoff", story.cutoff),
    )  # fmt: skip
    return [Score(name, value, "native", story.capacity, details) for name, value in values]


def _attention(seen: _Seen) -> list[Score]:
    shares = [line["attention_share"] for line in seen.trace[FULL_WINDOW:]] or [
        seen.trace[-1]["attention_share"]
    ]
    roles = dict.fromkeys(role for share in shares for role in share)
    return [
        Score(
            f"attention_{role}",
            float(np.mean([s.get(role, [0.0])[0] for s in shares])),
            "native",
            len(shares),
        )
        for role in roles
    ]


def _time(seen: _Seen) -> list[Score]:
    """Of drawing alone, blocks from the fourth on; the slope tells whether a later block costs more."""
    seconds = np.array([line["seconds"] for line in read_lines(seen.folder / "timing.jsonl")])
    steady = seconds[FULL_WINDOW:] if len(seconds) > FULL_WINDOW + 1 else seconds
    slope = float(np.polyfit(np.arange(len(steady)), steady, 1)[0]) if len(steady) > 1 else None
    values = (
        ("seconds", float(seconds.sum())),
        ("block_s", float(np.median(steady))),
        ("block_slope_s", slope),
    )
    return [Score(name, value, "native", len(seconds)) for name, value in values]


MEASURES: dict[str, Callable[[_Seen], list[Score]]] = {
    "identity": _identity, "retention": _retention, "reappearance": _reappearance, "dynamics": _dynamics,
    "length": _length, "motion": _motion, "bank": _bank, "attention": _attention, "time": _time,
}  # fmt: skip
