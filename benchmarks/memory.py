"""Does a block cost the same after 400 blocks as after 10?  `python -m benchmarks.memory [memory] [blocks]`

One rollout is generated almost to its end; then its last 100 blocks alternate with blocks 10 to 110 of a second,
young rollout. A machine that slows down or is shared slows both, so the ratio of the two medians is still valid.
Memory is measured at block 10 and before the young rollout starts.
"""

from __future__ import annotations

import resource
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.timing import next_block, print_json
from recap.config import RunConfig
from recap.plan import make_plan
from recap.registry import load_backbone
from recap.rollout import rollout
from recap.run import build_memory
from recap.types import GeneratedBlock

EARLY, SPAN = 10, 100
"""The young rollout is timed after `EARLY` blocks; `SPAN` blocks of each rollout are timed."""


def measure(memory: str, num_blocks: int, device: str) -> dict[str, object]:
    """Measure milliseconds per block and MiB of memory, early and late in a rollout."""
    backbone = load_backbone("untrained", device=device)
    spec = backbone.spec
    seconds = num_blocks * spec.frames_per_block * spec.pictures_per_frame / spec.pictures_per_second
    shots = [{"prompt": "a red boat", "seconds": seconds}]
    config = RunConfig.from_dict({"shots": shots, "memory": memory, "flow": "classical", "device": device})
    plan = make_plan([config.shots], spec)

    def start() -> Iterator[GeneratedBlock]:
        return rollout(backbone, build_memory(config, spec), plan, seeds=config.seeds)

    old, mib = start(), []
    for block in range(num_blocks - SPAN):
        next_block(old)
        if block in (EARLY, num_blocks - SPAN - 1):
            mib.append(_used_mib(device))
    young = start()
    for _ in range(EARLY):
        next_block(young)
    early, late = [], []
    for _ in range(SPAN):
        early.append(next_block(young)[1])
        late.append(next_block(old)[1])
    return {
        "memory": memory,
        "blocks": num_blocks,
        "device": device,
        "block_ms_early": 1e3 * statistics.median(early),
        "block_ms_late": 1e3 * statistics.median(late),
        "time_ratio": statistics.median(late) / statistics.median(early),
        "mib_early": mib[0],
        "mib_late": mib[1],
        "memory_ratio": mib[1] / mib[0],
    }


def _used_mib(device: str) -> float:
    """Return the memory in use: the allocator's on CUDA, else the resident pages of the process."""
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
        sys.exit(f"blocks is {num_blocks}: at least {EARLY + 2 * SPAN} are needed")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    table = Table("memory", "ms/block early", "late", "ratio", "MiB early", "late", "ratio")
    # One memory per process, because a first run leaves memory in the allocator that would hide the second.
    result = measure(memory, num_blocks, device)
    table.add_row(memory, *(f"{value:.3f}" for value in result.values() if isinstance(value, float)))
    Console().print(table)
    print_json("memory", device, result)


if __name__ == "__main__":
    main(sys.argv[1:])
