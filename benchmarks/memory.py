"""Does a block cost the same after 400 blocks as after 10?  `python -m benchmarks.memory [memory] [blocks]`

One rollout is drawn almost to its end; then its last 100 blocks and blocks 10 to 110 of a second, young one are
drawn in turns. A machine that slows down or is shared slows both alike, so the ratio of the two medians holds.
Memory is what the process holds at block 10 and before the young rollout starts.
"""

from __future__ import annotations

import json
import resource
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from recap.config import RunConfig
from recap.plan import make_plan
from recap.registry import load_backbone
from recap.rollout import rollout
from recap.run import build_memory
from recap.types import GeneratedBlock

EARLY, SPAN = 10, 100  # blocks before the young rollout is timed, and blocks timed of each


def measure(memory: str, num_blocks: int, device: str) -> dict[str, object]:
    """Seconds per block and MiB held, early and late in a rollout."""
    backbone = load_backbone("untrained", device=device)
    spec = backbone.spec
    seconds = num_blocks * spec.frames_per_block * spec.pictures_per_frame / spec.pictures_per_second
    shots = [{"prompt": "a red boat", "seconds": seconds}]
    config = RunConfig.from_dict({"shots": shots, "memory": memory, "flow": "classical", "device": device})
    plan = make_plan([config.shots], spec)

    def start() -> Iterator[GeneratedBlock]:
        return rollout(backbone, build_memory(config, spec), plan, seeds=config.seeds)

    old, held = start(), []
    for block in range(num_blocks - SPAN):
        _draw(old)
        if block in (EARLY, num_blocks - SPAN - 1):
            held.append(_held_mib(device))
    young = start()
    for _ in range(EARLY):
        _draw(young)
    early, late = [], []
    for _ in range(SPAN):
        early.append(_draw(young))
        late.append(_draw(old))
    return {
        "memory": memory,
        "blocks": num_blocks,
        "device": device,
        "block_ms_early": 1e3 * statistics.median(early),
        "block_ms_late": 1e3 * statistics.median(late),
        "time_ratio": statistics.median(late) / statistics.median(early),
        "mib_early": held[0],
        "mib_late": held[1],
        "memory_ratio": held[1] / held[0],
    }


def _draw(blocks: Iterator[GeneratedBlock]) -> float:
    """Draw one block and wait for the device; returns the seconds it took."""
    began = time.perf_counter()
    next(blocks).latents.sum().item()
    return time.perf_counter() - began


def _held_mib(device: str) -> float:
    """Memory held just now: the allocator's on CUDA, else the process's resident pages."""
    if device.startswith("cuda"):
        return torch.cuda.memory_allocated() / 2**20
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def main(arguments: list[str]) -> None:
    memory = arguments[0] if arguments else "recap"
    if len(arguments) > 2 or (len(arguments) == 2 and not arguments[1].isdigit()):
        sys.exit("usage: python -m benchmarks.memory [memory] [blocks]")
    num_blocks = int(arguments[1]) if len(arguments) > 1 else 400
    if num_blocks < EARLY + 2 * SPAN:
        sys.exit(
            f"blocks is {num_blocks}: at least {EARLY + 2 * SPAN} are needed for the old rollout to be older"
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
