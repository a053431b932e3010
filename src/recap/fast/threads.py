"""How many threads to compute with: torch counts the machine's cores, not those that this process may use.

More threads than cores wait for each other at every product: on 2 cores that two processes share, a block takes ten
times as long as for one alone (docs/log.md).
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path

import torch

QUOTA = Path("/sys/fs/cgroup/cpu.max")  # of a container, as Linux tells it: microseconds used of so many


def use_fair_threads() -> None:
    """Let torch use as many threads as may really run at once."""
    torch.set_num_threads(fair_threads(torch.get_num_threads(), os.environ, QUOTA))


def fair_threads(most: int, environment: Mapping[str, str], quota: Path) -> int:
    """At most `most`, no more than this process's cores and its container's share; a wish of the user's stands."""
    if "OMP_NUM_THREADS" in environment or "MKL_NUM_THREADS" in environment:
        return most
    limits = [most]
    if hasattr(os, "sched_getaffinity"):
        limits.append(len(os.sched_getaffinity(0)))
    try:
        used, period = quota.read_text().split()
        limits.append(math.ceil(int(used) / int(period)))
    except (OSError, ValueError, ZeroDivisionError):
        pass  # no container, or no limit ("max")
    return max(1, min(limits))
