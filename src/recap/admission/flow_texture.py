"""`flow-texture` is optical-flow novelty that rain, spray and ripples do not fill. It goes beyond the paper.

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

from recap.admission.flow import FlowNovelty, FlowNoveltyConfig
from recap.admission.flow_steps import Evidence
from recap.contracts import Entry, Flow, FlowEstimator, State, copies, together
from recap.errors import check_settings
from recap.flow.warp import inside, pixel_grid, sample
from recap.types import BackboneSpec

KEPT = ("restless", "seen", "shown", "waiting")
"""Names of what is kept from block to block, in a state and, with an underscore, as attributes."""

LAG = 2
"""Blocks before what was seen is familiar: a second and a half, in which a subject can finish entering."""


@dataclass(frozen=True, slots=True)
class FlowTextureConfig(FlowNoveltyConfig):
    """Sets up optical-flow novelty that ignores rain, spray and ripples; everywhere else it is `flow`."""

    keeps: ClassVar[str] = "first appearances that last, or look unlike their place; not fleeting texture"
    needs: ClassVar[str] = "optical flow"

    # What is lost within this many pictures is fleeting.
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
        shares = ("restless_here", "restless_long", "restless_everywhere", "familiar_share", "speck_share")
        limit = "must lie in 0..1, as a share"
        check_settings(self, (*shares, "fading"), 0, 1, limit, "leave it out for the default")
        check_settings(self, ("horizon_pictures",), 1, 64, "must be 1 to 64 pictures", "2 is the default")
        limit = "must be 2 to 16 levels of each colour"
        check_settings(self, ("colour_levels",), 2, 16, limit, "14 is the default")

    def build(self, spec: BackboneSpec, flow: FlowEstimator) -> FlowTexture:
        return FlowTexture.on(spec, self, flow)


class FlowTexture(FlowNovelty):
    """Scores as `flow` does, less what is fleeting or familiar in restless squares."""

    config: FlowTextureConfig
    # B rows columns: how restless each token's square has been for long.
    _restless: Tensor | None = None
    # B squares colours: what each square has shown, fading.
    _seen: Tensor | None = None
    # B colours: what has fired in restless squares.
    _shown: Tensor | None = None
    # B LAG squares+1 colours: both, of blocks that do not count yet.
    _waiting: Tensor | None = None

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
        squares = self._judge_squares(flagged & lost)
        restless = squares.repeat_interleave(self._side, 1).repeat_interleave(self._side, 2)[:, None]
        slots = colour_slots(settled(stream), cfg.colour_levels, self._side)
        strange = flagged & ~lost & ~self._recognise(slots).view_as(flagged)
        crowd = crowding(strange, 2 * (self._side // 2) + 1)
        counts = strange & (crowd >= cfg.speck_share)
        self._take_in(slots, counts & restless)
        # The flow of a drop is not that of what it hides: a claim must neither leave nor end with it.
        here = pixel_grid((at.shape[-2], at.shape[-1]), at)
        passed = restless & flagged & ~counts
        return Evidence(
            # About as large as the scores of others after the division by the block's scale.
            torch.where(restless, 1 + crowd, novelty),
            torch.where(restless, counts, flagged),
            traced | passed,
            torch.where(passed[:, :, None], here, at),
        )

    def _judge_squares(self, fleeting: Tensor) -> Tensor:
        """Tell, B rows columns, in which squares what appears does not stay; fleeting B P y x."""
        cfg = self.config
        touched = functional.max_pool2d(fleeting.float(), self._side)
        # Of the last picture nothing is known.
        rate = touched.sum(dim=1) / max(fleeting.shape[1] - 1, 1)
        around = functional.avg_pool2d(rate, 5, stride=1, padding=2, count_include_pad=False)
        before = torch.zeros_like(around) if self._restless is None else self._restless
        # The mean of some four seconds.
        self._restless = before.lerp(around, 0.2)
        # A picture full of rain has dips, square by square and block by block: what holds for all of it is surer.
        now, long = (each.mean(dim=(1, 2), keepdim=True) for each in (rate, self._restless))
        everywhere = torch.maximum(now, long)
        return (
            (around >= cfg.restless_here)
            | (self._restless >= cfg.restless_long)
            | (everywhere >= cfg.restless_everywhere)
        )

    def _recognise(self, slots: Tensor) -> Tensor:
        """Tell, B P*y*x, which pixels have a colour that their square has been showing or that has fired anywhere."""
        cfg = self.config
        levels = cfg.colour_levels
        if self._seen is None:
            self._seen = count_colours(slots, self._grid, levels)
        known = familiar_colours(self._seen, self._grid, levels, cfg.familiar_share).gather(1, slots)
        if self._shown is not None:
            cube = self._shown.view(-1, 1, levels, levels, levels)
            most = functional.max_pool3d(cube, 3, stride=1, padding=1).flatten(1)
            known |= (most >= cfg.speck_share * self._side**2).gather(1, slots % levels**3)
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

    def state(self) -> State:
        return {**super().state(), **copies({name: getattr(self, f"_{name}") for name in KEPT})}

    def expected(self, state: State) -> dict[str, Entry]:
        squares, colours = self._grid[0] * self._grid[1], self.config.colour_levels**3
        shapes = (self._grid, (squares, colours), (colours,), (LAG, squares + 1, colours))
        own = {name: Entry(("B", *shape), torch.float32) for name, shape in zip(KEPT, shapes, strict=True)}
        return {**super().expected(state), **together(state, own)}

    def load_state(self, state: State) -> None:
        super().load_state(state)
        for name in KEPT:
            setattr(self, f"_{name}", state.get(name))


def vanishing(
    stream: Tensor, flow: Flow, *, horizon: int, cycle_threshold_px: float, photometric_threshold: float
) -> Tensor:
    """Tell, B P y x, whether what each pixel of pictures 1 to P shows is lost again within `horizon` pictures.

    It is followed along the forward flow and must stay reliable and keep the colour it came with. What leaves
    the picture is not lost, and of the last picture nothing is known yet. stream B P+1 3 y x.
    """
    batch, pairs = flow.forward.shape[:2]
    size = (stream.shape[-2], stream.shape[-1])
    at = pixel_grid(size, stream).expand(batch, pairs, -1, -1, -1).clone()
    lost = torch.zeros(batch, pairs, *size, dtype=torch.bool, device=stream.device)
    for later in range(1, min(horizon, pairs - 1) + 1):
        # Only this many pictures are followed by one `later` pictures on.
        known = pairs - later
        here = at[:, :known].flatten(0, 1)
        step = sample(flow.forward[:, later : later + known].flatten(0, 1), here)
        there = here + step
        target = torch.cat([flow.backward[:, later:], stream[:, later + 1 :]], dim=2).flatten(0, 1)
        found = sample(target, there)
        cycle = torch.linalg.vector_norm(step + found[:, :2], dim=1)
        photometric = (found[:, 2:] - stream[:, 1 : known + 1].flatten(0, 1)).abs().mean(dim=1)
        broken = (cycle > cycle_threshold_px) | (photometric > photometric_threshold)
        lost[:, :known] |= (broken & inside(there, size)).unflatten(0, (batch, known))
        at[:, :known] = there.unflatten(0, (batch, known))
    return lost


def settled(stream: Tensor) -> Tensor:
    """Return pictures 1 to P with each pixel the median of three in time: a drop of one picture is not in them.

    stream B P+1 3 y x -> B P 3 y x; the last picture, which has no successor, gets its predecessor's.
    """
    if stream.shape[1] < 3:
        return stream[:, 1:]
    three = torch.stack([stream[:, :-2], stream[:, 1:-1], stream[:, 2:]])
    middle = three.sum(dim=0) - three.amax(dim=0) - three.amin(dim=0)
    return torch.cat([middle, middle[:, -1:]], dim=1)


def crowding(marked: Tensor, window: int) -> Tensor:
    """Return, B P y x, the share of marked pixels around each, in three pictures and `window` rows and columns.

    What enters does so in all three; two drops in one square do not. Outside the clip or picture nothing counts.
    """
    here = functional.avg_pool2d(
        marked.float(), window, stride=1, padding=window // 2, count_include_pad=False
    )
    total, count = here.clone(), torch.ones_like(here[:1, :, :1, :1])
    total[:, 1:] += here[:, :-1]
    total[:, :-1] += here[:, 1:]
    count[:, 1:] += 1
    count[:, :-1] += 1
    return total / count


def colour_slots(pictures: Tensor, levels: int, side: int) -> Tensor:
    """Return, B P*y*x, for every pixel its entry in a table of squares, `side` pixels wide, and colours."""
    height, width = pictures.shape[-2:]
    red, green, blue = (pictures * levels).long().clamp(0, levels - 1).unbind(2)
    rows = torch.arange(height, device=pictures.device)[:, None] // side
    square = rows * (width // side) + torch.arange(width, device=pictures.device) // side
    return (((square * levels + red) * levels + green) * levels + blue).flatten(1)


def count_colours(slots: Tensor, grid: tuple[int, int], levels: int) -> Tensor:
    """Count, B squares levels^3, the pixels of the block that showed each colour in each square."""
    squares, colours = grid[0] * grid[1], levels**3
    table = torch.zeros(slots.shape[0], squares * colours, dtype=torch.float32, device=slots.device)
    # Sums of ones are exact in any order, so this is the same on every device.
    table.scatter_add_(1, slots, torch.ones_like(slots, dtype=torch.float32))
    counts: Tensor = table.unflatten(1, (squares, colours))
    return counts


def familiar_colours(seen: Tensor, grid: tuple[int, int], levels: int, share: float) -> Tensor:
    """Tell, B squares*levels^3, which colours are familiar: they or neighbours of them make up `share` of what a
    square and the squares around it have shown. seen B squares levels^3."""
    batch, (rows, columns) = seen.shape[0], grid
    table = seen.unflatten(1, grid).permute(0, 3, 1, 2)
    around = functional.avg_pool2d(table, 3, stride=1, padding=1, count_include_pad=False)
    around = around.permute(0, 2, 3, 1).reshape(batch * rows * columns, 1, levels, levels, levels)
    most = functional.max_pool3d(around, 3, stride=1, padding=1).flatten(1)
    return (most >= share * around.flatten(1).sum(dim=1, keepdim=True)).reshape(batch, -1)
