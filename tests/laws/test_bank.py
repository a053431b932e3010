"""The bank after every block is the top-K of everything ever seen, bit for bit, in every layer."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recap.admission.base import retain_top
from recap.memory.bank import NoveltyBank
from recap.types import NO_TOKEN, Candidates

LAYERS, BATCH, ROWS, COLUMNS = 3, 2, 2, 3


class NaiveBank:
    """Keeps every candidate with its keys and values, and picks the best K from scratch."""

    def __init__(self, capacity):
        self.capacity = capacity
        self.seen = [[] for _ in range(BATCH)]

    def offer(self, candidates, keys, values):
        for row in range(BATCH):
            for token in range(candidates.count):
                source = tuple(candidates.source[row, token].tolist())
                entry = (
                    -candidates.score[row, token].item(),
                    source,
                    keys[:, row, token],
                    values[:, row, token],
                )
                self.seen[row].append(entry)

    def best(self, row):
        return sorted(self.seen[row], key=lambda entry: entry[:2])[: self.capacity]


def stream(draw_scores, num_blocks, length=3):
    for block, scores in zip(range(num_blocks), draw_scores, strict=True):
        frames = torch.arange(length * block, length * (block + 1))
        places = torch.cartesian_prod(frames, torch.arange(ROWS), torch.arange(COLUMNS))
        source = places.expand(BATCH, -1, 3)
        keys, values = torch.randn(2, LAYERS, BATCH, len(places), 2, 4)
        yield Candidates(source, scores[:, : len(places)]), keys, values


# Few distinct values, so that ties and all-zero blocks are the rule, not the exception.
block_scores = st.lists(
    st.sampled_from([0.0, 0.0, 0.25, 0.5, 1.0, 1.0, 3.75]), min_size=BATCH * 18, max_size=BATCH * 18
).map(lambda values: torch.tensor(values).view(BATCH, 18))
streams = st.lists(st.one_of(block_scores, st.just(torch.zeros(BATCH, 18))), min_size=1, max_size=6)


@settings(max_examples=200, deadline=None)
@given(
    scores=streams,
    capacity=st.sampled_from([0, 1, 5, 18, 19, 40, 500]),
    seed=st.integers(0, 2**31),
    length=st.sampled_from([1, 3]),
)
def test_bank_equals_brute_force_over_everything_ever_seen(scores, capacity, seed, length):
    torch.manual_seed(seed)
    bank, naive = NoveltyBank(capacity, LAYERS), NaiveBank(capacity)
    for candidates, keys, values in stream(scores, len(scores), length):
        before = slots(bank)
        admitted, evicted = bank.admit(candidates, keys, values, retain_top)
        naive.offer(candidates, keys, values)
        assert bank.count == min(capacity, len(naive.seen[0]))
        for row in range(BATCH):
            kept = slots(bank)[row]
            assert set(kept) == {entry[1] for entry in naive.best(row)}
            for negative, source, key, value in naive.best(row):
                slot = kept[source]
                assert bank.entries.score[row, slot].item() == -negative
                assert torch.equal(bank.keys[:, row, slot], key)
                assert torch.equal(bank.values[:, row, slot], value)
            entered = {tuple(s) for s in admitted.source[row][admitted.score[row] >= 0].tolist()}
            left = {tuple(s) for s in evicted.source[row][evicted.score[row] >= 0].tolist()}
            assert set(kept) == (set(before[row]) | entered) - left
            assert entered.isdisjoint(before[row])
            # In place: whoever stays keeps its slot.
            assert all(kept[source] == slot for source, slot in before[row].items() if source in kept)


def slots(bank):
    if bank.count == 0:
        return [{} for _ in range(BATCH)]
    return [{tuple(source): slot for slot, source in enumerate(row)} for row in bank.entries.source.tolist()]


def test_zero_scores_fill_empty_slots_only():
    bank = NoveltyBank(4, LAYERS)
    blocks = list(stream([torch.zeros(BATCH, 18)] * 2, 2))
    bank.admit(*blocks[0], retain_top)
    first = bank.entries.source.clone()
    bank.admit(*blocks[1], retain_top)
    assert torch.equal(bank.entries.source, first)
    assert first[0].tolist() == [[0, 0, 0], [0, 0, 1], [0, 0, 2], [0, 1, 0]]


def test_state_continues_bit_for_bit():
    blocks = list(stream([torch.rand(BATCH, 18) for _ in range(6)], 6))
    straight, first, second = (NoveltyBank(7, LAYERS) for _ in range(3))
    for offered in blocks[:3]:
        straight.admit(*offered, retain_top)
        first.admit(*offered, retain_top)
    state = first.state()
    copy = {name: value.clone() for name, value in state.items()}
    first.admit(*blocks[3], retain_top)
    assert all(torch.equal(state[name], value) for name, value in copy.items()), "a state handed out stays"
    second.load_state(state)
    for offered in blocks[3:]:
        straight.admit(*offered, retain_top)
        second.admit(*offered, retain_top)
    assert all(torch.equal(straight.state()[name], value) for name, value in second.state().items())


def test_negative_capacity_is_refused():
    with pytest.raises(ValueError, match=r"capacity is -1: must be 0 or more"):
        NoveltyBank(-1, LAYERS)


def test_state_of_another_size_is_refused():
    bank = NoveltyBank(4, LAYERS)
    bank.admit(*next(stream([torch.rand(BATCH, 18)], 1)), retain_top)
    with pytest.raises(ValueError, match="with the same settings"):
        NoveltyBank(5, LAYERS).load_state(bank.state())


@settings(max_examples=60, deadline=None)
@given(
    scores=streams,
    capacity=st.sampled_from([0, 1, 5, 18, 19, 40]),
    seed=st.integers(0, 2**31),
    length=st.sampled_from([1, 3]),
)
def test_a_bank_without_zero_scores_holds_the_best_of_what_was_new(scores, capacity, seed, length):
    """Its other slots are there and are not seen: what shows is the top-K of positive scores, row by row."""
    torch.manual_seed(seed)
    bank, naive = NoveltyBank(capacity, LAYERS, zero_scores_fill=False), NaiveBank(capacity)
    shown = [set() for _ in range(BATCH)]
    for candidates, keys, values in stream(scores, len(scores), length):
        admitted, evicted = bank.admit(candidates, keys, values, retain_top)
        naive.offer(candidates, keys, values)
        for row in range(BATCH):
            best = {entry[1] for entry in naive.best(row) if entry[0] < 0}
            there = bank.token_bias[row] == 0
            assert {tuple(s) for s in bank.entries.source[row][there].tolist()} == best
            assert (bank.token_bias[row][~there] == NO_TOKEN).all()
            for change, places in ((shown[row].difference_update, evicted), (shown[row].update, admitted)):
                change({tuple(s) for s in places.source[row][places.score[row] >= 0].tolist()})
            assert shown[row] == best, "the trace tells the same"
