"""Every admission under every memory that takes one: the promises of `Admission`.

Sixty blocks are generated on `untrained`; on the embedded backbone all but the last are given latents, to save time.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from benchmarks.scenes import make_scene, render
from recap.flow import ClassicalFlow
from recap.io.trace import BlockTrace
from recap.memory.bank import NoveltyBank
from recap.plan import Shot, make_plan
from recap.registry import ADMISSIONS, MEMORIES, load_backbone
from recap.rollout import Resume, rollout
from recap.types import Block, Candidates, Role
from tests.contracts.test_policies import lasting

PROMPT = "a boat on the sea"


@pytest.fixture(scope="module")
def embedded():
    return load_backbone("embedded")


# A rule without a row runs as it is.
SETTINGS = {"random": {"seed": 3}, "diversity": {"num_centres": 8}, "diversity-keys": {"num_centres": 8}}
PAIRS = [(memory, rule) for memory, kind in MEMORIES.items() if kind.keeps_bank for rule in ADMISSIONS]


def config_of(rule, dino):
    weights = {"model": dino} if rule == "diversity" else {}
    return ADMISSIONS[rule](**SETTINGS.get(rule, {}), **weights)


def build(memory, rule, spec, dino):
    return MEMORIES[memory]().build(spec, lambda: config_of(rule, dino).build(spec, ClassicalFlow()))


def generate(backbone, policy, shots, seeds=(0,), start=0, decoder=None):
    plan = make_plan([shots] * len(seeds), backbone.spec)
    return rollout(backbone, policy, plan, seeds=seeds, resume=Resume(start), decoder=decoder)


@pytest.mark.parametrize(("memory", "rule"), PAIRS)
def test_generates_on_the_embedded_backbone_and_its_trace_is_plain_data(memory, rule, dino, embedded):
    policy = build(memory, rule, embedded.spec, dino)
    for made in generate(embedded, policy, [Shot(PROMPT, 2.25)]):
        assert torch.isfinite(made.latents).all()
        record = json.loads(json.dumps(BlockTrace.of(made).to_json()))
    assert record["attended_tokens"]["bank"] == embedded.spec.frame_tokens


class Drifting:
    """A decoder of pictures that are cheap to make: a texture that drifts, in which a new patch shows per block."""

    def __init__(self, spec):
        self._spec, self._frames = spec, 0
        self._texture = torch.rand(3, *spec.picture_size, generator=torch.Generator().manual_seed(0))

    def decode(self, latents):
        begun, self._frames = self._frames, self._frames + latents.shape[1]
        times = range(self._spec.num_pictures(begun), self._spec.num_pictures(self._frames))
        pictures = torch.stack([torch.roll(self._texture, 2 * time, dims=-1) for time in times])
        corner = 8 * (begun % 12)
        pictures[:, :, corner : corner + 24, 8:40] = begun % 7 / 7
        return pictures[None]


@pytest.mark.parametrize(("memory", "rule"), PAIRS)
def test_sixty_blocks_on_the_embedded_backbone_with_a_cut_do_not_grow(memory, rule, dino, embedded):
    spec = embedded.spec
    policy = build(memory, rule, spec, dino)
    opening = torch.randn(1, 59 * spec.frames_per_block, spec.latent_channels, *spec.latent_size)
    plan = make_plan([[Shot(PROMPT, 0.75)]], spec, opening.shape[1])
    blocks = [replace(block, clears_prior=block.index == 40) for block in plan.blocks]
    sizes = {}
    for made in rollout(
        embedded,
        policy,
        replace(plan, blocks=tuple(blocks)),
        seeds=[0],
        resume=Resume(opening_latents=opening),
        decoder=Drifting(spec),
    ):
        if made.block.index in (9, 39, 59):
            sizes[made.block.index] = sum(value.nbytes for value in policy.state().values())
        if made.block.index == 40:
            assert Role.PRIOR not in made.memory.tokens
    assert made.block.index == 59 and torch.isfinite(made.latents).all()
    assert len(sizes) == 3 and len(set(sizes.values())) == 1, sizes
    assert made.memory.tokens[Role.BANK] == spec.frame_tokens


@pytest.mark.parametrize(("memory", "rule"), PAIRS)
def test_sixty_blocks_with_a_cut_stop_and_go_on_bit_for_bit_without_growing(memory, rule, dino, backbone):
    shots = [Shot("a red boat", lasting(backbone.spec, 32)), Shot("a blue house", lasting(backbone.spec, 28))]

    def fresh():
        return build(memory, rule, backbone.spec, dino), backbone.decoder()

    policy, decoder = fresh()
    straight, sizes = [], {}
    for made in generate(backbone, policy, shots, decoder=decoder):
        straight.append(made)
        if made.block.index in (9, 31, 59):
            sizes[made.block.index] = sum(value.nbytes for value in policy.state().values())
    assert len(straight) == 60 and len(set(sizes.values())) == 1, sizes
    cut = next(made for made in straight if made.block.clears_prior)
    assert Role.PRIOR not in cut.memory.tokens and cut.memory.tokens[Role.BANK] == backbone.spec.frame_tokens

    for stop in (1, 2, 33):
        first, first_decoder = fresh()
        begun = generate(backbone, first, shots, decoder=first_decoder)
        head = [next(begun) for _ in range(stop)]
        second, second_decoder = fresh()
        second.load_state(first.state())
        second_decoder.load_state(first_decoder.state())
        tail = generate(backbone, second, shots, start=stop, decoder=second_decoder)
        again = head + [next(tail) for _ in range(3)]
        for one, other in zip(straight, again, strict=False):
            assert torch.equal(one.latents, other.latents)
            assert BlockTrace.of(one) == BlockTrace.of(other)


class Blank:
    """A decoder of nothing: NaN in the shape of the pictures."""

    def __init__(self, spec):
        self._spec, self._frames = spec, 0

    def decode(self, latents):
        begun, self._frames = self._frames, self._frames + latents.shape[1]
        count = self._spec.num_pictures(self._frames) - self._spec.num_pictures(begun)
        return torch.full((latents.shape[0], count, 3, *self._spec.picture_size), torch.nan)


@pytest.mark.parametrize("rule", ADMISSIONS)
def test_a_rule_that_needs_no_pixels_does_not_look_at_them(rule, dino, backbone):
    """With a decoder of nothing the same is generated and remembered; a rule that looks at pixels must say so."""
    policies = [build("recap", rule, backbone.spec, dino) for _ in range(2)]
    shots = [Shot("a red boat", 3.0), Shot("a blue house", 3.0)]
    if policies[0].needs_pixels:
        assert rule not in ("keys", "diversity-keys", "random", "recent")
        return
    runs = [
        list(generate(backbone, policy, shots, decoder=decoder))
        for policy, decoder in zip(policies, (backbone.decoder(), Blank(backbone.spec)), strict=True)
    ]
    for one, other in zip(*runs, strict=True):
        assert torch.equal(one.latents, other.latents)
        assert BlockTrace.of(one) == BlockTrace.of(other)
    states = [policy.state() for policy in policies]
    assert all(torch.equal(states[1][name], value) for name, value in states[0].items())


@pytest.mark.parametrize("rule", ADMISSIONS)
def test_rows_do_not_know_of_each_other(rule, dino, backbone):
    """The same pictures and keys, alone and in a batch of two: the same tokens are kept."""
    spec = backbone.spec
    count = spec.num_pictures(12)
    clips = [render(make_scene(name, spec.picture_size, count)).pictures for name in ("demo", "rain")]
    keys = torch.randn(spec.layers, 2, 12 * spec.frame_tokens, spec.heads, spec.head_dim)

    def kept(rows):
        admission = config_of(rule, dino).build(spec, ClassicalFlow())
        bank, pictures = (
            NoveltyBank(spec.frame_tokens, spec.layers),
            torch.stack([clips[row] for row in rows]),
        )
        for index in range(12 // spec.frames_per_block):
            block = Block(index, spec.frames_per_block * index, spec.frames_per_block, ("",) * len(rows))
            tokens = slice(index * spec.block_tokens, (index + 1) * spec.block_tokens)
            part = slice(spec.num_pictures(block.first_frame), spec.num_pictures(block.end_frame))
            if admission.reads_keys:
                admission.read_keys(keys[:, rows][:, :, tokens])
            offered: Candidates = admission.propose(block, pictures[:, part])
            bank.admit(offered, *[keys[:, rows][:, :, tokens]] * 2, admission.retain)
        return bank.entries

    both = kept([0, 1])
    for row in (0, 1):
        alone = kept([row])
        assert torch.equal(alone.source[0], both.source[row])
        torch.testing.assert_close(alone.score[0], both.score[row])
