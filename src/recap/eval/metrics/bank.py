"""Bank retention: does the bank contain the best of all it was ever offered, and how old are its tokens?

A trace of a run with `trace_offered` lists every candidate, and the oracle ranks them all; from other traces it knows
those admitted alone, and is not `complete`. Scores are frozen and ties go to the older token, then row by row, so the
overlap must be exactly 1: anything less is a fault of the bank, not a measurement.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from recap.errors import refuse
from recap.eval.judged import JudgedRun, Measure
from recap.eval.scores import Score
from recap.trace import Bank, BlockTrace, Position, has_bank, replay_bank

AGE_BINS = 10


class BankStory(NamedTuple):
    overlap: list[float]  # with the oracle, after every block
    complete: bool  # the oracle knew every candidate, not only those admitted
    bank: Bank  # at the end
    capacity: int  # slots in use at the end
    evictions: int
    evicted_below_cutoff: float | None  # share of evictions that score below the final cut-off
    cutoff: float  # the lowest score in the bank at the end
    ties_at_cutoff: int  # candidates outside that score just as much
    ages: list[float]  # (T - source frame) / T of every slot
    age_histogram: list[float]  # shares in ten bins from new to old
    mean_age: float | None
    uniform_distance: float | None  # Kolmogorov-Smirnov, to the uniform distribution


def bank_story(trace: Sequence[BlockTrace], row: int = 0) -> BankStory:
    """Replay one row of a trace."""
    if not has_bank(trace):
        raise refuse("trace", f"{len(trace)} blocks", "its memory has no bank", "trace a run with one")
    complete = all(line.offered is not None for line in trace if line.admitted is not None)
    bank: Bank = {}
    pool: Bank = {}
    overlap: list[float] = []
    evicted: list[float] = []
    for line, bank in zip(trace, replay_bank(trace, row), strict=True):
        evicted += line.evicted[row].values() if line.evicted else ()
        pool |= line.candidates(row) if complete else line.admitted[row] if line.admitted else {}
        oracle = best(pool, len(bank))
        overlap.append(len(oracle & bank.keys()) / len(bank) if bank else 1.0)
    cutoff = min(bank.values(), default=0.0)
    end_frame = trace[-1].first_frame + len(trace[-1].first_pictures)
    ages = sorted((end_frame - frame) / end_frame for frame, _, _ in bank)
    return BankStory(
        overlap=overlap,
        complete=complete,
        bank=bank,
        capacity=len(bank),
        evictions=len(evicted),
        evicted_below_cutoff=float(np.mean(np.array(evicted) < cutoff)) if evicted else None,
        cutoff=cutoff,
        ties_at_cutoff=sum(score == cutoff for position, score in pool.items() if position not in bank),
        ages=ages,
        age_histogram=(np.histogram(ages, AGE_BINS, (0, 1))[0] / max(1, len(ages))).tolist(),
        mean_age=float(np.mean(ages)) if ages else None,
        uniform_distance=uniform_distance(ages) if ages else None,
    )


def best(pool: Mapping[Position, float], capacity: int) -> set[Position]:
    """The top `capacity` by score; ties: older first, then row-major."""
    return set(sorted(pool, key=lambda position: (-pool[position], position))[:capacity])


def uniform_distance(values: Sequence[float]) -> float:
    """Kolmogorov-Smirnov distance of values in 0..1 to the uniform distribution."""
    x, num = np.sort(values), len(values)
    above, below = np.arange(1, num + 1) / num - x, x - np.arange(num) / num
    return float(max(above.max(), below.max()))


def sources_by_block(trace: Sequence[BlockTrace], row: int = 0) -> list[Counter[int]]:
    """After every block, how many slots come from which frame."""
    return [Counter(frame for frame, _, _ in bank) for bank in replay_bank(trace, row)]


def _measure(run: JudgedRun) -> list[Score]:
    if not run.has_bank:
        return []
    story = bank_story(run.trace)
    details = {"overlap": story.overlap, "ages": story.age_histogram, "complete": story.complete}
    values = (
        ("bank_overlap", story.overlap[-1]), ("bank_overlap_lowest", min(story.overlap)),
        ("bank_mean_age", story.mean_age), ("bank_age_ks", story.uniform_distance),
        ("bank_evicted_below_cutoff", story.evicted_below_cutoff), ("bank_cutoff", story.cutoff),
    )  # fmt: skip
    return [
        Score(name, value, "native", story.capacity, details if name == "bank_overlap" else {})
        for name, value in values
    ]


MEASURES = (Measure("bank", _measure, reads_offered=True, shows_bank=True),)
