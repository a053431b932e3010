"""Does a block cost the same after 400 blocks as after 10?  `python -m recap.bench.memory [memory] [blocks]`

Draws a long rollout and compares time per block (medians over 40) and memory held at block 10 and at the end: ratios
of one run, so that the machine's speed drops out.
"""

from __future__ import annotations

import json
import resource
import statistics
import sys
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from recap.config import RunConfig
from recap.plan import make_plan
from recap.registry import load_backbone
from recap.rollout import rollout
from recap.run import build_memory

EARLY, SPAN = 10, 40  # blocks left out as warm-up, and blocks a median is taken over


def measure(memory: str, num_blocks: int, device: str) -> dict[str, object]:
    """Seconds per block and MiB held, early and late in one rollout."""
    backbone = load_backbone("untrained", device=device)
    spec = backbone.spec
    seconds = num_blocks * spec.frames_per_block * spec.pictures_per_frame / spec.pictures_per_second
    config = RunConfig.from_dict(
        {
            "shots": [{"prompt": "a red boat", "seconds": seconds}],
            "memory": memory,
            "flow": "classical",
            "device": device,
        }
    )
    plan = make_plan([config.shots], spec)
    policy = build_memory(config, spec)
    times: list[float] = []
    held: list[float] = []
    began = time.perf_counter()
    for made in rollout(backbone, policy, plan, seeds=config.seeds):
        made.latents.sum().item()  # waits for the device
        now = time.perf_counter()
        times.append(now - began)
        held.append(_held_mib(device))
        began = now
    early, late = slice(EARLY, EARLY + SPAN), slice(num_blocks - SPAN, num_blocks)
    time_early, time_late = statistics.median(times[early]), statistics.median(times[late])
    return {
        "memory": memory,
        "blocks": num_blocks,
        "device": device,
        "block_ms_early": 1e3 * time_early,
        "block_ms_late": 1e3 * time_late,
        "time_ratio": time_late / time_early,
        "mib_early": held[EARLY],
        "mib_late": held[-1],
        "memory_ratio": held[-1] / held[EARLY],
    }


def _held_mib(device: str) -> float:
    """Memory held just now: the allocator's on CUDA, else the process's resident pages."""
    if device.startswith("cuda"):
        return torch.cuda.memory_allocated() / 2**20
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def main(arguments: list[str]) -> None:
    memory = arguments[0] if arguments else "recap"
    if len(arguments) > 2 or (len(arguments) == 2 and not arguments[1].isdigit()):
        sys.exit("usage: python -m recap.bench.memory [memory] [blocks]")
    num_blocks = int(arguments[1]) if len(arguments) > 1 else 400
    if num_blocks < EARLY + 2 * SPAN:
        sys.exit(
            f"blocks is {num_blocks}: at least {EARLY + 2 * SPAN} are needed for an early and a late median"
        )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    table = Table("memory", "ms/block early", "late", "ratio", "MiB early", "late", "ratio")
    # One memory per process: what a first run leaves in the allocator would hide the second.
    result = measure(memory, num_blocks, device)
    table.add_row(memory, *(f"{value:.3f}" for value in result.values() if isinstance(value, float)))
    Console().print(table)
    print(json.dumps({"bench": "memory", "torch": torch.__version__, **result}))


if __name__ == "__main__":
    main(sys.argv[1:])
