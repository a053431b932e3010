"""Measure what the embedded backbone must hold, one claim a PART, in batches through the real rollout.

    python -m training.evaluate PART [PART ...] --weights FOLDER --probe FILE --out DIR [--device cuda] [--minutes 9]

PART is autoencoder, opening, stability, lookup, retention, reappearance or speed. Each writes DIR/PART.json, with
the value of every rollout, and prints a Markdown table for the model card. Rows of a batch are rollouts; memories
are compared on the same prompts and seeds. Where time runs out, fewer whole batches are drawn and n says so.
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
from recap.contracts import FlowEstimator
from recap.errors import refuse
from recap.eval.judges.probe import load_probe
from recap.flow import FLOWS, build_flow, resolve_flow
from recap.io.files import write_whole
from training.atlas import load_atlas
from training.bench import (
    KEPT,
    MEMORIES,
    SEED,
    Bench,
    Options,
    load_models,
)
from training.effects import lookup, reappearance, retention
from training.measures import (
    as_json,
    markdown,
)
from training.quality import Answer, autoencoder, opening, speed, stability
from training.world import World

PARTS: dict[str, Callable[[Bench], Answer]] = {
    "speed": speed, "autoencoder": autoencoder, "opening": opening, "lookup": lookup,
    "stability": stability, "retention": retention, "reappearance": reappearance,
}  # fmt: skip
"""In the order they run: speed first, so that its peak memory is its own."""


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
    parser.add_argument(
        "--teacher", type=Path, help="folder of the flow model that sixteen steps are drawn with"
    )
    parser.add_argument("--guidance", type=float, default=1.0, help="of the teacher")
    parser.add_argument("--probe", type=Path)
    parser.add_argument("--flow", choices=list(FLOWS), default="auto", help="of the bank")
    parser.add_argument("--raft", type=Path, help="a file of weights for raft-small, not the installed ones")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="of the transformer"
    )
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="no batch begins that would end later"
    )
    parser.add_argument("--prompts", type=int, help="fewer or more than the part's own")
    parser.add_argument("--repeats", type=int, default=2, help="seeds of each prompt")
    parser.add_argument("--seconds", type=float, help="length of rollouts, other than the part's own")
    parser.add_argument("--rows", type=int, default=50, help="rollouts in one batch")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--memories", nargs="+", choices=sorted(MEMORIES), default=list(MEMORIES))
    parser.add_argument("--cycle-threshold-px", type=float, default=FlowNoveltyConfig().cycle_threshold_px)
    return parser.parse_args(words)


def choose_flow(given: argparse.Namespace) -> str:
    """The flow's own name, found out once: it stands in every file of results."""
    if given.raft is None:
        return resolve_flow(given.flow)
    if given.flow == "classical":
        raise refuse("--raft", str(given.raft), "classical flow has no weights", "leave out --raft or --flow")
    return "raft-small"


def main(words: Sequence[str] | None = None) -> None:
    given = read_arguments(words)
    flow = choose_flow(given)
    options = Options(
        given.prompts, given.repeats, given.seconds, given.rows, given.seed, tuple(given.memories),
        given.cycle_threshold_px, given.dtype, flow, given.device,
    )  # fmt: skip
    begin = time.monotonic()
    # Whole precision: a measurement should not depend on which kernels a GPU has for rounded factors.
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    models = load_models(
        given.weights,
        given.device,
        getattr(torch, given.dtype),
        teacher=given.teacher,
        guidance=given.guidance,
    )
    about = {"weights": given.weights.name, "probe": given.probe and given.probe.name}
    about["load_s"] = time.monotonic() - begin
    if given.device.startswith("cuda"):
        about["gpu"] = torch.cuda.get_device_name()
    asked = set(given.parts)
    judged = asked - {"autoencoder", "speed"}
    if judged and given.probe is None:
        raise refuse(
            "--probe", None, f"{', '.join(sorted(judged))} need it", "make it with python -m training.probe"
        )

    def open_flow() -> FlowEstimator:
        return build_flow(flow, device=given.device, weights=given.raft)

    bench = Bench(
        options,
        models,
        load_probe(given.probe, given.device) if judged else None,
        World(load_atlas(), given.device)
        if asked & {"autoencoder", "opening", "stability", "lookup"}
        else None,
        open_flow,
        given.minutes,
    )
    for part in PARTS:
        if part in asked and bench.time_left():
            measure(part, bench, given.out, about)
        elif part in asked:
            bench.say(f"out of time before {part}")


if __name__ == "__main__":
    main()
