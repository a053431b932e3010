"""The bank of a trace against the oracle: overlap exactly 1 for our own bank, less for a faulty one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from recap.admission.base import retain_top
from recap.config import RunConfig
from recap.eval.metrics.bank import bank_story, uniform_distance
from recap.io.trace import BlockTrace, Offered, bank_before, banks_of, read_trace
from recap.memory.bank import NoveltyBank
from recap.plan import make_plan
from recap.rollout import rollout
from recap.run import build_backbone, build_memory, generate
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


def replay(blocks: int = 25) -> tuple[list[BlockTrace], NoveltyBank]:
    dice = torch.Generator().manual_seed(0)
    bank = NoveltyBank(CAPACITY, 1)
    trace = []
    for block in range(blocks):
        new = offers(block, dice)
        blank = torch.zeros(1, 1, new.count, 1, 1)
        admitted, evicted = bank.admit(new, blank, blank, retain_top)
        frames = list(range(block * FRAMES, (block + 1) * FRAMES))
        line = BlockTrace(
            block, frames[0], tuple(frames), FRAMES, admitted=banks_of(admitted), evicted=banks_of(evicted),
            offered=Offered(frames, GRID, new.score.tolist()),
        )  # fmt: skip
        trace.append(line)
    return trace, bank


@pytest.fixture(scope="module")
def run():
    return replay()


def test_the_bank_is_the_oracle_after_every_block(run):
    trace, bank = run
    story = bank_story(trace)
    assert story.overlap == [1.0] * len(trace) and story.complete
    assert set(story.bank) == {tuple(place) for place in bank.entries.source[0].tolist()}
    # The tie rule was put to the test.
    pool = {position: score for line in trace for position, score in line.candidates().items()}
    assert any(pool[position] == story.cutoff for position in pool.keys() - story.bank.keys())


def test_a_trace_of_what_was_admitted_alone_is_read_and_called_incomplete(run):
    bare = [replace(line, offered=None) for line in run[0]]
    story = bank_story(bare)
    assert not story.complete and story.overlap[-1] == 1.0 and story.bank == bank_story(run[0]).bank


def test_a_bank_that_keeps_the_wrong_token_is_found_out():
    trace, _ = replay()
    trace[10].offered.scores[0][0] = 99.0  # the best of all, which the bank did not take
    story = bank_story(trace)
    assert story.overlap[9] == 1.0 and story.overlap[10:] == [1 - 1 / CAPACITY] * 15


@pytest.fixture(scope="module")
def generated():
    """Trace lines of a real run, with a cut, whose bank is full and has thrown out some."""
    config = RunConfig.from_dict({
        "shots": [{"prompt": "fox snow day", "seconds": 2.25}, {"prompt": "boat sea dusk", "seconds": 1.5}],
        "flow": "classical", "memory": {"name": "recap", "capacity_frames": 0.5},
    })  # fmt: skip
    backbone = build_backbone(config)
    policy = build_memory(config, backbone.spec)
    blocks = rollout(backbone, policy, make_plan([config.shots] * 2, backbone.spec), seeds=[3, 4])
    return [BlockTrace.of(made, offered=True) for made in blocks], policy.bank.entries.source.tolist()


@pytest.mark.parametrize("row", [0, 1])
def test_the_oracle_of_all_candidates_finds_a_real_bank_faultless(generated, row):
    trace, kept = generated
    story = bank_story([line.row(row) for line in trace])
    assert story.complete and story.overlap == [1.0] * len(trace)
    assert set(story.bank) == {tuple(place) for place in kept[row]} and story.evicted
    offered = [len(line.offered.scores[row]) for line in trace]
    assert offered == [208, 312, 312, 312, 312]  # the sink owns the first frame, all else is offered


@pytest.mark.slow
def test_a_tampered_slot_of_a_real_bank_is_found_out(generated):
    """The best newcomer of the last block is replaced by one that the bank had refused."""
    *before, last = generated[0][:3]
    taken, candidates = dict(last.admitted[0]), last.candidates()
    del taken[max(taken, key=taken.get)]
    worst = min(candidates, key=candidates.get)
    story = bank_story([*before, replace(last, admitted=[taken | {worst: candidates[worst]}])])
    assert story.overlap[:2] == [1.0, 1.0] and story.overlap[2] == pytest.approx(1 - 1 / len(story.bank))


def test_a_trace_tells_what_was_refused_only_when_asked(tmp_path):
    settings = {"shots": [{"prompt": "x", "seconds": 0.75}], "backbone": "untrained", "flow": "classical"}
    for asked in (False, True):
        generate(RunConfig.from_dict({**settings, "trace_offered": asked}), tmp_path / str(asked))
    plain, full = (read_trace(tmp_path / str(asked) / "trace.jsonl") for asked in (False, True))
    assert all(line.offered is None for line in plain) and bank_story(full).complete
    assert [replace(line, offered=None) for line in full] == plain


def test_ages_and_evictions(run):
    trace, _ = run
    story = bank_story(trace)
    assert len(story.ages) == CAPACITY and min(story.ages) > 0 and max(story.ages) <= 1
    assert any(score < story.cutoff for score in story.evicted)
    assert bank_before(trace, len(trace)) == story.bank and bank_before(trace, 0) == {}


def test_distance_to_uniform():
    even = (np.arange(100) + 0.5) / 100
    assert uniform_distance(even) == pytest.approx(0.005)
    assert uniform_distance([1.0] * 10) == pytest.approx(1)
    assert uniform_distance(even / 2) == pytest.approx(0.5, abs=0.01)


def test_traces_without_a_bank_or_with_damage_are_refused(run):
    with pytest.raises(ValueError, match="has no bank"):
        bank_story([BlockTrace(0, 0, (0,), 1)])
    first, *rest = run[0]
    fewer = dict(list(first.admitted[0].items())[1:])
    with pytest.raises(ValueError, match="damaged"):
        bank_story([replace(first, admitted=[fewer]), *rest])
