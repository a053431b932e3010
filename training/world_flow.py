"""world-flow: a small network for pictures of the embedded model's size, trained on its world's exact flow.

An encoder looks at each picture once and describes it at a quarter and at an eighth of its size. Flow is found
at an eighth from all-pairs correlations, then corrected twice at a quarter, each time by what the correlations
around the current flow say. Last, every pixel takes a mean of the nine flows nearest to it, weighted by the
network, which keeps the outlines of what moves sharp. Nothing is recurrent and no step shares its weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recap.flow.raft import RaftFlow, conv, stage
from recap.flow.warp import backtrace
from recap.io.weights import fill, open_tensors

FINE, COARSE = 4, 8  # pixels between neighbouring features
RADIUS = 3  # of the neighbourhood of correlations that a step reads
WINDOW = (2 * RADIUS + 1) ** 2
HALF, QUARTER, EIGHTH = 32, 64, 96  # channels, by how much smaller than the picture
MATCH, READ = 32, 32  # channels of what is compared, and of what a step makes of its correlations
HEADS = 8  # ways to weigh the places of a picture in a summary of it
SMALLEST = 16  # pixels; a picture of one coarse feature could not be normalised
RETRAIN = "train it with python -m training.train_flow, or name another file"


class Residual(nn.Module):
    """Two convolutions added to what they were applied to."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = conv(channels, channels, 3)
        self.conv2 = conv(channels, channels, 3)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.conv2(F.relu(self.conv1(x))))


class Summary(nn.Module):
    """Adds to every place what the whole picture shows.

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


class Encoded(NamedTuple):
    """All that is ever read of a picture."""

    fine: Tensor  # N 64 Y/4 X/4: what is there
    fine_match: Tensor  # N 32 Y/4 X/4: what is compared between pictures
    coarse: Tensor  # N 96 Y/8 X/8
    coarse_match: Tensor  # N 32 Y/8 X/8

    def of(self, pictures: Tensor) -> Encoded:
        return Encoded(*(part[pictures] for part in self))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.to_half = nn.Sequential(stage(3 * 4, HALF, 3), Residual(HALF))
        self.to_quarter = nn.Sequential(stage(HALF, QUARTER, 3, 2), Residual(QUARTER))
        self.to_eighth = nn.Sequential(stage(QUARTER, EIGHTH, 3, 2), Residual(EIGHTH))
        self.fine_match = conv(QUARTER, MATCH, 1)
        self.coarse_match = conv(EIGHTH, MATCH, 1)

    def forward(self, pictures: Tensor) -> Encoded:
        """Pictures N 3 Y X in -1..1, sides multiples of 8."""
        # Channels innermost: so all that follows runs fastest, on CPU and GPU alike.
        squares = F.pixel_unshuffle(pictures, 2).contiguous(memory_format=torch.channels_last)
        fine = self.to_quarter(self.to_half(squares))
        coarse = self.to_eighth(fine)
        # Normalised over the picture, or what all its places have in common would drown what tells them apart.
        fine_match, coarse_match = self.fine_match(fine), self.coarse_match(coarse)
        return Encoded(fine, F.instance_norm(fine_match), coarse, F.instance_norm(coarse_match))


class Step(nn.Module):
    """Corrects a flow by the correlations that it points at and by what is known of the picture it leaves."""

    def __init__(self, known: int, channels: int) -> None:
        super().__init__()
        self.read = stage(WINDOW + 2, READ, 1)
        self.join = stage(known + READ, channels, 3)
        self.summary = Summary(channels)
        self.deepen = stage(channels, channels, 3)
        self.correct = conv(channels, 2, 3)

    def forward(self, known: Tensor, maps: Tensor, flow: Tensor) -> tuple[Tensor, Tensor]:
        """The corrected flow N 2 y x, in features, and the state N channels y x that it was read from."""
        # The place that is looked at is an input: no gradient goes through where the windows lie.
        flow = flow.detach()
        seen = self.read(torch.cat((read_windows(maps, backtrace(flow)), flow), dim=1))
        state = self.summary(self.join(torch.cat((known, seen), dim=1)))
        state = state + self.deepen(state)
        return flow + self.correct(state).float(), state


class Estimate(NamedTuple):
    """Flow N 2 y x as it got better, in features of its own size, and the state that the last was read from."""

    coarse: Tensor
    middle: Tensor
    fine: Tensor
    state: Tensor


class WorldFlowNet(nn.Module):
    """The network. Sides must be multiples of 8; `WorldFlow` sees to that."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = Encoder()
        self.first = Step(EIGHTH, EIGHTH)
        self.hand_down = conv(EIGHTH, READ, 1)
        self.know = stage(QUARTER + READ, QUARTER, 1)
        self.second = Step(QUARTER, QUARTER)
        self.third = Step(QUARTER, QUARTER)
        self.weigh = conv(QUARTER, 9 * FINE**2, 1)
        self.apply(_draw_weights)

    def estimate(self, source: Encoded, target: Encoded) -> Estimate:
        """Flow from each source picture to its target picture, step by step."""
        start = torch.zeros_like(source.coarse[:, :2], dtype=torch.float32)
        coarse, state = self.first(source.coarse, correlate(source.coarse_match, target.coarse_match), start)
        from_above = F.interpolate(self.hand_down(state), scale_factor=2, mode="bilinear")
        known = self.know(torch.cat((source.fine, from_above), dim=1))
        maps = correlate(source.fine_match, target.fine_match)
        middle, state = self.second(known, maps, enlarge(coarse, 2))
        fine, state = self.third(state, maps, middle)
        return Estimate(coarse, middle, fine, state)

    def sharpen(self, estimate: Estimate) -> Tensor:
        """The last flow in pixels, N 2 Y X: of each pixel, a weighted mean of the nine flows around it."""
        num, _, height, width = estimate.fine.shape
        weights = self.weigh(estimate.state).float().unflatten(1, (1, 9, FINE, FINE)).softmax(dim=2)
        # Borders are repeated: zeros around the picture would slow everything there down.
        around = F.unfold(F.pad(FINE * estimate.fine, (1, 1, 1, 1), mode="replicate"), 3)
        around = around.view(num, 2, 9, 1, 1, height, width)
        mixed: Tensor = (weights * around).sum(dim=2)
        return mixed.permute(0, 1, 4, 2, 5, 3).reshape(num, 2, height * FINE, width * FINE)


def _draw_weights(module: nn.Module) -> None:
    """Weights that keep the size of what passes a ReLU: torch's own would shrink it at every layer."""
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
    if isinstance(module, Residual):
        nn.init.zeros_(module.conv2.weight)
    if isinstance(module, Step):
        nn.init.normal_(module.correct.weight, std=1e-3)


def enlarge(flow: Tensor, factor: int) -> Tensor:
    """The same motion in features `factor` times as many; both count from the outer edge of the picture."""
    return factor * F.interpolate(flow, scale_factor=factor, mode="bilinear")


def correlate(source: Tensor, target: Tensor) -> Tensor:
    """How well each place of the source matches all of the target: N (y x) y+2 x+2, in a ring of zeros."""
    ringed = F.pad(target, (1, 1, 1, 1))
    rows = (source / source.shape[1] ** 0.5).flatten(2).mT
    maps: Tensor = (rows @ ringed.flatten(2)).unflatten(-1, ringed.shape[-2:])
    return maps


def read_windows(maps: Tensor, centres: Tensor) -> Tensor:
    """Correlations N WINDOW y x around centres N 2 y x, each in its own map, bilinear.

    All places of a window lie between the map's in the same way: so whole places are read, then blended twice.
    """
    height, width = maps.shape[-2:]
    whole = centres.floor()
    across, down = (centres - whole).flatten(2).unbind(1)
    offsets = torch.arange(-RADIUS, RADIUS + 2, device=maps.device)
    columns, rows = (whole.flatten(2).long() + 1).unbind(1)
    # Outside the picture everything lands on the ring of zeros.
    columns = (columns[..., None] + offsets).clamp(0, width - 1)
    rows = (rows[..., None] + offsets).clamp(0, height - 1)
    places = (rows[..., :, None] * width + columns[..., None, :]).flatten(2)
    read = maps.flatten(2).gather(2, places).unflatten(2, (len(offsets), len(offsets)))
    read = torch.lerp(read[..., :-1], read[..., 1:], across[..., None, None].to(read.dtype))
    read = torch.lerp(read[..., :-1, :], read[..., 1:, :], down[..., None, None].to(read.dtype))
    windows: Tensor = read.flatten(2).mT.unflatten(2, centres.shape[-2:])
    return windows


class WorldFlow(RaftFlow):
    """The flow estimator: pairs and padding are RAFT's, the network is ours."""

    smallest = SMALLEST

    def __init__(self, model: WorldFlowNet, *, volume_bytes: int = 2**31) -> None:
        """`volume_bytes` bounds the correlations in memory at once; a block that needs more goes in parts."""
        self.model = model.eval().requires_grad_(False)
        self.volume_bytes = volume_bytes

    def _track(self, encoded: Encoded, source: Tensor, target: Tensor) -> Tensor:
        area = encoded.fine[0, 0].numel()
        # A quarter as much again for the windows, the coarse correlations and the ring.
        num = max(1, int(self.volume_bytes / (1.25 * area * area * encoded.fine.element_size())))
        parts = zip(torch.split(source, num), torch.split(target, num), strict=True)
        found = [self.model.estimate(encoded.of(here), encoded.of(there)) for here, there in parts]
        return torch.cat([self.model.sharpen(each) for each in found])


def load_world_flow(path: Path, device: torch.device | str = "cpu") -> WorldFlowNet:
    """The network with the weights of a file, which must contain exactly its tensors."""
    with torch.device("meta"):
        model = WorldFlowNet()
    found = open_tensors(path, "weights", RETRAIN)
    fill(model, found, path=path, field="weights", dtype=torch.float32, what="world-flow", remedy=RETRAIN)
    return model.to(device)
