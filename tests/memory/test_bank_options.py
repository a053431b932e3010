"""Options of the bank, each by its law: a reinforced bank is a bank of repeated keys, and so is a merged one."""

from __future__ import annotations

import math

import pytest
import torch

from recap.admission.base import ScoredAdmission, retain_top
from recap.attention.likeness import describe_keys, spread_layers
from recap.fast.backbone import FastWanBackbone
from recap.flow.classical import ClassicalFlow
from recap.memory.bank import NoveltyBank, shared_scores
from recap.memory.merging import NUM_LAYERS, SAME, Duplicates
from recap.memory.recap import RecapConfig, RecapMemory
from recap.plan import Shot, make_plan
from recap.registry import ADMISSIONS
from recap.rollout import Resume, rollout
from recap.types import Block, Candidates, Role, Tokens, frame_positions
from tests.contracts.test_policies import SeededAdmission


def memory_of(backbone, **settings):
    return RecapConfig(**settings).build(backbone.spec, lambda: SeededAdmission(backbone.spec))


def begin_rollout(backbone, policy, seconds=4.5, **resume):
    plan = make_plan([[Shot("a red boat", seconds), Shot("a blue house", seconds)]], backbone.spec)
    return rollout(backbone, policy, plan, seeds=[0], **resume)


def repeat_bank(policy: RecapMemory, times: int) -> None:
    """Let every block see the bank and what is pinned so many times, with no bias."""
    begin = policy.begin

    def begin_repeated(block):
        phases = begin(block)
        for seen in policy.window.segments:
            kept = [segment for segment in seen if segment.role in (Role.BANK, Role.CAST)]
            seen.extend(kept * (times - 1))
        return phases

    policy.begin = begin_repeated


@pytest.mark.parametrize("path", ["readable", "fast"])
@pytest.mark.parametrize(
    ("times", "settings"),
    [(2, {}), (3, {"zero_scores_fill": False}), (5, {"reinforcement": 5.0}), (2, {"reinforcement": 1.0})],
)
def test_a_reinforced_bank_equals_its_keys_repeated(backbone, path, times, settings):
    model = FastWanBackbone(backbone) if path == "fast" else backbone
    policy = memory_of(backbone, bank_reinforcement=float(times), **settings)
    twin = memory_of(backbone, **settings)
    repeat_bank(twin, times)
    plain = memory_of(backbone, **settings)
    runs = [list(begin_rollout(model, each)) for each in (policy, twin, plain)]
    for one, other in zip(*runs[:2], strict=True):
        torch.testing.assert_close(one.latents, other.latents, atol=1e-5, rtol=1e-5)
        assert torch.equal(one.memory.admitted.source, other.memory.admitted.source)
        if Role.BANK in other.shares:
            torch.testing.assert_close(one.shares[Role.BANK], other.shares[Role.BANK], atol=1e-5, rtol=1e-4)
    assert not torch.allclose(runs[0][-1].latents, runs[2][-1].latents, atol=1e-4), "it does something"


def test_pinning_does_not_change_a_tokens_weight(backbone):
    """The next block sees the same tokens with the same bias, whether some of them are pinned or not."""
    latents = []
    for pins in (False, True):
        policy = memory_of(backbone, bank_reinforcement=3.0)
        made = begin_rollout(backbone, policy)
        next(made), next(made)
        if pins:
            policy.pin([0, 3, 4], "fox")
        latents.append(next(made).latents)
    torch.testing.assert_close(*latents, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("margin", [-1.0, 101.0, math.nan])
def test_a_margin_that_is_none_is_refused(backbone, margin):
    with pytest.raises(ValueError, match="merge_margin"):
        memory_of(backbone, merge_margin=margin)


@pytest.mark.parametrize("factor", [0.0, -2.0, math.inf, math.nan])
def test_a_reinforcement_that_is_no_factor_is_refused(backbone, factor):
    with pytest.raises(ValueError, match="bank_reinforcement"):
        memory_of(backbone, bank_reinforcement=factor)


def fill_with_copies(policy):
    """Offer some of what the bank has once more, and some twice, from the same places in later frames."""
    new = (policy.bank.entries.score[0] > 0).nonzero()[:3, 0].tolist()
    keys, values, entries = policy.bank.take(new)
    twice = [0, 1, 2, 1]
    source = entries.source[:, twice].clone()
    source[..., 0] = torch.tensor([90, 90, 90, 91])
    again = Candidates(source, torch.full_like(source[..., 0], 0.3, dtype=torch.float32))
    policy.bank.admit(again, keys[:, :, twice], values[:, :, twice], retain_top)


@pytest.mark.parametrize("path", ["readable", "fast"])
@pytest.mark.parametrize("settings", [{}, {"zero_scores_fill": False}, {"bank_reinforcement": 2.0}])
def test_merged_duplicates_equal_those_that_are_kept(backbone, path, settings):
    """Exact duplicates at one place: a slot that counts for three is three slots, for every query of every layer."""
    model = FastWanBackbone(backbone) if path == "fast" else backbone
    made = []
    for merges in (True, False):
        policy = memory_of(backbone, merge_margin=float(merges), capacity_frames=8.0, **settings)
        if merges:
            # Nothing but the same is a duplicate.
            policy.bank.duplicates._limit = torch.full((1, 1), SAME)
        blocks = begin_rollout(model, policy)
        next(blocks), next(blocks)
        held = (policy.bank.entries.score > 0).sum()
        fill_with_copies(policy)
        more = (policy.bank.entries.score > 0).sum() - held
        assert more == (0 if merges else 4)
        if merges:
            assert policy.bank.state()["bank.copies"].sort().values[0, -3:].tolist() == [2, 2, 3]
        made.append(next(blocks))
    torch.testing.assert_close(made[0].latents, made[1].latents, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(made[0].shares[Role.BANK], made[1].shares[Role.BANK], atol=1e-5, rtol=1e-4)


def naive_merge(limit, kept, kept_score, tokens, score):
    """The same by loops over tokens: who is counted where. Kept tokens are named -1, -2, ..."""
    where = {}
    for i, one in enumerate(tokens):
        near = [
            (float(one @ k), -1 - j) for j, k in enumerate(kept) if kept_score[j] > 0 and 1 - one @ k <= limit
        ]
        if score[i] > 0 and near:
            where[i] = max(near)[1]
    rest = [i for i in range(len(tokens)) if score[i] > 0 and i not in where]

    def near_ones(i):
        return [j for j in rest if j != i and 1 - tokens[i] @ tokens[j] <= limit]

    def before(j, i):
        return (-score[j], j) < (-score[i], i)

    leaders = [i for i in rest if not any(before(j, i) for j in near_ones(i))]
    for i in rest:
        near = [(float(tokens[i] @ tokens[j]), j) for j in near_ones(i) if j in leaders]
        if i not in leaders and near:
            where[i] = max(near)[1]
    return where


def test_merging_equals_loops_over_tokens(spec):
    looks = torch.randn(12, spec.heads, spec.head_dim)

    def keys_of(count):
        shown = looks[torch.randint(12, (count,))]
        return (shown + 0.15 * torch.randn(count, *looks.shape[1:])).expand(spec.layers, 1, -1, -1, -1)

    duplicates, layers = Duplicates(spec.layers), spread_layers(NUM_LAYERS, spec.layers)
    merged_somewhere = 0
    for trial in range(20):
        kept_keys, keys = keys_of(trial % 7), keys_of(18)
        kept, score = torch.rand(1, trial % 7).round(decimals=1), torch.rand(1, 18).round(decimals=1)
        duplicates._limit = torch.full((1, 1), 0.02)
        found = duplicates.merge(kept_keys, kept, keys, Candidates(torch.zeros(1, 18, 3).long(), score))
        where = naive_merge(
            0.02,
            describe_keys(kept_keys, layers)[0],
            kept[0].tolist(),
            describe_keys(keys, layers)[0],
            score[0].tolist(),
        )
        targets = list(where.values())
        assert found.gone[0].nonzero()[:, 0].tolist() == sorted(where)
        assert found.copies[0].tolist() == [1 + targets.count(i) for i in range(18)]
        assert found.gained[0].tolist() == [targets.count(-1 - j) for j in range(trial % 7)]
        for j in range(trial % 7):
            best = max((float(score[0, i]) for i, to in where.items() if to == -1 - j), default=-math.inf)
            assert float(found.best[0, j]) == best
        merged_somewhere += bool(targets)
    assert merged_somewhere > 10


@pytest.mark.parametrize("stop", [1, 2, 4])
def test_a_merging_bank_stops_and_goes_on_bit_for_bit(backbone, stop):
    straight = memory_of(backbone, merge_margin=1.0)
    whole = list(begin_rollout(backbone, straight))
    assert straight.state()["bank.copies"].max() > 1
    first, decoder = memory_of(backbone, merge_margin=1.0), backbone.decoder()
    begun = begin_rollout(backbone, first, decoder=decoder)
    head = [next(begun) for _ in range(stop)]
    second, again = memory_of(backbone, merge_margin=1.0), backbone.decoder()
    second.load_state(first.state())
    again.load_state(decoder.state())
    tail = list(begin_rollout(backbone, second, resume=Resume(stop), decoder=again))
    for one, other in zip(whole, head + tail, strict=True):
        assert torch.equal(one.latents, other.latents)
    assert second.state().keys() == straight.state().keys()
    assert all(torch.equal(second.state()[name], value) for name, value in straight.state().items())


def test_a_bank_of_another_size_takes_the_counts_over(backbone):
    policy = memory_of(backbone, merge_margin=1.0, capacity_frames=2.0)
    made = begin_rollout(backbone, policy)
    next(made), next(made)
    before = policy.bank.state()
    policy.replace_bank(memory_of(backbone, merge_margin=1.0, capacity_frames=3.0))
    after = policy.bank.state()
    counts = [
        {
            tuple(source): (score, copies)
            for source, score, copies in zip(
                state["bank.source"][0].tolist(),
                state["bank.score"][0].tolist(),
                state["bank.copies"][0].tolist(),
                strict=True,
            )
            if score > 0
        }
        for state in (before, after)
    ]
    assert counts[0] == counts[1] and max(copies for _, copies in counts[0].values()) > 1
    assert torch.equal(before["bank.limit"], after["bank.limit"])
    next(made)


def test_a_state_without_its_counts_is_refused(backbone):
    policy = memory_of(backbone, merge_margin=1.0)
    next(begin_rollout(backbone, policy))
    for missing in ("bank.copies", "bank.limit"):
        state = {name: value for name, value in policy.state().items() if name != missing}
        with pytest.raises(ValueError, match=missing):
            memory_of(backbone, merge_margin=1.0).load_state(state)
    with pytest.raises(ValueError, match=r"bank\.(copies|limit)"):
        memory_of(backbone).load_state(policy.state())


def in_turn(groups, capacity):
    """Of every group its best, then its second, ...: entries (-score, source), the better ones of a round first."""
    ranked = [sorted(group) for group in groups]
    rounds = [
        sorted(group[turn] for group in ranked if turn < len(group)) for turn in range(max(map(len, ranked)))
    ]
    return [entry for each in rounds for entry in each][:capacity]


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("capacity", [3, 11, 20, 60])
def test_a_shared_bank_is_filled_in_turn_from_everything_ever_seen(offset, capacity):
    """Against loops that start from scratch after every block; with an offset frame 0 is a block of its own."""
    bank, groups = NoveltyBank(capacity, 1), []
    for index in range(8):
        first = max(0, 3 * index - 2) if offset else 3 * index
        frames = torch.arange(first, 1 if offset and not index else first + 3)
        source = torch.cartesian_prod(frames, torch.arange(2), torch.arange(3))[None]
        # Few values, so that many are equal or 0; now and then a block with far more to show than the others.
        score = (torch.rand(1, source.shape[1]) * (9 if index in (2, 5) else 2)).floor() / 2
        keys = torch.randn(1, 1, source.shape[1], 1, 2)
        bank.admit(
            Candidates(source, score),
            keys,
            keys,
            lambda pool, capacity, first=first: retain_top(shared_scores(pool, first, 3), capacity),
        )
        groups.append(
            [(-s, tuple(p)) for s, p in zip(score[0].tolist(), source[0].tolist(), strict=True) if s > 0]
        )
        best = in_turn(groups, capacity)
        held = {
            tuple(p): -s
            for p, s in zip(bank.entries.source[0].tolist(), bank.entries.score[0].tolist(), strict=True)
            if s > 0
        }
        assert held == {place: score for score, place in best}


def test_a_late_block_cannot_evict_an_early_one_from_a_shared_bank(backbone):
    """Every later block scores higher; a plain bank then forgets the first, a shared one keeps its share."""

    class Louder(SeededAdmission):
        def score(self, block, pixels):
            return super().score(block, pixels) + 1 + 10 * block.index

    blocks = {}
    for shared in (False, True):
        config = RecapConfig(share_by_block=shared, capacity_frames=2.0)
        policy = config.build(backbone.spec, lambda: Louder(backbone.spec))
        list(begin_rollout(backbone, policy))
        frames = policy.bank.entries.source[0, :, 0] // backbone.spec.frames_per_block
        blocks[shared] = frames.bincount(minlength=12).tolist()
    assert blocks[False] == [0] * 11 + [policy.bank.capacity]
    assert min(blocks[True]) >= policy.bank.capacity // 12 and max(blocks[True]) - min(blocks[True]) <= 1


@pytest.mark.parametrize("rule", ["keys", "flow"])
def test_all_options_together_stop_and_go_on_bit_for_bit(backbone, rule):
    options = {"bank_reinforcement": 2.0, "merge_margin": 1.0, "share_by_block": True}

    def fresh():
        admission = ADMISSIONS[rule]()
        policy = RecapConfig(**options).build(
            backbone.spec, lambda: admission.build(backbone.spec, ClassicalFlow())
        )
        return policy, backbone.decoder()

    whole, decoder = fresh()
    straight = list(begin_rollout(backbone, whole, decoder=decoder))
    first, first_decoder = fresh()
    begun = begin_rollout(backbone, first, decoder=first_decoder)
    for _ in range(3):
        next(begun)
    second, second_decoder = fresh()
    second.load_state(first.state())
    second_decoder.load_state(first_decoder.state())
    tail = list(begin_rollout(backbone, second, resume=Resume(3), decoder=second_decoder))
    for one, other in zip(straight[3:], tail, strict=True):
        assert torch.equal(one.latents, other.latents)
    assert all(torch.equal(second.state()[name], value) for name, value in whole.state().items())


class Brightness(ScoredAdmission):
    """Scores every token by the brightness of the block."""

    def score(self, block, pixels):
        return pixels.mean().expand(block.num_frames * self._grid[0] * self._grid[1])


def test_a_loaded_state_forgets_the_pictures_of_a_block_that_did_not_end(backbone):
    spec = backbone.spec
    policy = RecapConfig().build(spec, lambda: Brightness(spec.grid))
    block = Block(0, 0, spec.frames_per_block, ("a red boat",))
    dark, bright = torch.zeros(1, 9, 3, *spec.picture_size), torch.ones(1, 9, 3, *spec.picture_size)
    before = policy.state()
    policy.begin(block)
    policy.look(block, bright)
    policy.load_state(before)
    phases = policy.begin(block)
    tokens = torch.zeros(1, spec.block_tokens, spec.heads, spec.head_dim)
    for layer in range(spec.layers):
        policy.write(layer, Tokens(tokens, tokens, tokens, frame_positions(phases, spec.grid)))
    assert policy.commit(block, dark).offered.score.max() == 0
