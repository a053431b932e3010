"""`recent`: the last tokens that left the window. Recent History of the paper's ablation.

The clock is the score, and tokens are offered as they leave the window: what the prior still holds would only be
there twice. A memory that does not offer leaving tokens keeps the last tokens generated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from recap.admission.base import ScoredAdmission, sources
from recap.contracts import AdmissionConfig, FlowEstimator
from recap.types import BackboneSpec, Block, Candidates


@dataclass(frozen=True, slots=True)
class RecentHistoryConfig(AdmissionConfig):
    """The last tokens that left the window; the ablation's Recent History."""

    keeps: ClassVar[str] = "as many tokens as fit of those that left the window last"
    needs: ClassVar[str] = "nothing"
    needs_flow: ClassVar[bool] = False

    def build(self, spec: BackboneSpec, flow: FlowEstimator) -> RecentHistory:
        return RecentHistory(spec.grid)


class RecentHistory(ScoredAdmission):
    takes_leaving = True

    def score(self, block: Block, pixels: Tensor) -> Tensor:
        return self.score_leaving(sources(block, self._grid, pixels)).score

    def score_leaving(self, source: Tensor) -> Candidates:
        # One more than the frame, since a score of 0 means nothing new; exact up to 2^24 frames.
        return Candidates(source, (source[..., 0] + 1).float())
