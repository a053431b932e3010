"""Our loop over diffusers' untouched transformer: off it is diffusers' own pipeline bit for bit; on, what changes."""

from __future__ import annotations

import importlib.util
import json
import sys
import types

import pytest
import torch

pytest.importorskip("diffusers")

from diffusers.hooks import group_offloading
from helios_fakes import (
    CHUNKS,
    FRAMES,
    PROMPT,
    ROWS,
    PipelineNoise,
    SeededAdmission,
    call,
    make_backbone,
    make_pipeline,
    stock_latents,
    text_of,
)

from recap.attention.context import BlockContext
from recap.backbones.helios.backbone import HeliosBackbone
from recap.backbones.helios.family import offload_groups
from recap.backbones.helios.sampler import correlated
from recap.io.trace import BlockTrace
from recap.memory.recap import RecapConfig
from recap.memory.sink import NoMemoryConfig, SinkConfig
from recap.plan import Shot, make_plan
from recap.registry import MEMORIES
from recap.rollout import Resume, rollout
from recap.types import Block, Past, Role


def generate_chunks(backbone, kind, config, chunks=CHUNKS, noise=None):
    """The rollout's loop with the noise of diffusers' pipeline; latents, and per block the context and the trace."""
    spec = backbone.spec
    policy = config.build(spec, lambda: SeededAdmission(spec))
    noise, decoder = noise or PipelineNoise(kind), backbone.decoder()
    conditioning, opening, chunks_so_far, records = backbone.condition((PROMPT,)), None, [], []
    for index in range(chunks):
        block = Block(index, index * FRAMES, FRAMES, (PROMPT,))
        past = Past(opening, torch.cat(chunks_so_far, dim=1) if chunks_so_far else None)
        context = BlockContext(policy, policy.begin(block), past=past)
        latents = backbone.denoise(noise.block(), conditioning, context)
        shares = context.shares(), context.stage_shares()
        pixels = decoder.decode(latents)
        backbone.settle(latents, conditioning, context.clean_pass())
        records.append((*shares, policy.commit(block, pixels), pixels))
        chunks_so_far.append(latents)
        opening = latents[:, :1] if opening is None else opening
    return torch.cat(chunks_so_far, dim=1), records, policy


OFF = {
    "none": NoMemoryConfig(),
    "sink": SinkConfig(),
    "lambda 1, no bank": RecapConfig(reinforcement=1.0, capacity_frames=0),
}


@pytest.mark.parametrize("memory", OFF)
@pytest.mark.parametrize("kind", ROWS)
def test_off_is_the_stock_pipeline_bit_for_bit(kind, memory):
    latents, records, _ = generate_chunks(make_backbone(kind), kind, OFF[memory])
    expected = stock_latents(kind)
    assert expected.shape[1] == CHUNKS * FRAMES
    assert torch.equal(expected, latents)
    assert all(shares == {} for shares, *_ in records)


def test_pictures_are_those_of_the_stock_pipeline():
    frames = call(make_pipeline("distilled"), "distilled", output_type="pt")
    _, records, _ = generate_chunks(make_backbone("distilled"), "distilled", NoMemoryConfig())
    pictures = torch.cat([pixels for *_, pixels in records], dim=1)
    assert pictures.shape[1] == CHUNKS * 33 and frames.shape[1] == 97  # diffusers cuts to 4k + 1
    assert torch.equal(pictures[:, :97], frames)


@pytest.mark.parametrize("kind", ROWS)
def test_on_the_first_chunk_stays_and_later_ones_change(kind):
    latents, records, policy = generate_chunks(make_backbone(kind), kind, RecapConfig())
    expected = stock_latents(kind)
    assert torch.equal(latents[:, :FRAMES], expected[:, :FRAMES])
    for chunk in range(1, CHUNKS):
        own = slice(chunk * FRAMES, (chunk + 1) * FRAMES)
        assert not torch.equal(latents[:, own], expected[:, own])
        shares, by_stage, trace, _ = records[chunk]
        assert set(shares) == set(trace.tokens) == {Role.SINK, Role.BANK, Role.PRIOR, Role.CURRENT}
        torch.testing.assert_close(sum(shares.values()), torch.ones(1), rtol=0, atol=1e-5)
        assert sorted(by_stage) == list(range(len(ROWS[kind].steps)))
    assert records[0][0] == {} and Role.SINK not in records[0][2].tokens
    assert policy.bank.count == 32


def test_bank_holds_what_the_clean_pass_made_of_the_frames_it_names():
    """Layer 0 has no context: every slot must be the embedding of its own frame and place."""
    backbone = make_backbone("distilled")
    latents, _, policy = generate_chunks(backbone, "distilled", RecapConfig())
    model, kept = backbone.transformer, policy.bank.entries.source[0]
    frames = latents.transpose(1, 2)
    hidden = model.patch_short(frames)[0]  # D F rows columns
    block = model.blocks[0]
    zero, text = torch.zeros(1, dtype=torch.int64), torch.zeros(1, 1, 8)
    _, times, _ = model.condition_embedder(zero, text)
    shift, scale = (block.scale_shift_table + times.unflatten(-1, (6, -1)))[0, :2]
    for slot, (frame, row, column) in enumerate(kept.tolist()):
        token = block.norm1(hidden[:, frame, row, column].float()) * (1 + scale) + shift
        key = block.attn1.norm_k(block.attn1.to_k(token)).unflatten(-1, (2, -1))
        torch.testing.assert_close(policy.bank.keys[0, 0, slot], key, rtol=0, atol=1e-5)
    assert kept[:, 0].min() > 0  # the opening is the sink's


def test_stages_may_have_their_own_lambda():
    records = {}
    for stages in ((), (1.0, 1.8, 5.0), (5.0, 5.0, 5.0)):
        backbone = make_backbone("distilled", stage_reinforcement=stages)
        latents, blocks, _ = generate_chunks(backbone, "distilled", SinkConfig(reinforcement=5.0), chunks=2)
        records[stages] = latents, [share[Role.SINK].item() for _, share in sorted(blocks[1][1].items())]
    assert torch.equal(records[()][0], records[5.0, 5.0, 5.0][0])
    coarse, _, fine = records[1.0, 1.8, 5.0][1]
    assert coarse < records[()][1][0] and fine == pytest.approx(records[()][1][2], abs=0.05)
    with pytest.raises(ValueError, match="3 stages"):
        make_backbone("distilled", stage_reinforcement=(1.0, 5.0))
    with pytest.raises(ValueError, match="above 0"):
        make_backbone("distilled", stage_reinforcement=(1.0, 0.0, 5.0))


@pytest.mark.slow
def test_lambda_by_layer_and_by_share_and_what_helios_cannot_do():
    backbone = make_backbone("distilled")

    def shares_of(reinforcement):
        policy = SinkConfig(reinforcement=reinforcement).build(backbone.spec, lambda: None)
        made = list(rollout(backbone, policy, plan_of(backbone, 5.5), seeds=[1]))
        return [block.shares[Role.SINK].item() for block in made[1:]], policy

    weak, strong = shares_of("5@layers:0")[0], shares_of(5.0)[0]
    assert 0 < weak[0] < strong[0]
    shares, policy = shares_of("share:0.3")
    assert len(shares) > 2 and shares[-1] == pytest.approx(0.3, abs=0.05)
    assert set(policy.state()) == {"reinforcement.bonus"}
    for text in ("5@steps:0", "5@heads:top-0.5", "5@gate"):
        with pytest.raises(ValueError, match="reinforcement is"):
            shares_of(text)


def plan_of(backbone, *seconds, cut=True):
    return make_plan([[Shot(f"{PROMPT}{i}", s, cut=cut) for i, s in enumerate(seconds)]], backbone.spec)


def test_stopping_and_going_on_changes_nothing():
    backbone = make_backbone("distilled")
    plan = plan_of(backbone, 4 * 33 / 24)
    assert len(plan.blocks) == 4

    def fresh():
        return RecapConfig().build(backbone.spec, lambda: SeededAdmission(backbone.spec))

    straight = list(rollout(backbone, fresh(), plan, seeds=[1]))
    first = fresh()
    begun = rollout(backbone, first, plan, seeds=[1])
    head = [next(begun) for _ in range(2)]
    second = fresh()
    second.load_state(first.state())
    seen = [made.latents for made in head]
    tail = rollout(backbone, second, plan, seeds=[1], resume=Resume(2, None, seen, seen[0][:, :1]))
    for one, other in zip(straight[2:], tail, strict=True):
        assert torch.equal(one.latents, other.latents)
        assert BlockTrace.of(one) == BlockTrace.of(other)
    record = BlockTrace.of(straight[-1]).to_json()
    assert [set(stage) for stage in record["attention_share_by_stage"]] == [
        {"sink", "bank", "prior", "current"}
    ] * 3
    json.dumps(record)


def test_a_cut_empties_the_history_and_keeps_sink_and_bank():
    backbone, seen = make_backbone("distilled"), []
    ask = backbone._forward
    backbone._forward = lambda asked, text: (seen.append(asked), ask(asked, text))[1]
    policy = SinkConfig(reinforcement=5.0).build(backbone.spec, lambda: None)
    made = list(rollout(backbone, policy, plan_of(backbone, 1.3, 1.3), seeds=[1]))
    assert [block.block.clears_prior for block in made] == [False, True]
    short = seen[-1]["latents_history_short"]
    assert not seen[-1]["latents_history_long"].any() and not short[:, :, 1].any()
    assert torch.equal(short[:, :, 0], made[0].latents[:, 0])
    assert Role.SINK in made[1].shares


def test_one_model_serves_rollouts_that_take_turns():
    backbone = make_backbone("distilled")
    scripts = [(RecapConfig(), PROMPT), (SinkConfig(reinforcement=5.0), "a fox")]

    def begun():
        for config, prompt in scripts:
            policy = config.build(backbone.spec, lambda: SeededAdmission(backbone.spec))
            plan = make_plan([[Shot(prompt, 2 * 33 / 24)]], backbone.spec)
            yield rollout(backbone, policy, plan, seeds=[1])

    alone = [[made.latents for made in live] for live in begun()]
    in_turns = zip(*([made.latents for made in both] for both in zip(*begun(), strict=True)), strict=True)
    for expected, found in zip(alone, in_turns, strict=True):
        assert len(found) == 2 and all(map(torch.equal, expected, found))


def test_two_rows_are_two_videos():
    """One batch against two runs; rounding differs with the shapes of the products."""
    backbone = make_backbone("distilled")
    plan = make_plan([[Shot(PROMPT, 2.75)]] * 2, backbone.spec)
    config = RecapConfig()

    def fresh():
        return config.build(backbone.spec, lambda: SeededAdmission(backbone.spec))

    both = list(rollout(backbone, fresh(), plan, seeds=[1, 2]))
    one = list(rollout(backbone, fresh(), make_plan([[Shot(PROMPT, 2.75)]], backbone.spec), seeds=[1]))
    torch.testing.assert_close(both[0].latents[:1], one[0].latents, rtol=0, atol=1e-4)


@pytest.mark.parametrize("rival", ["deep-forcing", "memrope", "rolling-sink", "relax-forcing"])
def test_memories_that_keep_a_window_are_refused(rival):
    spec = ROWS["distilled"].backbone_spec()
    with pytest.raises(ValueError, match="none, sink or recap"):
        MEMORIES[rival]().build(spec, lambda: SeededAdmission(spec))


def test_what_is_refused_says_why():
    backbone = make_backbone("distilled")
    with pytest.raises(ValueError, match="attach"):
        backbone.encode(torch.zeros(1, 33, 3, 64, 128))
    with pytest.raises(ValueError, match="one frame of the opening"):
        SinkConfig(sink_frames=2).build(backbone.spec, lambda: None)
    with pytest.raises(ValueError, match="at least one row"):
        backbone.condition(())


def test_cell_noise_has_the_covariance_that_is_claimed():
    for gamma in (0.2, 1 / 3):
        noise = correlated(torch.randn(4000, 4, 4), 2, gamma)
        cells = noise.unflatten(-1, (2, 2)).unflatten(-3, (2, 2)).transpose(-3, -2).reshape(-1, 4)
        expected = torch.eye(4) * (1 + gamma) - gamma
        torch.testing.assert_close(cells.T @ cells / len(cells), expected, rtol=0, atol=0.05)


def test_weights_that_are_brought_over_group_by_group_compute_the_same(monkeypatch):
    """Where accelerate is missing, the one function diffusers' hooks take from it is put in its place."""
    backbone = make_backbone("distilled")
    if importlib.util.find_spec("accelerate") is None:
        with pytest.raises(ValueError, match="accelerate"):
            offload_groups(backbone.transformer, torch.device("cpu"))
        monkeypatch.setitem(sys.modules, "accelerate", types.ModuleType("accelerate"))
        monkeypatch.setattr(group_offloading, "send_to_device", lambda x, *_, **__: x, raising=False)
    offload_groups(backbone.transformer, torch.device("cpu"))
    latents, _, _ = generate_chunks(backbone, "distilled", NoMemoryConfig())
    assert torch.equal(latents, stock_latents("distilled"))


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_off_is_the_stock_pipeline_on_a_gpu_too(dtype):
    pipeline, other = make_pipeline("distilled"), make_pipeline("distilled")
    for each in (pipeline, other):
        each.transformer.to("cuda", dtype)
        each.vae.to("cuda")
    backbone = HeliosBackbone(ROWS["distilled"], other.transformer, other.scheduler, text_of, other.vae)
    latents, _, _ = generate_chunks(backbone, "distilled", NoMemoryConfig())
    assert torch.equal(call(pipeline, "distilled"), latents)
    remembered, records, _ = generate_chunks(backbone, "distilled", RecapConfig())
    assert torch.equal(remembered[:, :FRAMES], latents[:, :FRAMES])
    shares, by_stage, trace, _ = records[-1]
    assert remembered.isfinite().all() and not torch.equal(remembered, latents)
    assert set(trace.tokens) == {Role.SINK, Role.BANK, Role.PRIOR, Role.CURRENT}
    # Keys of equal bias are read by one kernel there, so that only the reinforced sink has a share of its own.
    assert set(shares) == {Role.SINK} and all(set(stage) == {Role.SINK} for stage in by_stage.values())
