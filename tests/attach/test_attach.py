"""attach() on stand-ins of every code base: what changes nothing changes no bit; what the memory does."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext

import pytest
import torch
import upstream_wan as wan
from pipelines import (
    AS_RELEASED,
    KINDS,
    SPEC,
    causal_wan,
    generate,
    generate_interrupted,
    make,
    noise_of,
    switch,
)
from upstream_ll1 import InteractiveCausalInferencePipeline

import recap
from recap import attach
from recap.backbones.noise import block_noise
from recap.backbones.wan.backbone import WanBackbone
from recap.backbones.wan.decoder import UpsampleDecoder
from recap.contracts import MemoryConfig, MemoryPolicy
from recap.memory.base import WindowMemory
from recap.memory.deep_forcing import DeepForcingConfig
from recap.memory.memrope import MemRopeConfig
from recap.memory.recap import RecapConfig, RecapMemory
from recap.memory.relax_forcing import RelaxForcingConfig
from recap.memory.rolling_sink import RollingSinkConfig
from recap.memory.sink import SinkConfig
from recap.memory.window import Window

EMPTY = {  # the whole method, with lambda 1 and no bank
    kind: RecapConfig(sink_frames=KINDS[kind][4], reinforcement=1.0, capacity_frames=0) for kind in KINDS
}

RIVALS = (
    DeepForcingConfig(window_frames=7, budget_frames=7, sink_frames=2),
    MemRopeConfig(window_frames=7, sink_frames=1),
    RollingSinkConfig(window_frames=9, replayed_frames=3),
    RelaxForcingConfig(),
)


def same_caches(one, other):
    for mine, yours in zip(one.kv_cache1, other.kv_cache1, strict=True):
        assert mine.keys() == yours.keys()
        assert all(torch.equal(mine[name], yours[name]) for name in mine)


# --- what equals the code base itself changes no bit ---


@pytest.mark.parametrize("lora", [False, True], ids=["plain", "lora"])
@pytest.mark.parametrize("memory", [AS_RELEASED, EMPTY], ids=["as released", "lambda 1, no bank"])
@pytest.mark.parametrize("kind", KINDS)
def test_as_released_is_unpatched_bit_for_bit(kind, memory, lora):
    bare, remembering = make(kind, lora=lora), make(kind, lora=lora)
    video, latents = generate(bare)
    with attach(remembering, memory[kind], phases="released", flow="classical") as attached:
        remembered_video, remembered = generate(remembering)
    assert torch.equal(latents, remembered) and torch.equal(video, remembered_video)
    same_caches(bare, remembering)
    assert attached.checkout == kind and len(attached.trace) == 6
    assert [list(line.first_pictures) for line in attached.trace[:2]] == [[0, 1, 5], [9, 13, 17]]
    absolute = kind in ("self-forcing", "longlive-1.0")
    assert attached.spec.phases == ("absolute" if absolute else "window")
    assert attached.spec.window_frames == KINDS[kind][3]


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        ("cpu", torch.bfloat16),
        pytest.param("cuda", torch.bfloat16, marks=pytest.mark.cuda),
        pytest.param("cuda", torch.float32, marks=pytest.mark.cuda),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_bit_for_bit_in_half_precision_and_on_a_gpu_too(kind, device, dtype):
    generated = []
    for memory in (None, AS_RELEASED[kind], "recap"):
        pipeline = moved(make(kind), device, dtype)
        noise = noise_of(6).to(device, dtype)
        torch.manual_seed(0)
        options = {"phases": "window" if memory == "recap" else "released", "flow": "classical"}
        with torch.device(device), attach(pipeline, memory, **options) if memory else nullcontext():
            generated.append(pipeline.inference(noise, ["a red boat"], return_latents=True)[1])
    bare, same, remembered = generated
    assert torch.equal(bare, same) and torch.equal(bare[:, :3], remembered[:, :3])
    assert remembered.isfinite().all() and (bare[:, 3:] - remembered[:, 3:]).abs().max() > 1e-2


def moved(pipeline, device, dtype):
    encode, generator, scheduler = pipeline.text_encoder, pipeline.generator, pipeline.scheduler
    pipeline.text_encoder = lambda text_prompts: {
        name: part.to(device, dtype) for name, part in encode(text_prompts).items()
    }
    generator.to(device, dtype)
    generator.model.freqs = generator.model.freqs.to(device)
    scheduler.sigmas, scheduler.timesteps = scheduler.sigmas.to(device), scheduler.timesteps.to(device)
    pipeline.denoising_step_list = pipeline.denoising_step_list.to(device)
    return pipeline


@pytest.mark.parametrize(("window", "sink"), [(6, 0), (6, 1), (7, 0), (7, 3), (12, 1)])
@pytest.mark.parametrize("kind", KINDS)
def test_other_windows_and_sinks_too(kind, window, sink):
    bare, remembering = make(kind, window=window, sink=sink), make(kind, window=window, sink=sink)
    _, latents = generate(bare)
    with attach(remembering, SinkConfig(sink_frames=sink), phases="released"):
        _, remembered = generate(remembering)
    assert torch.equal(latents, remembered)
    same_caches(bare, remembering)


def test_self_forcing_without_a_window_within_one_clip():
    bare, remembering = make("self-forcing", window=-1), make("self-forcing", window=-1)
    _, latents = generate(bare, blocks=7)
    with attach(remembering, "none", phases="released"):
        _, remembered = generate(remembering, blocks=7)
        assert torch.equal(latents, remembered)
        with pytest.raises(ValueError, match=r"kv_cache is 126: .*set the model's local_attn_size"):
            generate(remembering, blocks=8)


@pytest.mark.parametrize("kind", ["self-forcing", "longlive-1.0"])
def test_window_phases_differ_from_absolute_ones_only_once_the_sink_lags(kind):
    """Only differences of time count, so without a sink the two are equal to rounding; a sink that drifts is not."""
    bare, remembering = make(kind), make(kind)
    _, latents = generate(bare)
    with attach(remembering, AS_RELEASED[kind]):
        _, remembered = generate(remembering)
    full = 12 if kind == "longlive-1.0" else 18
    torch.testing.assert_close(remembered[:, :full], latents[:, :full], atol=1e-4, rtol=1e-4)
    if kind == "longlive-1.0":
        assert (remembered[:, full:] - latents[:, full:]).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("at", "global_sink"), [([3], True), ([6], True), ([13], True), ([9, 14], True), ([11], False)], ids=str
)
@pytest.mark.parametrize("kind", ["longlive-1.0", "longlive-1.0-infinity"])
def test_a_prompt_switch_is_followed_bit_for_bit(kind, at, global_sink):
    """After block 0 the re-cache has the range of its clean pass; from frame 15 on it leaves the sink alone."""
    bare, remembering = (
        make(kind, pipeline=InteractiveCausalInferencePipeline, global_sink=global_sink) for _ in range(2)
    )
    _, latents = switch(bare, 7, at)
    with attach(remembering, AS_RELEASED[kind], phases="released") as attached:
        _, remembered = switch(remembering, 7, at)
    assert torch.equal(latents, remembered)
    same_caches(bare, remembering)
    assert [line.block for line in attached.trace] == [*range(7)]


def test_given_frames_go_in_by_the_clean_pass():
    bare, remembering = make("self-forcing"), make("self-forcing")
    given = noise_of(2, seed=8)
    _, latents = generate(bare, initial_latent=given)
    with attach(remembering, "none", phases="released") as attached:
        _, remembered = generate(remembering, initial_latent=given)
    assert torch.equal(latents, remembered)
    assert len(attached.trace) == 8 and not any(attached.trace[0].shares.values())


def test_our_own_rollout_generates_what_the_attached_checkout_does(monkeypatch):
    """The same weights and noise in CausalWan under our loop, with a sink, reinforced, and with each rival."""
    encode, spec = wan.TextEncoder(), SPEC.backbone_spec()
    backbone = WanBackbone(
        causal_wan(), lambda prompt: encode([prompt])["prompt_embeds"], lambda: UpsampleDecoder(spec)
    )
    config = recap.RunConfig.from_dict(
        {"shots": [{"prompt": "a red boat", "seconds": 4.5}], "memory": "sink"}
    )
    plan = recap.make_plan([config.shots], spec)
    sources = [block_noise(spec, [7], block) for block in plan.blocks[:6]]
    noise = torch.cat([source() for source in sources], dim=1)
    fresh = [source() for source in sources for _ in range(3)]

    def upstream(pipeline):
        order = iter(fresh)
        with monkeypatch.context() as patch:
            patch.setattr(torch, "randn_like", lambda flat: next(order).view_as(flat))
            return pipeline.inference(noise, ["a red boat"], return_latents=True)[1]

    for memory in (SinkConfig(), SinkConfig(reinforcement=5.0), *RIVALS):
        blocks = recap.rollout(backbone, memory.build(spec, lambda: None), plan, seeds=[7])
        ours = torch.cat([made.latents for made in blocks], dim=1)
        pipeline = make("infinite-forcing")
        with attach(pipeline, memory):
            theirs = upstream(pipeline)
        torch.testing.assert_close(theirs, ours, atol=1e-5, rtol=0)
        if memory == SinkConfig():
            torch.testing.assert_close(upstream(make("infinite-forcing")), ours, atol=1e-5, rtol=0)


# --- what the memory does ---


@pytest.mark.parametrize("kind", KINDS)
def test_recap_changes_all_but_the_first_block(kind):
    bare, remembering = make(kind), make(kind)
    video, latents = generate(bare)
    with attach(remembering, "recap", flow="classical") as attached:
        seen, remembered = generate(remembering)
    assert torch.equal(latents[:, :3], remembered[:, :3])
    changed = (latents - remembered).abs().amax(dim=(0, 2, 3, 4)) > 1e-2
    assert changed.tolist() == [False] * 3 + [True] * 15
    assert torch.equal(video[:, :9], seen[:, :9]) and video.shape == seen.shape
    first, second, third = attached.trace[:3]
    assert first.shares == {"current": [1.0]} and first.tokens == {"current": 18}
    assert second.tokens == {"sink": 6, "prior": 12, "current": 18, "bank": 6}
    assert sum(share for (share,) in third.shares.values()) == pytest.approx(1, abs=1e-5)
    assert len(first.admitted[0]) == 6
    assert len({tuple(place) for row in attached.memory.bank.entries.source for place in row.tolist()}) == 6


def test_reinforcement_moves_attention_to_the_sink():
    shares = []
    for reinforcement in (2.0, 8.0):
        pipeline = make("infinite-forcing")
        with attach(pipeline, {"name": "sink", "reinforcement": reinforcement}) as attached:
            generate(pipeline, blocks=2)
        shares.append(attached.trace[1].shares["sink"][0])
    assert shares[1] > 1.5 * shares[0]


def test_a_schedule_of_lambda_works_in_a_pipeline_that_does_not_know_of_it():
    shares = {}
    for text in ("8@layers:0", "8@steps:0", "8@heads:top-0.5", "share:0.3@gate", 8):
        pipeline = make("infinite-forcing")
        with attach(pipeline, {"name": "sink", "reinforcement": text}) as attached:
            generate(pipeline, blocks=3)
        last = attached.trace[2].shares
        shares[text] = last["sink"][0]
        assert sum(share for (share,) in last.values()) == pytest.approx(1, abs=1e-5)
        measured = {name for name in attached.memory.state() if name.startswith("reinforcement.")}
        assert bool(measured) == (text in ("8@heads:top-0.5", "share:0.3@gate"))
    assert max(shares["8@layers:0"], shares["8@steps:0"], shares["8@heads:top-0.5"]) < shares[8]
    pipeline = make("infinite-forcing")
    with (
        pytest.raises(ValueError, match="name them by number"),
        attach(pipeline, {"name": "sink", "reinforcement": "5@steps:last-half"}),
    ):
        generate(pipeline, blocks=1)


def test_the_memory_holds_the_clean_pass():
    """What Infinite-Forcing's own cache ends with; the last noisy step made something else of the same frames."""
    bare, remembering = make("infinite-forcing"), make("infinite-forcing")
    noisy = []
    forward = bare.generator.forward

    def watched(**given):
        result = forward(**given)
        if bool((given["timestep"] > 0).all()):
            noisy.append([{name: cache[name][:, 24:].clone() for name in "kv"} for cache in bare.kv_cache1])
        return result

    vars(bare.generator)["forward"] = watched
    generate(bare)
    with attach(remembering, SinkConfig()) as attached:
        generate(remembering)
    state = attached.memory.state()
    for layer, cache in enumerate(bare.kv_cache1):
        for name, part in (("keys", "k"), ("values", "v")):
            assert torch.equal(state[f"prior.{name}"][layer], cache[part][:, 24:])
            assert torch.equal(state[f"sink.{name}"][layer], cache[part][:, :6])
            assert not torch.allclose(state[f"prior.{name}"][layer], noisy[-1][layer][part], atol=1e-3)


@pytest.mark.parametrize("global_sink", [True, False])
def test_a_switch_refreshes_the_prior_keeps_the_sink_and_the_bank_and_scores_nothing(global_sink):
    """Where the checkout takes a new sink, ours stays: it is the opening scene."""
    remembering = make("longlive-1.0", pipeline=InteractiveCausalInferencePipeline, global_sink=global_sink)
    states, recomputed = [], []
    with attach(remembering, "recap", flow="classical", window_frames=6) as attached:
        hook = remembering.generator.forward

        def watched(**given):
            if given["noisy_image_or_video"].shape[1] == 3:
                return hook(**given)
            states.append(attached.memory.state())
            result = hook(**given)
            states.append(attached.memory.state())
            recomputed.append([cache["v"][:, -12:].clone() for cache in remembering.kv_cache1])
            return result

        vars(remembering.generator)["forward"] = watched
        switch(remembering, 7, [14])
        vars(remembering.generator)["forward"] = hook
    before, after = states
    assert before.keys() == after.keys()
    for name in before:
        assert torch.equal(before[name], after[name]) == (name not in ("prior.keys", "prior.values")), name
    assert torch.equal(after["prior.values"], torch.stack(recomputed[0]))
    assert len(attached.trace) == 7


def test_a_memory_that_cannot_be_refreshed_says_so_at_the_switch():
    remembering = make("longlive-1.0", pipeline=InteractiveCausalInferencePipeline)

    class Stubborn(WindowMemory):
        refresh = MemoryPolicy.refresh

    @dataclasses.dataclass(frozen=True)
    class StubbornConfig(MemoryConfig):
        def build(self, spec, admission):
            return Stubborn(Window(spec, sink_frames=1))

    with (
        pytest.raises(ValueError, match="cannot take keys recomputed for a new prompt"),
        attach(remembering, StubbornConfig()),
    ):
        switch(remembering, 4, [6])
    switch(remembering, 4, [6])


@pytest.mark.parametrize("memory", RIVALS, ids=lambda m: type(m).__name__)
def test_rivals_follow_a_switch_of_prompts(memory):
    remembering = make("longlive-1.0", pipeline=InteractiveCausalInferencePipeline)
    with attach(remembering, memory) as attached:
        _, latents = switch(remembering, 6, [9])
    assert len(attached.trace) == 6 and torch.isfinite(latents).all()


def test_noise_that_the_checkout_draws_is_not_promised():
    remembering = make("self-forcing")
    with (
        pytest.raises(ValueError, match=r"RollingSink.*same noise.*switch that setting off"),
        attach(remembering, RollingSinkConfig(tiled_noise=True)),
    ):
        generate(remembering)


def test_each_video_starts_with_an_empty_memory():
    alone = make("infinite-forcing")
    with attach(alone, "recap", flow="classical"):
        _, expected = generate(alone, seed=4)
    pipeline = make("infinite-forcing")
    with attach(pipeline, "recap", flow="classical") as attached:
        generate(pipeline, seed=1)
        with pytest.raises(KeyboardInterrupt):
            generate_interrupted(pipeline, at=5)
        _, latents = generate(pipeline, seed=4)
    assert torch.equal(latents, expected)
    assert [(line.video, line.block) for line in attached.trace] == [
        *((0, block) for block in range(6)), (1, 0), *((2, block) for block in range(6))
    ]  # fmt: skip


def test_a_flow_that_knows_one_world_is_refused():
    pipeline = make("infinite-forcing")
    with (
        pytest.raises(ValueError, match=r"flow is 'world-flow'.*`embedded` alone"),
        attach(pipeline, "recap", flow="world-flow"),
    ):
        generate(pipeline, blocks=1)


def test_the_flow_in_use_is_reported_once(capsys):
    pipeline = make("infinite-forcing")
    with attach(pipeline, "recap"):
        generate(pipeline, blocks=1)
        generate(pipeline, blocks=1)
    assert capsys.readouterr().out.count("flow: classical") == 1


def test_rows_of_a_batch_need_a_decoder():
    spec = SPEC.backbone_spec()

    def both(pipeline, **options):
        with attach(pipeline, "recap", flow="classical", **options):
            torch.manual_seed(0)
            return pipeline.inference(noise_of(3, rows=2), ["a red boat", "a house"], return_latents=True)

    with pytest.raises(ValueError, match=r"batch is 2: .*pass decoder="):
        both(make("infinite-forcing"))
    _, latents = both(make("infinite-forcing"), decoder=lambda: UpsampleDecoder(spec))
    assert latents.shape[0] == 2


BLIND = ("keys", "random", "recent", "diversity-keys")
"""Rules to which it does not matter what the pictures show."""


@pytest.mark.parametrize("kind", KINDS)
def test_a_rule_that_needs_no_pictures_has_none_decoded(kind, monkeypatch):
    """Only the pipeline's own last step decodes; the video is what decoding on the way would have led to."""
    generated = []
    for forced in (False, True):
        pipeline = make(kind)
        with monkeypatch.context() as patched:
            if forced:
                patched.setattr(RecapMemory, "needs_pixels", True)
            rule = {"name": "keys", "margin": 0.2}
            with attach(pipeline, "recap", admission=rule, reuse_pictures=False) as attached:
                generated.append(generate(pipeline))
        frames = generated[-1][1].shape[1]
        assert pipeline.vae.model.frames_decoded == (2 if forced else 1) * frames
        assert sum(line.num_pictures for line in attached.trace) == generated[-1][0].shape[1]
        assert max(score for line in attached.trace for *_, score in line.admitted[0]) > 0
    assert torch.equal(generated[0][0], generated[1][0]) and torch.equal(generated[0][1], generated[1][1])


@pytest.mark.parametrize("rule", BLIND)
def test_rows_of_a_batch_need_no_decoder_without_pictures(rule):
    """The autoencoder of a checkout streams one row, but nothing is streamed."""
    pipeline = make("infinite-forcing")
    with attach(pipeline, "recap", admission=rule) as attached:
        torch.manual_seed(0)
        _, latents = pipeline.inference(noise_of(3, rows=2), ["a red boat", "a house"], return_latents=True)
    assert latents.shape[0] == 2 and torch.isfinite(latents).all()
    assert len(attached.trace[-1].admitted) == 2


def test_the_rotary_table_is_no_limit():
    short, whole = make("self-forcing"), make("self-forcing")
    short.generator.model.freqs = short.generator.model.freqs[:9]
    with pytest.raises((IndexError, RuntimeError)):
        generate(short)
    generated = []
    for pipeline in (short, whole):
        with attach(pipeline, "recap", flow="classical"):
            generated.append(generate(pipeline)[1])
    assert torch.equal(*generated)
    for mine, yours in zip(short.kv_cache1, whole.kv_cache1, strict=True):
        torch.testing.assert_close(mine["k"], yours["k"], atol=1e-6, rtol=0)
