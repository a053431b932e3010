"""Flow and keys together: a token scores as flow says if its key is new, and 0 otherwise."""

from __future__ import annotations

import pytest
import torch

from recap.admission.flow import FlowNoveltyConfig
from recap.admission.flow_keys import FlowKeysConfig
from recap.admission.keys import KeyNoveltyConfig
from recap.attention.likeness import nearest_distance
from recap.contracts import Flow
from recap.memory.bank import NoveltyBank
from recap.types import Block


class SmallShifts:
    """Flow that is made of the pictures, so that some tokens fire; it counts how often it is asked."""

    def __init__(self):
        self.calls = 0

    def __call__(self, pictures):
        self.calls += 1
        change = (pictures[:, 1:] - pictures[:, :-1])[:, :, :2]
        return Flow(60 * change, -40 * change)


def pictures_of(spec, index, rows=1):
    """Grey, with one square of noise that differs from picture to picture."""
    count = spec.num_pictures(3 * index + 3) - spec.num_pictures(3 * index)
    pixels = torch.full((rows, count, 3, *spec.picture_size), 0.5)
    side = spec.token_pixels
    pixels[..., :side, : 2 * side] = torch.rand(rows, count, 3, side, 2 * side)
    return pixels


def keys_of(spec, rows=1):
    return torch.randn(spec.layers, rows, spec.block_tokens, spec.heads, spec.head_dim)


@pytest.fixture
def blocks(spec):
    """Six blocks of pictures and keys; half of the later tokens look like some of the first frame's."""
    first = keys_of(spec)
    # Tokens of the opening come in pairs, so that others are near.
    first[:, :, 1::2] = first[:, :, ::2] + 0.05 * torch.randn(first[:, :, ::2].shape)
    made = [(pictures_of(spec, 0), first)]
    for index in range(1, 6):
        keys = keys_of(spec)
        like = torch.randint(spec.frame_tokens, (spec.block_tokens,))
        known = torch.rand(spec.block_tokens) < 0.5
        keys[:, :, known] = first[:, :, like[known]] + 0.02 * torch.randn(keys[:, :, known].shape)
        made.append((pictures_of(spec, index), keys))
    return made


def run(admission, bank, blocks, *, look=False):
    """Feed the blocks; returns every block's scores."""
    scores = []
    for index, (pixels, keys) in enumerate(blocks):
        block = Block(index, 3 * index, 3, ("",))
        if look:
            admission.look(block, pixels)
        if admission.reads_keys:
            admission.read_keys(keys)
        offered = admission.propose(block, pixels)
        bank.admit(offered, keys, keys, admission.retain)
        scores.append(offered.score)
    return scores


def test_a_token_scores_as_flow_says_if_its_key_is_new(spec, blocks):
    """Against a twin: flow's scores, of which those that resemble sink, bank or earlier new tokens are struck out."""
    flow = run(FlowNoveltyConfig().build(spec, SmallShifts()), NoveltyBank(4, spec.layers), blocks)
    rule = FlowKeysConfig().build(spec, SmallShifts())
    both = run(rule, NoveltyBank(4, spec.layers), blocks)
    opening, limit, bank = rule.state()["first"], rule.state()["limit"], []
    kept, struck = 0, 0
    for index, (_, keys) in enumerate(blocks):
        rule.read_keys(keys)
        frames = rule._keys.unflatten(1, (3, -1)).unbind(1)
        known, wanted = [opening[0], *(look[None] for _, _, look in bank)], []
        for frame, noticed in zip(frames, flow[index].unflatten(1, (3, -1)).unbind(1), strict=True):
            distance = nearest_distance(frame, torch.cat(known)[None])
            scores = torch.where(distance > limit, noticed, 0.0)
            known += [look[None] for look, score in zip(frame[0], scores[0], strict=True) if score > 0]
            wanted.append(scores)
        assert torch.equal(both[index], torch.cat(wanted, dim=1))
        kept, struck = kept + int((both[index] > 0).sum()), struck + int((flow[index] > both[index]).sum())
        looks = torch.cat(frames, dim=1)[0]
        bank += [(-float(s), (index, n), looks[n]) for n, s in enumerate(both[index][0]) if s > 0]
        bank = sorted(bank, key=lambda entry: entry[:2])[:4]
    assert kept > 10 and struck > 10


def test_with_no_margin_it_is_flow(spec, blocks):
    """Nothing is nearer than at no distance, so only flow decides."""
    flow = run(FlowNoveltyConfig().build(spec, SmallShifts()), NoveltyBank(4, spec.layers), blocks)
    both = run(FlowKeysConfig(margin=0.0).build(spec, SmallShifts()), NoveltyBank(4, spec.layers), blocks)
    # The tokens of the first frame are at no distance from themselves, and flow does not notice it.
    assert all(torch.equal(one, other) for one, other in zip(flow, both, strict=True))


def test_looking_early_changes_nothing_and_flow_is_asked_once_a_block(spec, blocks):
    late, early = SmallShifts(), SmallShifts()
    banks = [NoveltyBank(5, spec.layers) for _ in range(2)]
    one = run(FlowKeysConfig().build(spec, late), banks[0], blocks)
    other = run(FlowKeysConfig().build(spec, early), banks[1], blocks, look=True)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert late.calls == early.calls == len(blocks)


def test_its_settings_are_those_of_both_and_are_checked(spec):
    config = FlowKeysConfig()
    assert config.by_keys() == KeyNoveltyConfig()
    for settings in ({"margin": -1.0}, {"num_layers": 0}, {"percentile": 101.0}):
        with pytest.raises(ValueError, match=next(iter(settings))):
            FlowKeysConfig(**settings)


def test_a_memory_without_keys_is_refused(spec):
    with pytest.raises(ValueError, match="flow\\+keys"):
        FlowKeysConfig().build(spec, SmallShifts()).propose(Block(0, 0, 3, ("",)), pictures_of(spec, 0))
