"""What is measured of one run: its pictures, from a file or as they were drawn, and its trace, to scores by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from functools import cache, cached_property
from typing import Any

import numpy as np

from recap.backbones.tiny.vocabulary import parse_prompt
from recap.config import RunConfig
from recap.eval.embedders import Remembering, build_embedder
from recap.eval.judges.witness import ProbeWitness, build_probe_witness
from recap.eval.metrics.bank import bank_story
from recap.eval.metrics.consistency import consistency
from recap.eval.metrics.dynamic_degree import CLIP_S, dynamic_degree
from recap.eval.metrics.flickering import temporal_flickering
from recap.eval.metrics.identity import PER_SECOND, identity
from recap.eval.metrics.motion import motion
from recap.eval.metrics.presence import LEAVING_S, Stretch, presence, stretches
from recap.eval.metrics.reappearance import SETTLING_S, reappearance, slots_from, starts_from_trace
from recap.eval.metrics.retention import retention
from recap.eval.metrics.subject_motion import subject_motion
from recap.eval.motion_judge import USUAL, MotionJudge, build_motion_judge
from recap.eval.qwen import QwenDetector
from recap.eval.sampling import Drawn, Sampled, Span, sample_clip
from recap.eval.scores import Score
from recap.eval.witnesses import CropWitness, Embedder, FrameWitness, Witness
from recap.io.video import Clip
from recap.trace import BlockTrace, Position, bank_before, has_bank, pictures_of_frames

LENGTHS_S = (5, 10, 20, 30, 45, 60)
SHORT_BY_S = 1.0
"""A video of a length may lack so much of it: whole blocks are drawn, so up to half a block and the first frame's."""
FULL_WINDOW = 3  # blocks after which every part of the window is there


class Seen:
    """A finished run and who judges it. What several measures need is made once, when it is first asked for.

    `data` is a job's. `seconds` is the time of every block; there is none where many runs were drawn at once, and
    then nothing is said of it. `embedder` is given where pictures were embedded elsewhere.
    """

    def __init__(
        self,
        data: Mapping[str, Any],
        clip: Clip | Drawn,
        trace: Sequence[BlockTrace],
        seconds: Sequence[float] = (),
        embedder: Embedder | None = None,
    ):
        self.clip, self.trace, self.seconds = clip, trace, seconds
        self.subject: str = data["subject"]
        self.late_subject: str = data.get("late_subject", "")
        self._judge_flow: str = data.get("judge_flow", USUAL)
        config = RunConfig.from_dict(data["config"])
        self._device = config.device
        self.embedder: Embedder = Remembering(embedder or _embedder(data["embedder"], config.device))
        colours = _embedder("hsv", "cpu")
        self.colours = self.embedder if self.embedder.backend == colours.backend else Remembering(colours)
        self.subject_witness = _subject_witness(config, self.embedder, data["detector"])

    @cached_property
    def num_pictures(self) -> int:
        return self.clip.num_pictures or sum(1 for _ in self.clip.pictures())

    @cached_property
    def sampled(self) -> Sampled:
        return sample_clip(self.clip, PER_SECOND)

    @cached_property
    def stretches(self) -> list[Stretch]:
        return stretches(self.trace, self.clip.fps, self.sampled.duration_s)

    @property
    def motion_judge(self) -> MotionJudge:
        return _motion_judge(self._judge_flow, self._device)

    @cached_property
    def dynamic_degree(self) -> Score:
        return dynamic_degree(self.clip, self.num_pictures, *self.motion_judge)

    @property
    def witnesses(self) -> list[tuple[str, Witness]]:
        own = [("subject", self.subject_witness)] if self.subject_witness is not None else []
        return [*own, ("frame", FrameWitness(self.embedder))]


def score(seen: Seen, measures: Sequence[str]) -> dict[str, list[Score]]:
    """What every measure says of a run."""
    return {measure: MEASURES[measure](seen) for measure in measures}


def as_result(scores: Mapping[str, Sequence[Score]], measures: Sequence[str]) -> dict[str, Any]:
    """A job's result, of the measures that it asked for."""
    return {"scores": {each.name: each.as_dict() for measure in measures for each in scores[measure]}}


@cache
def _embedder(name: str, device: str) -> Embedder:
    return build_embedder(name, device=device)


@cache
def _motion_judge(name: str, device: str) -> MotionJudge:
    return build_motion_judge(name, device=device)


@cache
def _probe() -> Witness:
    return build_probe_witness()


@cache
def _qwen(source: str, device: str) -> QwenDetector:
    return QwenDetector(source, device)


def _subject_witness(config: RunConfig, embedder: Embedder, detector: str) -> Witness | None:
    """Who looks for the subject alone: the embedded world has its probe, others need a detector."""
    if config.backbone.name == "embedded":
        return _probe()
    return CropWitness(_qwen(detector.partition("=")[2], config.device), embedder) if detector else None


def _identity(seen: Seen) -> list[Score]:
    return [identity(seen.sampled, w, seen.subject, f"identity_{name}") for name, w in seen.witnesses]


def _retention(seen: Seen) -> list[Score]:
    sampled = sample_clip(seen.clip, 1)
    scores = []
    for name, witness in seen.witnesses:
        whole = retention(sampled, witness, seen.subject)
        for when in ("start", "mid", "end"):
            details = whole.details if when == "end" else {}
            scores.append(
                Score(f"retention_{name}_{when}", whole.details[when], whole.backend, whole.n, details)
            )
    return scores


def _reappearance(seen: Seen) -> list[Score]:
    sampled, trace = seen.sampled, seen.trace
    frames = [line.first_frame for line in trace]
    starts = starts_from_trace(trace, seen.clip.fps)
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
    cuts = [index for index, line in enumerate(trace) if line.clears_prior]
    if has_bank(trace):
        held = bank_before(trace, cuts[2])
        count = slots_from(held, frames[cuts[0]], frames[cuts[1]])
        scores.append(Score("bank_slots_from_B", float(count), "native", len(held)))
    return scores


def _dynamics(seen: Seen) -> list[Score]:
    clip, num = seen.clip, seen.num_pictures
    # VBench's own embedders differ for the two; without them, things for the subject and colours for the rest.
    return [
        temporal_flickering(clip, num),
        seen.dynamic_degree,
        consistency(clip, num, "subject", seen.embedder),
        consistency(clip, num, "background", seen.colours),
    ]


def _length(seen: Seen) -> list[Score]:
    """Of the lengths that the video has. Its clips do not tell: the last may overlap, for a rest of any size."""
    clips, backend = seen.dynamic_degree.details["clips"], seen.dynamic_degree.backend
    lasts_s = seen.num_pictures / seen.clip.fps
    return [
        Score(f"dynamic_degree_{s}s", float(np.mean(clips[: s // CLIP_S])), backend, s // CLIP_S)
        for s in LENGTHS_S
        if lasts_s >= s - SHORT_BY_S
    ]


def _motion(seen: Seen) -> list[Score]:
    return motion(seen.clip.pictures(), *seen.motion_judge)


def _subject_motion(seen: Seen) -> list[Score]:
    """Of those whose cells are known: a box would change its outline with every wobble of its detector."""
    if not isinstance(seen.subject_witness, ProbeWitness):
        return []
    flow, judge = seen.motion_judge
    shares = seen.subject_witness.where(seen.sampled.pictures, seen.subject)
    cuts = starts_from_trace(seen.trace, seen.clip.fps)[1:]
    return subject_motion(seen.sampled, shares, flow, (seen.subject_witness.backend, judge), cuts)


def _haunting(seen: Seen) -> list[Score]:
    """Nothing where every prompt names somebody, or is in words of which we cannot tell."""
    witness = seen.subject_witness
    if not isinstance(witness, ProbeWitness):
        return []
    empty = [each for each in seen.stretches if not parse_prompt(each.prompt).actors]
    if not empty:
        return []
    found, _ = witness.look(seen.sampled.pictures, seen.subject)
    spans = [each.without_first(SETTLING_S) for each in empty]
    return [presence(seen.sampled, found, spans, "haunting", witness.backend)]


def _entering(seen: Seen) -> list[Score]:
    """Of the subject that enters late, leaves and returns, and of the bank as it returns."""
    sampled, late = seen.sampled, seen.late_subject
    if not late:
        return []
    starts = [each.span.start for each in seen.stretches]
    scores = [
        reappearance(sampled, witness, late, starts, f"return_{name}", presence=seen.subject_witness)
        for name, witness in seen.witnesses
    ]
    _, visit, gone, back = seen.stretches
    if (witness := seen.subject_witness) is not None:
        found, _ = witness.look(sampled.pictures, late)
        opening, _ = witness.look(sampled.pictures, seen.subject)
        for name, who, span in (
            ("late_found_on_visit", found, visit.without_first(SETTLING_S)),
            ("late_haunting", found, gone.without_first(LEAVING_S)),
            ("late_found_on_return", found, back.without_first(SETTLING_S)),
            ("opening_found", opening, Span(0.0, sampled.duration_s)),
        ):
            scores.append(presence(sampled, who, [span], name, witness.backend))
    if has_bank(seen.trace):
        first, end = (seen.trace[each.first_block].first_frame for each in (visit, gone))
        held = bank_before(seen.trace, back.first_block)
        slots = float(slots_from(held, first, end))
        scores.append(Score("bank_slots_from_visit", slots, "native", len(held)))
        content = _content_before(seen, back.first_block)
        scores += [replace(each, name=f"{each.name}_at_return") for each in content]
    return scores


def _bank(seen: Seen) -> list[Score]:
    if not has_bank(seen.trace):
        return []
    story = bank_story(seen.trace)
    details = {"overlap": story.overlap, "ages": story.age_histogram, "complete": story.complete}
    values = (
        ("bank_overlap", story.overlap[-1]), ("bank_overlap_lowest", min(story.overlap)),
        ("bank_mean_age", story.mean_age), ("bank_age_ks", story.uniform_distance),
        ("bank_evicted_below_cutoff", story.evicted_below_cutoff), ("bank_cutoff", story.cutoff),
    )  # fmt: skip
    return [
        Score(name, value, "native", story.capacity, details if name == "bank_overlap" else {})
        for name, value in values
    ]


def _content(seen: Seen) -> list[Score]:
    """What the bank is made of, by its tokens that were new: at the last cut, or at the end where there are none."""
    if not has_bank(seen.trace):
        return []
    cuts = [index for index, line in enumerate(seen.trace) if line.clears_prior]
    return _content_before(seen, cuts[-1] if cuts else len(seen.trace))


def _content_before(seen: Seen, end: int) -> list[Score]:
    """As the block of that number begins."""
    new = {place for place, score in bank_before(seen.trace, end).items() if score > 0}
    edges = seen.trace[end - 1].edge_share
    edge = edges[0] if new and edges else None
    scores = [Score("bank_edge_share", edge, "native", len(new))]
    if isinstance(seen.subject_witness, ProbeWitness):
        actors = _on_actors(seen, seen.subject_witness, new)
        share = len(actors) / len(new) if new else None
        scores.append(Score("bank_actor_share", share, seen.subject_witness.backend, len(new)))
    return scores


def _on_actors(seen: Seen, probe: ProbeWitness, places: Set[Position]) -> Set[Position]:
    """The tokens in whose place an actor is seen, in the first or the last picture of their frame."""
    if not places:
        return set()
    spans = pictures_of_frames(seen.trace)
    pictures = {frame: {spans[frame][0], spans[frame][-1]} for frame, _, _ in places}
    wanted = sorted(set().union(*pictures.values()))
    found = {index: picture for index, picture in enumerate(seen.clip.pictures()) if index in set(wanted)}
    covered = dict(zip(wanted, probe.covered(np.stack([found[index] for index in wanted])), strict=True))
    return {
        (frame, row, column)
        for frame, row, column in places
        if any(covered[index][row, column] for index in pictures[frame])
    }


def _attention(seen: Seen) -> list[Score]:
    shares = [line.shares for line in seen.trace[FULL_WINDOW:] or seen.trace[-1:]]
    roles = dict.fromkeys(role for each in shares for role, share in each.items() if share is not None)
    scores = []
    for role in roles:
        # A role that was not there got nothing; one that was not measured says nothing.
        found = [share[0] for each in shares if (share := each.get(role, [0.0])) is not None]
        scores.append(Score(f"attention_{role}", float(np.mean(found)), "native", len(found)))
    return scores


def _time(seen: Seen) -> list[Score]:
    """Of drawing alone, blocks from the fourth on; the slope tells whether a later block costs more."""
    if not seen.seconds:
        return []
    seconds = np.array(seen.seconds)
    steady = seconds[FULL_WINDOW:] if len(seconds) > FULL_WINDOW + 1 else seconds
    slope = float(np.polyfit(np.arange(len(steady)), steady, 1)[0]) if len(steady) > 1 else None
    values = (
        ("seconds", float(seconds.sum())),
        ("block_s", float(np.median(steady))),
        ("block_slope_s", slope),
    )
    return [Score(name, value, "native", len(seconds)) for name, value in values]


MEASURES: dict[str, Callable[[Seen], list[Score]]] = {
    "identity": _identity, "retention": _retention, "reappearance": _reappearance, "dynamics": _dynamics,
    "length": _length, "motion": _motion, "bank": _bank, "attention": _attention, "time": _time,
    "content": _content, "subject_motion": _subject_motion, "haunting": _haunting, "entering": _entering,
}  # fmt: skip
OF_MOTION = {"dynamics", "length", "motion", "subject_motion"}
"""Those that look at flow, by the judge that a job names."""
