"""Pinned tokens stay, forgotten ones are not attended to, and both survive a state."""

from __future__ import annotations

import pytest
import torch

from recap.memory.recap import RecapConfig
from recap.plan import Shot, make_plan
from recap.rollout import read_alone, rollout
from recap.types import Candidates, Role
from tests.contracts.test_policies import SeededAdmission


def memory_of(backbone, **settings):
    return RecapConfig(**settings).build(backbone.spec, lambda: SeededAdmission(backbone.spec))


def blocks_of(backbone, policy, count, **resume):
    plan = make_plan([[Shot("a red boat", 0.75 * 40)]], backbone.spec)
    made = rollout(backbone, policy, plan, seeds=[0], **resume)
    return [next(made) for _ in range(count)], made


def slots_with(entries, sources):
    return [slot for slot, source in enumerate(entries.source[0].tolist()) if tuple(source) in sources]


def test_a_pinned_token_keeps_its_bits_in_a_slot_of_its_own(backbone):
    policy = memory_of(backbone)
    _, made = blocks_of(backbone, policy, 2)
    keys, values, entries = policy.bank.take([3, 5])
    policy.pin([3, 5], "fox")
    for block in (next(made) for _ in range(6)):
        assert block.memory.tokens[Role.CAST] == 2
        assert Role.CAST in block.shares
    group = policy.pinned.groups["fox"]
    assert torch.equal(group.keys, keys) and torch.equal(group.values, values)
    assert torch.equal(group.entries.source, entries.source)


def test_the_rest_of_the_bank_works_as_before_with_pinned_tokens_next_to_it(backbone):
    alone, other = memory_of(backbone), memory_of(backbone)
    _, made = blocks_of(backbone, alone, 3)
    _, again = blocks_of(backbone, other, 3)
    taken = other.bank.take([0])
    other.take_cast("guest", *taken)
    for _ in range(4):
        next(made), next(again)
    # The rule scores by seed, not by pixels, so both banks choose alike.
    assert torch.equal(alone.bank.entries.source, other.bank.entries.source)
    assert torch.equal(alone.bank.entries.score, other.bank.entries.score)


def test_a_forgotten_slot_is_not_attended_to(backbone):
    """Whatever its keys and values are, the next block is the same."""
    latents = []
    for poison in (0.0, 50.0):
        policy = memory_of(backbone)
        _, made = blocks_of(backbone, policy, 2)
        policy.forget([1])
        policy.bank.keys[:, :, 1] = poison
        policy.bank.values[:, :, 1] = poison
        latents.append(next(made).latents)
    assert torch.equal(*latents)
    policy = memory_of(backbone)
    _, made = blocks_of(backbone, policy, 2)
    assert not torch.equal(next(made).latents, latents[0]), "forgetting changes what is generated"


def test_a_forgotten_slot_is_taken_by_the_next_newcomer_and_the_trace_says_what_left(backbone):
    policy = memory_of(backbone)
    _, made = blocks_of(backbone, policy, 2)
    gone = tuple(policy.bank.entries.source[0, 1].tolist())
    policy.forget([1])
    trace = next(made).memory
    left = {
        tuple(s)
        for s, score in zip(trace.evicted.source[0].tolist(), trace.evicted.score[0].tolist(), strict=True)
        if score >= 0
    }
    assert gone in left
    assert bool((policy.bank.entries.score >= 0).all())
    assert slots_with(policy.bank.entries, {gone}) == []
    assert next(made).memory.evicted.count == policy.bank.capacity, "it is said once"


def test_pins_and_empty_slots_survive_a_state(backbone):
    policy = memory_of(backbone)
    blocks_of(backbone, policy, 2)
    policy.pin([0, 4], "fox")
    policy.forget([2])
    state = policy.state()
    other = memory_of(backbone)
    other.load_state(state)
    assert other.state().keys() == state.keys()
    assert all(torch.equal(other.state()[name], value) for name, value in state.items())
    assert list(other.pinned.groups) == ["fox"]
    assert torch.equal(other.bank.token_bias, policy.bank.token_bias)


def test_a_block_shows_the_subjects_that_it_names(backbone):
    policy = memory_of(backbone)
    blocks_of(backbone, policy, 1)
    policy.pin([0], "fox")
    policy.pin([1, 2], "bus")
    block = make_plan([[Shot("a red boat", 9.0)]], backbone.spec).blocks[1]
    for subjects, count in ((None, 3), (("fox",), 1), (("bus",), 2), ((), 0)):
        policy.begin(
            type(block)(block.index, block.first_frame, block.num_frames, block.prompts, subjects=subjects)
        )
        shown = [s for s in policy.arrange(0, []) if s.role is Role.CAST]
        assert sum(s.keys.shape[1] for s in shown) == count
        assert all(bool((s.positions[..., 0] == 0).all()) for s in shown)
    policy.drop_cast("fox")
    assert list(policy.pinned.groups) == ["bus"]


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ([], "must be different whole numbers"),
        ([0, 0], "must be different"),
        ([True], "must be different whole numbers"),
        ([999], "the bank has the slots 0 to"),
        ([-1], "the bank has the slots 0 to"),
        ([3], "was emptied already"),
    ],
)
def test_what_is_no_slot_is_refused_and_changes_nothing(backbone, slots, message):
    policy = memory_of(backbone)
    blocks_of(backbone, policy, 2)
    policy.forget([3])
    before = policy.state()
    for act in (policy.forget, lambda chosen: policy.pin(chosen, "x")):
        with pytest.raises(ValueError, match=message):
            act(slots)
    assert all(torch.equal(policy.state()[name], value) for name, value in before.items())


def test_a_memory_without_a_bank_refuses_in_words(backbone):
    from recap.memory.sink import SinkConfig

    policy = SinkConfig().build(backbone.spec, lambda: SeededAdmission(backbone.spec))
    with pytest.raises(ValueError, match="it has no bank"):
        policy.forget([0])
    with pytest.raises(ValueError, match="choose recap"):
        policy.drop_cast("fox")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("pinned.names", torch.tensor(list(b'["a", "a"]'), dtype=torch.uint8)),
        ("pinned.names", torch.tensor(list(b"{}"), dtype=torch.uint8)),
        ("pinned.names", torch.tensor([255], dtype=torch.uint8)),
        ("pinned.0.score", torch.zeros(1, 7)),
        ("pinned.0.source", torch.full((1, 2, 3), 10**9)),
    ],
)
def test_a_changed_state_is_refused(backbone, name, value):
    policy = memory_of(backbone)
    blocks_of(backbone, policy, 1)
    policy.pin([0, 1], "fox")
    with pytest.raises(ValueError, match="state"):
        memory_of(backbone).load_state({**policy.state(), name: value})


def test_a_block_read_alone_gives_the_keys_that_a_first_block_leaves(backbone):
    """The clean pass of a video's first block sees nothing else either."""
    policy = memory_of(backbone, capacity_frames=0.0)
    (made,), _ = blocks_of(backbone, policy, 1)
    keys, values = read_alone(backbone, made.latents, made.block.prompts)
    assert torch.equal(keys, policy.window.current.keys)
    assert torch.equal(values, policy.window.current.values)


def test_too_many_pinned_tokens_are_refused(backbone):
    policy = memory_of(backbone)
    many = backbone.spec.frame_tokens * 65
    shape = (backbone.spec.layers, 1, many, backbone.spec.heads, backbone.spec.head_dim)
    entries = Candidates(torch.zeros(1, many, 3, dtype=torch.int64), torch.zeros(1, many))
    with pytest.raises(ValueError, match=r"at most .* fit next to the bank"):
        policy.take_cast("crowd", torch.zeros(shape), torch.zeros(shape), entries)
    assert not policy.pinned.groups
