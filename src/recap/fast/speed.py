"""Measures how fast a video is generated with a memory: `recap bench`, or `python -m recap.fast.speed`

Every stage of a block is timed by events on the device, so measuring does not wait for it. Cold is the first block
of the process, steady the median of all blocks once the memory is full. The overhead is relative to `sink`, which
is timed before and after. End to end is the time from one block's pictures, as bytes in the host's memory, to the
next block's. All ratios are taken within one process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recap.attention.context import BlockContext
from recap.contracts import Decoder, MemoryPolicy
from recap.fast.accelerate import choose_aside
from recap.fast.growth import draw_curve
from recap.fast.parts import Parts, SpeedSettings, make_parts
from recap.fast.stopwatch import Stopwatch
from recap.fast.threads import use_fair_threads
from recap.io.files import write_whole
from recap.plan import Shot, make_plan
from recap.rollout import at_once, block_noise, rollout

# Blocks until the memory is full, graphs are recorded and clock rates are steady.
FULL = 5
ANCHORS_MS = {"denoise + settle": 412.0, "decode": 248.0, "block": 660.0}
"""The times of Self-Forcing's released code on one H200 at 832 x 480, without memory, which we compare with."""
ANCHORS_SIZE = (480, 832)
STAGES = ("denoise", "decode", "look", "settle", "commit")


def measure(parts: Parts, settings: SpeedSettings, blocks: int) -> dict[str, Any]:
    """Run one rollout; return milliseconds per stage and block, and the memory used."""
    spec, cuda = parts.backbone.spec, settings.device.startswith("cuda")
    watch = Stopwatch(cuda)
    policy, decoder = parts.policy(settings.memory), parts.open_decoder()
    length = blocks * spec.frames_per_block * spec.pictures_per_frame / spec.pictures_per_second
    plan = make_plan([[Shot("a fox on a beach at night", length)]], spec)
    aside = at_once if settings.eager else choose_aside(settings.device)
    with watch.listening(_timed_methods(parts, policy, decoder)):
        began = time.perf_counter()
        blocks_made = rollout(parts.backbone, policy, plan, seeds=[0], decoder=decoder, aside=aside)
        first_picture_s = _deliver(blocks_made, watch, cuda, began)
    if cuda:
        torch.cuda.synchronize()
    stages = {name: watch.milliseconds(name) for name in STAGES}
    periods = watch.periods("block")
    return {
        "first_picture_s": first_picture_s,
        "blocks_ms": periods,
        "stages": {name: _summary(values) for name, values in stages.items() if values},
        "block": _summary(periods),
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9 if cuda else None,
        "memory_gb": [round(x / 1e9, 4) for x in watch.memory],
    }


def _timed_methods(parts: Parts, policy: MemoryPolicy, decoder: Decoder) -> list[tuple[object, str, str]]:
    """List (object, method, stage) of everything that is timed."""
    named = [(parts.backbone, "denoise"), (decoder, "decode"), (parts.backbone, "settle"), (policy, "commit")]
    found: list[tuple[object, str, str]] = [(owner, name, name) for owner, name in named]
    return [*found, (policy, "look", "look")] if hasattr(policy, "look") else found


def _deliver(blocks: Iterator[Any], watch: Stopwatch, cuda: bool, began: float) -> float:
    """Copy every block's pictures to the host as bytes, one block late; return the seconds to the first picture."""
    first, wait = 0.0, None
    for block in blocks:
        pictures: Tensor = (block.pixels * 255).round().to(torch.uint8)
        if cuda:
            host = torch.empty(pictures.shape, dtype=torch.uint8, pin_memory=True)
            host.copy_(pictures, non_blocking=True)
        watch.mark("block")
        if not first:
            if cuda:
                torch.cuda.synchronize()
            first = time.perf_counter() - began
        if wait is not None:
            # The host runs at most one block ahead of the device.
            wait()
        wait = watch.fence()
    return first


def _summary(values: list[float]) -> dict[str, float]:
    """Return the cold value, and the median and 90th percentile of the steady ones."""
    steady = sorted(values[FULL:] or values)
    return {
        "cold": values[0],
        "median": statistics.median(steady),
        "p90": steady[min(len(steady) - 1, int(0.9 * len(steady)))],
    }


def compare_paths(parts: Parts, settings: SpeedSettings) -> dict[str, float]:
    """Return the largest relative error of a block's latents, fast against readable, on the same memory and noise."""
    spec, policy = parts.backbone.spec, parts.policy(settings.memory)
    plan = make_plan([[Shot("a fox on a beach at night", 5 * 0.75)]], spec)
    worst = 0.0
    with torch.no_grad():
        conditioning = parts.readable.condition(plan.blocks[0].prompts)
        decoder = parts.open_decoder()
        for block in plan.blocks:
            found = []
            for backbone in (parts.readable, parts.backbone):
                context = BlockContext(policy, policy.begin(block))
                found.append(backbone.denoise(block_noise(spec, [0], block), conditioning, context).double())
            error = (found[1] - found[0]).norm() / found[0].norm()
            worst = max(worst, float(error))
            # Both continue from the readable path's block.
            context = BlockContext(policy, policy.begin(block))
            parts.readable.settle(found[0].float(), conditioning, context.clean_pass())
            policy.commit(block, decoder.decode(found[0].float()))
    return {"largest_relative_error": worst, "limit": 2e-2 if settings.dtype != "float32" else 1e-3}


def run(settings: SpeedSettings, *, compare: bool, plot: Path | None, profile: bool) -> dict[str, Any]:
    """Warm up, then measure the memory and, for comparison, the plain sink; return everything as plain data."""
    began = time.perf_counter()
    parts = make_parts(settings)
    loaded = time.perf_counter()
    cold = measure(parts, settings, FULL)
    warm = time.perf_counter()
    plain = replace(settings, memory="sink")
    before = measure(parts, plain, min(settings.blocks, 20))
    if settings.device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()
    steady = measure(parts, settings, settings.blocks)
    # Before and after, because a chip that gets warm gets slow, which must not count against the memory.
    after = measure(parts, plain, min(settings.blocks, 20))
    sink_ms = statistics.mean(run["block"]["median"] for run in (before, after))
    spec = parts.backbone.spec
    pictures = spec.frames_per_block * spec.pictures_per_frame
    for name, summary in steady["stages"].items():
        summary["cold"] = cold["stages"][name]["cold"]
    stages = {name: summary["median"] for name, summary in steady["stages"].items()}
    dit = stages["denoise"] + stages["settle"]
    result = {
        "bench": "speed", "torch": torch.__version__, **asdict(settings), **parts.about,
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
    if spec.picture_size == ANCHORS_SIZE:
        measured = {"denoise + settle": dit, "decode": stages["decode"], "block": steady["block"]["median"]}
        result["times_faster_than_released"] = {k: ANCHORS_MS[k] / v for k, v in measured.items()}
    if compare:
        result["compare"] = compare_paths(parts, settings)
    if profile:
        result["kernels"] = top_kernels(lambda: measure(parts, settings, FULL + 1))
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
    return f"{result['backbone']}, {result['memory']}, {result['device_name']}, {result['dtype']}"


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
            f"largest relative error {found['largest_relative_error']:.2e} (limit {found['limit']:.0e})"
        )
    return "\n".join([*lines, *result.get("kernels", [])])


def main(arguments: list[str] | None = None) -> None:
    """Run `recap bench` where the packages of the command line are not installed."""
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backbone", default="self-forcing" if cuda else "embedded")
    parser.add_argument("--memory", default="recap")
    parser.add_argument("--decoder", default="full", help="full or tiny, for the public models")
    parser.add_argument("--blocks", type=int, default=30 if cuda else 12)
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--dtype", default="bfloat16" if cuda else "float32")
    parser.add_argument("--eager", action="store_true", help="the readable path")
    parser.add_argument("--compare", action="store_true", help="readable and fast path on the same inputs")
    parser.add_argument("--profile", action="store_true", help="name the kernels that take longest")
    parser.add_argument("--plot", type=Path, help="write the growth curve as SVG")
    values = vars(parser.parse_args(arguments))
    options = {name: values.pop(name) for name in ("compare", "profile", "plot")}
    use_fair_threads()
    try:
        result = run(SpeedSettings(**values), **options)
    except ValueError as error:
        sys.exit(f"error: {error}")
    print(table(result))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
