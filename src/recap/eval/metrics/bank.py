"""Measures the bank: does it contain the best of all it was ever offered, how old are its tokens, what do they show?

A trace of a run with `trace_offered` lists every candidate, and the oracle ranks them all; from other traces it knows
those admitted alone, and is not `complete`. Scores are frozen and ties go to the older token, then row by row, so the
overlap must be exactly 1: anything less is a fault of the bank, not a measurement.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from recap.errors import refuse
from recap.eval.judged import JudgedRun, Measure
from recap.eval.judges.subject import ProbeWitness
from recap.eval.scores import Score
from recap.io.trace import Bank, BlockTrace, bank_before, has_bank, pictures_of_frames, replay_bank

AGE_BINS = 10


class BankStory(NamedTuple):
    """Says how a bank was filled."""

    overlap: list[float]
    """The share of its slots that the oracle would have chosen, after every block."""
    complete: bool
    """Whether the oracle knew every candidate, not only those admitted."""
    bank: Bank
    """Its contents at the end."""
    evicted: list[float]
    """The scores of all tokens that were evicted."""
    cutoff: float
    """The lowest score in the bank at the end."""
    ages: list[float]
    """(T - source frame) / T of every slot at the end, in order."""


def bank_story(trace: Sequence[BlockTrace]) -> BankStory:
    """Replay the bank of a trace of one row."""
    if not has_bank(trace):
        raise refuse("trace", f"{len(trace)} blocks", "its memory has no bank", "trace a run with one")
    complete = all(line.offered is not None for line in trace if line.admitted is not None)
    bank: Bank = {}
    pool: Bank = {}
    overlap: list[float] = []
    evicted: list[float] = []
    for line, bank in zip(trace, replay_bank(trace), strict=True):
        evicted += line.evicted[0].values() if line.evicted else ()
        pool |= line.candidates(0) if complete else line.admitted[0] if line.admitted else {}
        # Ties go to the older token, then row by row.
        oracle = set(sorted(pool, key=lambda position: (-pool[position], position))[: len(bank)])
        overlap.append(len(oracle & bank.keys()) / len(bank) if bank else 1.0)
    end_frame = trace[-1].first_frame + len(trace[-1].first_pictures)
    ages = sorted((end_frame - frame) / end_frame for frame, _, _ in bank)
    return BankStory(overlap, complete, bank, evicted, min(bank.values(), default=0.0), ages)


def uniform_distance(values: Sequence[float]) -> float:
    """Return the Kolmogorov-Smirnov distance of values in 0..1 to the uniform distribution."""
    x, num = np.sort(values), len(values)
    above, below = np.arange(1, num + 1) / num - x, x - np.arange(num) / num
    return float(max(above.max(), below.max()))


def sources_by_block(trace: Sequence[BlockTrace]) -> list[Counter[int]]:
    """Return how many slots come from which frame, after every block."""
    return [Counter(frame for frame, _, _ in bank) for bank in replay_bank(trace)]


def content_before(run: JudgedRun, end: int) -> list[Score]:
    """Say what the bank is made of as the block of that number begins, by its tokens that were new.

    The scores are the shares of those at the border, and of those on an actor.
    """
    new = {position for position, score in bank_before(run.trace, end).items() if score > 0}
    edges = run.trace[end - 1].edge_share
    edge = edges[0] if new and edges else None
    scores = [Score("bank_edge_share", edge, "native", len(new))]
    if isinstance(run.subject_witness, ProbeWitness):
        share = _num_on_actors(run, run.subject_witness, new) / len(new) if new else None
        scores.append(Score("bank_actor_share", share, run.subject_witness.backend, len(new)))
    return scores


def _num_on_actors(run: JudgedRun, probe: ProbeWitness, positions: Collection[tuple[int, int, int]]) -> int:
    """Count the tokens on which an actor is seen, in the first or the last picture of their frame."""
    spans = pictures_of_frames(run.trace)
    pictures = {frame: {spans[frame][0], spans[frame][-1]} for frame, _, _ in positions}
    wanted = set().union(*pictures.values())
    found = {index: picture for index, picture in enumerate(run.clip.pictures()) if index in wanted}
    covered = dict(zip(found, probe.covered(np.stack(list(found.values()))), strict=True))
    return sum(
        any(covered[index][row, column] for index in pictures[frame]) for frame, row, column in positions
    )


def _measure(run: JudgedRun) -> list[Score]:
    if not run.has_bank:
        return []
    story = bank_story(run.trace)
    ages, evicted = story.ages, np.array(story.evicted)
    histogram = np.histogram(ages, AGE_BINS, (0, 1))[0] / max(1, len(ages))
    details = {"overlap": story.overlap, "ages": histogram.tolist(), "complete": story.complete}
    values = {
        "bank_overlap": story.overlap[-1],
        "bank_overlap_lowest": min(story.overlap),
        "bank_mean_age": float(np.mean(ages)) if ages else None,
        "bank_age_ks": uniform_distance(ages) if ages else None,
        "bank_evicted_below_cutoff": float(np.mean(evicted < story.cutoff)) if story.evicted else None,
        "bank_cutoff": story.cutoff,
    }
    return [
        Score(name, value, "native", len(story.bank), details if name == "bank_overlap" else {})
        for name, value in values.items()
    ]


def _measure_content(run: JudgedRun) -> list[Score]:
    """Look at the bank at the last cut, or at the end where there are none."""
    if not run.has_bank:
        return []
    cuts = [index for index, line in enumerate(run.trace) if line.clears_prior]
    return content_before(run, cuts[-1] if cuts else len(run.trace))


MEASURES = (
    Measure("bank", _measure, reads_offered=True, shows_bank=True),
    Measure("content", _measure_content),
)
