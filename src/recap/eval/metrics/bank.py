"""Bank retention: does the bank hold the best of all it was ever offered, and how old is what it holds?

A trace of a run with `trace_offered` tells every candidate, and the oracle ranks them all; from other traces it knows
those admitted alone, and is not `complete`. Scores are frozen and ties go to the older token, then row by row, so the
overlap must be exactly 1: anything less is a fault of the bank, not a measurement.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from recap.errors import refuse
from recap.eval.judged import JudgedRun, Measure
from recap.eval.scores import Score

Place = tuple[int, int, int]
"""A token's frame, row and column."""

Held = dict[Place, float]
"""What a bank holds, with its scores."""

AGE_BINS = 10


class BankStory(NamedTuple):
    overlap: list[float]  # with the oracle, after every block
    complete: bool  # the oracle knew every candidate, not only those admitted
    held: Held  # at the end
    capacity: int  # slots in use at the end
    evictions: int
    evicted_below_cutoff: float | None  # share of evictions that score below the final cut-off
    cutoff: float  # the lowest score in the bank at the end
    ties_at_cutoff: int  # candidates outside that score just as much
    ages: list[float]  # (T - source frame) / T of every slot
    age_histogram: list[float]  # shares in ten bins from new to old
    mean_age: float | None
    uniform_distance: float | None  # Kolmogorov-Smirnov, to the uniform distribution


def bank_story(trace: Sequence[Mapping[str, Any]], row: int = 0) -> BankStory:
    """Replay one row of a trace."""
    if not any("admitted" in line for line in trace):
        raise refuse("trace", f"{len(trace)} blocks", "its memory has no bank", "trace a run with one")
    complete = all("offered" in line for line in trace if "admitted" in line)
    held: Held = {}
    pool: Held = {}
    overlap: list[float] = []
    evicted: list[float] = []
    for block, line in enumerate(trace):
        admitted = _places(line, "admitted", row)
        for place, score in _places(line, "evicted", row).items():
            if place not in held:
                limit = f"block {block} evicts a token that the bank does not hold"
                raise refuse("trace", list(place), limit, "the trace is damaged: draw the run again")
            del held[place]
            evicted.append(score)
        held |= admitted
        pool |= _offered(line, row) if complete else admitted
        oracle = best(pool, len(held))
        overlap.append(len(oracle & held.keys()) / len(held) if held else 1.0)
    cutoff = min(held.values(), default=0.0)
    end_frame = _end_frame(trace)
    ages = sorted((end_frame - frame) / end_frame for frame, _, _ in held)
    return BankStory(
        overlap=overlap,
        complete=complete,
        held=held,
        capacity=len(held),
        evictions=len(evicted),
        evicted_below_cutoff=float(np.mean(np.array(evicted) < cutoff)) if evicted else None,
        cutoff=cutoff,
        ties_at_cutoff=sum(score == cutoff for place, score in pool.items() if place not in held),
        ages=ages,
        age_histogram=(np.histogram(ages, AGE_BINS, (0, 1))[0] / max(1, len(ages))).tolist(),
        mean_age=float(np.mean(ages)) if ages else None,
        uniform_distance=uniform_distance(ages) if ages else None,
    )


def best(pool: Mapping[Place, float], capacity: int) -> set[Place]:
    """The top `capacity` by score; ties: older first, then row-major."""
    return set(sorted(pool, key=lambda place: (-pool[place], place))[:capacity])


def uniform_distance(values: Sequence[float]) -> float:
    """Kolmogorov-Smirnov distance of values in 0..1 to the uniform distribution."""
    x, num = np.sort(values), len(values)
    above, below = np.arange(1, num + 1) / num - x, x - np.arange(num) / num
    return float(max(above.max(), below.max()))


def sources_by_block(trace: Sequence[Mapping[str, Any]], row: int = 0) -> list[Counter[int]]:
    """After every block, how many slots come from which frame."""
    held: set[Place] = set()
    told = []
    for line in trace:
        held = (held - _places(line, "evicted", row).keys()) | _places(line, "admitted", row).keys()
        told.append(Counter(frame for frame, _, _ in held))
    return told


def held_before(trace: Sequence[Mapping[str, Any]], block: int, row: int = 0) -> Held:
    """What the bank holds when a block begins."""
    held: Held = {}
    for line in trace[:block]:
        for place in _places(line, "evicted", row):
            held.pop(place, None)
        held |= _places(line, "admitted", row)
    return held


def _places(line: Mapping[str, Any], which: str, row: int) -> Held:
    rows = line.get(which)
    return _as_places(rows[row]) if rows else {}


def _offered(line: Mapping[str, Any], row: int) -> Held:
    """Every candidate of a block; whole frames, row-major."""
    if "offered" not in line:
        return {}
    told = line["offered"]
    places = itertools.product(told["frames"], range(told["grid"][0]), range(told["grid"][1]))
    return dict(zip(places, told["scores"][row], strict=True))


def _as_places(entries: Sequence[Sequence[float]]) -> Held:
    return {(int(frame), int(row), int(column)): score for frame, row, column, score in entries}


def _end_frame(trace: Sequence[Mapping[str, Any]]) -> int:
    starts = [int(line["first_frame"]) for line in trace]
    told = len(trace[-1].get("first_pictures", ()))
    return starts[-1] + (told or (starts[-1] - starts[-2] if len(starts) > 1 else 1))


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
