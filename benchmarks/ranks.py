"""Proves that several processes generate what one does: latents, trace and memory, also cut, reread and resumed.

    python -m benchmarks.ranks --processes 2                     on the CPU, bit for bit in float64
    python -m benchmarks.ranks --processes 2 --device cuda       two processes on one GPU, through gloo

It needs torch, numpy and safetensors only. Weights are random and small, with 12 heads; no speed is measured.
The last line is JSON; the exit code is 0 if every case is within the tolerance and made the same decisions.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from recap.attention.context import OWN_KERNELS
from recap.backbones.wan.backbone import build_untrained
from recap.backbones.wan.spec import UNTRAINED
from recap.config import RunConfig
from recap.contracts import MemoryPolicy
from recap.fast.ranks.backbone import split_backbone
from recap.fast.ranks.group import LONE, Ranks, join_ranks
from recap.fast.ranks.states import join_state, load_state
from recap.fast.ranks.wan import RankedKernels
from recap.io.report import SILENT
from recap.io.trace import BlockTrace
from recap.memory.base import WindowMemory
from recap.plan import make_plan
from recap.rollout import Resume, reach, rollout
from recap.run import build_memory

# The name lets the package's own flow look at its pictures. Sums over tokens round alike where the heads of a process
# have a multiple of 32 channels together, as those of all public models have.
SPEC = replace(UNTRAINED, name="embedded", heads=12, dim=12 * 32, layers=2)
SEEDS = (3,)
STOP = 4
"""The block before which a rollout is stopped, and resumed in new objects from its state."""

SHOTS = [
    {"prompt": "a fox on a beach by day", "seconds": 3.0},
    {"prompt": "an empty beach by day", "seconds": 1.5, "cut": False, "reread": True},
    {"prompt": "a fox on a beach by day", "seconds": 1.5},
]
CASES: dict[str, dict[str, Any]] = {
    "none": {"memory": "none"},
    "sink": {"memory": {"name": "sink", "reinforcement": 3.0}},
    "sink, by head": {"memory": {"name": "sink", "reinforcement": "5@heads:top-0.5"}},
    "sink, gate": {"memory": {"name": "sink", "reinforcement": "5@gate:0.3"}},
    "sink, share": {"memory": {"name": "sink", "reinforcement": "share:0.3"}},
    "recap": {"memory": "recap"},
    "recap, steps": {"memory": {"name": "recap", "reinforcement": "5@steps:0-1@layers:last-half"}},
    "recap, merged": {"memory": {"name": "recap", "merge_margin": 2.0, "zero_scores_fill": False}},
    "recap random": {"memory": {"name": "recap", "share_by_block": True}, "admission": "random"},
    "recap recent": {"memory": "recap", "admission": "recent"},
    "recap keys": {"memory": "recap", "admission": {"name": "keys", "margin": 1.0}},
    "recap flow+keys": {"memory": "recap", "admission": {"name": "flow+keys", "margin": 1.0}},
    "recap flow-texture": {"memory": "recap", "admission": "flow-texture"},
    "recap diversity-keys": {"memory": "recap", "admission": {"name": "diversity-keys", "num_centres": 8}},
    "deep-forcing": {
        "memory": {"name": "deep-forcing", "window_frames": 12, "sink_frames": 2, "budget_frames": 8}
    },
    "deep-forcing, paper": {
        "memory": {
            "name": "deep-forcing",
            "variant": "paper",
            "window_frames": 9,
            "sink_frames": 2,
            "budget_frames": 7,
        }
    },
    "memrope": {"memory": {"name": "memrope", "window_frames": 9, "sink_frames": 1}},
    "rolling-sink": {"memory": {"name": "rolling-sink", "window_frames": 9, "replayed_frames": 3}},
    "relax-forcing": {"memory": {"name": "relax-forcing", "reservoir_frames": 12}},
}
"""Every memory, and every admission rule and option of it that looks across heads."""

TOLERANCES = {
    ("cpu", "float64"): 0.0,
    ("cpu", "float32"): 1e-6,
    ("cuda", "float64"): 1e-9,
    ("cuda", "float32"): 1e-3,
}
DTYPES = {"float64": torch.float64, "float32": torch.float32}


def generate(
    case: dict[str, Any], ranks: Ranks, device: str, dtype: str, stop: int | None
) -> dict[str, Tensor]:
    """Return latents, trace and state of a rollout; with `stop`, of one that was resumed before that block."""
    config = RunConfig.from_dict(
        {"shots": SHOTS, "seeds": list(SEEDS), "flow": "world-flow", "device": device, "eager": True, **case}
    )
    backbone = build_untrained(0, device, DTYPES[dtype], SPEC)
    made = backbone if ranks.alone else split_backbone(backbone, ranks)
    plan = make_plan([config.shots] * len(SEEDS), made.spec)
    policy, decoder = build_memory(config, made.spec, SILENT.notice, ranks), made.decoder()
    kernels = OWN_KERNELS if ranks.alone else RankedKernels(ranks)
    latents: list[Tensor] = []
    trace: list[Any] = []

    def run(policy: MemoryPolicy, resume: Resume, end: int | None) -> None:
        for block in rollout(
            made, policy, plan, seeds=SEEDS, decoder=decoder, resume=resume, kernels=kernels
        ):
            latents.append(block.latents)
            trace.append(BlockTrace.of(block).to_json())
            if block.block.index + 1 == end:
                return

    run(policy, Resume(), stop)
    assert isinstance(policy, WindowMemory)
    assert policy.window.current.keys.shape[3] * ranks.count == SPEC.heads, "a process keeps its own heads"
    if stop is not None:
        state, decoded = join_state(policy, ranks), decoder.state()
        policy, decoder = build_memory(config, made.spec, SILENT.notice, ranks), made.decoder()
        load_state(
            policy, ranks, {n: x.to(device) for n, x in state.items()} if ranks.leads else None, device
        )
        decoder.load_state(decoded)
        run(policy, Resume(stop, None, latents[-reach(made.spec) :], latents[0][:, :1]), None)
    state = {f"state {name}": value for name, value in join_state(policy, ranks).items()}
    written = torch.tensor(list(json.dumps(trace).encode()), dtype=torch.uint8)
    return {"latents": torch.cat(latents, dim=1), "trace": written, **state}


def compare(one: dict[str, Tensor], many: dict[str, Tensor]) -> tuple[float, list[str]]:
    """Return the largest difference of floats, and what differs otherwise: names, shapes, whole numbers, words."""
    other = sorted(one.keys() ^ many.keys())
    worst = 0.0
    for name in one.keys() & many.keys():
        a, b = one[name].cpu(), many[name].cpu()
        if name.endswith("trace"):
            far = max(differences(*(json.loads(bytes(x.tolist())) for x in (a, b))), default=0.0)
            worst = max(worst, far)
            if math.isinf(far):
                other.append(name)
        elif a.shape != b.shape or (not a.is_floating_point() and not torch.equal(a, b)):
            other.append(name)
        elif a.is_floating_point() and a.numel():
            worst = max(worst, float((a.double() - b.double()).abs().max()))
    return worst, other


def differences(a: Any, b: Any) -> Iterator[float]:
    """Yield how far the floats of two pieces of plain data are apart; anything else that differs is infinite."""
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        for name in a:
            yield from differences(a[name], b[name])
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for first, second in zip(a, b, strict=True):
            yield from differences(first, second)
    elif isinstance(a, float) and isinstance(b, float):
        yield abs(a - b)
    elif a != b:
        yield math.inf


def run_cases(names: list[str], device: str, dtype: str, ranks: Ranks = LONE) -> dict[str, Tensor]:
    """Return the results of all cases, undisturbed and resumed, with the case in front of each name."""
    torch.set_num_threads(1)
    return {
        f"{case}{suffix}/{name}": value.cpu().contiguous()
        for case in names
        for suffix, stop in (("", None), (", resumed", STOP))
        for name, value in generate(CASES[case], ranks, device, dtype, stop).items()
    }


def spawn(count: int, arguments: list[str]) -> int:
    """Run this module in so many processes, and return the exit code."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    return subprocess.run([*command, "-m", "benchmarks.ranks", *arguments], check=False).returncode


def prove(names: list[str], device: str, dtype: str, count: int) -> bool:
    """Generate every case with one process and with several, and print how far apart they are."""
    one = run_cases(names, device, dtype)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "many.safetensors"
        where = ["--device", device, "--dtype", dtype, "--out", str(file), "--cases", ";".join(names)]
        if spawn(count, where):
            print("the processes failed")
            return False
        many = load_file(file)
    found, good = {}, True
    for case in dict.fromkeys(name.partition("/")[0] for name in one):
        worst, other = compare(
            *({n: x for n, x in all_.items() if n.startswith(f"{case}/")} for all_ in (one, many))
        )
        fine = worst <= TOLERANCES[device, dtype] and not other
        good &= fine
        found[case] = worst
        print(f"{case:32} {worst:.1e} {'' if not other else 'also differs: ' + ', '.join(other)}")
    print(json.dumps({"device": device, "dtype": dtype, "processes": count, "good": good, "worst": found}))
    return good


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="float64")
    parser.add_argument("--cases", default=";".join(CASES), help="names, with ; between them")
    parser.add_argument("--out", type=Path, help="write results instead of comparing them; for the processes")
    options = parser.parse_args()
    names = options.cases.split(";")
    if options.out is None and "RANK" not in os.environ:
        sys.exit(not prove(names, options.device, options.dtype, options.processes))
    with join_ranks() as ranks:
        results = run_cases(names, options.device, options.dtype, ranks)
        if ranks.leads:
            save_file(results, options.out)


if __name__ == "__main__":
    main()
