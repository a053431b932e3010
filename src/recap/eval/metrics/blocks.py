"""Measures the blocks of a run: how much attention each role gets, and how long a block takes."""

from __future__ import annotations

import numpy as np

from recap.eval.judged import JudgedRun, Measure
from recap.eval.scores import Score

FULL_WINDOW = 3
"""Blocks after which every part of the window is there."""


def _measure_attention(run: JudgedRun) -> list[Score]:
    shares = [line.shares for line in run.trace[FULL_WINDOW:] or run.trace[-1:]]
    roles = dict.fromkeys(role for each in shares for role, share in each.items() if share is not None)
    scores = []
    for role in roles:
        # A role that was not there got nothing; one that was not measured says nothing.
        found = [share[0] for each in shares if (share := each.get(role, [0.0])) is not None]
        scores.append(Score(f"attention_{role}", float(np.mean(found)), "native", len(found)))
    return scores


def _measure_time(run: JudgedRun) -> list[Score]:
    """Count blocks from the fourth on; the slope tells whether a later block costs more."""
    if not run.seconds:
        return []
    seconds = np.array(run.seconds)
    steady = seconds[FULL_WINDOW:] if len(seconds) > FULL_WINDOW + 1 else seconds
    slope = float(np.polyfit(np.arange(len(steady)), steady, 1)[0]) if len(steady) > 1 else None
    values = {"seconds": float(seconds.sum()), "block_s": float(np.median(steady)), "block_slope_s": slope}
    return [Score(name, value, "native", len(seconds)) for name, value in values.items()]


MEASURES = (
    Measure("attention", _measure_attention, headlines=("attention_sink",), reads_shares=True),
    Measure("time", _measure_time),
)
