"""Noise that opposes itself, and noise on the sink: exact where they act, and nothing at all where they are off."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from recap.backbones.noise import PLAIN, Sampling, block_noise, blur_opening, opposed
from recap.config import RunConfig
from recap.fast.backbone import FastWanBackbone
from recap.memory.recap import RecapConfig
from recap.plan import Shot, make_plan
from recap.registry import MEMORIES
from recap.rollout import Resume, rollout
from recap.tables.ask import Ask
from recap.tables.recipes import RECIPES
from recap.tables.rows import Row
from recap.tables.runs import plan_runs
from recap.types import Block
from tests.contracts.test_policies import SeededAdmission

BOTH = Sampling(antiphase=0.6, sink_noise=0.3)
SHOTS = [Shot("a red boat", 3.0), Shot("a blue house", 2.25, cut=False)]


def policy_of(backbone, name, seeds=(0,)):
    return MEMORIES[name]().build(backbone.spec, lambda: SeededAdmission(backbone.spec, seeds))


def run(backbone, policy, sampling, seeds=(0,), shots=SHOTS, **options):
    plan = make_plan([shots] * len(seeds), backbone.spec)
    return rollout(backbone, policy, plan, seeds=seeds, sampling=sampling, **options)


def test_frames_oppose_their_neighbours_and_each_is_unit_gaussian():
    generator = torch.Generator().manual_seed(0)
    a = 0.6
    drawn = opposed(lambda: torch.randn(1, 4, 8, 64, 64, generator=generator), a)()
    frames = drawn[0].flatten(1).double()
    assert frames.mean(dim=1).abs().max() < 0.02
    assert (frames.std(dim=1) - 1).abs().max() < 0.02
    # A chain: the correlation at distance n is (-a)^n.
    wanted = torch.tensor([[(-a) ** abs(i - j) for j in range(4)] for i in range(4)], dtype=torch.float64)
    torch.testing.assert_close(frames.corrcoef(), wanted, atol=0.02, rtol=0)


def test_without_it_the_noise_is_the_same_object(backbone):
    noise = block_noise(backbone.spec, [0], Block(0, 0, 3, ("",)))
    assert opposed(noise, 0.0) is noise
    latents = torch.randn(1, 3, 4, 2, 2)
    assert blur_opening(latents, 1, 0.0, [0], 0) is latents
    assert blur_opening(latents, 0, 0.5, [0], 0) is latents


def test_noise_on_the_sink_is_on_its_frames_alone_and_by_seed_and_block():
    latents = torch.randn(2, 3, 4, 5, 6)
    blurred = blur_opening(latents, 2, 0.25, [3, 4], 7)
    assert torch.equal(blurred[:, 2:], latents[:, 2:])
    noise = (blurred - 0.75 * latents)[:, :2] / 0.25
    assert abs(float(noise.std()) - 1) < 0.15
    alone = blur_opening(latents[1:], 2, 0.25, [4], 7)
    assert torch.equal(alone[0], blurred[1])
    assert not torch.equal(blur_opening(latents, 2, 0.25, [3, 4], 8), blurred)


@pytest.mark.parametrize("name", MEMORIES)
def test_every_memory_generates_with_both_and_goes_on_bit_for_bit(backbone, name):
    def fresh():
        return policy_of(backbone, name), backbone.decoder()

    policy, decoder = fresh()
    plain = [made.latents for made in run(backbone, policy_of(backbone, name), PLAIN)]
    straight = list(run(backbone, policy, BOTH, decoder=decoder))
    assert all(torch.isfinite(made.latents).all() for made in straight)
    assert not torch.allclose(straight[-1].latents, plain[-1], atol=1e-3)
    for stop in (1, 4):
        first, first_decoder = fresh()
        begun = run(backbone, first, BOTH, decoder=first_decoder)
        head = [next(begun) for _ in range(stop)]
        second, second_decoder = fresh()
        second.load_state(first.state())
        second_decoder.load_state(first_decoder.state())
        resume = Resume(
            stop,
            recent_latents=[made.latents for made in head[-1:]],
            first_latent=head[0].latents[:, :1],
        )
        tail = list(run(backbone, second, BOTH, decoder=second_decoder, resume=resume))
        for one, other in zip(straight, head + tail, strict=True):
            assert torch.equal(one.latents, other.latents)
    # Made again from the latents alone, the memory is the same.
    again, again_decoder = fresh()
    known = {made.block.index: made.latents for made in straight}
    if not again.needs_queries:
        list(
            run(
                backbone,
                again,
                BOTH,
                decoder=again_decoder,
                resume=Resume(latents_of=lambda b: known[b.index]),
            )
        )
        assert all(torch.equal(again.state()[key], value) for key, value in policy.state().items())


def test_noise_on_the_sink_changes_what_the_sink_holds_and_nothing_without_a_sink(backbone):
    states = []
    for noise in (0.0, 0.4):
        policy = policy_of(backbone, "sink")
        made = run(backbone, policy, Sampling(sink_noise=noise))
        states.append((next(made).latents, policy.state()))
    # The block itself is generated before; the later frames of the block see the first one in the clean pass.
    assert torch.equal(states[0][0], states[1][0])
    assert not torch.allclose(states[0][1]["sink.keys"], states[1][1]["sink.keys"], atol=1e-3)
    none = [
        [made.latents for made in run(backbone, policy_of(backbone, "none"), Sampling(sink_noise=noise))]
        for noise in (0.0, 0.4)
    ]
    assert all(torch.equal(one, other) for one, other in zip(*none, strict=True))


def test_rows_and_paths_agree(backbone):
    config = RecapConfig()

    def latents_of(model, seeds):
        policy = config.build(model.spec, lambda: SeededAdmission(model.spec, seeds))
        return [made.latents for made in run(model, policy, BOTH, seeds)]

    both, alone = latents_of(backbone, (0, 5)), latents_of(backbone, (5,))
    fast = latents_of(FastWanBackbone(backbone), (0, 5))
    for pair, one, quick in zip(both, alone, fast, strict=True):
        torch.testing.assert_close(pair[1:], one, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(quick, pair, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("value", [-0.1, 1.0, math.nan])
@pytest.mark.parametrize("name", ["antiphase", "sink_noise"])
def test_what_is_out_of_range_is_refused(name, value):
    with pytest.raises(ValueError, match=name):
        Sampling(**{name: value})


def test_a_run_and_a_row_of_a_table_set_them_by_name():
    shots = [{"prompt": "a red boat", "seconds": 1.5}]
    config = RunConfig.from_dict({"shots": shots, "antiphase": 0.6, "sink_noise": 0.3})
    assert config.sampling == BOTH and RunConfig.from_dict(config.to_dict()) == config
    assert RunConfig.from_dict({"shots": shots}).sampling == PLAIN
    with pytest.raises(ValueError, match="antiphase"):
        RunConfig.from_dict({"shots": shots, "antiphase": 1.5})
    recipe = replace(RECIPES[0], rows=(Row("flex", {"name": "recap"}, "keys", sampling={"antiphase": 0.6}),))
    runs = plan_runs(recipe, Ask(backbone="untrained", prompts=1, seeds=1))
    assert [run.job.data["config"]["antiphase"] for run in runs] == [0.6]
