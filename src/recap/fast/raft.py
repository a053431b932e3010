"""RAFT-small made fast: the readable network's weights in half precision, few launches, one CUDA graph.

`FastRaftFlow` keeps the contract of `RaftFlow` and takes its parameters; what a layer means stands there.

The floor, for 12 pairs both ways of 416x240 and 12 updates on an H200 (790 TFLOP/s fp16, 4.3 TB/s, as measured):
    encoders, 13 pictures    16 GFLOP, 0.02 ms; about 1.2 GB of narrow activations, 0.3 ms
    correlations             20 GFLOP, 0.03 ms; 154 MB written, 0.04 ms
    look-ups, 12             60 MB touched and 15 MB written each, 0.2 ms
    updates, 12              53 GFLOP each, 0.8 ms; about 0.2 GB each, mostly out of the L2, 0.6 ms
Together 0.7 TFLOP: about 1.5 ms if all ran at peak. If convolutions of so few channels reach a third of it, and some
350 launches cost 2 to 4 us each even in a graph, 4 to 6 ms is what to expect; `benchmarks.flow` measures it.

The features of a block's first picture, which the block before had last, are made again: the contract hands over
pictures alone, and to know one again would take a comparison on the device. That is a 13th of the encoders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recap.contracts import Flow
from recap.errors import refuse
from recap.fast import raft_steps
from recap.fast.correlation import (
    ALIGNED,
    READ_CHANNELS,
    correlate,
    fused_reader,
    pool_levels,
    read_fused,
    read_plain,
)
from recap.fast.raft_steps import MOVED, STATE
from recap.flow.raft import (
    CONTEXT,
    HIDDEN,
    MOTION,
    STRIDE,
    Bottleneck,
    Encoder,
    RaftFlow,
    UpdateBlock,
    pad_to_network,
)

PRECISIONS = (torch.float32, torch.float16, torch.bfloat16)
WARM_RUNS = 3  # before a capture: compiling, choosing of convolution kernels, and once as it will be
Steps = Any
"""`recap.fast.raft_steps`, or `recap.fast.raft_kernels`, which means the same."""


def widened(weight: Tensor, *, inputs: int = 0, outputs: int = 0) -> Tensor:
    """A kernel O I y x with zero channels added up to the counts given."""
    more_in, more_out = max(inputs - weight.shape[1], 0), max(outputs - weight.shape[0], 0)
    return F.pad(weight, (0, 0, 0, 0, 0, more_in, 0, more_out))


def widened_conv(conv: nn.Conv2d, *, inputs: int = 0, outputs: int = 0) -> nn.Conv2d:
    """The same convolution, of more channels in and out that are all zero."""
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


class Stage(nn.Module):
    """A convolution and what follows it; `steps` does that in one pass or two."""

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
        raw = F.conv2d(x, self.conv.weight, None, self.conv.stride, self.conv.padding)
        if self._eps is None:
            assert self.conv.bias is not None
            made = self._steps.add_bias(raw, self.conv.bias, residual, relu=self._relu)
        else:  # which takes away any bias
            made = self._steps.normalise(raw, self._eps, residual, relu=self._relu)
        return made


class FastBottleneck(nn.Module):
    """The residual block; its sum is made where its last stage ends."""

    def __init__(self, block: Bottleneck, steps: Steps) -> None:
        super().__init__()
        self.first, self.second, self.third = (
            Stage(stage, steps) for stage in (block.convnormrelu1, block.convnormrelu2, block.convnormrelu3)
        )
        same = isinstance(block.downsample, nn.Identity)
        self.downsample = nn.Identity() if same else Stage(block.downsample, steps)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.third(self.second(self.first(x)), self.downsample(x))
        return made


def fast_encoder(encoder: Encoder, steps: Steps) -> nn.Sequential:
    """A copy that reads `ALIGNED` channels, three of them a picture's."""
    stem, *layers, last = encoder.children()
    blocks = [block for layer in layers for block in layer.children() if isinstance(block, Bottleneck)]
    assert isinstance(last, nn.Conv2d)
    return nn.Sequential(
        Stage(stem, steps, inputs=ALIGNED),
        *(FastBottleneck(block, steps) for block in blocks),
        widened_conv(last),
    )


class Shares(NamedTuple):
    """What the context adds to the gates at every update, N 192 y x, and to the proposed state, N 96 y x."""

    gates: Tensor
    proposal: Tensor


class FastUpdate(nn.Module):
    """The update block with channel counts rounded up, and products that share their input done at once."""

    def __init__(self, block: UpdateBlock, steps: Steps) -> None:
        super().__init__()
        self._steps = steps
        motion, unit = block.motion_encoder, block.recurrent_block.convgru1
        self.of_windows = widened_conv(first_conv(motion.convcorr1), inputs=READ_CHANNELS)
        self.of_flow = Stage(motion.convflow1, steps, inputs=MOVED)
        self.of_flow_again = widened_conv(first_conv(motion.convflow2))
        self.of_both = widened_conv(first_conv(motion.conv))
        self.head = Stage(nn.Sequential(block.flow_head.conv1, nn.ReLU()), steps)
        self.head_again = widened_conv(block.flow_head.conv2, outputs=ALIGNED)
        said = [conv.bias for conv in (self.of_windows, self.of_flow_again) if conv.bias is not None]
        self.said = nn.Parameter(torch.cat(said), requires_grad=False)
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

    def prepare(self, context: Tensor) -> Shares:
        return Shares(*self.of_context(context).split((2 * HIDDEN, HIDDEN), dim=1))

    def forward(
        self, windows: Tensor, hidden: Tensor, flow: Tensor, moved: Tensor, gates: Tensor, proposal: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden state N 96 y x, flow N y x 2 (fp32) and N `MOVED` y x after one update with windows N y x C."""
        steps = self._steps
        seen = _product(self.of_windows, windows.movedim(-1, 1))
        told = _product(self.of_flow_again, self.of_flow(moved))
        heard = _product(self.of_both, steps.pair(seen, told, self.said))
        # The flow is the last of the motion's channels; the zeros behind it meet the zeros of `widened`.
        state = steps.join(hidden, heard, self.of_both.bias, moved)
        update, state = steps.gate(F.conv2d(state, self.gates, padding=1), gates, hidden, state)
        hidden = steps.mix(hidden, F.conv2d(state, self.proposal, padding=1), proposal, update)
        change = _product(self.head_again, self.head(hidden))
        return hidden, *steps.advance(flow, change, self.head_again.bias)


def _product(conv: nn.Conv2d, x: Tensor) -> Tensor:
    """The convolution without its bias, which the next step adds."""
    return F.conv2d(x, conv.weight, None, conv.stride, conv.padding)


class Seen(NamedTuple):
    """All that is ever read of a picture, at an eighth of its size."""

    features: Tensor  # N (y x) C, to be matched
    pooled: Tensor  # N S C, to be matched with
    hidden: Tensor  # N 96 y x
    gates: Tensor  # N 192 y x: the context, already convolved
    proposal: Tensor  # N 96 y x


Module = TypeVar("Module", bound=nn.Module)


class FastRaftFlow:
    """The flow estimator, both directions of all pairs of a block at once, from a readable one's weights.

    `captured` replays a whole call as one CUDA graph, from the second call of a shape on (a video's first block,
    which comes once, is not worth it). `warm_up` does that ahead.
    """

    def __init__(
        self,
        flow: RaftFlow,
        *,
        dtype: torch.dtype = torch.float16,
        captured: bool = False,
        fused: bool = True,
    ) -> None:
        """`fused` takes Triton's kernels where there are any; their plain twins are for checks and the CPU."""
        if dtype not in PRECISIONS:
            limit = "must be float32, float16 or bfloat16"
            raise refuse("dtype", dtype, limit, "float16 is the usual one")
        model = flow.model
        self.device = next(model.parameters()).device
        if captured and self.device.type != "cuda":
            raise refuse("captured", True, f"graphs need CUDA, the weights are on {self.device}", "leave it")
        self.dtype = dtype
        self.num_updates = flow.num_updates
        self.volume_bytes = flow.volume_bytes
        self._fused = fused and self.device.type == "cuda" and fused_reader()
        self._captured = captured
        steps: Steps = raft_steps
        if self._fused:  # importing Triton takes its time
            from recap.fast import raft_kernels as steps
        self._features = self._ready(fast_encoder(model.feature_encoder, steps))
        self._context = self._ready(fast_encoder(model.context_encoder, steps))
        self.update = self._ready(FastUpdate(model.update_block, steps))
        self._met: set[tuple[int, ...]] = set()
        self._graphs: dict[tuple[int, ...], CapturedCall] = {}

    @torch.no_grad()
    def __call__(self, pictures: Tensor) -> Flow:
        """Pictures B T 3 Y X, 0..1, on any device; the flow is on theirs, float32."""
        if pictures.shape[1] < 2:
            raise refuse(
                "pictures", tuple(pictures.shape), "flow needs at least 2", "pass B T 3 Y X with T >= 2"
            )
        here = pictures.to(self.device, torch.float32)
        key = tuple(here.shape)
        if not self._captured or key not in self._met:
            self._met.add(key)
            found = self._estimate(here)
        else:
            if key not in self._graphs:
                self._graphs[key] = CapturedCall(self._estimate, here)
            found = self._graphs[key](here)
        return Flow(*found.to(pictures.device))

    def warm_up(self, shape: tuple[int, int, int, int, int]) -> None:
        """Do for pictures of this shape what is done once: choosing kernels, capturing."""
        for _ in range(2):
            self(torch.rand(shape, device=self.device))

    def _ready(self, module: Module) -> Module:
        module.eval().requires_grad_(False).to(device=self.device, dtype=self.dtype)
        # Convolutions run fastest with the channels innermost; torch's hints do not know this call.
        module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return module

    def encode(self, pictures: Tensor) -> Seen:
        """Pictures N 3 Y X in 0..1, padded."""
        given = F.pad(pictures * 2 - 1, (0, 0, 0, 0, 0, ALIGNED - 3)).to(self.dtype)
        given = given.contiguous(memory_format=torch.channels_last)
        features = self._features(given)
        hidden, context = self._context(given).split((HIDDEN, CONTEXT), dim=1)
        shares = self.update.prepare(F.relu(context))
        return Seen(features.flatten(2).mT, pool_levels(features), torch.tanh(hidden), *shares)

    def _estimate(self, pictures: Tensor) -> Tensor:
        """Flow 2 B T-1 2 Y X: forward, then backward. No shape or branch in here depends on a value."""
        rows, num = pictures.shape[:2]
        padded, crop = pad_to_network(pictures.flatten(0, 1))
        size = padded.shape[-2] // STRIDE, padded.shape[-1] // STRIDE
        seen = self.encode(padded)
        # Of a pair the source is read, and of the target only what it is to be matched with.
        pairs = Seen(*(leaving(part, rows, reverse=part is seen.pooled) for part in seen))
        flow = torch.cat([self._track(some, size) for some in self._split(pairs)])
        cropped = flow[(..., *crop)]
        return cropped.reshape(2, rows, num - 1, *cropped.shape[1:])

    def _split(self, pairs: Seen) -> Iterator[Seen]:
        """All pairs, so many at a time as the bound on memory lets."""
        each = pairs.features.shape[1] * pairs.pooled.shape[1] * pairs.pooled.element_size()
        num = max(1, int(self.volume_bytes / each))
        for start in range(0, len(pairs.features), num):
            yield Seen(*(part[start : start + num] for part in pairs))

    def _track(self, pairs: Seen, size: tuple[int, int]) -> Tensor:
        """Flow N 2 Y X in pixels."""
        volume = correlate(pairs.features, pairs.pooled)
        hidden, gates, proposal = pairs.hidden, pairs.gates, pairs.proposal
        flow = torch.zeros((len(volume), *size, 2), device=volume.device)
        moved = hidden.new_zeros((len(volume), *size, MOVED)).movedim(-1, 1)
        read = read_fused if self._fused else read_plain
        for _ in range(self.num_updates):
            windows = read(volume, flow, READ_CHANNELS)
            hidden, flow, moved = self.update(windows, hidden, flow, moved, gates, proposal)
        return enlarge(flow)


def leaving(pictures: Tensor, rows: int, *, reverse: bool) -> Tensor:
    """Of pictures (B T) ..., those that flow leaves, forward pairs first; `reverse`: those it arrives at.

    Slices joined, not indices: this keeps channels innermost.
    """
    clips = pictures.split(len(pictures) // rows)
    earlier, later = [clip[:-1] for clip in clips], [clip[1:] for clip in clips]
    return torch.cat([*later, *earlier] if reverse else [*earlier, *later])


def enlarge(flow: Tensor) -> Tensor:
    """Flow N y x 2 in features -> N 2 Y X in pixels."""
    given = flow.movedim(-1, 1).contiguous()
    return STRIDE * F.interpolate(given, scale_factor=STRIDE, mode="bilinear", align_corners=True)


class CapturedCall:
    """A function of one tensor as a CUDA graph: for inputs like the example, one launch a call."""

    def __init__(self, function: Callable[[Tensor], Tensor], example: Tensor) -> None:
        self._given = example.clone()
        here, aside = torch.cuda.current_stream(), torch.cuda.Stream()
        aside.wait_stream(here)
        with choosing_kernels():
            with torch.cuda.stream(aside):
                for _ in range(WARM_RUNS):
                    function(self._given)
            here.wait_stream(aside)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._found = function(self._given)

    def __call__(self, given: Tensor) -> Tensor:
        self._given.copy_(given)
        self.replay()
        return self._found.clone()  # the next replay writes over it

    def replay(self) -> None:
        self._graph.replay()


@contextmanager
def choosing_kernels() -> Iterator[None]:
    """Let cuDNN time its convolution kernels, which pays where the choice is then kept in a graph."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before
