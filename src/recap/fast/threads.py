"""Chooses the number of threads: torch counts the machine's cores, not those that this process may use.

More threads than cores wait for each other at every product: on 2 cores shared by two processes, a block takes ten
times as long as for one process alone (docs/log.md).
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path

import torch

# The limit of a container on Linux: microseconds of CPU time per period, and the period.
QUOTA = Path("/sys/fs/cgroup/cpu.max")


def use_fair_threads() -> None:
    """Let torch use as many threads as can really run at once."""
    torch.set_num_threads(fair_threads(torch.get_num_threads(), os.environ, QUOTA))


def fair_threads(most: int, environment: Mapping[str, str], quota: Path) -> int:
    """Return at most `most`, this process's cores and its container's share.

    OMP_NUM_THREADS and MKL_NUM_THREADS take precedence: where one is set, the result is `most`.
    """
    if "OMP_NUM_THREADS" in environment or "MKL_NUM_THREADS" in environment:
        return most
    limits = [most]
    if hasattr(os, "sched_getaffinity"):
        limits.append(len(os.sched_getaffinity(0)))
    try:
        used, period = quota.read_text().split()
        limits.append(math.ceil(int(used) / int(period)))
    except (OSError, ValueError, ZeroDivisionError):
        # Not in a container, or in one without a limit ("max").
        pass
    return max(1, min(limits))
