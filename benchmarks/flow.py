"""Flow, novelty and bank at their real size: `python -m benchmarks.flow [--variants fp16 fp16-graph ...]`

Per block of a video: RAFT-small both ways, the scoring of its pictures, the bank's exchange of keys and values.
Pictures are a texture that drifts by whole pixels, in which a patch appears. Weights of RAFT-small are random
unless given: then errors say how the arithmetic differs, not how well the flow fits.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from recap.admission.flow import FlowNovelty, FlowNoveltyConfig
from recap.admission.retention import retain_top
from recap.backbones.wan.spec import EMBEDDED, WAN_1_3B
from recap.contracts import Flow, FlowEstimator
from recap.fast.correlation import READ_CHANNELS, correlate, fused_reader, pool_levels, read_fused, read_plain
from recap.fast.graphs import Graphed
from recap.fast.raft import FastRaftFlow, enlarge
from recap.fast.raft_steps import MOVED
from recap.flow.raft import FEATURES, STRIDE, RaftFlow, RaftSmall, load_raft_small
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
FASTEST = "fp16-graph"  # the one whose parts are timed, too
ON_CPU = ["readable", "fp32", "fp16", "bf16"]


@dataclass(frozen=True, slots=True)
class Scene:
    """What all variants are shown: an opening block and the next one, B T 3 Y X; and how often, to be timed."""

    spec: BackboneSpec
    opening: Tensor
    following: Tensor
    repeats: int

    def stream(self) -> Tensor:
        """What flow is asked about in the second block, at its size."""
        pictures = torch.cat((self.opening[:, -1:], self.following), dim=1)
        factor = FlowNoveltyConfig().flow_downscale
        small: Tensor = F.avg_pool2d(pictures.flatten(0, 1), factor).unflatten(0, pictures.shape[:2])
        return small


def make_scene(spec: BackboneSpec, device: str, repeats: int) -> Scene:
    """A texture that drifts 4 pixels right and 2 down a picture; a patch appears in the second block."""
    height, width = spec.picture_size
    count = spec.num_pictures(2 * spec.frames_per_block)
    generator = torch.Generator().manual_seed(0)
    room = (height + 2 * count, width + 4 * count)
    texture = torch.zeros(1, 3, *room)
    for octave in (4, 16, 64):
        coarse = torch.rand(1, 3, room[0] // octave + 2, room[1] // octave + 2, generator=generator)
        texture += F.interpolate(coarse, size=room, mode="bicubic", align_corners=False) / 3
    pictures = torch.stack(
        [
            texture[0, :, room[0] - height - 2 * t :][:, :height, room[1] - width - 4 * t :][..., :width]
            for t in range(count)
        ]
    )
    opening = spec.num_pictures(spec.frames_per_block)
    side = height // 4
    pictures[opening + 2 :, :, side : 2 * side, side : 2 * side] = torch.rand(3, 1, 1, generator=generator)
    pictures = pictures.clamp(0, 1)[None].to(device)
    return Scene(spec, pictures[:, :opening], pictures[:, opening:], repeats)


def milliseconds(function: Callable[[], object], repeats: int) -> float:
    """Median time of a call, after two that do not count."""
    cuda = torch.cuda.is_available()
    times = []
    for repeat in range(repeats + 2):
        if cuda:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            function()
            end.record()
            torch.cuda.synchronize()
            spent = float(start.elapsed_time(end))
        else:
            began = time.perf_counter()
            function()
            spent = 1e3 * (time.perf_counter() - began)
        if repeat > 1:
            times.append(spent)
    return statistics.median(times)


def graph_milliseconds(function: Callable[[Tensor], Tensor], given: Tensor, repeats: int) -> float:
    """The same of a function replayed as a CUDA graph, so that launches do not count; plain on the CPU."""
    graphed = Graphed(function, tune=True)
    # `milliseconds` leaves out two calls: the first is plain, the second records.
    return milliseconds(lambda: graphed(given), repeats)


def scores(scene: Scene, flow: FlowEstimator) -> Tensor:
    """Novelty of the second block's tokens."""
    novelty = FlowNoveltyConfig().build(scene.spec, flow)
    novelty.notice(scene.opening)
    return novelty.notice(scene.following).score


@torch.no_grad()
def measure_variant(
    name: str, readable: RaftFlow, scene: Scene, truth: Flow, fires: Tensor, made: dict[str, FlowEstimator]
) -> dict[str, object]:
    """Time of one estimator, and how far it is from the readable one; it is put among those made."""
    pictures = scene.stream()
    began = time.perf_counter()
    flow = made[name] = VARIANTS[name](readable)
    for _ in range(2):
        flow(pictures)
    if pictures.is_cuda:
        torch.cuda.synchronize()
    warm = time.perf_counter() - began
    found = flow(pictures)
    pairs = zip(found, truth, strict=True)
    distance = torch.cat([(ours - theirs).norm(dim=2).flatten() for ours, theirs in pairs])
    agreeing = ((scores(scene, flow) > 0) == fires).float().mean()
    return {
        "variant": name,
        "ms": milliseconds(lambda: flow(pictures), scene.repeats),
        "warm_up_s": warm,
        "mean_px": float(distance.mean()),
        "p99_px": float(distance.quantile(0.99)),
        "firing_agrees": float(agreeing),
    }


@torch.no_grad()
def measure_stages(flow: FastRaftFlow, scene: Scene) -> dict[str, float]:
    """Where the time of a fast call goes: every part alone, as a graph."""
    cuda = scene.following.is_cuda
    pictures = scene.stream().flatten(0, 1)
    size = [-(-side // STRIDE) for side in pictures.shape[-2:]]
    num, height, width = 2 * (len(pictures) - 1), max(size[0], 2 * STRIDE), max(size[1], 2 * STRIDE)
    given = pictures.new_zeros((len(pictures), 3, height * STRIDE, width * STRIDE)).uniform_()
    seen = flow.encode(given)
    source = torch.randn((num, height * width, FEATURES), device=given.device).to(flow.dtype)
    pooled = pool_levels(torch.randn((num, FEATURES, height, width), device=given.device).to(flow.dtype))
    volume, still = correlate(source, pooled), torch.randn(num, height, width, 2, device=given.device)
    windows = read_plain(volume, still, READ_CHANNELS)
    state = [torch.cat((part[:-1], part[1:])) for part in (seen.hidden, seen.gates, seen.proposal)]
    moved = given.new_zeros((num, height, width, MOVED)).to(flow.dtype).movedim(-1, 1)
    place = height * width

    def transposed(first: Tensor) -> Tensor:
        """The other way to both directions: half the finest level by product, the rest by transposing."""
        ahead = correlate(first[: num // 2], pooled[: num // 2, :place])
        return torch.cat((ahead, ahead.mT))

    steps: dict[str, tuple[Callable[[Tensor], Tensor], Tensor]] = {
        "encode": (lambda x: flow.encode(x).features, given),
        "correlate": (lambda x: correlate(x, pooled), source),
        "correlate finest": (lambda x: correlate(x, pooled[:, :place]), source),
        "correlate finest, transposing": (transposed, source),
        "read plain": (lambda x: read_plain(volume, x, READ_CHANNELS), still),
        "update": (lambda x: flow.update(windows, state[0], x, moved, state[1], state[2])[1], still),
        "enlarge": (enlarge, still),
    }
    if cuda and fused_reader():
        steps["read fused"] = (lambda x: read_fused(volume, x, READ_CHANNELS), still)
    return {name: graph_milliseconds(*step, scene.repeats) for name, step in steps.items()}


class Given:
    """An estimator that was told."""

    def __init__(self, flow: Flow) -> None:
        self._flow = flow

    def __call__(self, pictures: Tensor) -> Flow:
        return self._flow


def steady_novelty(scene: Scene, flow: FlowEstimator) -> FlowNovelty:
    novelty = FlowNoveltyConfig().build(scene.spec, flow)
    state = scene.stream()[:, 0]
    novelty.load_state({"last": state, "claimed": torch.zeros_like(state[:, 0])})
    return novelty


@torch.no_grad()
def measure_memory(scene: Scene, truth: Flow, flow: FlowEstimator) -> dict[str, float]:
    """Propose and admit, apart and behind the flow; the bank is full."""
    spec = scene.spec
    block = Block(1, spec.frames_per_block, spec.frames_per_block, ("",))
    kind = torch.bfloat16 if scene.following.is_cuda else torch.float32
    shape = (spec.layers, 1, spec.block_tokens, spec.heads, spec.head_dim)
    keys, values = (torch.randn(shape, device=scene.following.device, dtype=kind) for _ in range(2))
    bank = NoveltyBank(spec.frame_tokens, spec.layers)
    told, asked = steady_novelty(scene, Given(truth)), steady_novelty(scene, flow)
    offered = told.propose(block, scene.following)
    few = Candidates(offered.source, torch.where(offered.score.argsort(1) % 50 == 0, offered.score, 0.0))
    bank.admit(offered, keys, values, retain_top)

    def whole() -> None:
        bank.admit(asked.propose(block, scene.following), keys, values, retain_top)

    def replayed(pixels: Tensor) -> Tensor:
        """Propose with its state at fixed places, as a graph wants it."""
        told.load_state({"last": last, "claimed": claimed})
        score = told.propose(block, pixels).score
        after = told.state()
        last.copy_(after["last"])
        claimed.copy_(after["claimed"])
        return score

    last, claimed = told.state()["last"], told.state()["claimed"]
    return {
        "propose without flow": milliseconds(lambda: told.propose(block, scene.following), scene.repeats),
        "propose without flow, as a graph": graph_milliseconds(replayed, scene.following, scene.repeats),
        "admit": milliseconds(lambda: bank.admit(few, keys, values, retain_top), scene.repeats),
        "flow, propose and admit": milliseconds(whole, scene.repeats),
    }


def attempt(name: str, function: Callable[[], dict[str, object]]) -> dict[str, object]:
    """One that fails says so and lets the others run."""
    try:
        return function()
    except Exception as problem:  # whatever a kernel or a compiler throws
        reason = f"{type(problem).__name__}: {str(problem).strip().partition(chr(10))[0]}"
        print(f"{name}: {reason}")
        return {"variant": name, "error": reason}


def print_row(row: dict[str, object]) -> None:
    if "error" not in row:
        numbers = [f"{value:>10.4f}" for value in row.values() if isinstance(value, float)]
        print(f"{row['variant']:<28}{''.join(numbers)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    cuda = torch.cuda.is_available()
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=None)
    parser.add_argument("--size", choices=list(SIZES), default="real" if cuda else "small")
    parser.add_argument("--weights", type=Path, default=None, help="a file of RAFT-small; else random ones")
    parser.add_argument("--repeats", type=int, default=20 if cuda else 3)
    chosen = parser.parse_args()
    device = "cuda" if cuda else "cpu"
    names = chosen.variants or (list(VARIANTS) if cuda else ON_CPU)
    torch.manual_seed(0)
    scene = make_scene(SIZES[chosen.size].backbone_spec(), device, chosen.repeats)
    model = load_raft_small(chosen.weights, device) if chosen.weights else RaftSmall().to(device)
    readable = RaftFlow(model)
    tf32 = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False  # what all are measured against is exact
    truth, fires = readable(scene.stream()), scores(scene, readable) > 0
    torch.backends.cudnn.allow_tf32 = tf32
    print(f"{'variant':<28}{'ms':>10}{'warm-up s':>10}{'mean px':>10}{'p99 px':>10}{'agree':>10}")
    rows, made = [], dict[str, FlowEstimator]()
    for name in names:
        rows.append(attempt(name, partial(measure_variant, name, readable, scene, truth, fires, made)))
        print_row(rows[-1])
    best = next((made[name] for name in (FASTEST, "fp16", "fp32") if name in made), None)
    if not isinstance(best, FastRaftFlow):
        best = FastRaftFlow(readable, dtype=half if cuda else torch.float32)
    parts = attempt("memory", lambda: dict(measure_memory(scene, truth, best)))
    stages = attempt("stages", lambda: dict(measure_stages(best, scene)))
    for title, part in (("of a block", parts), ("of a fast call", stages)):
        print(title)
        for name, value in part.items():
            print(f"  {name:<34}{value:>10.3f}" if isinstance(value, float) else f"  {name}: {value}")
    result = {
        "device_name": torch.cuda.get_device_name() if cuda else "cpu",
        "size": chosen.size,
        "weights": "given" if chosen.weights else "random",
        "firing_share": float(fires.float().mean()),
        "variants": rows,
        "parts_ms": parts,
        "stages_ms": stages,
    }
    print(json.dumps({"bench": "flow", "torch": torch.__version__, **result}))


if __name__ == "__main__":
    main()
