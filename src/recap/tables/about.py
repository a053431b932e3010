"""What a reader must know of a number: prompts, models, sizes, judges, machine and code."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from recap.eval.judged import EMBEDDED
from recap.eval.metrics import find_measures
from recap.fast.threads import QUOTA, fair_threads
from recap.run import versions
from recap.tables.recipes import Ask, Recipe

VERSIONS = ("recap", "torch")
"""Of which a table has one each: numbers of two versions of the code do not belong into one table."""


def made_here(device: str, commit: str = "") -> dict[str, str]:
    """What makes the results of this process."""
    cuda = device.startswith("cuda") and torch.cuda.is_available()
    hardware = torch.cuda.get_device_name(device) if cuda else _processor()
    return {
        **{name: versions()[name] for name in VERSIONS},
        "hardware": hardware,
        "commit": commit or _commit(),
    }


def about_table(recipe: Recipe, ask: Ask, runs: int, makers: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    """The settings of a table, and what made its runs."""
    scale = 1.0 if ask.seconds is None else ask.seconds / recipe.seconds
    lengths = sorted({scale * (row.seconds or recipe.seconds) for row in recipe.rows})
    words = "the embedded world's words" if ask.backbone_name == EMBEDDED else "sentences"
    uses_flow = any(measure.uses_flow for measure in find_measures(recipe.measures))
    return {
        "suite": f"{recipe.script} prompts of our own, in {words}",
        "backbone": ask.backbone_name,
        "prompts": ask.prompts,
        "seeds": ask.seeds or recipe.seeds,
        "runs": runs,
        "length": " and ".join(f"{seconds:g} s" for seconds in lengths),
        "flow of the bank": ask.flow,
        **({"flow of the judge": ask.judge_flow} if uses_flow else {}),
        "frame embedder": ask.embedder,
        "judged": "pictures as generated, not encoded",
        "hardware": _all_of(makers, "hardware"),
        "dtype": ask.dtype,
        **{name: _all_of(makers, name) for name in (*VERSIONS, "commit")},
    }


def _all_of(makers: Sequence[Mapping[str, str]], name: str) -> str:
    return " and ".join(sorted({str(maker.get(name, "")) for maker in makers}))


def cores() -> int:
    """Processors that this process may use: fewer than there are, in many containers."""
    return fair_threads(os.cpu_count() or 1, {}, QUOTA)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        return f"{len(names)} cores of {names[0]}" if names else platform.processor()
    except OSError:
        return platform.processor() or platform.machine()


def _commit() -> str:
    """The commit of the checkout this file lies in, "" for an installed package."""
    here = Path(__file__).parent
    command = ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=10"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
