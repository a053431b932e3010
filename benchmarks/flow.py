"""Time flow, novelty and bank at full size: `python -m benchmarks.flow [--variants fp16 fp16-graph ...]`

It times, per block of a video, RAFT-small in both directions, the scoring of the pictures, and the bank's exchange of
keys and values. The pictures show a texture that drifts by whole pixels, in which a patch appears. Without --weights,
RAFT-small has random weights: then errors measure how the arithmetic differs, not how well the flow fits.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.timing import describe_error, median_milliseconds, print_json
from recap.admission.base import retain_top
from recap.admission.flow import FlowNovelty, FlowNoveltyConfig
from recap.backbones.wan.spec import EMBEDDED, WAN_1_3B
from recap.contracts import Flow, FlowEstimator
from recap.fast.graphs import Graphed
from recap.fast.raft import FastRaftFlow, enlarge
from recap.fast.raft_steps import MOVED, correlate, pool_levels, read
from recap.flow.network import STRIDE
from recap.flow.raft import FEATURES, RaftFlow, RaftSmall, load_raft_small
from recap.memory.bank import NoveltyBank
from recap.types import BackboneSpec, Block, Candidates

SIZES = {"real": WAN_1_3B, "small": EMBEDDED}
half = torch.float16
VARIANTS: dict[str, Callable[[RaftFlow], FlowEstimator]] = {
    "readable": lambda flow: flow,
    "fp32": lambda flow: FastRaftFlow(flow, dtype=torch.float32),
    "fp16": lambda flow: FastRaftFlow(flow, dtype=half),
    "bf16": lambda flow: FastRaftFlow(flow, dtype=torch.bfloat16),
    "fp16-graph": lambda flow: FastRaftFlow(flow, dtype=half, captured=True),
    "fp16-graph-plain": lambda flow: FastRaftFlow(flow, dtype=half, captured=True, fused=False),
    "bf16-graph": lambda flow: FastRaftFlow(flow, dtype=torch.bfloat16, captured=True),
}
# The parts of this variant are timed, too.
FASTEST = "fp16-graph"
ON_CPU = ["readable", "fp32", "fp16", "bf16"]


@dataclass(frozen=True, slots=True)
class DriftingVideo:
    """The first block and the next one, B T 3 Y X, that all variants see, and how often each call is timed."""

    spec: BackboneSpec
    first: Tensor
    following: Tensor
    repeats: int

    def stream(self) -> Tensor:
        """Return the pictures of the second block that the flow estimator reads, at its resolution."""
        pictures = torch.cat((self.first[:, -1:], self.following), dim=1)
        factor = FlowNoveltyConfig().flow_downscale
        small: Tensor = F.avg_pool2d(pictures.flatten(0, 1), factor).unflatten(0, pictures.shape[:2])
        return small


def make_video(spec: BackboneSpec, device: str, repeats: int) -> DriftingVideo:
    """Show a texture that drifts 4 pixels right and 2 down per picture; a patch appears in the second block."""
    height, width = spec.picture_size
    count = spec.num_pictures(2 * spec.frames_per_block)
    generator = torch.Generator().manual_seed(0)
    room = (height + 2 * count, width + 4 * count)
    texture = torch.zeros(1, 3, *room)
    for octave in (4, 16, 64):
        coarse = torch.rand(1, 3, room[0] // octave + 2, room[1] // octave + 2, generator=generator)
        texture += F.interpolate(coarse, size=room, mode="bicubic", align_corners=False) / 3
    corners = [(room[0] - height - 2 * t, room[1] - width - 4 * t) for t in range(count)]
    pictures = torch.stack([texture[0, :, y : y + height, x : x + width] for y, x in corners])
    first = spec.num_pictures(spec.frames_per_block)
    side = height // 4
    pictures[first + 2 :, :, side : 2 * side, side : 2 * side] = torch.rand(3, 1, 1, generator=generator)
    pictures = pictures.clamp(0, 1)[None].to(device)
    return DriftingVideo(spec, pictures[:, :first], pictures[:, first:], repeats)


def graph_milliseconds(function: Callable[[Tensor], Tensor], x: Tensor, repeats: int) -> float:
    """Time a function as a replayed CUDA graph, without launch costs; on the CPU it is called directly."""
    graphed = Graphed(function, tune=True)
    # `median_milliseconds` leaves out two calls: the first is plain, the second records.
    return median_milliseconds(lambda: graphed(x), repeats)


def scores(video: DriftingVideo, flow: FlowEstimator) -> Tensor:
    """Return the novelty of the second block's tokens."""
    novelty = FlowNovelty.on(video.spec, FlowNoveltyConfig(), flow)
    novelty.notice(video.first)
    return novelty.notice(video.following).score


@torch.no_grad()
def measure_variant(
    name: str,
    readable: RaftFlow,
    video: DriftingVideo,
    truth: Flow,
    fires: Tensor,
    built: dict[str, FlowEstimator],
) -> dict[str, object]:
    """Time one estimator and compare it with the readable one; it is added to `built`."""
    pictures = video.stream()
    began = time.perf_counter()
    flow = built[name] = VARIANTS[name](readable)
    for _ in range(2):
        flow(pictures)
    if pictures.is_cuda:
        torch.cuda.synchronize()
    warm = time.perf_counter() - began
    found = flow(pictures)
    pairs = zip(found, truth, strict=True)
    distance = torch.cat([(ours - theirs).norm(dim=2).flatten() for ours, theirs in pairs])
    agreeing = ((scores(video, flow) > 0) == fires).float().mean()
    return {
        "variant": name,
        "ms": median_milliseconds(lambda: flow(pictures), video.repeats),
        "warm_up_s": warm,
        "mean_px": float(distance.mean()),
        "p99_px": float(distance.quantile(0.99)),
        "firing_agrees": float(agreeing),
    }


@torch.no_grad()
def measure_stages(flow: FastRaftFlow, video: DriftingVideo) -> dict[str, float]:
    """Time every part of a fast call alone, as a graph."""
    cuda = video.following.is_cuda
    pictures = video.stream().flatten(0, 1)
    size = [-(-side // STRIDE) for side in pictures.shape[-2:]]
    num, height, width = 2 * (len(pictures) - 1), max(size[0], 2 * STRIDE), max(size[1], 2 * STRIDE)
    noise = pictures.new_zeros((len(pictures), 3, height * STRIDE, width * STRIDE)).uniform_()
    encoded = flow.encode(noise)
    source = torch.randn((num, height * width, FEATURES), device=noise.device).to(flow.dtype)
    pooled = pool_levels(torch.randn((num, FEATURES, height, width), device=noise.device).to(flow.dtype))
    volume, points = correlate(source, pooled), torch.randn(num, height, width, 2, device=noise.device)
    windows = read(volume, points)
    state = [torch.cat((part[:-1], part[1:])) for part in (encoded.hidden, encoded.gates, encoded.proposal)]
    moved = noise.new_zeros((num, height, width, MOVED)).to(flow.dtype).movedim(-1, 1)
    area = height * width

    def transposed(first: Tensor) -> Tensor:
        """Compute half of the finest level by a product and the other direction by transposing."""
        ahead = correlate(first[: num // 2], pooled[: num // 2, :area])
        return torch.cat((ahead, ahead.mT))

    steps: dict[str, tuple[Callable[[Tensor], Tensor], Tensor]] = {
        "encode": (lambda x: flow.encode(x).features, noise),
        "correlate": (lambda x: correlate(x, pooled), source),
        "correlate finest": (lambda x: correlate(x, pooled[:, :area]), source),
        "correlate finest, transposing": (transposed, source),
        "read plain": (lambda x: read(volume, x), points),
        "update": (lambda x: flow.update(windows, state[0], x, moved, state[1], state[2])[1], points),
        "enlarge": (enlarge, points),
    }
    if cuda:
        from recap.fast import raft_kernels

        steps["read fused"] = (lambda x: raft_kernels.read(volume, x), points)
    return {name: graph_milliseconds(*step, video.repeats) for name, step in steps.items()}


def steady_novelty(video: DriftingVideo, flow: FlowEstimator) -> FlowNovelty:
    """Build the novelty rule in the state it has between two blocks."""
    novelty = FlowNovelty.on(video.spec, FlowNoveltyConfig(), flow)
    state = video.stream()[:, 0]
    novelty.load_state({"last": state, "claimed": torch.zeros_like(state[:, 0])})
    return novelty


@torch.no_grad()
def measure_memory(video: DriftingVideo, truth: Flow, flow: FlowEstimator) -> dict[str, float]:
    """Time propose and admit, alone and after the flow; the bank is full."""
    spec, pixels = video.spec, video.following
    block = Block(1, spec.frames_per_block, spec.frames_per_block, ("",))
    dtype = torch.bfloat16 if pixels.is_cuda else torch.float32
    shape = (spec.layers, 1, spec.block_tokens, spec.heads, spec.head_dim)
    keys, values = (torch.randn(shape, device=pixels.device, dtype=dtype) for _ in range(2))
    bank = NoveltyBank(spec.frame_tokens, spec.layers)
    # One has its flow precomputed, the other estimates it.
    scorer, estimating = steady_novelty(video, lambda pictures: truth), steady_novelty(video, flow)
    offered = scorer.propose(block, pixels)
    few = Candidates(offered.source, torch.where(offered.score.argsort(1) % 50 == 0, offered.score, 0.0))
    bank.admit(offered, keys, values, retain_top)

    def whole() -> None:
        bank.admit(estimating.propose(block, pixels), keys, values, retain_top)

    def replayed(pixels: Tensor) -> Tensor:
        """Propose with the state at fixed addresses, as a graph needs it."""
        scorer.load_state({"last": last, "claimed": claimed})
        score = scorer.propose(block, pixels).score
        after = scorer.state()
        last.copy_(after["last"])
        claimed.copy_(after["claimed"])
        return score

    last, claimed = scorer.state()["last"], scorer.state()["claimed"]
    repeats = video.repeats
    return {
        "propose without flow": median_milliseconds(lambda: scorer.propose(block, pixels), repeats),
        "propose without flow, as a graph": graph_milliseconds(replayed, pixels, repeats),
        "admit": median_milliseconds(lambda: bank.admit(few, keys, values, retain_top), repeats),
        "flow, propose and admit": median_milliseconds(whole, repeats),
    }


def attempt(name: str, function: Callable[[], dict[str, object]]) -> dict[str, object]:
    """Run a measurement; report a failure and let the others run."""
    try:
        return function()
    except Exception as error:
        # Kernels and compilers raise many types.
        reason = describe_error(error)
        print(f"{name}: {reason}")
        return {"variant": name, "error": reason}


def print_variant(found: dict[str, object]) -> None:
    if "error" not in found:
        numbers = [f"{value:>10.4f}" for value in found.values() if isinstance(value, float)]
        print(f"{found['variant']:<28}{''.join(numbers)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    cuda = torch.cuda.is_available()
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=None)
    parser.add_argument("--size", choices=list(SIZES), default="real" if cuda else "small")
    parser.add_argument("--weights", type=Path, default=None, help="a file of RAFT-small [default: random]")
    parser.add_argument("--repeats", type=int, default=20 if cuda else 3)
    options = parser.parse_args()
    device = "cuda" if cuda else "cpu"
    names = options.variants or (list(VARIANTS) if cuda else ON_CPU)
    torch.manual_seed(0)
    video = make_video(SIZES[options.size].backbone_spec(), device, options.repeats)
    model = load_raft_small(options.weights, device) if options.weights else RaftSmall().to(device)
    readable = RaftFlow(model)
    tf32 = torch.backends.cudnn.allow_tf32
    # The reference must be exact.
    torch.backends.cudnn.allow_tf32 = False
    truth, fires = readable(video.stream()), scores(video, readable) > 0
    torch.backends.cudnn.allow_tf32 = tf32
    print(f"{'variant':<28}{'ms':>10}{'warm-up s':>10}{'mean px':>10}{'p99 px':>10}{'agree':>10}")
    results, built = [], dict[str, FlowEstimator]()
    for name in names:
        results.append(attempt(name, partial(measure_variant, name, readable, video, truth, fires, built)))
        print_variant(results[-1])
    best = next((built[name] for name in (FASTEST, "fp16", "fp32") if name in built), None)
    if not isinstance(best, FastRaftFlow):
        best = FastRaftFlow(readable, dtype=half if cuda else torch.float32)
    parts = attempt("memory", lambda: dict(measure_memory(video, truth, best)))
    stages = attempt("stages", lambda: dict(measure_stages(best, video)))
    for title, part in (("of a block", parts), ("of a fast call", stages)):
        print(title)
        for name, value in part.items():
            print(f"  {name:<34}{value:>10.3f}" if isinstance(value, float) else f"  {name}: {value}")
    result = {
        "size": options.size,
        "weights": "trained" if options.weights else "random",
        "firing_share": float(fires.float().mean()),
        "variants": results,
        "parts_ms": parts,
        "stages_ms": stages,
    }
    print_json("flow", device, result)


if __name__ == "__main__":
    main()
