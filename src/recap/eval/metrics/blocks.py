"""What the blocks of a run tell: how much attention each role gets, and how long a block takes."""

from __future__ import annotations

import numpy as np

from recap.eval.judged import JudgedRun, Measure
from recap.eval.scores import Score

FULL_WINDOW = 3
"""Blocks after which every part of the window is there."""


def _measure_attention(run: JudgedRun) -> list[Score]:
    last = run.trace[-1]["attention_share"]
    shares = [line["attention_share"] for line in run.trace[FULL_WINDOW:]] or [last]
    roles = dict.fromkeys(role for share in shares for role in share)
    means = {role: float(np.mean([share.get(role, [0.0])[0] for share in shares])) for role in roles}
    return [Score(f"attention_{role}", mean, "native", len(shares)) for role, mean in means.items()]


def _measure_time(run: JudgedRun) -> list[Score]:
    """Counts blocks from the fourth on; the slope tells whether a later block costs more."""
    if not run.seconds:
        return []
    seconds = np.array(run.seconds)
    steady = seconds[FULL_WINDOW:] if len(seconds) > FULL_WINDOW + 1 else seconds
    slope = float(np.polyfit(np.arange(len(steady)), steady, 1)[0]) if len(steady) > 1 else None
    values = (
        ("seconds", float(seconds.sum())),
        ("block_s", float(np.median(steady))),
        ("block_slope_s", slope),
    )
    return [Score(name, value, "native", len(seconds)) for name, value in values]


MEASURES = (
    Measure("attention", _measure_attention, headlines=("attention_sink",), reads_shares=True),
    Measure("time", _measure_time),
)
