"""A finished run and its judges, and the entry by which a metric becomes available to tables.

A metric is a file of `recap.eval.metrics`: functions of pictures and trace, and `MEASURES`, which lists one or more
`Measure`. Nothing else has to be edited: tables find measures by name. A measure outside the package is named as
`module:ATTRIBUTE`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, TypeVar

from recap.eval.embedders import Remembering, build_embedder
from recap.eval.judges.witness import build_probe_witness
from recap.eval.motion_judge import USUAL, MotionJudge, build_motion_judge
from recap.eval.qwen import QwenDetector
from recap.eval.sampling import PER_SECOND, InMemoryClip, Sampled, sample_clip
from recap.eval.scores import Score
from recap.eval.witnesses import CropWitness, Embedder, FrameWitness, Witness
from recap.io.video import Clip
from recap.trace import BlockTrace, has_bank

Value = TypeVar("Value")
EMBEDDED = "embedded"
"""The backbone whose world a probe of ours knows."""


class JudgedRun:
    """The pictures and the trace of a finished run, and who judges them.

    `data` are those of a job. `seconds` is the time of every block, empty where many runs were generated at once.
    `embedder` replaces the one that `data` names, where the pictures were embedded elsewhere.
    """

    def __init__(
        self,
        data: Mapping[str, Any],
        clip: Clip | InMemoryClip,
        trace: Sequence[BlockTrace],
        seconds: Sequence[float] = (),
        embedder: Embedder | None = None,
    ):
        self.clip, self.trace, self.seconds = clip, trace, seconds
        self.subject: str = data["subject"]
        self.late_subject: str = data.get("late_subject", "")
        self._judge_flow: str = data.get("judge_flow", USUAL)
        self._device: str = data["config"]["device"]
        self.embedder: Embedder = Remembering(embedder or _embedder(data["embedder"], self._device))
        colours = _embedder("hsv", "cpu")
        self.colours = self.embedder if self.embedder.backend == colours.backend else Remembering(colours)
        self.subject_witness = self._subject_witness(data["config"]["backbone"]["name"], data["detector"])
        self._made: dict[str, Any] = {}

    def _subject_witness(self, backbone: str, detector: str) -> Witness | None:
        """Who looks for the subject alone: the embedded world has its probe, others need a detector."""
        if backbone == EMBEDDED:
            return _probe()
        return (
            CropWitness(_qwen(detector.partition("=")[2], self._device), self.embedder) if detector else None
        )

    def once(self, name: str, make: Callable[[], Value]) -> Value:
        """Make something that several measures need when it is first asked for."""
        if name not in self._made:
            self._made[name] = make()
        found: Value = self._made[name]
        return found

    @cached_property
    def num_pictures(self) -> int:
        return self.clip.num_pictures or sum(1 for _ in self.clip.pictures())

    @cached_property
    def sampled(self) -> Sampled:
        return sample_clip(self.clip, PER_SECOND)

    @property
    def has_bank(self) -> bool:
        return has_bank(self.trace)

    @property
    def motion_judge(self) -> MotionJudge:
        return _motion_judge(self._judge_flow, self._device)

    @property
    def witnesses(self) -> list[tuple[str, Witness]]:
        own = [("subject", self.subject_witness)] if self.subject_witness is not None else []
        return [*own, ("frame", FrameWitness(self.embedder))]


@dataclass(frozen=True, slots=True)
class Measure:
    """A metric as tables know it: a function from a run to scores, and what has to be known of it beforehand."""

    name: str
    score: Callable[[JudgedRun], list[Score]]
    headlines: tuple[str, ...] = ()
    """Scores that stand first in a table."""
    paper: Mapping[str, tuple[str, float]] = field(default_factory=dict)
    """Score -> the paper's column for it, and the factor that makes it 0..1."""
    of_subject: bool = False  # says more where somebody can find the subject
    uses_flow: bool = False  # asks the judge of motion
    reads_shares: bool = False  # needs the attention share of every role, which the fast path on a GPU lacks
    reads_offered: bool = False  # needs a trace of all candidates of the bank
    shows_bank: bool = False  # a page of it shows what the bank kept, and when


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
