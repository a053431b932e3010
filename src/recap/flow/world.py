"""world-flow is a small network for the embedded model's pictures, trained on the exact flow of its rendered world.

It knows that world and nothing else (`training/train_flow.py` trains it). An encoder looks at each picture once and
describes it at a quarter and at an eighth of its size. Flow is found at an eighth from all-pairs correlations, then
corrected twice at a quarter, each time by what the correlations around the current flow say. Last, every pixel takes
a mean of the nine flows nearest to it, weighted by the network, which keeps the outlines of what moves sharp. Nothing
is recurrent and no step shares its weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recap.errors import RecapError, refuse
from recap.flow.network import STRIDE, NetworkFlow, conv, load_network, stage
from recap.flow.warp import backtrace
from recap.io.weights import open_tensors

WORLD = "embedded"
"""The backbone that generates this world."""
PICTURE_SIZE = (128, 208)
"""Rows and columns of its pictures; the network was trained on them at half that size."""
WEIGHTS = Path(__file__).parent / "weights" / "world-flow.safetensors"

FINE, COARSE = STRIDE // 2, STRIDE  # pixels between neighbouring features
RADIUS = 3  # of the neighbourhood of correlations that a step reads
WINDOW = (2 * RADIUS + 1) ** 2
HALF, QUARTER, EIGHTH = 32, 64, 96  # channels, by how much smaller than the picture
MATCH, READ = 32, 32  # channels that are compared, and channels of a step's correlations
HEADS = 8  # ways to weight the positions of a picture in a summary of it
SMALLEST = 16  # pixels; a picture of one coarse feature could not be normalised
RETRAIN = "train it with python -m training.train_flow, or name another file"


class Residual(nn.Module):
    """Adds two convolutions to what they are applied to."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = conv(channels, channels, 3)
        self.conv2 = conv(channels, channels, 3)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.conv2(F.relu(self.conv1(x))))


class PictureSummary(nn.Module):
    """Adds to every position what the whole picture shows.

    Plain sky matches everywhere. It moves as the scene around it does, which may be out of a convolution's reach.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weigh = conv(channels, HEADS, 1)
        self.spread = nn.Linear(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.weigh(x).flatten(2).softmax(dim=-1)
        values = x.flatten(2).unflatten(1, (HEADS, -1))
        means = (values @ weights.unsqueeze(-1)).flatten(1)
        summed: Tensor = x + self.spread(means)[..., None, None]
        return summed


class EncodedPictures(NamedTuple):
    """Carries all that is ever read of pictures."""

    fine: Tensor  # N 64 Y/4 X/4: what is there
    fine_match: Tensor  # N 32 Y/4 X/4: what is compared between pictures
    coarse: Tensor  # N 96 Y/8 X/8
    coarse_match: Tensor  # N 32 Y/8 X/8


class PictureEncoder(nn.Module):
    """Describes pictures at a quarter and at an eighth of their size."""

    def __init__(self) -> None:
        super().__init__()
        self.to_half = nn.Sequential(stage(3 * 4, HALF, 3), Residual(HALF))
        self.to_quarter = nn.Sequential(stage(HALF, QUARTER, 3, 2), Residual(QUARTER))
        self.to_eighth = nn.Sequential(stage(QUARTER, EIGHTH, 3, 2), Residual(EIGHTH))
        self.fine_match = conv(QUARTER, MATCH, 1)
        self.coarse_match = conv(EIGHTH, MATCH, 1)

    def forward(self, pictures: Tensor) -> EncodedPictures:
        """Encode pictures N 3 Y X in -1..1, whose sides are multiples of 8."""
        # Channels innermost: so all that follows runs fastest, on CPU and GPU alike.
        squares = F.pixel_unshuffle(pictures, 2).contiguous(memory_format=torch.channels_last)
        fine = self.to_quarter(self.to_half(squares))
        coarse = self.to_eighth(fine)
        # Normalised over the picture, or what all its positions have in common would drown what tells them apart.
        fine_match, coarse_match = self.fine_match(fine), self.coarse_match(coarse)
        return EncodedPictures(fine, F.instance_norm(fine_match), coarse, F.instance_norm(coarse_match))


class FlowStep(nn.Module):
    """Corrects a flow by the correlations that it points at and by what is known of the picture it leaves."""

    def __init__(self, known: int, channels: int) -> None:
        super().__init__()
        self.read = stage(WINDOW + 2, READ, 1)
        self.join = stage(known + READ, channels, 3)
        self.summary = PictureSummary(channels)
        self.deepen = stage(channels, channels, 3)
        self.correct = conv(channels, 2, 3)

    def forward(self, known: Tensor, maps: Tensor, flow: Tensor) -> tuple[Tensor, Tensor]:
        """Return the corrected flow N 2 y x, in features, and the state N channels y x that it was read from."""
        # The position that is looked at is an input: no gradient goes through where the windows lie.
        flow = flow.detach()
        seen = self.read(torch.cat((read_windows(maps, backtrace(flow)), flow), dim=1))
        state = self.summary(self.join(torch.cat((known, seen), dim=1)))
        state = state + self.deepen(state)
        return flow + self.correct(state).float(), state


class FlowEstimate(NamedTuple):
    """Carries flow N 2 y x as it got better, in features of its size, and the state the last was read from."""

    coarse: Tensor
    middle: Tensor
    fine: Tensor
    state: Tensor


class WorldFlowNet(nn.Module):
    """Is the network. Sides must be multiples of 8; `WorldFlow` pads to that."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = PictureEncoder()
        self.first = FlowStep(EIGHTH, EIGHTH)
        self.hand_down = conv(EIGHTH, READ, 1)
        self.know = stage(QUARTER + READ, QUARTER, 1)
        self.second = FlowStep(QUARTER, QUARTER)
        self.third = FlowStep(QUARTER, QUARTER)
        self.weigh = conv(QUARTER, 9 * FINE**2, 1)
        self.apply(_draw_weights)

    def estimate(self, source: EncodedPictures, target: EncodedPictures) -> FlowEstimate:
        """Find the flow from each source picture to its target picture, step by step."""
        start = torch.zeros_like(source.coarse[:, :2], dtype=torch.float32)
        coarse, state = self.first(source.coarse, correlate(source.coarse_match, target.coarse_match), start)
        from_above = F.interpolate(self.hand_down(state), scale_factor=2, mode="bilinear")
        known = self.know(torch.cat((source.fine, from_above), dim=1))
        maps = correlate(source.fine_match, target.fine_match)
        middle, state = self.second(known, maps, enlarge(coarse, 2))
        fine, state = self.third(state, maps, middle)
        return FlowEstimate(coarse, middle, fine, state)

    def sharpen(self, estimate: FlowEstimate) -> Tensor:
        """Return the last flow in pixels, N 2 Y X: every pixel gets a weighted mean of the nine flows around it."""
        num, _, height, width = estimate.fine.shape
        weights = self.weigh(estimate.state).float().unflatten(1, (1, 9, FINE, FINE)).softmax(dim=2)
        # Borders are repeated: zeros around the picture would slow everything there down.
        around = F.unfold(F.pad(FINE * estimate.fine, (1, 1, 1, 1), mode="replicate"), 3)
        around = around.view(num, 2, 9, 1, 1, height, width)
        mixed: Tensor = (weights * around).sum(dim=2)
        return mixed.permute(0, 1, 4, 2, 5, 3).reshape(num, 2, height * FINE, width * FINE)


def _draw_weights(module: nn.Module) -> None:
    """Draw weights that keep the size of what passes a ReLU: torch's own would shrink it at every layer."""
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
    if isinstance(module, Residual):
        nn.init.zeros_(module.conv2.weight)
    if isinstance(module, FlowStep):
        nn.init.normal_(module.correct.weight, std=1e-3)


def enlarge(flow: Tensor, factor: int) -> Tensor:
    """Return the same motion in features `factor` times as many; both count from the picture's outer edge."""
    return factor * F.interpolate(flow, scale_factor=factor, mode="bilinear")


def correlate(source: Tensor, target: Tensor) -> Tensor:
    """Tell how well each position of the source matches all of the target: N (y x) y+2 x+2, in a ring of zeros."""
    ringed = F.pad(target, (1, 1, 1, 1))
    rows = (source / source.shape[1] ** 0.5).flatten(2).mT
    maps: Tensor = (rows @ ringed.flatten(2)).unflatten(-1, ringed.shape[-2:])
    return maps


def read_windows(maps: Tensor, centres: Tensor) -> Tensor:
    """Read correlations N WINDOW y x around centres N 2 y x, each in its own map, bilinearly.

    All positions of a window lie between the map's in the same way: so whole ones are read, then blended twice.
    """
    height, width = maps.shape[-2:]
    whole = centres.floor()
    across, down = (centres - whole).flatten(2).unbind(1)
    offsets = torch.arange(-RADIUS, RADIUS + 2, device=maps.device)
    columns, rows = (whole.flatten(2).long() + 1).unbind(1)
    # Outside the picture everything lands on the ring of zeros.
    columns = (columns[..., None] + offsets).clamp(0, width - 1)
    rows = (rows[..., None] + offsets).clamp(0, height - 1)
    index = (rows[..., :, None] * width + columns[..., None, :]).flatten(2)
    read = maps.flatten(2).gather(2, index).unflatten(2, (len(offsets), len(offsets)))
    read = torch.lerp(read[..., :-1], read[..., 1:], across[..., None, None].to(read.dtype))
    read = torch.lerp(read[..., :-1, :], read[..., 1:, :], down[..., None, None].to(read.dtype))
    windows: Tensor = read.flatten(2).mT.unflatten(2, centres.shape[-2:])
    return windows


class WorldFlow(NetworkFlow[EncodedPictures]):
    """Estimates flow by world-flow."""

    smallest = SMALLEST
    model: WorldFlowNet

    def _encode(self, pictures: Tensor) -> EncodedPictures:
        encoded: EncodedPictures = self.model.encode(pictures)
        return encoded

    def _pair_bytes(self, encoded: EncodedPictures) -> float:
        area = encoded.fine[0, 0].numel()
        # A quarter as much again for the windows, the coarse correlations and the ring.
        return 1.25 * area * area * encoded.fine.element_size()

    def _track(self, here: EncodedPictures, there: EncodedPictures) -> Tensor:
        return self.model.sharpen(self.model.estimate(here, there))


def refuse_world(pictures: str) -> RecapError:
    """Make the error for pictures of another world: flow would be found there, too, and nothing would show it."""
    limit = f"it knows the pictures of `{WORLD}` alone, {PICTURE_SIZE[1]}x{PICTURE_SIZE[0]}, not {pictures}"
    return refuse("flow", "world-flow", limit, "take raft-small or classical")


def load_world_flow(path: Path = WEIGHTS, device: torch.device | str = "cpu") -> WorldFlowNet:
    """Load the network from a file, by default the package's, which must contain exactly its tensors."""
    found = open_tensors(path, "weights", RETRAIN)
    return load_network(WorldFlowNet, found, path, device, remedy=RETRAIN, what="world-flow")
