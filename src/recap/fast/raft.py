"""Estimates flow by a fast RAFT-small: the readable one's weights in half precision, few launches, one CUDA graph.

`FastRaftFlow` keeps the contract of `RaftFlow` and takes its parameters; that module explains the layers.

The least time, for 12 pairs both ways of 416x240 and 12 updates on an H200 (measured: 790 TFLOP/s fp16, 4.3 TB/s):
    encoders, 13 pictures    16 GFLOP, 0.02 ms; about 1.2 GB of narrow activations, 0.3 ms
    correlations             20 GFLOP, 0.03 ms; 154 MB written, 0.04 ms
    look-ups, 12             60 MB touched and 15 MB written each, 0.2 ms
    updates, 12              53 GFLOP each, 0.8 ms; about 0.2 GB each, mostly from the L2, 0.6 ms
Together 0.7 TFLOP: about 1.5 ms if everything ran at peak. If convolutions with so few channels reach a third of
that, and about 350 launches cost 2 to 4 us each even in a graph, 4 to 6 ms can be expected; `benchmarks.flow`
measures it.

The features of a block's first picture, which was also the last of the previous block, are computed again: the
contract passes pictures only, and recognising one would take a comparison on the device. That is a 13th of the
encoders' work.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recap.contracts import Flow
from recap.fast import raft_steps
from recap.fast.graphs import Graphed
from recap.fast.raft_steps import ALIGNED, MOVED, STATE, WINDOWS, correlate, pool_levels
from recap.flow.network import STRIDE, check_clip, pad_to_network
from recap.flow.raft import CONTEXT, HIDDEN, MOTION, SMALLEST, Bottleneck, Encoder, RaftFlow, UpdateBlock

Steps = Any
"""`recap.fast.raft_steps`, or `recap.fast.raft_kernels`, which computes the same."""


def widened(weight: Tensor, *, inputs: int = 0, outputs: int = 0) -> Tensor:
    """Add zero channels to a kernel O I y x until it has these numbers of inputs and outputs."""
    more_in, more_out = max(inputs - weight.shape[1], 0), max(outputs - weight.shape[0], 0)
    return F.pad(weight, (0, 0, 0, 0, 0, more_in, 0, more_out))


def widened_conv(conv: nn.Conv2d, *, inputs: int = 0, outputs: int = 0) -> nn.Conv2d:
    """Copy a convolution with more input and output channels, all of them zero."""
    weight = widened(conv.weight.detach(), inputs=inputs, outputs=outputs)
    made = nn.Conv2d(
        weight.shape[1], weight.shape[0], weight.shape[-1], conv.stride[0], padding=conv.kernel_size[0] // 2
    )
    assert conv.bias is not None
    made.weight = nn.Parameter(weight, requires_grad=False)
    bias = F.pad(conv.bias.detach(), (0, weight.shape[0] - conv.bias.shape[0]))
    made.bias = nn.Parameter(bias, requires_grad=False)
    return made


def first_conv(stage: nn.Module) -> nn.Conv2d:
    assert isinstance(stage, nn.Sequential) and isinstance(stage[0], nn.Conv2d)
    return stage[0]


class ConvStage(nn.Module):
    """Convolves, and applies the norm or bias after it, which `steps` computes in one pass or two."""

    def __init__(self, stage: nn.Module, steps: Steps, *, inputs: int = 0) -> None:
        super().__init__()
        assert isinstance(stage, nn.Sequential)
        self.conv = widened_conv(first_conv(stage), inputs=inputs)
        norms = [part for part in stage if isinstance(part, nn.InstanceNorm2d)]
        self._eps = norms[0].eps if norms else None
        self._relu = any(isinstance(part, nn.ReLU) for part in stage)
        self._steps = steps

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        made: Tensor
        raw = _without_bias(self.conv, x)
        if self._eps is None:
            made = self._steps.add_bias(raw, self.conv.bias, residual, relu=self._relu)
        else:
            # The norm would remove any bias.
            made = self._steps.normalise(raw, self._eps, residual, relu=self._relu)
        return made


class FastBottleneck(nn.Module):
    """Computes the residual block; its last stage also adds the sum."""

    def __init__(self, block: Bottleneck, steps: Steps) -> None:
        super().__init__()
        self.first, self.second, self.third = (
            ConvStage(stage, steps)
            for stage in (block.convnormrelu1, block.convnormrelu2, block.convnormrelu3)
        )
        same = isinstance(block.downsample, nn.Identity)
        self.downsample = nn.Identity() if same else ConvStage(block.downsample, steps)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.third(self.second(self.first(x)), self.downsample(x))
        return made


def fast_encoder(encoder: Encoder, steps: Steps) -> nn.Sequential:
    """Copy an encoder so that it reads `ALIGNED` channels, the first three of them those of a picture."""
    stem, *layers, last = encoder.children()
    blocks = [block for layer in layers for block in layer.children() if isinstance(block, Bottleneck)]
    assert isinstance(last, nn.Conv2d)
    return nn.Sequential(
        ConvStage(stem, steps, inputs=ALIGNED),
        *(FastBottleneck(block, steps) for block in blocks),
        widened_conv(last),
    )


class FastUpdate(nn.Module):
    """Computes the update block with channel counts rounded up, and one product for all that share an input."""

    def __init__(self, block: UpdateBlock, steps: Steps) -> None:
        super().__init__()
        self._steps = steps
        motion, unit = block.motion_encoder, block.recurrent_block.convgru1
        self.of_windows = widened_conv(first_conv(motion.convcorr1), inputs=WINDOWS)
        self.of_flow = ConvStage(motion.convflow1, steps, inputs=MOVED)
        self.of_flow_again = widened_conv(first_conv(motion.convflow2))
        self.of_both = widened_conv(first_conv(motion.conv))
        self.head = ConvStage(nn.Sequential(block.flow_head.conv1, nn.ReLU()), steps)
        self.head_again = widened_conv(block.flow_head.conv2, outputs=ALIGNED)
        biases = [conv.bias for conv in (self.of_windows, self.of_flow_again) if conv.bias is not None]
        self.pair_bias = nn.Parameter(torch.cat(biases), requires_grad=False)
        parts = (unit.convz, unit.convr, unit.convq)
        weight = torch.cat([part.weight.detach() for part in parts])
        hidden, context, moving = weight.split((HIDDEN, CONTEXT, MOTION), dim=1)
        changing = widened(torch.cat((hidden, moving), dim=1), inputs=STATE)
        self.gates, self.proposal = (
            nn.Parameter(part.clone(), requires_grad=False) for part in changing.split((2 * HIDDEN, HIDDEN))
        )
        self.of_context = nn.Conv2d(CONTEXT, 3 * HIDDEN, 3, padding=1)
        self.of_context.weight = nn.Parameter(context.clone(), requires_grad=False)
        bias = torch.cat([part.bias.detach() for part in parts if part.bias is not None])
        self.of_context.bias = nn.Parameter(bias, requires_grad=False)

    def prepare(self, context: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the context adds to the gates, N 192 y x, and to the proposed state, N 96 y x."""
        gates, proposal = self.of_context(context).split((2 * HIDDEN, HIDDEN), dim=1)
        return gates, proposal

    def forward(
        self, windows: Tensor, hidden: Tensor, flow: Tensor, moved: Tensor, gates: Tensor, proposal: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return hidden state N 96 y x, flow N y x 2 (fp32) and flow N `MOVED` y x after one update.

        The windows are N y x C.
        """
        steps = self._steps
        of_windows = _without_bias(self.of_windows, windows.movedim(-1, 1))
        of_flow = _without_bias(self.of_flow_again, self.of_flow(moved))
        motion = _without_bias(self.of_both, steps.pair(of_windows, of_flow, self.pair_bias))
        # The flow is the last of the motion's channels; the zeros after it meet the zeros of `widened`.
        state = steps.join(hidden, motion, self.of_both.bias, moved)
        update, state = steps.gate(F.conv2d(state, self.gates, padding=1), gates, hidden, state)
        hidden = steps.mix(hidden, F.conv2d(state, self.proposal, padding=1), proposal, update)
        change = _without_bias(self.head_again, self.head(hidden))
        return hidden, *steps.advance(flow, change, self.head_again.bias)


def _without_bias(conv: nn.Conv2d, x: Tensor) -> Tensor:
    """Compute a convolution without its bias, which the next step adds."""
    return F.conv2d(x, conv.weight, None, conv.stride, conv.padding)


class PictureFeatures(NamedTuple):
    """Keeps everything that is computed from a picture, at an eighth of its size."""

    # N (y x) C of the picture that is matched, and N S C of the one it is matched with.
    features: Tensor
    pooled: Tensor
    # N 96 y x.
    hidden: Tensor
    # N 192 y x and N 96 y x: the context, already convolved.
    gates: Tensor
    proposal: Tensor


Module = TypeVar("Module", bound=nn.Module)


class FastRaftFlow:
    """Estimates flow with a readable estimator's weights, both directions of all pairs of a block at once.

    With `captured`, a whole call is replayed as one CUDA graph, from the second call with a shape on: a video's
    first block, which comes once, is not worth it.
    """

    def __init__(
        self,
        flow: RaftFlow,
        *,
        dtype: torch.dtype = torch.float16,
        captured: bool = False,
        fused: bool = True,
    ) -> None:
        """Take over the weights of `flow`; `fused` uses Triton's kernels where they are available."""
        model = flow.model
        self.device = next(model.parameters()).device
        self.dtype = dtype
        self.num_updates = flow.num_updates
        self.volume_bytes = flow.volume_bytes
        self._steps: Steps = raft_steps
        if fused and self.device.type == "cuda" and find_spec("triton") is not None:
            # Imported here because importing Triton takes time.
            self._steps = import_module("recap.fast.raft_kernels")
        steps = self._steps
        self._features = self._ready(fast_encoder(model.feature_encoder, steps))
        self._context = self._ready(fast_encoder(model.context_encoder, steps))
        self.update = self._ready(FastUpdate(model.update_block, steps))
        # By a weak reference: a cycle would keep the graph's memory alive until the garbage collector runs.
        weak = weakref.proxy(self)
        self._graphed = Graphed(lambda pictures: weak._estimate(pictures), tune=True) if captured else None

    @torch.no_grad()
    def __call__(self, pictures: Tensor) -> Flow:
        """Estimate the flow of pictures B T 3 Y X in 0..1, on any device; the result is on theirs, float32."""
        check_clip(pictures)
        estimate = self._graphed or self._estimate
        found: Tensor = estimate(pictures.to(self.device, torch.float32))
        # A copy, because the next replay overwrites the output of the recording.
        return Flow(*found.to(pictures.device, copy=True))

    def _ready(self, module: Module) -> Module:
        module.eval().requires_grad_(False).to(device=self.device, dtype=self.dtype)
        # Convolutions run fastest with the channels innermost; torch's hints do not know this call.
        module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return module

    def encode(self, pictures: Tensor) -> PictureFeatures:
        """Compute the features of pictures N 3 Y X in 0..1, already padded."""
        wide = F.pad(pictures * 2 - 1, (0, 0, 0, 0, 0, ALIGNED - 3)).to(self.dtype)
        wide = wide.contiguous(memory_format=torch.channels_last)
        features = self._features(wide)
        hidden, context = self._context(wide).split((HIDDEN, CONTEXT), dim=1)
        convolved = self.update.prepare(F.relu(context))
        return PictureFeatures(features.flatten(2).mT, pool_levels(features), torch.tanh(hidden), *convolved)

    def _estimate(self, pictures: Tensor) -> Tensor:
        """Return flow 2 B T-1 2 Y X: forward, then backward. No shape or branch in here depends on a value."""
        rows, num = pictures.shape[:2]
        padded, crop = pad_to_network(pictures.flatten(0, 1), SMALLEST)
        size = padded.shape[-2] // STRIDE, padded.shape[-1] // STRIDE
        seen = self.encode(padded)
        # Everything comes from the source of a pair, except the pooled features, which are the target's.
        pairs = PictureFeatures(*(sources(part, rows, reverse=part is seen.pooled) for part in seen))
        flow = torch.cat([self._track(some, size) for some in self._split(pairs)])
        cropped = flow[(..., *crop)]
        return cropped.reshape(2, rows, num - 1, *cropped.shape[1:])

    def _split(self, pairs: PictureFeatures) -> Iterator[PictureFeatures]:
        """Yield all pairs, as many at a time as `volume_bytes` allows."""
        each = pairs.features.shape[1] * pairs.pooled.shape[1] * pairs.pooled.element_size()
        num = max(1, int(self.volume_bytes / each))
        for start in range(0, len(pairs.features), num):
            yield PictureFeatures(*(part[start : start + num] for part in pairs))

    def _track(self, pairs: PictureFeatures, size: tuple[int, int]) -> Tensor:
        """Return flow N 2 Y X in pixels."""
        volume = correlate(pairs.features, pairs.pooled)
        hidden, gates, proposal = pairs.hidden, pairs.gates, pairs.proposal
        flow = torch.zeros((len(volume), *size, 2), device=volume.device)
        moved = hidden.new_zeros((len(volume), *size, MOVED)).movedim(-1, 1)
        for _ in range(self.num_updates):
            windows = self._steps.read(volume, flow)
            hidden, flow, moved = self.update(windows, hidden, flow, moved, gates, proposal)
        return enlarge(flow)


def sources(pictures: Tensor, rows: int, *, reverse: bool) -> Tensor:
    """Select the sources of all pairs from pictures (B T) ..., forward pairs first; with `reverse`, the targets.

    Slices are joined instead of indexed, which keeps channels innermost.
    """
    clips = pictures.split(len(pictures) // rows)
    earlier, later = [clip[:-1] for clip in clips], [clip[1:] for clip in clips]
    return torch.cat([*later, *earlier] if reverse else [*earlier, *later])


def enlarge(flow: Tensor) -> Tensor:
    """Enlarge flow N y x 2, in units of features, to N 2 Y X in pixels."""
    small = flow.movedim(-1, 1).contiguous()
    return STRIDE * F.interpolate(small, scale_factor=STRIDE, mode="bilinear", align_corners=True)
