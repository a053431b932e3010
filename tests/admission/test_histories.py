"""`random` is a reservoir, `recent` is what left the window last."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from recap.admission.history import RandomHistoryConfig, RecentHistoryConfig
from recap.memory.bank import NoveltyBank
from recap.memory.recap import RecapConfig
from recap.types import Block, Tokens, frame_positions


def keep(admission, spec, capacity, num_blocks, rows=1):
    bank = NoveltyBank(capacity, spec.layers)
    for index in range(num_blocks):
        offered = admission.propose(Block(index, 3 * index, 3, ("",) * rows), torch.zeros(rows, 1))
        keys = torch.zeros(spec.layers, rows, offered.count, spec.heads, spec.head_dim)
        bank.admit(offered, keys, keys, admission.retain)
    return bank.entries


def test_every_past_token_is_equally_likely(spec):
    """300 seeds, 12 slots, 10 blocks of 18 tokens: each third of the past holds a third of the slots."""
    frames = torch.cat(
        [
            keep(RandomHistoryConfig(seed).build(spec, None), spec, 12, 10).source[0, :, 0]
            for seed in range(300)
        ]
    )
    thirds = torch.bincount(frames // 10, minlength=3).float() / len(frames)
    assert (thirds - 1 / 3).abs().max() < 0.03  # four standard deviations
    places = keep(RandomHistoryConfig(1).build(spec, None), spec, 12, 10).source[0]
    assert len(places.unique(dim=0)) == 12


def test_a_seed_decides_the_sample_whatever_the_batch_and_the_blocks(spec):
    one = keep(RandomHistoryConfig(7).build(spec, None), spec, 12, 6)
    many = keep(RandomHistoryConfig(7).build(spec, None), spec, 12, 6, rows=3)
    other = keep(RandomHistoryConfig(8).build(spec, None), spec, 12, 6)
    assert torch.equal(many.source, one.source.expand(3, -1, -1)) and not torch.equal(
        one.source, other.source
    )
    admission = RandomHistoryConfig(7).build(spec, None)
    whole = admission.propose(Block(0, 0, 6, ("",)), torch.zeros(1, 1)).score
    halves = [admission.propose(Block(i, 3 * i, 3, ("",)), torch.zeros(1, 1)).score for i in range(2)]
    assert torch.equal(whole, torch.cat(halves, dim=1))


def run_recap(spec, capacity_frames, num_blocks, sink_frames=1, cut_before=None):
    """The frames whose tokens the bank holds after every block; every key is its token's number."""
    config = RecapConfig(sink_frames=sink_frames, capacity_frames=capacity_frames)
    policy = config.build(spec, lambda: RecentHistoryConfig().build(spec, None))
    kept = []
    for index in range(num_blocks):
        block = Block(index, 3 * index, 3, ("",))
        if index == cut_before:
            policy.clear_prior()
        policy.begin(block)
        number = torch.arange(spec.block_tokens) + index * spec.block_tokens + 0.0
        keys = number[None, :, None, None].expand(1, -1, spec.heads, spec.head_dim)
        for layer in range(spec.layers):
            policy.write(layer, Tokens(keys, keys, keys, frame_positions(torch.arange(3), spec.grid)))
        policy.commit(block, torch.zeros(1, 1))
        if not policy.bank.count:
            kept.append(set())
            continue
        frame, row, column = policy.bank.entries.source[0].unbind(-1)
        mine = (frame * spec.grid[0] + row) * spec.grid[1] + column
        assert torch.equal(policy.bank.keys[0, 0, :, 0, 0], mine.float())  # the very keys of those tokens
        kept.append(set(frame.tolist()))
    return kept


# Window 6 with a sink of 1 has a prior of 2: after block b (frames 3b to 3b+2) frames up to 3b have left.
@pytest.mark.parametrize(
    ("window", "sink", "capacity", "want"),
    [
        (6, 1, 1, [set(), {3}, {6}, {9}, {12}]),
        (6, 1, 2, [set(), {2, 3}, {5, 6}, {8, 9}, {11, 12}]),
        (6, 1, 4, [set(), {1, 2, 3}, {3, 4, 5, 6}, {6, 7, 8, 9}, {9, 10, 11, 12}]),
        (12, 3, 1, [set(), set(), set(), {5}, {8}]),  # a prior longer than a block, as LongLive's
        (4, 1, 1, [{2}, {5}, {8}, {11}, {14}]),  # no prior at all
    ],
)
def test_recent_holds_the_last_tokens_that_left_the_window(spec, window, sink, capacity, want):
    assert run_recap(dataclasses.replace(spec, window_frames=window), capacity, 5, sink) == want


def test_what_a_cut_drops_is_not_offered(spec):
    """Frames 4 and 5 fall to the cut before block 2; the bank continues with frame 6."""
    assert run_recap(spec, 2, 4, cut_before=2)[1:] == [{2, 3}, {3, 6}, {8, 9}]
