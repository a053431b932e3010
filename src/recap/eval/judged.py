"""Brings a finished run and its judges together, and defines the entry by which tables find a metric.

A metric is a file of `recap.eval.metrics`: functions of pictures and trace, and `MEASURES`, which lists one or more
`Measure`. Nothing else has to be edited: tables find measures by name. A measure outside the package is named as
`module:ATTRIBUTE`.
"""

from __future__ import annotations

import copy
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any, NamedTuple, TypeVar

import numpy as np

from recap.errors import refuse, unknown_name
from recap.eval.embedders import Remembering, build_embedder
from recap.eval.judges.crops import build_crop_witness
from recap.eval.judges.probe import Judged, load_probe
from recap.eval.judges.subject import ProbeWitness
from recap.eval.qwen import QwenDetector, QwenModel, QwenWitness, qwen_model
from recap.eval.sampling import PER_SECOND, Footage, ForwardFlow, Sampled, sample_clip
from recap.eval.scores import Score
from recap.eval.witnesses import CropWitness, Embedder, FrameWitness, Witness
from recap.flow import ClassicalFlow, RaftFlow, build_flow
from recap.io.trace import BlockTrace, has_bank

Value = TypeVar("Value")
EMBEDDED = "embedded"
"""The backbone whose world a probe of ours knows."""
USUAL = "classical"
"""Published tables were measured with it, and numbers of two estimators do not compare."""
JUDGING_FLOWS = ("auto", "raft-small", "classical")
"""A judge must know more than the world of the model that it judges."""


BOTH = "both"
"""Motion is judged by `USUAL` and by `SECOND`, whose scores have names of their own."""
SECOND, BY_SECOND = "raft-small", "_by_raft"
WITNESSES = ("subject", "crop", "vlm", "frame")
"""Who compares sightings, by what they look at: scores of the same thing by two of them differ in this word."""


class MotionJudge(NamedTuple):
    """Pairs a flow estimator with its name on scores."""

    flow: ForwardFlow
    backend: str


def build_motion_judge(
    name: str = USUAL, *, device: str = "cpu", notice: Callable[[str], None] = print
) -> MotionJudge:
    """Build the judge with the flow of that name; `auto` is RAFT-small if its weights are available."""
    if name not in JUDGING_FLOWS:
        raise unknown_name("--judge-flow", name, JUDGING_FLOWS)
    flow = build_flow(name, device=device, notice=notice)
    assert isinstance(flow, (ClassicalFlow, RaftFlow)), "every flow that judges has a `forward`"
    # All earlier scores carry the name "dis", for dense inverse search.
    return MotionJudge(flow.forward, "raft-small" if isinstance(flow, RaftFlow) else "dis")


# Every judge is built once per process.
_embedder, _motion_judge = cache(build_embedder), cache(build_motion_judge)
_probe = cache(load_probe)


class JudgedRun:
    """Holds the pictures and the trace of a finished run, and who judges them.

    `data` are those of a job. `seconds` is the time of every block, empty where many runs were generated at once.
    `embedder` replaces the one that `data` names, where the pictures were embedded elsewhere; `judged` are the
    probe's answers to all pictures, where they were judged elsewhere.
    """

    def __init__(
        self,
        data: Mapping[str, Any],
        clip: Footage,
        trace: Sequence[BlockTrace],
        seconds: Sequence[float] = (),
        embedder: Embedder | None = None,
        judged: Judged | None = None,
    ):
        self.clip, self.trace, self.seconds = clip, trace, seconds
        self.has_bank = has_bank(trace)
        self.subject: str = data["subject"]
        self.late_subject: str = data.get("late_subject", "")
        # Of a schedule: who is on stage, stretch by stretch.
        self.stage: Sequence[Sequence[str]] = data.get("stage", ())
        asked: str = data.get("judge_flow", USUAL)
        self.has_two_judges = asked == BOTH
        self._judge_flow = USUAL if self.has_two_judges else asked
        self._device: str = data["config"]["device"]
        self.embedder: Embedder = Remembering(embedder or _embedder(data["embedder"], self._device))
        colours = _embedder("hsv", "cpu")
        self.colours = self.embedder if self.embedder.backend == colours.backend else Remembering(colours)
        # Language models that may be asked.
        self.asked: list[QwenModel] = []
        # The embedded world has its probe for the subject alone, others need a detector.
        self.subject_witness: Witness | None = None
        self.crop_witness: Witness | None = None
        if data["config"]["backbone"]["name"] == EMBEDDED:
            # Of this run alone: it remembers the pictures that it has seen.
            self.subject_witness = witness = ProbeWitness(_probe())
            if judged is not None:
                witness.remember(np.stack(list(clip.pictures())), judged)
            self.crop_witness = build_crop_witness(witness)
        elif data["detector"]:
            model = qwen_model(data["detector"].partition("=")[2], self._device)
            self.subject_witness, self.asked = CropWitness(QwenDetector(model), self.embedder), [model]
        self.seeing_witness: Witness | None = None
        if judge := data.get("judge", ""):
            model = qwen_model(judge.partition("=")[2], self._device)
            self.seeing_witness = QwenWitness(model)
            self.asked = [*dict.fromkeys((*self.asked, model))]
        self._made: dict[str, Any] = {}

    def once(self, name: str, make: Callable[[], Value]) -> Value:
        """Make something that several measures need when it is first asked for."""
        if name not in self._made:
            self._made[name] = make()
        found: Value = self._made[name]
        return found

    def by_second_judge(self) -> JudgedRun:
        """Return this run with the other judge of motion; what was made with the first is made again."""
        other = copy.copy(self)
        other._judge_flow, other._made = SECOND, {}
        return other

    @cached_property
    def sampled(self) -> Sampled:
        """Return the pictures at which the protocols of identity and reappearance look."""
        return sample_clip(self.clip, PER_SECOND)

    @property
    def finder(self) -> Witness | None:
        """Return who says whether a subject is there at all, None where nobody can."""
        return self.subject_witness or self.seeing_witness

    @property
    def motion_judge(self) -> MotionJudge:
        """Return the flow that motion is measured with."""
        return _motion_judge(self._judge_flow, device=self._device)

    @property
    def witnesses(self) -> list[tuple[str, Witness]]:
        """Return everybody who can compare sightings, by what they look at."""
        frame = FrameWitness(self.embedder)
        own = (self.subject_witness, self.crop_witness, self.seeing_witness, frame)
        return [(name, who) for name, who in zip(WITNESSES, own, strict=True) if who is not None]


@dataclass(frozen=True, slots=True)
class Measure:
    """Describes a metric to tables: a function from a run to scores, and what has to be known beforehand."""

    name: str
    score: Callable[[JudgedRun], list[Score]]
    headlines: tuple[str, ...] = ()
    """The scores that come first in a table."""
    paper: Mapping[str, tuple[str, float]] = field(default_factory=dict)
    """Score -> the paper's column for it, and the factor that makes it 0..1."""
    visible: Mapping[str, float | Mapping[str, float]] = field(default_factory=dict)
    """Score -> the smallest difference that a viewer could see, by judge where they differ (`recap.eval.visible`)."""
    counted: Mapping[str, str] = field(default_factory=dict)
    """Score -> what it is called where runs without it count as 0 instead of being left out."""
    of_subject: bool = False
    """It says more where somebody can find the subject."""
    uses_flow: bool = False
    """It asks the judge of motion."""
    reads_shares: bool = False
    """It needs the attention share of every role, which the fast path on a GPU lacks."""
    reads_offered: bool = False
    """It needs a trace of all candidates of the bank."""
    shows_bank: bool = False
    """A page of it shows what the bank kept, and when."""

    def scores(self, run: JudgedRun) -> list[Score]:
        """Score a run; where two judge its motion, the second's scores follow under names of their own.

        What a language model answered meanwhile is kept, as it is, in the details of the first score.
        """
        marks = {model: len(model.answers) for model in run.asked}
        scores = self.score(run)
        if not isinstance(scores, list) or not all(isinstance(each, Score) for each in scores):
            limit = f"its function returned {reprlib.repr(scores)}"
            raise refuse("measure", self.name, limit, "return a list of recap.eval.scores.Score")
        new = [answer for model, mark in marks.items() for answer in model.answers[mark:]]
        if scores and new:
            scores[0] = replace(scores[0], details={**scores[0].details, "answers": new})
        if self.uses_flow and run.has_two_judges:
            others = [each for each in self.score(run.by_second_judge()) if each.backend.endswith(SECOND)]
            scores = [*scores, *(replace(each, name=each.name + BY_SECOND) for each in others)]
        return scores

    def count_all(self, scores: Mapping[str, Any]) -> dict[str, Any]:
        """Return a run's scores, as they are stored, and those that leave out no run next to them."""
        names = {name: new for name, new in self.counted.items() if name in scores}
        counted = {
            new: {**scores[name], "name": new, "value": scores[name]["value"] or 0.0}
            for name, new in names.items()
        }
        return {**scores, **counted}

    def smallest_visible(self, score: str, backend: str) -> float:
        """Return the smallest visible difference of a score by this judge, 0 where none is declared."""
        found = self.visible.get(score.removesuffix(BY_SECOND), 0.0)
        return found if isinstance(found, float) else found.get(backend, found[""])
