"""The bank of a trace against the oracle: overlap exactly 1 for our own bank, less for a faulty one."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from recap.eval.metrics.bank import bank_story, held_before, uniform_distance
from recap.memory.bank import NoveltyBank
from recap.novelty.retention import retain_top
from recap.trace import _entries
from recap.types import Candidates

CAPACITY, FRAMES, GRID = 20, 3, (3, 4)


def offers(block: int, dice: torch.Generator) -> Candidates:
    """A block's tokens; many scores are zero and many are equal, as real ones are."""
    places = torch.tensor(
        [
            (block * FRAMES + f, row, column)
            for f in range(FRAMES)
            for row in range(GRID[0])
            for column in range(GRID[1])
        ]
    )
    score = (torch.rand(1, len(places), generator=dice) * 8).floor() / 8
    return Candidates(places[None], torch.where(score < 0.5, 0.0, score))


@pytest.fixture(scope="module")
def run():
    dice = torch.Generator().manual_seed(0)
    bank = NoveltyBank(CAPACITY, 1)
    trace, offered = [], []
    for block in range(25):
        new = offers(block, dice)
        blank = torch.zeros(1, 1, new.count, 1, 1)
        admitted, evicted = bank.admit(new, blank, blank, retain_top)
        line = {"first_frame": block * FRAMES, "admitted": _entries(admitted), "evicted": _entries(evicted)}
        trace.append(json.loads(json.dumps(line)))
        offered.append(_entries(new)[0])
    return trace, offered, bank


def test_the_bank_is_the_oracle_after_every_block(run):
    trace, offered, bank = run
    story = bank_story(trace, offered)
    assert story.overlap == [1.0] * len(trace) and story.complete
    assert set(story.held) == {tuple(place) for place in bank.held.source[0].tolist()}
    assert story.ties_at_cutoff > 0  # the tie rule was put to the test
    assert not bank_story(trace).complete and bank_story(trace).overlap[-1] == 1.0


def test_a_bank_that_keeps_the_wrong_token_is_found_out(run):
    trace, offered, _ = run
    better = [[list(entry) for entry in block] for block in offered]
    better[10][0][3] = 99.0  # the best of all, which the bank did not take
    story = bank_story(trace, better)
    assert story.overlap[9] == 1.0 and story.overlap[10:] == [1 - 1 / CAPACITY] * 15


def test_ages_and_evictions(run):
    trace, offered, _ = run
    story = bank_story(trace, offered)
    assert len(story.ages) == CAPACITY and 0 < story.mean_age <= 1
    assert sum(story.age_histogram) == pytest.approx(1)
    assert 0 < story.evicted_below_cutoff <= 1 and story.evictions > 0
    assert held_before(trace, len(trace)) == story.held and held_before(trace, 0) == {}


def test_distance_to_uniform():
    even = (np.arange(100) + 0.5) / 100
    assert uniform_distance(even) == pytest.approx(0.005)
    assert uniform_distance([1.0] * 10) == pytest.approx(1)
    assert uniform_distance(even / 2) == pytest.approx(0.5, abs=0.01)


def test_traces_without_a_bank_or_with_damage_are_refused(run):
    with pytest.raises(ValueError, match="has no bank"):
        bank_story([{"first_frame": 0}])
    broken = [dict(line) for line in run[0]]
    broken[0]["admitted"] = [broken[0]["admitted"][0][1:]]
    with pytest.raises(ValueError, match="damaged"):
        bank_story(broken)
