"""Measures how fast a video is generated with a memory: `recap bench`.

Speed does not depend on values, so a public model at its real size needs no file: its weights are random. Every
stage of a block is timed by events on the device, so measuring does not wait for it. Cold is the first block of the
process, steady the median of all blocks once the memory is full. The overhead is relative to `sink`, which is timed
before and after. End to end is the time from one block's pictures, as bytes in the host's memory, to the next
block's. All ratios are taken within one process.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recap.backbones.wan.backbone import WanBackbone
from recap.backbones.wan.family import DECODERS, WanConfig
from recap.backbones.wan.model import CausalWan
from recap.backbones.wan.quantised import check_precision, quantise
from recap.backbones.wan.spec import WanSpec
from recap.backbones.wan.taehv import Taehv
from recap.config import AUTO, DTYPES, Choice, check_device, choose, usual_admission
from recap.contracts import Admission, AdmissionConfig, Backbone, Decoder, FlowEstimator, MemoryPolicy
from recap.errors import refuse, unknown_name
from recap.fast.accelerate import accelerate, accelerate_admission, accelerate_flow, choose_aside
from recap.fast.comparing import LIMITS, largest_error
from recap.fast.stopwatch import Stopwatch, draw_curve
from recap.fast.taehv import FastTaehv
from recap.fast.vae import PUBLIC_WIDTH, FastVae
from recap.flow.classical import ClassicalFlow
from recap.flow.raft import RaftFlow, RaftSmall
from recap.flow.world import WORLD, WorldFlow, load_world_flow
from recap.io.devices import let_segments_grow
from recap.io.files import write_whole
from recap.memory.recap import RecapMemory
from recap.plan import Shot, make_plan
from recap.rollout import at_once, rollout
from recap.types import BackboneSpec, GeneratedBlock

See = Callable[[GeneratedBlock, Tensor], None]
"""Is shown every block, and its pictures as bytes."""

MOST_BLOCKS = 10_000
# Frames until the memory is full, graphs are recorded and clock rates are steady.
FULL = 15
ANCHORS_MS = {"denoise + settle": 412.0, "decode": 248.0, "block": 660.0}
"""The times of Self-Forcing's released code on one H200 at 832 x 480, without memory, which we compare with."""
ANCHORS_SIZE, ANCHORS_FRAMES = (480, 832), 3
STAGES = ("denoise", "decode", "look", "settle", "commit")
BANK_PARTS = ("read_keys", "propose", "retain", "admit", "slide")
"""What a memory with a bank calls in `look` and `commit`; `retain`, where the rule chooses, is a part of `admit`."""
PROMPT = "a fox on a beach at night"


@dataclass(frozen=True, slots=True)
class SpeedSettings:
    """Sets what one measurement runs."""

    backbone: str
    memory: str
    decoder: str
    device: str
    dtype: str
    blocks: int
    eager: bool = False
    # "auto" is the usual one of the memory.
    admission: str = "auto"
    precision: str = "full"

    def __post_init__(self) -> None:
        if not 2 <= self.blocks <= MOST_BLOCKS:
            raise refuse("--blocks", self.blocks, f"must be 2 to {MOST_BLOCKS}", "30 are enough for medians")
        check_device(self.device, self.dtype)
        check_precision(self.precision, self.device, self.dtype)
        if self.decoder not in DECODERS:
            raise unknown_name("--decoder", self.decoder, DECODERS)

    @property
    def rule(self) -> Choice[AdmissionConfig]:
        """Return the admission that fills the memory's bank."""
        if self.admission == AUTO.name:
            return usual_admission(choose("memory", self.memory))
        found: Choice[AdmissionConfig] = choose("admission", self.admission)
        return found


@dataclass(frozen=True, slots=True)
class Parts:
    """Keeps everything a rollout needs, and a description of what was chosen."""

    readable: WanBackbone
    backbone: Backbone
    flow: FlowEstimator
    about: dict[str, str]

    def policy(self, settings: SpeedSettings) -> MemoryPolicy:
        """Build a fresh memory."""
        return self.policy_and_rule(settings)[0]

    def policy_and_rule(self, settings: SpeedSettings) -> tuple[MemoryPolicy, list[Admission]]:
        """Build a fresh memory; also return the rule that fills its bank, if it has one."""
        spec = self.backbone.spec
        config, rule = choose("memory", settings.memory).settings, settings.rule.settings
        rules: list[Admission] = []

        def build_rule() -> Admission:
            made = rule.build(spec, self.flow)
            rules.append(made if settings.eager else accelerate_admission(made, settings.device))
            return rules[-1]

        return config.build(spec, build_rule), rules


def make_readable(settings: SpeedSettings) -> WanBackbone:
    """Build the readable backbone in full precision, with random weights where real ones would need files."""
    kind = type(choose("backbone", settings.backbone).settings)
    let_segments_grow(settings.device)
    device, dtype = torch.device(settings.device), DTYPES[settings.dtype]
    torch.manual_seed(0)
    if issubclass(kind, WanConfig):
        return random_backbone(settings, kind.row, device, dtype)
    if settings.decoder != "full":
        limit = f"{settings.backbone} has one decoder, its own"
        raise refuse("--decoder", settings.decoder, limit, "leave it out")
    made: WanBackbone = kind().build(device=settings.device, dtype=dtype, prompts=[], notice=print)
    return made


def make_parts(settings: SpeedSettings) -> Parts:
    """Build the parts of a measurement."""
    readable, device = make_readable(settings), torch.device(settings.device)
    quantise(readable, settings.precision)
    public = issubclass(type(choose("backbone", settings.backbone).settings), WanConfig)
    weights = "random, at real size" if public else "the package's own"
    flow = random_flow(settings.device)
    if device.type != "cuda" and settings.backbone == WORLD:
        flow = WorldFlow(load_world_flow())
    path = "readable" if settings.eager else "fast"
    about = {"weights": weights, "flow": type(flow).__name__, "path": path}
    if settings.eager:
        return Parts(readable, readable, flow, about)
    return Parts(readable, accelerate(readable, on_cpu=True), accelerate_flow(flow), about)


def random_flow(device: str) -> FlowEstimator:
    """Make the paper's flow with random weights on a GPU; elsewhere return one that needs none."""
    return RaftFlow(RaftSmall().to(device)) if device.startswith("cuda") else ClassicalFlow()


def random_backbone(
    settings: SpeedSettings, spec: WanSpec, device: torch.device, dtype: torch.dtype
) -> WanBackbone:
    """Build a model of the family with torch's own random weights, directly on the device."""
    if settings.eager and settings.decoder != "tiny":
        limit = "the readable full decoder needs its weight files"
        raise refuse("--decoder", settings.decoder, limit, "measure --eager with --decoder tiny")
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        with device:
            model = CausalWan(spec)
    finally:
        torch.set_default_dtype(before)
    text = torch.randn(1, spec.text_len, spec.text_dim)
    return WanBackbone(model, lambda prompt: text, random_decoder(settings, spec, device, dtype))


def random_decoder(
    settings: SpeedSettings, spec: WanSpec, device: torch.device, dtype: torch.dtype
) -> Callable[[], Decoder]:
    """Return what opens streams of the chosen decoder with random weights."""
    if settings.decoder == "tiny":
        half = torch.float16 if device.type == "cuda" else dtype
        model = Taehv().requires_grad_(False).to(device, half)
        return model.open_decoder if settings.eager else FastTaehv(model).open_decoder
    vae = FastVae(PUBLIC_WIDTH, spec.in_channels).to(device).requires_grad_(False)
    for tensor in vae.state_dict().values():
        tensor.copy_(torch.randn_like(tensor) * (tensor[0].numel() ** -0.5 if tensor.dim() > 1 else 0.1))
    return vae.arrange(dtype).open_decoder


def measure(
    parts: Parts,
    settings: SpeedSettings,
    blocks: int,
    *,
    closely: bool = False,
    prompt: str = PROMPT,
    seed: int = 0,
    see: See = lambda block, pictures: None,
) -> dict[str, Any]:
    """Run one rollout; return milliseconds per stage and block, and the memory used.

    `see` is called with every block and its pictures, 1 T 3 Y X, uint8; what it does counts. `closely` also
    measures what a bank calls.
    """
    backbone, spec, cuda = parts.backbone, parts.backbone.spec, settings.device.startswith("cuda")
    watch = Stopwatch(cuda)
    (policy, rules), decoder = parts.policy_and_rule(settings), backbone.decoder()
    plan = make_plan([[Shot(prompt, blocks * spec.block_s)]], spec)
    aside = at_once if settings.eager else choose_aside(settings.device)
    owners = (backbone, decoder, policy, backbone, policy)
    watched: list[tuple[object, str]] = list(zip(owners, STAGES, strict=True))
    if closely and isinstance(policy, RecapMemory):
        watched += zip((*rules * 3, policy.bank, policy), BANK_PARTS, strict=True)
    with watch.timing(watched):
        began = time.perf_counter()
        blocks_made = rollout(backbone, policy, plan, seeds=[seed], decoder=decoder, aside=aside)
        first_picture_s = _deliver(blocks_made, watch, cuda, began, see)
    if cuda:
        torch.cuda.synchronize()
    stages = {name: watch.milliseconds(name) for _, name in watched}
    periods = watch.periods()
    return {
        "first_picture_s": first_picture_s,
        "blocks_ms": periods,
        "stages": {name: _summary(values, full_blocks(spec)) for name, values in stages.items() if values},
        "block": _summary(periods, full_blocks(spec)),
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9 if cuda else None,
        "memory_gb": [round(x / 1e9, 4) for x in watch.memory],
    }


def _deliver(blocks: Iterator[GeneratedBlock], watch: Stopwatch, cuda: bool, began: float, see: See) -> float:
    """Copy every block's pictures to the host as bytes, one block late; return the seconds to the first picture."""
    first, done = 0.0, None
    for block in blocks:
        pictures: Tensor = (block.pixels * 255).round().to(torch.uint8)
        if cuda:
            host = torch.empty(pictures.shape, dtype=torch.uint8, pin_memory=True)
            host.copy_(pictures, non_blocking=True)
        else:
            # Waits for a GPU of another kind, so that its blocks are timed; on a CPU nothing happens.
            pictures = pictures.cpu()
        see(block, pictures)
        watch.mark()
        if not first:
            if cuda:
                torch.cuda.synchronize()
            first = time.perf_counter() - began
        if cuda:
            # The host runs at most one block ahead of the device.
            if done is not None:
                done.synchronize()
            done = torch.cuda.Event()
            done.record()
    return first


def full_blocks(spec: BackboneSpec) -> int:
    """Return the blocks until everything is steady."""
    return -(-FULL // spec.frames_per_block)


def _summary(values: list[float], full: int) -> dict[str, float]:
    """Return the cold value, and the median and 90th percentile of the steady ones, after `full` blocks."""
    steady = sorted(values[full:] or values)
    return {
        "cold": values[0],
        "median": statistics.median(steady),
        "p90": steady[min(len(steady) - 1, int(0.9 * len(steady)))],
    }


def compare_paths(parts: Parts, settings: SpeedSettings) -> dict[str, Any]:
    """Compare with the readable path; where the transformer is in 8 bits, with the same weights in float32."""
    spec, reference, whole = parts.backbone.spec, parts.readable, settings.precision == "full"
    plan = make_plan([[Shot(PROMPT, FULL * spec.pictures_per_frame / spec.pictures_per_second)]], spec)
    if not whole:
        reference = make_readable(settings)
        reference.model.float()
    error = largest_error(reference, parts.backbone, parts.policy(settings), plan)
    against = f"the readable path in {settings.dtype if whole else 'float32'}"
    return {
        "largest_relative_error": error,
        "limit": LIMITS[settings.dtype] if whole else None,
        "against": against,
    }


def run(settings: SpeedSettings, *, compare: bool, plot: Path | None, profile: bool) -> dict[str, Any]:
    """Warm up, then measure the memory and, for comparison, the plain sink; return everything as plain data."""
    began = time.perf_counter()
    parts = make_parts(settings)
    loaded = time.perf_counter()
    spec = parts.backbone.spec
    cold = measure(parts, settings, full_blocks(spec))
    warm = time.perf_counter()
    plain = replace(settings, memory="sink")
    before = measure(parts, plain, min(settings.blocks, 20))
    if settings.device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()
    steady = measure(parts, settings, settings.blocks)
    # Before and after, because a chip that gets warm gets slow, which must not count against the memory.
    after = measure(parts, plain, min(settings.blocks, 20))
    sink_ms = statistics.mean(run["block"]["median"] for run in (before, after))
    pictures = spec.block_pictures
    for name, summary in steady["stages"].items():
        summary["cold"] = cold["stages"][name]["cold"]
    stages = {name: summary["median"] for name, summary in steady["stages"].items()}
    dit = stages["denoise"] + stages["settle"]
    result = {
        "bench": "speed", "torch": torch.__version__, **asdict(settings), **parts.about,
        "admission": settings.rule.name,
        "device_name": torch.cuda.get_device_name() if settings.device.startswith("cuda") else "cpu",
        "threads": torch.get_num_threads(), "load_s": loaded - began, "warm_up_s": warm - loaded,
        **{k: v for k, v in steady.items() if k != "blocks_ms"},
        "denoise_fps": 1e3 * pictures / dit, "end_to_end_fps": 1e3 * pictures / steady["block"]["median"],
        "overhead_to_sink": steady["block"]["median"] / sink_ms,
        "sink_block_ms": sink_ms,
        "sink_stages": {name: summary["median"] for name, summary in after["stages"].items()},
    }  # fmt: skip
    times = steady["blocks_ms"]
    if len(times) >= 60:
        result["late_to_early"] = statistics.median(times[-30:]) / statistics.median(times[10:40])
        memory = steady["memory_gb"]
        result["memory_late_to_early"] = memory[-1] / memory[10] if memory else None
    if (spec.picture_size, spec.frames_per_block) == (ANCHORS_SIZE, ANCHORS_FRAMES):
        measured = {"denoise + settle": dit, "decode": stages["decode"], "block": steady["block"]["median"]}
        result["times_faster_than_released"] = {k: ANCHORS_MS[k] / v for k, v in measured.items()}
    if compare:
        result["compare"] = compare_paths(parts, settings)
    if profile:
        close = measure(parts, settings, settings.blocks, closely=True)["stages"]
        result["bank_parts"] = {name: close[name]["median"] for name in BANK_PARTS if name in close}
        result["kernels"] = top_kernels(lambda: measure(parts, settings, full_blocks(spec) + 1))
    if plot is not None:
        write_whole(plot, draw_curve(times, steady["memory_gb"], _title(result)).encode())
    return result


def top_kernels(work: Callable[[], object]) -> list[str]:
    """Name the kernels that take longest on the device, with their share of the time."""
    from torch.profiler import ProfilerActivity, profile

    cuda = torch.cuda.is_available()
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as seen:
        work()
    events = seen.key_averages()
    spent = [(e.self_device_time_total if cuda else e.self_cpu_time_total, e.key) for e in events]
    total = sum(t for t, _ in spent) or 1
    return [f"{100 * t / total:.1f} % {name[:90]}" for t, name in sorted(spent, reverse=True)[:10]]


def _title(result: dict[str, Any]) -> str:
    """Name what was measured, and where."""
    memory = (
        result["memory"] if result["admission"] == "flow" else f"{result['memory']} by {result['admission']}"
    )
    precision = "" if result["precision"] == "full" else f", {result['precision']}"
    return f"{result['backbone']}, {memory}, {result['device_name']}, {result['dtype']}{precision}"


def table(result: dict[str, Any]) -> str:
    """Format a result of `run` for people."""
    lines = [
        f"{_title(result)}: {result['path']} path, torch {result['torch']}, weights {result['weights']}",
        "",
        f"{'stage':<10}{'cold ms':>10}{'median':>10}{'p90':>10}",
    ]
    for name, times in [*result["stages"].items(), ("block", result["block"])]:
        lines.append(f"{name:<10}{times['cold']:>10.1f}{times['median']:>10.1f}{times['p90']:>10.1f}")
    lines += [
        "",
        f"denoise only {result['denoise_fps']:.1f} pictures/s, end to end {result['end_to_end_fps']:.1f}",
        f"{result['overhead_to_sink']:.3f} times the block of `sink` ({result['sink_block_ms']:.1f} ms)",
        f"first picture after {result['first_picture_s']:.2f} s; load {result['load_s']:.1f} s, "
        f"warm-up {result['warm_up_s']:.1f} s"
        + (f"; peak {result['peak_gb']:.1f} GB" if result["peak_gb"] else ""),
    ]
    for name, text in (
        ("late_to_early", "last 30 blocks / blocks 10 to 40"),
        ("memory_late_to_early", "memory in use"),
    ):
        if result.get(name):
            lines.append(f"{text}: {result[name]:.3f}")
    for name, factor in result.get("times_faster_than_released", {}).items():
        lines.append(
            f"{name}: {factor:.2f} times as fast as the released code without memory ({ANCHORS_MS[name]:.0f} ms)"
        )
    if "compare" in result:
        found = result["compare"]
        lines.append(
            f"largest relative error {found['largest_relative_error']:.2e} against {found['against']}"
            + (f" (limit {found['limit']:.0e})" if found["limit"] else "")
        )
    inside = [f"{name} {spent:.2f}" for name, spent in result.get("bank_parts", {}).items()]
    if inside:
        lines.append(f"ms of look and commit, admit with retain: {', '.join(inside)}")
    return "\n".join([*lines, *result.get("kernels", [])])
