"""RAFT-small is recurrent all-pairs optical flow (Teed and Deng, ECCV 2020), for inference, in plain torch.

Two encoders look at each picture once, at an eighth of its size. A pyramid of feature correlations contains how
well every pixel of one picture matches every pixel of the next; a recurrent unit reads the neighbourhood its
current flow points at and corrects the flow, a fixed number of times. Parameter names are those of
torchvision's `raft_small`, so that its files fit as they are; the authors' own file is renamed on loading.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recap.errors import refuse
from recap.flow.network import STRIDE, VOLUME_BYTES, NetworkFlow, conv, load_network, stage
from recap.flow.warp import backtrace, sample
from recap.io.weights import open_tensors

LEVELS = 4  # of the correlation pyramid
RADIUS = 3  # of the neighbourhood read at each level
SMALLEST = STRIDE * 2**LEVELS  # pixels; the coarsest level then still has two rows and columns
FEATURES, HIDDEN, CONTEXT, MOTION = 128, 96, 64, 82  # channels


class Bottleneck(nn.Module):
    """Adds a residual that does its 3x3 convolution at a quarter of its channels."""

    def __init__(self, channels: int, out: int, stride: int, *, norm: bool) -> None:
        super().__init__()
        self.convnormrelu1 = stage(channels, out // 4, 1, norm=norm)
        self.convnormrelu2 = stage(out // 4, out // 4, 3, stride, norm=norm)
        self.convnormrelu3 = stage(out // 4, out, 1, norm=norm)
        self.downsample = nn.Identity() if stride == 1 else stage(channels, out, 1, stride, norm=norm)[:-1]

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.convnormrelu3(self.convnormrelu2(self.convnormrelu1(x)))
        return F.relu(self.downsample(x) + y)


class Encoder(nn.Module):
    """Encodes pictures N 3 Y X in -1..1 as N out Y/8 X/8."""

    def __init__(self, out: int, *, norm: bool) -> None:
        super().__init__()
        self.convnormrelu = stage(3, 32, 7, 2, norm=norm)
        for layer, (channels, width, stride) in enumerate(((32, 32, 1), (32, 64, 2), (64, 96, 2)), start=1):
            first = Bottleneck(channels, width, stride, norm=norm)
            self.add_module(f"layer{layer}", nn.Sequential(first, Bottleneck(width, width, 1, norm=norm)))
        self.conv = conv(96, out, 1)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.children():
            x = part(x)
        return x


class MotionEncoder(nn.Module):
    """Encodes the motion from correlations and the flow so far: N 82 y x, the last two the flow itself."""

    def __init__(self) -> None:
        super().__init__()
        self.convcorr1 = stage(LEVELS * (2 * RADIUS + 1) ** 2, 96, 1)
        self.convflow1 = stage(2, 64, 7)
        self.convflow2 = stage(64, 32, 3)
        self.conv = stage(96 + 32, MOTION - 2, 3)

    def forward(self, flow: Tensor, correlations: Tensor) -> Tensor:
        seen = torch.cat((self.convcorr1(correlations), self.convflow2(self.convflow1(flow))), dim=1)
        return torch.cat((self.conv(seen), flow), dim=1)


class Gates(NamedTuple):
    """Carries a recurrent unit prepared for one context, which stays the same from update to update."""

    update_reset: Tensor  # weights of both gates on (hidden, motion)
    proposal: Tensor  # weights of the proposed state on the same
    update_reset_share: Tensor  # N 192 y x: what the context adds to both gates
    proposal_share: Tensor  # N 96 y x


class ConvGRU(nn.Module):
    """Updates a hidden state, as a gated recurrent unit with 3x3 convolutions of (hidden, context, motion)."""

    def __init__(self) -> None:
        super().__init__()
        self.convz = conv(HIDDEN + CONTEXT + MOTION, HIDDEN, 3)
        self.convr = conv(HIDDEN + CONTEXT + MOTION, HIDDEN, 3)
        self.convq = conv(HIDDEN + CONTEXT + MOTION, HIDDEN, 3)

    def prepare(self, context: Tensor) -> Gates:
        """Convolve the context once instead of at every update: a third less time in this unit (CPU)."""
        products = (self.convz, self.convr, self.convq)
        weight = torch.cat([product.weight for product in products])
        bias = torch.cat([product.bias for product in products if product.bias is not None])
        of_hidden, of_context, of_motion = torch.split(weight, [HIDDEN, CONTEXT, MOTION], dim=1)
        share = F.conv2d(context, of_context, bias, padding=1)
        gates = [2 * HIDDEN, HIDDEN]
        changing = torch.split(torch.cat((of_hidden, of_motion), dim=1), gates)
        return Gates(*changing, *torch.split(share, gates, dim=1))

    def forward(self, hidden: Tensor, motion: Tensor, gates: Gates) -> Tensor:
        both = F.conv2d(torch.cat((hidden, motion), dim=1), gates.update_reset, padding=1)
        update, reset = torch.sigmoid(both + gates.update_reset_share).chunk(2, dim=1)
        proposal = F.conv2d(torch.cat((reset * hidden, motion), dim=1), gates.proposal, padding=1)
        return torch.lerp(hidden, torch.tanh(proposal + gates.proposal_share), update)


class FlowHead(nn.Module):
    """Reads the correction of the flow from a hidden state."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = conv(HIDDEN, 128, 3)
        self.conv2 = conv(128, 2, 3)

    def forward(self, hidden: Tensor) -> Tensor:
        correction: Tensor = self.conv2(F.relu(self.conv1(hidden)))
        return correction


class RecurrentBlock(nn.Module):
    """Adds a level of names: the larger RAFT has two units here."""

    def __init__(self) -> None:
        super().__init__()
        self.convgru1 = ConvGRU()


class UpdateBlock(nn.Module):
    """Estimates the flow recurrently."""

    def __init__(self) -> None:
        super().__init__()
        self.motion_encoder = MotionEncoder()
        self.recurrent_block = RecurrentBlock()
        self.flow_head = FlowHead()

    def forward(self, hidden: Tensor, context: Tensor, pyramid: list[Tensor], num_updates: int) -> Tensor:
        """Return flow N 2 y x in features, from none, after all updates."""
        recurrent = self.recurrent_block.convgru1
        gates = recurrent.prepare(context)
        flow = torch.zeros_like(hidden[:, :2])
        for _ in range(num_updates):
            motion = self.motion_encoder(flow, look_up(pyramid, backtrace(flow)))
            hidden = recurrent(hidden, motion, gates)
            flow = flow + self.flow_head(hidden)
        return flow


class Encoded(NamedTuple):
    """Carries all that is ever read of a picture, at an eighth of its size."""

    features: Tensor  # N 128 y x, to be matched
    hidden: Tensor  # N 96 y x, where the recurrent state starts when flow leaves this picture
    context: Tensor  # N 64 y x


class RaftSmall(nn.Module):
    """Is the network. Sizes must be multiples of 8 and at least `SMALLEST`; `RaftFlow` pads to that."""

    def __init__(self) -> None:
        super().__init__()
        self.feature_encoder = Encoder(FEATURES, norm=True)
        self.context_encoder = Encoder(HIDDEN + CONTEXT, norm=False)
        self.update_block = UpdateBlock()

    def encode(self, pictures: Tensor) -> Encoded:
        """Encode pictures N 3 Y X in -1..1."""
        hidden, context = self.context_encoder(pictures).split((HIDDEN, CONTEXT), dim=1)
        return Encoded(self.feature_encoder(pictures), torch.tanh(hidden), F.relu(context))

    def track(self, source: Encoded, target: Encoded, num_updates: int) -> Tensor:
        """Return flow N 2 Y X in pixels from each source picture to its target picture."""
        pyramid = correlation_pyramid(source.features, target.features)
        flow = self.update_block(source.hidden, source.context, pyramid, num_updates)
        return STRIDE * F.interpolate(flow, scale_factor=STRIDE, mode="bilinear", align_corners=True)

    def forward(self, source: Tensor, target: Tensor, num_updates: int = 12) -> Tensor:
        """Return flow N 2 Y X in pixels between two batches of pictures N 3 Y X in -1..1."""
        return self.track(self.encode(source), self.encode(target), num_updates)


def correlation_pyramid(source: Tensor, target: Tensor) -> list[Tensor]:
    """Tell how well each source pixel matches every position of the target, ever coarser: (N y x) 1 y' x' a level.

    Pooling the target's features equals pooling the correlations, which are linear in them. It moves so much
    less memory that both directions of a pair are faster made so (0.21 s for 12 pairs of 416x240, two cores)
    than as one volume and its transpose (0.35 s). Every map has a ring of zeros, so that clamped reading
    gives zero outside the picture.
    """
    pyramid = []
    rows = (source / source.shape[1] ** 0.5).flatten(2).mT
    for _ in range(LEVELS):
        ringed = F.pad(target, (1, 1, 1, 1))
        pyramid.append((rows @ ringed.flatten(2)).reshape(-1, 1, *ringed.shape[-2:]))
        target = F.avg_pool2d(target, 2)
    return pyramid


def look_up(pyramid: list[Tensor], positions: Tensor) -> Tensor:
    """Read correlations N (levels, dx, dy) y x around positions N 2 y x, each level at its own scale."""
    num, _, height, width = positions.shape
    offsets = torch.arange(-RADIUS, RADIUS + 1, device=positions.device, dtype=positions.dtype)
    # The trained order of the window is x first, y second: x varies along the rows of the window.
    window = torch.stack(torch.meshgrid(offsets, offsets, indexing="ij"))
    centres = positions.movedim(1, -1).reshape(-1, 2, 1, 1)
    read = [sample(level, centres / 2**depth + window + 1) for depth, level in enumerate(pyramid)]
    return torch.cat(read, dim=1).reshape(num, height, width, -1).movedim(-1, 1)


class RaftFlow(NetworkFlow[Encoded]):
    """Estimates flow by RAFT-small."""

    smallest = SMALLEST
    model: RaftSmall

    def __init__(self, model: RaftSmall, *, num_updates: int = 12, volume_bytes: int = VOLUME_BYTES) -> None:
        if num_updates < 1:
            raise refuse("num_updates", num_updates, "at least 1 is needed", "12 is usual")
        super().__init__(model, volume_bytes)
        self.num_updates = num_updates

    def _pair_bytes(self, encoded: Encoded) -> float:
        area = encoded.features.shape[-2] * encoded.features.shape[-1]
        # All levels together have 4/3 of the finest; their rings of zeros are what the 3/2 is for.
        return area * area * encoded.features.element_size() * 3 / 2

    def _encode(self, pictures: Tensor) -> Encoded:
        return self.model.encode(pictures)

    def _track(self, here: Encoded, there: Encoded) -> Tensor:
        return self.model.track(here, there, self.num_updates)


AUTHORS_NAMES = (
    ("feature_encoder.", "fnet."),
    ("context_encoder.", "cnet."),
    ("net.conv.", "net.conv2."),
    (".convnormrelu.0.", ".conv1."),
    (".convnormrelu1.0.", ".conv1."),
    (".convnormrelu2.0.", ".conv2."),
    (".convnormrelu3.0.", ".conv3."),
    (".motion_encoder.convcorr1.0.", ".encoder.convc1."),
    (".motion_encoder.convflow1.0.", ".encoder.convf1."),
    (".motion_encoder.convflow2.0.", ".encoder.convf2."),
    (".motion_encoder.conv.0.", ".encoder.conv."),
    (".recurrent_block.convgru1.", ".gru."),
)
"""Ours (torchvision's) -> the authors', to be applied in this order."""

FETCH_AGAIN = "fetch the weights with `recap weights raft-small`"


def authors_name(name: str) -> str:
    """Return the name a parameter has in the authors' own files, `module.` aside."""
    for ours, theirs in AUTHORS_NAMES:
        name = name.replace(ours, theirs)
    return name


def load_raft_small(path: Path, device: torch.device | str = "cpu") -> RaftSmall:
    """Load the network from a file: the authors' `raft-small.pth` or torchvision's layout."""
    stored = open_tensors(path, "weights", FETCH_AGAIN)
    found = {name.removeprefix("module."): tensor for name, tensor in stored.items()}
    by_authors = any(name.startswith("fnet.") for name in found)
    rename = authors_name if by_authors else str
    return load_network(RaftSmall, found, path, device, remedy=FETCH_AGAIN, rename=rename)
