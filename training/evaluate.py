"""Measure the claims about the embedded backbone, one per PART, in batches through the real rollout.

    python -m training.evaluate PART [PART ...] --weights FOLDER --probe FILE --out DIR [--device cuda] [--minutes 9]

PART is autoencoder, opening, stability, motion, lookup, retention, reappearance or speed. Each writes DIR/PART.json,
with the value of every rollout, and prints a Markdown table for the model card. Rows of a batch are rollouts;
memories are compared on the same prompts and seeds. If time runs out, there are fewer whole batches, and n reports
how many.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from recap.admission.flow import FlowNoveltyConfig
from recap.backbones.wan.spec import NUM_TRAIN_STEPS
from recap.contracts import FlowEstimator
from recap.errors import refuse
from recap.eval.judges.probe import load_probe
from recap.eval.judges.subject import KEPT
from recap.flow import FLOWS, build_flow, resolve_flow
from recap.flow.world import WORLD
from recap.io.files import write_whole
from training.atlas import load_atlas
from training.bench import MEMORIES, SEED, Answer, Bench, Options, load_models
from training.effects import lookup, reappearance, retention
from training.measures import as_json, markdown
from training.openings import opening
from training.quality import autoencoder, motion, speed, stability
from training.sampling import MANY_STEPS
from training.world import World

PARTS: dict[str, Callable[[Bench], Answer]] = {
    "speed": speed, "autoencoder": autoencoder, "opening": opening, "lookup": lookup,
    "stability": stability, "motion": motion, "retention": retention, "reappearance": reappearance,
}  # fmt: skip
"""The parts in the order they run: speed first, so that its peak memory is its own."""


@torch.no_grad()
def measure(part: str, bench: Bench, out: Path, about: dict[str, Any] | None = None) -> dict[str, Any]:
    """Run one part; write its JSON and print its table."""
    begin = time.monotonic()
    result, table = PARTS[part](bench)
    content: dict[str, Any] = as_json({
        "part": part, "options": asdict(bench.options), **(about or {}), "kept_under_delta_e": KEPT,
        "torch": torch.__version__, "seconds": time.monotonic() - begin, "result": result,
    })  # fmt: skip
    out.mkdir(parents=True, exist_ok=True)
    write_whole(out / f"{part}.json", json.dumps(content).encode())
    print(f"\n### {part}\n{markdown(table)}\n", flush=True)
    return content


def read_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("parts", nargs="+", choices=sorted(PARTS), metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--weights", type=Path, required=True, help="folder of dit, autoencoder and text")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--teacher", type=Path, help="folder of the flow model for many steps")
    parser.add_argument("--teacher-steps", type=int, default=MANY_STEPS, help="steps of the teacher")
    parser.add_argument("--guidance", type=float, default=1.0, help="guidance of the teacher")
    parser.add_argument("--probe", type=Path)
    parser.add_argument("--flow", choices=list(FLOWS), default="auto", help="flow of the bank")
    parser.add_argument("--raft", type=Path, help="file of raft-small, which is then the flow")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="of the transformer"
    )
    parser.add_argument("--minutes", type=float, default=math.inf, help="time limit for starting batches")
    parser.add_argument("--prompts", type=int, help="number of prompts [default: that of the part]")
    parser.add_argument("--repeats", type=int, default=2, help="seeds per prompt")
    parser.add_argument("--seconds", type=float, help="length of rollouts [default: that of the part]")
    parser.add_argument("--rows", type=int, default=50, help="rollouts per batch")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--memories", nargs="+", choices=sorted(MEMORIES), default=list(MEMORIES))
    parser.add_argument("--cycle-threshold-px", type=float, default=FlowNoveltyConfig().cycle_threshold_px)
    return parser.parse_args(words)


def choose_flow(arguments: argparse.Namespace) -> str:
    """Return the name of the flow, resolved once, as every file of results records it."""
    if arguments.raft is None:
        return resolve_flow(arguments.flow, backbone=WORLD, device=arguments.device)
    if arguments.flow not in ("auto", "raft-small"):
        limit = f"these weights are not for {arguments.flow} flow"
        raise refuse("--raft", str(arguments.raft), limit, "leave out --raft or --flow")
    return "raft-small"


def main(words: Sequence[str] | None = None) -> None:
    arguments = read_arguments(words)
    flow, device = choose_flow(arguments), arguments.device
    options = Options(
        arguments.prompts, arguments.repeats, arguments.seconds, arguments.rows, arguments.seed,
        tuple(arguments.memories), arguments.cycle_threshold_px, arguments.dtype, flow, device,
    )  # fmt: skip
    begin = time.monotonic()
    # Full precision: a measurement should not depend on a GPU's kernels for rounded factors.
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    dtype, teacher = getattr(torch, arguments.dtype), arguments.teacher
    steps = arguments.teacher_steps
    if not 1 <= steps <= NUM_TRAIN_STEPS:
        raise refuse("--teacher-steps", steps, f"must be 1 to {NUM_TRAIN_STEPS}", f"{MANY_STEPS} is usual")
    models = load_models(
        arguments.weights, device, dtype, teacher=teacher, guidance=arguments.guidance, teacher_steps=steps
    )
    about = {"weights": arguments.weights.name, "probe": arguments.probe and arguments.probe.name}
    about["load_s"] = time.monotonic() - begin
    if device.startswith("cuda"):
        about["gpu"] = torch.cuda.get_device_name()
    parts = set(arguments.parts)
    judged = parts - {"autoencoder", "speed"}
    if judged and arguments.probe is None:
        limit = f"{', '.join(sorted(judged))} need it"
        raise refuse("--probe", None, limit, "make it with python -m training.probe")

    def open_flow() -> FlowEstimator:
        return build_flow(flow, device=device, weights=arguments.raft)

    probe = load_probe(arguments.probe, device) if judged else None
    rendered = parts & {"autoencoder", "opening", "stability", "motion", "lookup"}
    world = World(load_atlas(), device) if rendered else None
    bench = Bench(options, models, probe, world, open_flow, arguments.minutes)
    for part in PARTS:
        if part in parts and bench.time_left():
            measure(part, bench, arguments.out, about)
        elif part in parts:
            bench.say(f"out of time before {part}")


if __name__ == "__main__":
    main()
