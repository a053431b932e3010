"""Measure what a card needs: `python -m benchmarks.card [--out FILE] [--other FOLDER/src]`

Every setting runs in a fresh process, with random weights at the real size. A row with a card in it has the
allocator's memory capped at that card's, less what the driver and a screen take, and either runs to the end or does
not. With `--other` the rows without a card are measured for another source tree too, so that two versions stand
next to each other; `latents` is a hash of the last block, equal where two rows computed the same bits.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.timing import describe_error
from recap.fast import vae
from recap.fast.speed import SpeedSettings, make_parts, measure
from recap.io.files import write_whole
from recap.types import GeneratedBlock

TAKEN_GB = 0.7
"""What is not the allocator's on a card: the driver's own, and a small screen."""
# A row takes ten seconds, on a new machine a minute for the first.
LONGEST_S = 120


@dataclass(frozen=True, slots=True)
class Row:
    """Names one measurement: path and decoder, and the card in GB that the allocator is capped to, or 0."""

    path: str
    decoder: str
    card: float = 0.0
    precision: str = "full"
    # Without the kernels that only Hopper and Blackwell have shared memory for.
    plain: bool = False
    source: str = ""

    def __str__(self) -> str:
        parts = [
            f"{self.path} {self.decoder}",
            self.precision if self.precision != "full" else "",
            "plain" if self.plain else "",
            f"on {self.card:g} GB" if self.card else "",
            "as it was" if self.source else "",
        ]
        return " ".join(part for part in parts if part)


ROWS = (
    Row("fast", "full"),
    Row("fast", "tiny"),
    Row("readable", "tiny"),
    Row("fast", "full", 16),
    Row("fast", "tiny", 12),
    Row("readable", "tiny", 8),
    Row("readable", "tiny", 6, "int8"),
    Row("fast", "full", plain=True),
    Row("fast", "tiny", 10, "int8"),
    Row("fast", "full", 24),
    Row("readable", "tiny", 10),
)


def measure_row(row: Row, blocks: int, backbone: str, device: str) -> dict[str, Any]:
    """Generate in this process; return pictures per second, and the memory in GB at its largest and at the end."""
    cuda = device.startswith("cuda")
    if cuda and row.card:
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction((row.card - TAKEN_GB) * 1e9 / total)
    dtype = "bfloat16" if cuda else "float32"
    if row.plain:
        vae.ROOMY = ()
    # Only where it is used, so that a version without it can be measured.
    more = {"precision": row.precision} if row.precision != "full" else {}
    settings = SpeedSettings(
        backbone, "recap", row.decoder, device, dtype, blocks, eager=row.path == "readable", **more
    )
    began = time.perf_counter()
    # Before anything is on the card: what of `outside` is CUDA's context, and what others take.
    context = read_memory()["outside"] if cuda else 0.0
    parts = make_parts(settings)
    latents: list[torch.Tensor] = []
    reserved: list[float] = []

    def see(block: GeneratedBlock, pictures: torch.Tensor) -> None:
        latents[:] = [block.latents]
        reserved.append(torch.cuda.max_memory_reserved() / 1e9 if cuda else 0.0)

    found = measure(parts, settings, blocks, see=see)
    spec = parts.backbone.spec
    pictures = spec.frames_per_block * spec.pictures_per_frame
    bits = latents[0].cpu().float().numpy().tobytes()
    return {
        "pictures_per_s": 1e3 * pictures / found["block"]["median"],
        "seconds": time.perf_counter() - began,
        "latents": hashlib.sha256(bits).hexdigest()[:12],
        **(
            {"memory": {**read_memory(), "context": context}, "peak_reserved_by_block": reserved}
            if cuda
            else {}
        ),
    }


def read_memory() -> dict[str, Any]:
    """Return what this process has of the card, in GB, and where it is: by pool and stream of the allocator."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    reserved = torch.cuda.memory_reserved()
    pools: dict[str, list[float]] = {}
    for segment in torch.cuda.memory_snapshot():
        name = f"pool {segment['segment_pool_id']} stream {segment['stream']}"
        sums = pools.setdefault(name, [0.0, 0.0])
        sums[0] += segment["total_size"] / 1e9
        sums[1] += segment["allocated_size"] / 1e9
    peak = torch.cuda.max_memory_reserved()
    return {
        "peak_allocated": torch.cuda.max_memory_allocated() / 1e9,
        "peak_reserved": peak / 1e9,
        "reserved": reserved / 1e9,
        # What is not the allocator's: the context, kernels, libraries.
        "outside": (total - free - reserved) / 1e9,
        "card": (total - free - reserved + peak) / 1e9,
        "reserved_and_allocated_by_pool": pools,
    }


def run_row(row: Row, options: argparse.Namespace) -> dict[str, Any]:
    """Measure a row in a fresh process; a card that is too small is a result, not an error."""
    environment = dict(os.environ)
    if row.source:
        environment["PYTHONPATH"] = os.pathsep.join([row.source, str(Path.cwd())])
    command = [sys.executable, "-m", "benchmarks.card", "--row", json.dumps(asdict(row))]
    for name in ("blocks", "backbone", "device"):
        command += [f"--{name}", str(getattr(options, name))]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LONGEST_S)
    except subprocess.TimeoutExpired:
        return {**asdict(row), "error": f"it took more than {LONGEST_S} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return {**asdict(row), "error": done.stderr.strip()[-600:] or f"exit status {done.returncode}"}
    return {**asdict(row), **json.loads(lines[-1])}


def describe(row: Row, result: dict[str, Any]) -> str:
    """Return one line of the table."""
    if "error" in result:
        return f"{row!s:<42} no: {' '.join(result['error'].split())[:110]}"
    speed = f"{row!s:<42}{result['pictures_per_s']:>8.1f}"
    if "memory" not in result:
        return speed
    names = ("peak_allocated", "peak_reserved", "reserved", "outside", "card")
    return speed + "".join(f"{result['memory'][name]:>10.2f}" for name in names) + f"  {result['latents']}"


def choose_rows(other: str, only: str) -> list[Row]:
    """Return the rows to measure; with another source tree, every row without a card is followed by its own."""
    rows = []
    for row in ROWS:
        rows.append(row)
        if other and not (row.card or row.plain):
            rows.append(replace(row, source=other))
    return [row for row in rows if only in str(row)]


def main(arguments: Sequence[str] | None = None) -> None:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backbone", default="self-forcing" if cuda else "embedded")
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--blocks", type=int, default=14)
    parser.add_argument("--seconds", type=float, default=600.0, help="begin no further row after this time")
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--other", default="", help="the src folder of another version")
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.row:
        row = Row(**json.loads(options.row))
        try:
            found = measure_row(row, options.blocks, options.backbone, options.device)
        except (RuntimeError, ValueError) as error:
            found = {"error": describe_error(error)}
        print(json.dumps(found))
        return
    began, results = time.perf_counter(), []
    name = torch.cuda.get_device_name() if options.device.startswith("cuda") else "cpu"
    print(
        f"{options.backbone} on {name}, torch {torch.__version__}; GB, and a cap of the card less {TAKEN_GB}"
    )
    heads = ("pictures/s", "allocated", "reserved", "at end", "outside", "card")
    print(f"{'':<40}" + "".join(f"{head:>10}" for head in heads) + "  latents")
    for row in choose_rows(options.other, options.only):
        if time.perf_counter() - began > options.seconds:
            print(f"{row!s:<42} left out, no time")
            continue
        results.append(run_row(row, options))
        print(describe(row, results[-1]), flush=True)
    document = {"bench": "card", "torch": torch.__version__, "device_name": name, "rows": results}
    if options.out is not None:
        write_whole(options.out, json.dumps(document, indent=1).encode())


if __name__ == "__main__":
    main()
