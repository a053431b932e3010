"""`flow` is eq. (novelty) of the paper: new is what no reliable antecedent in the previous picture explains.

For a pixel u of picture t with backtrace u' = u + F(t -> t-1)(u):
    e_cyc = |F(t -> t-1)(u) + F(t-1 -> t)(u')|      in pixels of the grid the flow is computed on
    e_pho = mean over RGB of |x_t(u) - x_{t-1}(u')|  colours 0..1
u is *flagged* when e_cyc > tau_cyc, e_pho > tau_pho or u' lies outside, and then nu = e_cyc + alpha e_pho.
It *fires* if flagged and u' does not land on claimed ground; fired pixels are claimed, and the claimed map
travels with the flow where the cycle holds, so content that stays traceable fires once, and whatever shows
behind a broken correspondence may fire: a new side of a subject, the next scene. A token scores the maximum
over its pictures and pixels, divided by max(90th percentile of the block's positive scores, 1), and keeps that
score for good.

Where the paper is silent:
- Outside the picture there is no flow and no colour: both read as 0. Otherwise a smooth pan, whose flow is the
  same on both sides of the border, would score what it reveals near 0.
- What the camera has shown before and brings back into the picture is not new (`borders`, see surroundings.py).
- The claimed map has values in 0..1 and is sampled bilinearly; at least one half is claimed ground. A map of bits
  moved by whole pixels would stand still under motion of less than half a pixel per picture.
- Picture 0 fires nothing and claims nothing: the sink owns it.
"""

from __future__ import annotations

from dataclasses import dataclass
from sys import float_info
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional

from recap.admission import flow_steps
from recap.admission.base import ScoredAdmission
from recap.admission.flow_steps import Evidence, Steps
from recap.admission.surroundings import Surroundings
from recap.contracts import AdmissionConfig, Entry, Flow, FlowEstimator, State, copies, together
from recap.errors import check_settings, refuse
from recap.io.older import Self
from recap.types import BackboneSpec, Block

CLAIMS = ("traced", "carried")
BORDERS = ("seen", "literal")


@dataclass(frozen=True, slots=True)
class FlowNoveltyConfig(AdmissionConfig):
    """Sets up optical-flow novelty, eq. (novelty) of the paper; defaults are the paper's."""

    keeps: ClassVar[str] = "what no reliable antecedent in the previous picture explains"
    needs: ClassVar[str] = "optical flow"

    cycle_threshold_px: float = 2.0
    photometric_threshold: float = 0.2
    photometric_weight: float = 0.5
    flow_downscale: int = 2
    percentile: float = 90.0
    scale_floor: float = 1.0
    # A claim travels where the cycle holds ("traced"), or along any flow ("carried").
    claims: Literal["traced", "carried"] = "traced"
    # What enters is new unless the camera showed it before ("seen"), or always ("literal").
    borders: Literal["seen", "literal"] = "seen"

    def __post_init__(self) -> None:
        sizes = ("cycle_threshold_px", "photometric_threshold", "photometric_weight", "scale_floor")
        limit = "must be 0 or more and finite"
        check_settings(self, sizes, 0, float_info.max, limit, "leave it out for the paper's value")
        if self.scale_floor == 0:
            raise refuse("scale_floor", 0, "must be above 0", "the paper's is 1")
        check_settings(self, ("percentile",), 0, 100, "must lie in 0..100", "the paper's is 90")
        if self.flow_downscale not in (1, 2, 4):
            raise refuse("flow_downscale", self.flow_downscale, "must be 1, 2 or 4", "2 is half resolution")
        for name, known in (("claims", CLAIMS), ("borders", BORDERS)):
            if getattr(self, name) not in known:
                limit = f"must be one of {', '.join(known)}"
                raise refuse(name, getattr(self, name), limit, f"{known[0]} is the default")

    def build(self, spec: BackboneSpec, flow: FlowEstimator) -> ScoredAdmission:
        return FlowNovelty.on(spec, self, flow)


@dataclass(frozen=True, slots=True)
class Noticed:
    """Says what one block showed that was new."""

    fired: Tensor  # B T y x: nu where a pixel fired, 0 elsewhere, on the flow's grid
    raw: Tensor  # B F rows columns: s(p), the maximum of a token's pixels
    score: Tensor  # B F rows columns: s(p) over the block's scale


class FlowNovelty(ScoredAdmission):
    """Scores tokens by eq. (novelty); the first picture of the stream scores 0."""

    def __init__(
        self,
        config: FlowNoveltyConfig,
        flow: FlowEstimator,
        grid: tuple[int, int],
        token_pixels: int,
        pictures_per_frame: int,
        *,
        decodes_alone: bool = False,
    ):
        super().__init__(grid)
        self.config = config
        self._flow = flow
        self._token_pixels = token_pixels
        self._pictures_per_frame = pictures_per_frame
        # If so, the first frame of every call is one picture.
        self._decodes_alone = decodes_alone
        # B 3 y x: the previous block's last picture, at the flow's size.
        self._last: Tensor | None = None
        # B y x, 0..1.
        self._claimed: Tensor | None = None
        self._surroundings = Surroundings()
        # Twins of the plain steps that are faster, by the kind of device that pictures are on.
        self.faster: dict[str, Steps] = {}

    @classmethod
    def on(cls, spec: BackboneSpec, config: FlowNoveltyConfig, flow: FlowEstimator) -> Self:
        """Make the rule for the videos of a backbone."""
        sizes = (spec.grid, spec.token_pixels, spec.pictures_per_frame)
        return cls(config, flow, *sizes, decodes_alone=spec.decodes_alone)

    def score(self, block: Block, pixels: Tensor) -> Tensor:
        return self.notice(pixels).score.flatten(1)

    @torch.no_grad()
    def notice(self, pixels: Tensor) -> Noticed:
        """Score the next pictures of the stream, B T 3 Y X in 0..1."""
        self._check(pixels)
        factor = self.config.flow_downscale
        small = functional.avg_pool2d(pixels.float().flatten(0, 1), factor).unflatten(0, pixels.shape[:2])
        opening = self._last is None
        stream = small if self._last is None else torch.cat([self._last[:, None], small], dim=1)
        fired = self._fire(stream)
        if opening:
            fired = torch.cat([torch.zeros_like(small[:, :1, 0]), fired], dim=1)
        self._last = small[:, -1].clone()
        raw = self._pool(fired, opening or self._decodes_alone)
        return Noticed(fired, raw, raw / self._scale(raw))

    def _fire(self, stream: Tensor) -> Tensor:
        """Return nu of the pixels that fire in every picture of the stream but the first, B T-1 y x."""
        claimed = torch.zeros_like(stream[:, 0, 0]) if self._claimed is None else self._claimed
        if stream.shape[1] == 1:
            self._claimed = claimed
            return stream[:, 1:, 0]
        flow = self._flow(stream)
        self._check_flow(flow)
        steps = self.faster.get(stream.device.type, flow_steps)
        evidence = steps.find_evidence(stream, flow, self.config, self._surroundings)
        fired, self._claimed = steps.claim(self._sift(stream, flow, evidence), claimed)
        return fired

    def _sift(self, stream: Tensor, flow: Flow, evidence: Evidence) -> Evidence:
        """Return the evidence that counts; a subclass can drop some of it."""
        return evidence

    @property
    def _side(self) -> int:
        """Return the pixels along the side of a token's square, on the flow's grid."""
        return self._token_pixels // self.config.flow_downscale

    def _pool(self, fired: Tensor, first_alone: bool) -> Tensor:
        """Return the maximum over a token's pixels and a frame's pictures; the first may be one picture alone."""
        patches, alone = functional.max_pool2d(fired, self._side), int(first_alone)
        frames: Tensor = patches[:, alone:].unflatten(1, (-1, self._pictures_per_frame)).amax(dim=2)
        return torch.cat([patches[:, :alone], frames], dim=1)

    def _scale(self, raw: Tensor) -> Tensor:
        """Return max(rho_b, 1), rho_b the percentile of the block's positive scores, for each row of the batch."""
        positive = torch.where(raw > 0, raw, torch.nan).flatten(1)
        rho = torch.nanquantile(positive, self.config.percentile / 100, dim=1)
        return rho.nan_to_num(0.0).clamp(min=self.config.scale_floor)[:, None, None, None]

    def _check(self, pixels: Tensor) -> None:
        size = (self._grid[0] * self._token_pixels, self._grid[1] * self._token_pixels)
        if pixels.dim() != 5 or pixels.shape[2] != 3 or tuple(pixels.shape[3:]) != size:
            limit = f"must be B T 3 {size[0]} {size[1]}, the pictures of a {self._grid} grid of tokens"
            raise refuse("pixels", tuple(pixels.shape), limit, "resize or crop the pictures first")
        # A NaN would rank above every score for good. On a GPU the check would stall the block; there the run's own
        # check of each finished block stands in.
        if pixels.device.type == "cpu" and not bool(torch.isfinite(pixels).all()):
            raise refuse("pixels", "NaN or infinity", "must be finite", "look for the step that made them")
        whole = pixels.shape[1] - (self._last is None or self._decodes_alone)
        if whole < 0 or whole % self._pictures_per_frame:
            limit = f"pictures must fill whole frames of {self._pictures_per_frame} (the first frame is 1 picture)"
            raise refuse("pixels", tuple(pixels.shape), limit, "keep the rest back until the frame is whole")

    def _check_flow(self, flow: Flow) -> None:
        """Refuse flow that is not finite, by the number of its picture; on a GPU the trace of the block does it."""
        if flow.forward.device.type != "cpu":
            return
        finite = torch.isfinite(flow.forward + flow.backward).transpose(0, 1).flatten(1).all(1)
        if not bool(finite.all()):
            # The first pair of a later block leads from the picture before it to picture 0.
            picture = finite.tolist().index(False) + (self._last is None)
            limit = f"picture {picture} of the block: must be finite"
            raise refuse("flow", "NaN or infinity", limit, "try --flow classical, or look at the estimator")

    def state(self) -> State:
        return {**copies({"last": self._last, "claimed": self._claimed}), **self._surroundings.state()}

    def expected(self, state: State) -> dict[str, Entry]:
        size = self._grid[0] * self._side, self._grid[1] * self._side
        seen = {
            "last": Entry(("B", 3, *size), torch.float32),
            "claimed": Entry(("B", *size), torch.float32),
        }
        return {**together(state, seen), **self._surroundings.expected(state, size)}

    def load_state(self, state: State) -> None:
        super().load_state(state)
        self._last, self._claimed = state.get("last"), state.get("claimed")
        self._surroundings.load_state(state)
