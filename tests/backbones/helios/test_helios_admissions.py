"""Every admission of the registry on chunks that are decoded alone: generated and resumed, or refused in words."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from helios_fakes import FRAMES, PROMPT, TinyHelios, call, make_pipeline

from recap import attach
from recap.config import RunConfig
from recap.contracts import Flow
from recap.eval.metrics.bank import bank_story
from recap.flow import ClassicalFlow
from recap.io.cast import Subject
from recap.io.trace import BlockTrace
from recap.memory.recap import RecapConfig
from recap.plan import Shot, make_plan
from recap.registry import ADMISSIONS
from recap.rollout import Resume, rollout
from recap.session import Session
from recap.types import Block

CHUNKS, CHUNK_S = 4, 33 / 24
SETTINGS = {"random": {"seed": 3}, "diversity": {"num_centres": 8}, "diversity-keys": {"num_centres": 8}}
REFUSED = {"recent": "takes what leaves the window, and this backbone's own history is its window"}


@pytest.fixture(scope="module")
def helios():
    return TinyHelios().build(device="cpu", dtype=torch.float32, prompts=[], notice=print)


def memory(rule, spec, dino):
    settings = {"model": dino} if rule == "diversity" else {}
    config = ADMISSIONS[rule](**SETTINGS.get(rule, {}), **settings)
    return RecapConfig().build(spec, lambda: config.build(spec, ClassicalFlow()))


def plan_of(spec):
    """Two shots of two chunks each."""
    return make_plan([[Shot(PROMPT, 2 * CHUNK_S), Shot("a house", 2 * CHUNK_S)]], spec)


@pytest.mark.parametrize("rule", [rule for rule in ADMISSIONS if rule not in REFUSED])
def test_four_chunks_with_a_cut_fill_the_bank_and_can_be_stopped(rule, dino, helios):
    spec, plan = helios.spec, plan_of(helios.spec)
    policy = memory(rule, spec, dino)
    begun, blocks, states = rollout(helios, policy, plan, seeds=[1]), [], []
    for made in begun:
        blocks.append(made)
        states.append(policy.state())
    lines = [json.loads(json.dumps(BlockTrace.of(made, offered=True).to_json())) for made in blocks]
    lines = [BlockTrace.from_json(line) for line in lines]
    assert len(lines) == CHUNKS and all(made.latents.isfinite().all() for made in blocks)
    assert [line.clears_prior for line in lines] == [False, False, True, False]
    for index, line in enumerate(lines):
        first = index * FRAMES + (index == 0)  # the opening frame is the sink's
        assert line.offered.frames == list(range(first, (index + 1) * FRAMES))
        assert len(line.fired[0]) == FRAMES
        assert line.tokens.get("bank", 0) == (spec.frame_tokens if index else 0)
    story = bank_story(lines)
    assert story.complete and len(story.bank) == spec.frame_tokens
    if not rule.startswith("diversity"):  # which keeps what is different, whatever its score
        assert story.overlap == [1.0] * CHUNKS
    assert min(story.ages) > 0 and max(story.ages) < 1

    second = memory(rule, spec, dino)
    second.load_state(states[2])
    seen = [made.latents for made in blocks[:3]]
    tail = rollout(helios, second, plan, seeds=[1], resume=Resume(3, None, seen, seen[0][:, :1]))
    (last,) = tail
    assert torch.equal(last.latents, blocks[3].latents) and BlockTrace.of(last) == BlockTrace.of(blocks[3])


@pytest.mark.parametrize("rule", REFUSED)
def test_what_cannot_work_is_refused_in_words(rule, dino, helios):
    with pytest.raises(ValueError, match=REFUSED[rule]):
        memory(rule, helios.spec, dino)
    pipeline = make_pipeline("distilled")
    with pytest.raises(ValueError, match=REFUSED[rule]), attach(pipeline, "recap", admission=rule):
        call(pipeline, "distilled", chunks=1)


@pytest.mark.parametrize("rule", ["flow", "flow-texture"])
def test_flow_rules_count_the_pictures_of_chunks_that_are_decoded_alone(rule, helios):
    """Picture 33 is the first frame of the second chunk by itself; picture 34 belongs to the frame after it."""
    size = helios.spec.picture_size
    still = lambda pictures: Flow(*[torch.zeros(1, pictures.shape[1] - 1, 2, 32, 64)] * 2)  # noqa: E731
    novelty = ADMISSIONS[rule]().build(helios.spec, still)
    assert not novelty.propose(Block(0, 0, FRAMES, ("",)), torch.zeros(1, 33, 3, *size)).score.any()
    second = torch.zeros(1, 33, 3, *size)
    second[:, 0:, :, :16, :16] = 1.0  # appears in picture 33 and stays
    second[:, 1:, :, 16:32, 32:48] = 1.0  # a picture later
    found = novelty.propose(Block(1, FRAMES, FRAMES, ("",)), second)
    assert found.source[found.score > 0].tolist() == [[9, 0, 0], [10, 1, 2]]


def test_texture_is_passed_over_in_the_users_pipeline_too():
    pipeline = make_pipeline("distilled")
    with attach(pipeline, "recap", admission="flow-texture", flow="classical") as attached:
        call(pipeline, "distilled", chunks=3)
    assert [line.tokens.get("bank", 0) for line in attached.trace] == [0, 32, 32]
    assert [list(line.first_pictures) for line in attached.trace] == [
        [33 * chunk, *range(33 * chunk + 1, 33 * chunk + 33, 4)] for chunk in range(3)
    ]


def test_ages_of_a_single_chunk_are_shares_of_it(helios):
    plan = make_plan([[Shot(PROMPT, CHUNK_S)]], helios.spec)
    policy = memory("random", helios.spec, None)
    story = bank_story([BlockTrace.of(made) for made in rollout(helios, policy, plan, seeds=[1])])
    assert {round(age * FRAMES) for age in story.ages} <= set(range(1, FRAMES))


def test_a_cast_joins_and_leaves(helios):
    """What is cast is read at the next chunk; once it has left, the video is that of a session without it."""
    shots = [{"prompt": PROMPT, "seconds": 2.0}]
    settings = {"shots": shots, "backbone": "untrained", "admission": {"name": "random"}, "seeds": [1]}
    session = Session(RunConfig.from_dict(settings), backbone=helios)
    made = session.step()
    mask = torch.zeros((made.block.num_frames, *helios.spec.grid), dtype=torch.bool)
    mask[-1, 1, 2:5] = True
    picture = np.zeros((*helios.spec.picture_size, 3), np.uint8)
    fox = Subject("fox", "a fox", made.latents[0], mask, mask.float(), picture)
    alone, joined, left = (session.fork() for _ in range(3))
    joined.cast(fox)
    left.cast(fox)
    left.drop_cast("fox")
    latents = [each.step().latents for each in (alone, joined, left)]
    assert torch.equal(latents[0], latents[2])
    assert not torch.equal(latents[0], latents[1]) and latents[1].isfinite().all()
