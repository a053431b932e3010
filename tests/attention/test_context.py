"""BlockContext: what is rotated how often, who gets written, what is counted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from one_softmax import reference

from recap.attention import context as context_module
from recap.attention.attend import Readable
from recap.attention.context import BlockContext
from recap.attention.rope import rotate, rotation
from recap.memory.sink import SinkConfig
from recap.types import Block, Role, Segment, Tokens, frame_positions


def own_segment(spec, phases):
    keys, values = torch.randn(2, 1, spec.block_tokens, spec.heads, spec.head_dim, dtype=torch.float64)
    return Segment(Role.CURRENT, keys, values, frame_positions(phases, spec.grid))


def block_of(index):
    return Block(index, 3 * index, 3, ("",))


@pytest.fixture
def policy(spec):
    return SinkConfig(reinforcement=5.0).build(spec, lambda: None)


def step(context, spec, own):
    query = torch.randn(1, spec.block_tokens, spec.heads, spec.head_dim, dtype=torch.float64)
    return query, [context.attend(layer, query, [own]) for layer in range(spec.layers)]


def settle(policy, spec, index):
    context = BlockContext(policy, policy.begin(block_of(index)))
    own = own_segment(spec, context.phases)
    step(context.clean_pass(), spec, own)
    policy.commit(block_of(index), torch.empty(0))
    return own


def test_kept_segments_are_rotated_once_per_block_and_layer(monkeypatch, policy, spec):
    settle(policy, spec, 0)
    rotated = []
    monkeypatch.setattr(
        context_module, "rotate", lambda x, turn: (rotated.append(x.shape[1]), rotate(x, turn))[1]
    )
    context = BlockContext(policy, policy.begin(block_of(1)))
    own = own_segment(spec, context.phases)
    for _ in range(5):
        step(context, spec, own)
    frame = spec.frame_tokens
    assert rotated.count(frame) == spec.layers  # the sink
    assert rotated.count(2 * frame) == spec.layers  # the prior
    assert rotated.count(3 * frame) == 5 * 2 * spec.layers  # the block's own queries and keys, every step


def test_what_was_let_go_is_read_as_before_and_the_policy_not_asked_again(monkeypatch, policy, spec):
    settle(policy, spec, 0)
    context = BlockContext(policy, policy.begin(block_of(1)))
    own = own_segment(spec, context.phases)
    torch.manual_seed(0)
    _, before = step(context, spec, own)
    context.forget_rotated()
    assert all(ready is None for kept in context._reads.kept.values() for _, ready in kept)
    monkeypatch.setattr(policy, "arrange", lambda *_: pytest.fail("a policy is asked once per block"))
    torch.manual_seed(0)
    _, after = step(context.clean_pass(), spec, own)
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def test_reading_equals_the_equation_with_the_layouts_phases(policy, spec):
    first = settle(policy, spec, 0)
    context = BlockContext(policy, policy.begin(block_of(1)))
    own = own_segment(spec, context.phases)
    query, outputs = step(context, spec, own)
    frame = spec.frame_tokens

    def turned(keys, phases):
        return rotate(
            keys, rotation(frame_positions(torch.tensor(phases), spec.grid), spec.head_dim, torch.float64)
        )

    segments = [
        Readable(
            Role.SINK,
            turned(first.keys[:, :frame], [0]),
            first.values[:, :frame],
            torch.tensor(5.0).log().item(),
        ),
        Readable(Role.PRIOR, turned(first.keys[:, frame:], [1, 2]), first.values[:, frame:], 0.0),
        Readable(Role.CURRENT, turned(own.keys, [3, 4, 5]), own.values, 0.0),
    ]
    want = reference(turned(query, [3, 4, 5]), segments)
    for output in outputs:
        torch.testing.assert_close(output, want.output, rtol=1e-7, atol=1e-7)
    for role, share in context.shares().items():
        torch.testing.assert_close(share.double(), want.shares[role], rtol=1e-5, atol=1e-6)


def test_only_the_clean_pass_writes(policy, spec):
    context = BlockContext(policy, policy.begin(block_of(0)))
    noisy, clean = own_segment(spec, context.phases), own_segment(spec, context.phases)
    step(context, spec, noisy)
    step(context.clean_pass(), spec, clean)
    policy.commit(block_of(0), torch.empty(0))
    policy.begin(block_of(1))
    sink, prior = policy.arrange(0, [])
    assert torch.equal(torch.cat([sink.keys, prior.keys], dim=1), clean.keys)


class Rebuilding:
    """A policy that makes its segments again whenever it is asked."""

    def __init__(self, policy):
        self._policy, self.asked = policy, []

    def __getattr__(self, name):
        return getattr(self._policy, name)

    def arrange(self, layer, own):
        self.asked.append(layer)
        return [replace(segment) for segment in self._policy.arrange(layer, own)]


def test_a_policy_is_asked_once_per_block_and_layer_whatever_it_returns(policy, spec):
    settle(policy, spec, 0)
    rebuilding = Rebuilding(policy)
    contexts = [BlockContext(each, policy.begin(block_of(1))) for each in (policy, rebuilding)]
    own = own_segment(spec, contexts[0].phases)
    query = torch.randn(1, spec.block_tokens, spec.heads, spec.head_dim, dtype=torch.float64)
    for _ in range(3):
        for layer in range(spec.layers):
            one, other = (context.attend(layer, query, [own]) for context in contexts)
            assert torch.equal(one, other)
    assert rebuilding.asked == list(range(spec.layers))


def test_the_clean_pass_shares_what_was_rotated_and_measures_for_itself(policy, spec):
    settle(policy, spec, 0)
    rebuilding = Rebuilding(policy)
    context = BlockContext(rebuilding, policy.begin(block_of(1)))
    clean = context.clean_pass()
    assert clean.block_key is context.block_key is not BlockContext(policy, context.phases).block_key
    own = own_segment(spec, context.phases)
    step(context, spec, own)
    before = context.shares()
    step(clean, spec, own)
    assert len(rebuilding.asked) == spec.layers
    assert all(torch.equal(before[role], share) for role, share in context.shares().items())
    tokens = Tokens(own.keys, own.keys, own.values, own.positions)
    clean.hand_over(0, tokens)
    with pytest.raises(AssertionError, match="clean_pass"):
        context.hand_over(0, tokens)
