"""`flow-texture`: optical-flow novelty that rain, spray and ripples do not fill. Beyond the paper.

The paper states its limit: texture that breaks the flow again and again is noticed again and again. Here a
pixel that `flow` flags is passed over if both are true:
- the square of its token is *restless*: in many pictures something appears there that is lost again within a
  few pictures. What enters a scene stays, so a pan, an entrance or a return leave a square calm;
- it is itself lost again, or a speck, or of a *familiar* colour: one that the square and its neighbours have
  been showing, or that has fired before. Colours are read from the median of three pictures, which a drop of
  rain is not in, and become familiar LAG blocks late, so that a subject can finish entering.
In a restless square the size of a residual says nothing, so there nu is 1 + the share of strange pixels nearby.
What is passed over claims no ground, so texture cannot hide a later subject either. In a calm square nothing is
passed over and the rule is `flow`, bit for bit.

Scores never change: retention is the paper's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from recap.admission.fleeting import (
    colour_slots,
    count_colours,
    crowding,
    familiar_colours,
    settled,
    vanishing,
)
from recap.admission.flow import Evidence, FlowNovelty, FlowNoveltyConfig
from recap.contracts import Flow, FlowEstimator, State
from recap.errors import refuse
from recap.flow.warp import pixel_grid
from recap.types import BackboneSpec

LAG = 2
"""Blocks before what was seen is familiar: a second and a half, in which a subject can finish entering."""


@dataclass(frozen=True, slots=True)
class FlowTextureConfig(FlowNoveltyConfig):
    """Optical-flow novelty that passes over rain, spray and ripples; everywhere else it is `flow`."""

    keeps: ClassVar[str] = "first appearances that last, or look unlike their place; not fleeting texture"
    needs: ClassVar[str] = "optical flow"

    # What is lost within so many pictures is fleeting.
    horizon_pictures: int = 2
    # A square is restless if something fleeting shows around it in this share of a block's pictures, in this share
    # over some seconds, or in this share in the mean of all squares, now or over some seconds.
    restless_here: float = 0.3
    restless_long: float = 0.1
    restless_everywhere: float = 0.06
    # A colour is familiar if it makes up this share of the pixels that a square has shown.
    familiar_share: float = 0.01
    # Of each of red, green and blue.
    colour_levels: int = 14
    # Of the pixels around, over three pictures: less is passed over with the texture.
    speck_share: float = 0.04
    # What is left after a block of the colours that a square has shown.
    fading: float = 0.95

    def __post_init__(self) -> None:
        FlowNoveltyConfig.__post_init__(self)
        for name in (
            "restless_here",
            "restless_long",
            "restless_everywhere",
            "familiar_share",
            "speck_share",
            "fading",
        ):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise refuse(name, value, "must lie in 0..1, as a share", "leave it out for the default")
        if not 1 <= self.horizon_pictures <= 64:
            limit = "must be 1 to 64 pictures"
            raise refuse("horizon_pictures", self.horizon_pictures, limit, "2 is the default")
        if not 2 <= self.colour_levels <= 16:
            limit = "must be 2 to 16 levels of each colour"
            raise refuse("colour_levels", self.colour_levels, limit, "14 is the default")

    def build(self, spec: BackboneSpec, flow: FlowEstimator) -> FlowTexture:
        return FlowTexture.on(spec, self, flow)


class FlowTexture(FlowNovelty):
    config: FlowTextureConfig
    # B rows columns: how restless each token's square has been for long.
    _restless: Tensor | None = None
    # B squares colours: what each square has shown, fading.
    _seen: Tensor | None = None
    # B colours: what has fired in restless squares.
    _shown: Tensor | None = None
    # B LAG squares+1 colours: both, of blocks that do not count yet.
    _waiting: Tensor | None = None

    @property
    def _side(self) -> int:
        """Pixels along the side of a token's square, on the flow's grid."""
        return self._token_pixels // self.config.flow_downscale

    def _sift(self, stream: Tensor, flow: Flow, evidence: Evidence) -> Evidence:
        """Pass over what is fleeting or familiar in restless squares; there, how much is strange is the score."""
        cfg = self.config
        novelty, flagged, traced, at = evidence
        lost = vanishing(
            stream,
            flow,
            horizon=cfg.horizon_pictures,
            cycle_threshold_px=cfg.cycle_threshold_px,
            photometric_threshold=cfg.photometric_threshold,
        )
        restless = self._upsample(self._judge_squares(flagged & lost))[:, None]
        slots = colour_slots(settled(stream), cfg.colour_levels, self._side)
        strange = flagged & ~lost & ~self._recognise(slots).view_as(flagged)
        crowd = crowding(strange, 2 * (self._side // 2) + 1)
        counts = strange & (crowd >= cfg.speck_share)
        self._take_in(slots, counts & restless)
        # The flow of a drop is not that of what it hides: a claim must neither leave nor end with it.
        here = pixel_grid((at.shape[-2], at.shape[-1]), at)
        passed = restless & flagged & ~counts
        return Evidence(
            torch.where(restless, 1 + crowd, novelty),  # about what the block's own scale makes of others
            torch.where(restless, counts, flagged),
            traced | passed,
            torch.where(passed[:, :, None], here, at),
        )

    def _judge_squares(self, fleeting: Tensor) -> Tensor:
        """B rows columns, bool: squares where what appears does not stay; fleeting B P y x."""
        cfg = self.config
        touched = functional.max_pool2d(fleeting.float(), self._side)
        rate = touched.sum(dim=1) / max(fleeting.shape[1] - 1, 1)  # of the last picture nothing is known
        around = functional.avg_pool2d(rate, 5, stride=1, padding=2, count_include_pad=False)
        before = torch.zeros_like(around) if self._restless is None else self._restless
        self._restless = before.lerp(around, 0.2)  # some four seconds
        # A picture full of rain has dips, square by square and block by block: what holds for all of it is surer.
        now, long = (each.mean(dim=(1, 2), keepdim=True) for each in (rate, self._restless))
        everywhere = torch.maximum(now, long)
        return (
            (around >= cfg.restless_here)
            | (self._restless >= cfg.restless_long)
            | (everywhere >= cfg.restless_everywhere)
        )

    def _recognise(self, slots: Tensor) -> Tensor:
        """B P*y*x, bool: pixels whose colour their square has been showing, or has fired anywhere."""
        cfg = self.config
        levels = cfg.colour_levels
        if self._seen is None:
            self._seen = count_colours(slots, self._grid, levels)
        known = familiar_colours(self._seen, self._grid, levels, cfg.familiar_share).gather(1, slots)
        if self._shown is not None:
            cube = self._shown.view(-1, 1, levels, levels, levels)
            met = (
                functional.max_pool3d(cube, 3, stride=1, padding=1).flatten(1)
                >= cfg.speck_share * self._side**2
            )
            known = known | met.gather(1, slots % levels**3)
        return known

    def _take_in(self, slots: Tensor, counts: Tensor) -> None:
        """Remember the block's colours, of every square and of what counted; they are known LAG blocks from now."""
        cfg = self.config
        now = count_colours(slots, self._grid, cfg.colour_levels)
        shown = torch.zeros_like(now[:, 0]).scatter_add_(1, slots % now.shape[2], counts.flatten(1).float())
        entry = torch.cat([now, shown[:, None]], dim=1)[:, None]
        if self._waiting is None:
            # The first block is known at once, as the square's own look.
            entry[:, :, :-1] = 0
            self._waiting = torch.zeros_like(entry).expand(-1, LAG, -1, -1).clone()
            self._shown = torch.zeros_like(shown)
        assert self._seen is not None and self._shown is not None
        due = self._waiting[:, 0]
        self._seen = cfg.fading * self._seen + due[:, :-1]
        self._shown = self._shown + due[:, -1]
        self._waiting = torch.cat([self._waiting[:, 1:], entry], dim=1)

    def _upsample(self, squares: Tensor) -> Tensor:
        return squares.repeat_interleave(self._side, dim=1).repeat_interleave(self._side, dim=2)

    def state(self) -> State:
        own = {
            "restless": self._restless,
            "seen": self._seen,
            "shown": self._shown,
            "waiting": self._waiting,
        }
        return {
            **super().state(),
            **{name: value.clone() for name, value in own.items() if value is not None},
        }

    def load_state(self, state: State) -> None:
        super().load_state(state)
        self._restless, self._seen = state.get("restless"), state.get("seen")
        self._shown, self._waiting = state.get("shown"), state.get("waiting")
