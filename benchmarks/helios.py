"""Time Helios-Distilled at full size with and without a memory: `python -m benchmarks.helios [--size tiny]`

Speed does not depend on values, so the transformer, the autoencoder and the flow network have random weights, made on
the device in the precision they run in. The same loop in the same process generates both videos; the first chunk,
which has twice the steps, is left out of the medians. It needs diffusers: if that is not installed, put a folder made
by `pip install --no-deps --target FOLDER diffusers` on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.timing import print_json
from recap.admission.flow import FlowNoveltyConfig
from recap.backbones.helios.backbone import HeliosBackbone
from recap.backbones.helios.random import random_backbone
from recap.backbones.helios.spec import DISTILLED
from recap.config import DTYPES, check_device
from recap.contracts import FlowEstimator, MemoryPolicy
from recap.errors import refuse
from recap.fast.accelerate import accelerate_admission, accelerate_flow
from recap.fast.speed import STAGES, random_flow
from recap.fast.stopwatch import Stopwatch
from recap.io.extras import import_extra
from recap.io.lookup import look_up
from recap.plan import Shot, make_plan
from recap.registry import MEMORIES
from recap.rollout import rollout
from recap.types import Role

_SMALL = {"layers": 2, "heads": 2, "head_dim": 12, "text_len": 5, "text_dim": 8, "height": 64, "width": 128}
TINY = replace(DISTILLED, name="helios-tiny", **_SMALL)  # type: ignore[arg-type]
SIZES = {"full": DISTILLED, "tiny": TINY}
MOST_CHUNKS = 1000
GOAL = 1.35
"""The goal for the time of a chunk without decoding, relative to no memory."""


@dataclass(frozen=True, slots=True)
class HeliosSettings:
    """Sets what one measurement runs."""

    size: str
    chunks: int
    memories: tuple[str, ...]
    device: str
    dtype: str
    flow: str

    def __post_init__(self) -> None:
        if not 2 <= self.chunks <= MOST_CHUNKS:
            limit = f"must be 2 to {MOST_CHUNKS}, since the first is left out of the medians"
            raise refuse("--chunks", self.chunks, limit, "4 are enough")
        check_device(self.device, self.dtype)
        for memory in self.memories:
            look_up("memory", memory, MEMORIES)


def measure(
    backbone: HeliosBackbone, memory: str, flow: FlowEstimator, settings: HeliosSettings
) -> dict[str, Any]:
    """Measure the time per stage and chunk of one video, and its peak memory."""
    spec, cuda = backbone.spec, settings.device.startswith("cuda")

    config = look_up("memory", memory, MEMORIES)()
    policy: MemoryPolicy = config.build(
        spec, lambda: accelerate_admission(FlowNoveltyConfig().build(spec, flow), settings.device)
    )
    decoder, watch = backbone.decoder(), Stopwatch(cuda)
    plan = make_plan([[Shot("a fox", settings.chunks * spec.block_s)]], spec)
    methods = list(zip((backbone, decoder, policy, backbone, policy), STAGES, strict=True))
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    shares: list[Any] = []
    finite = torch.tensor(True, device=settings.device)
    with watch.timing(methods):
        watch.mark()
        for made in rollout(backbone, policy, plan, seeds=[0], decoder=decoder):
            watch.mark()
            shares.append({s: part[Role.SINK] for s, part in made.stage_shares.items()})
            # Read only at the end, so that the loop never waits for the device.
            finite &= made.latents.isfinite().all()
    if cuda:
        torch.cuda.synchronize()
    stages = {name: _steady(watch.milliseconds(name)) for name in STAGES}
    return {
        "stages_ms": stages,
        "first_chunk_ms": watch.periods()[0],
        "chunk_ms": _steady(watch.periods()),
        "without_decode_ms": sum(ms for name, ms in stages.items() if name != "decode"),
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9 if cuda else None,
        "sink_share_by_stage": {s: round(float(share.mean()), 4) for s, share in shares[-1].items()} or None,
        "finite": bool(finite),
    }


def _steady(values: Sequence[float]) -> float:
    """Return the median without the first chunk; 0 for a stage that never runs."""
    return statistics.median(values[1:] or values) if values else 0.0


def compare(settings: HeliosSettings) -> dict[str, Any]:
    """Measure every memory on one model, after a warm-up."""
    try:
        import_extra("diffusers", "Helios", "helios")
    except ValueError as missing:
        remedy = "or put a folder of `pip install --no-deps --target FOLDER diffusers` on PYTHONPATH"
        raise SystemExit(f"{missing}, {remedy}") from missing
    device = torch.device(settings.device)
    torch.manual_seed(0)
    backbone = random_backbone(SIZES[settings.size], device, DTYPES[settings.dtype])
    flow = random_flow(settings.device)
    flow = accelerate_flow(flow) if settings.flow == "fast" else flow
    weights_gb = sum(p.numel() * p.element_size() for p in backbone.transformer.parameters()) / 1e9
    # The warm-up selects kernels and records the graph of the flow.
    for memory in settings.memories:
        measure(backbone, memory, flow, replace(settings, chunks=2))
    found = {memory: measure(backbone, memory, flow, settings) for memory in settings.memories}
    off, *others = settings.memories
    parts = ("without_decode_ms", "chunk_ms")
    ratios = {memory: {part: found[memory][part] / found[off][part] for part in parts} for memory in others}
    return {"weights_gb": weights_gb, "by_memory": found, "to_off": ratios}


def show(result: dict[str, Any], off: str) -> None:
    names = list(result["by_memory"])
    print(f"{'':24}" + "".join(f"{name:>12}" for name in names))
    columns = []
    for found in result["by_memory"].values():
        column = {f"{stage}, ms": found["stages_ms"][stage] for stage in STAGES}
        column |= {"chunk, ms": found["chunk_ms"], "without decode, ms": found["without_decode_ms"]}
        column |= {"first chunk, ms": found["first_chunk_ms"], "peak, GB": found["peak_gb"] or float("nan")}
        columns.append(column)
    for label in columns[0]:
        print(f"{label:24}" + "".join(f"{column[label]:12.2f}" for column in columns))
    for name, ratio in result["to_off"].items():
        without, whole = ratio["without_decode_ms"], ratio["chunk_ms"]
        print(f"{name} to {off}: {without:.3f} without decode (goal {GOAL}), {whole:.3f} with it")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    cuda = torch.cuda.is_available()
    parser.add_argument("--size", choices=list(SIZES), default="full")
    parser.add_argument("--chunks", type=int, default=4)
    parser.add_argument("--memories", default="none,recap", help="ratios are relative to the first")
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16" if cuda else "float32")
    parser.add_argument("--flow", choices=["fast", "eager"], default="fast", help="which RAFT, on a GPU")
    options = vars(parser.parse_args())
    options["memories"] = tuple(options["memories"].split(","))
    try:
        settings = HeliosSettings(**options)
        result = compare(settings)
    except ValueError as error:
        sys.exit(f"error: {error}")
    show(result, settings.memories[0])
    print_json("helios", settings.device, {"weights": "random", **options, **result})


if __name__ == "__main__":
    main()
