"""What the benchmarks share: timing of calls and blocks, and the JSON line that each of them ends with."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping

import torch

from recap.types import GeneratedBlock


def milliseconds(function: Callable[..., object], *arguments: object) -> float:
    """Time one call, with CUDA events if there is a GPU."""
    if not torch.cuda.is_available():
        began = time.perf_counter()
        function(*arguments)
        return 1e3 * (time.perf_counter() - began)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    function(*arguments)
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def median_milliseconds(function: Callable[[], object], repeats: int) -> float:
    """Return the median time of a call, after two calls to warm up."""
    return statistics.median([milliseconds(function) for _ in range(repeats + 2)][2:])


def next_block(blocks: Iterator[GeneratedBlock]) -> tuple[GeneratedBlock, float]:
    """Generate one block; return it and the seconds until the device finished it."""
    began = time.perf_counter()
    made = next(blocks)
    # Reading the result waits for the device.
    assert bool(made.latents.isfinite().all()), f"block {made.block.index} is not finite"
    return made, time.perf_counter() - began


def describe_error(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip()[:300]}"


def print_json(bench: str, device: str, result: Mapping[str, object]) -> None:
    """Print the result as one line of JSON, the last line of a benchmark."""
    name = torch.cuda.get_device_name() if device.startswith("cuda") else "cpu"
    print(json.dumps({"bench": bench, "torch": torch.__version__, "device_name": name, **result}))
