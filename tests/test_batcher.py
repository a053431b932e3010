"""Videos that are generated in one forward: nobody's bits depend on the others, and nobody waits for long."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from recap.config import RunConfig
from recap.errors import RecapError
from recap.fast.accelerate import accelerate
from recap.fast.backbone import FastWanBackbone
from recap.session import Session
from recap.session.batcher import Batcher, step_together
from tests.test_session import MEMORIES, PROMPTS, config_of, same_state

WIDTH = 3


def session_of(backbone, number, batcher, memory="recap", **more):
    plain = config_of(memory, **more).to_dict()
    plain["shots"][0]["prompt"] = PROMPTS[number % 3]
    config = RunConfig.from_dict({**plain, "seeds": [number]})
    return Session(config, backbone=backbone, batcher=batcher)


@pytest.fixture
def joint(monkeypatch):
    """How many videos each joint forward had."""
    sizes = []
    whole = Batcher._run_joint

    def counted(self, rows):
        sizes.append(len(rows))
        return whole(self, rows)

    monkeypatch.setattr(Batcher, "_run_joint", counted)
    return sizes


def same_block(one, other):
    assert one.block == other.block and one.first_pictures == other.first_pictures
    assert torch.equal(one.latents, other.latents) and torch.equal(one.pixels, other.pixels)
    assert one.memory.tokens == other.memory.tokens and one.shares.keys() == other.shares.keys()
    assert all(torch.equal(one.shares[role], other.shares[role]) for role in one.shares)


@pytest.mark.parametrize("memory", MEMORIES)
def test_a_video_is_the_same_whoever_is_generated_with_it(backbone, memory, joint):
    batcher = Batcher(WIDTH)
    alone = [session_of(backbone, number, batcher, memory) for number in (0, 1)]
    expected = [[session.step() for _ in range(4)] for session in alone]
    joint.clear()
    first, second = (session_of(backbone, number, batcher, memory) for number in (0, 1))
    # One is a block ahead of the other, and their order changes.
    made = [[first.step()], []]
    for turn in range(3):
        both = (first, second) if turn % 2 else (second, first)
        blocks = dict(zip(both, step_together(both), strict=True))
        made[0].append(blocks[first])
        made[1].append(blocks[second])
    made[1].append(second.step())
    for own, wanted in zip(made, expected, strict=True):
        for one, other in zip(own, wanted, strict=True):
            same_block(one, other)
    for own, wanted in zip((first, second), alone, strict=True):
        same_state(own, wanted)
    if memory in ("none", "sink", "recap"):
        # Windows fill up within two blocks of this model; from then on blocks of any number are alike.
        assert joint[-3:] == [2, 2, 1], "videos that stood alike were not generated together"
    if memory == "deep-forcing":
        assert joint == [], "what it shows is not known before its first step"


def test_cuts_prompts_lambda_edits_and_rewinds_stay_with_their_video(backbone, joint):
    def direct(session, block):
        if block == 2:
            session.prompt("two birds", cut=True)
        if block == 3:
            session.set(reinforcement=2.0)
            session.forget([0, 1])
        if block == 4:
            session.prompt("a red boat", reread=True)
        if block == 5:
            session.rewind(3)

    batcher = Batcher(WIDTH)
    alone, led = (session_of(backbone, 0, batcher) for _ in range(2))
    plain, joined = (session_of(backbone, 1, batcher) for _ in range(2))
    for block in range(6):
        direct(alone, block)
        direct(led, block)
        wanted = [alone.step(), plain.step()]
        for one, other in zip(step_together([joined, led])[::-1], wanted, strict=True):
            same_block(one, other)
    same_state(alone, led)
    same_state(plain, joined)
    assert 2 in joint


def test_a_session_that_moved_goes_on_from_its_latents_with_the_same_bits(backbone):
    batcher = Batcher(WIDTH)
    pair = [session_of(backbone, number, batcher) for number in (0, 1)]
    blocks = [step_together(pair) for _ in range(4)]
    elsewhere = session_of(backbone, 0, Batcher(WIDTH))
    for first, _ in blocks:
        elsewhere.step(first.latents)
    same_state(elsewhere, pair[0])
    same_block(elsewhere.step(), step_together(pair)[0])


def test_another_width_differs_by_roundings_alone(backbone):
    narrow, wide = (session_of(backbone, 0, Batcher(width)) for width in (1, WIDTH))
    for _ in range(3):
        assert torch.allclose(narrow.step().latents, wide.step().latents, atol=1e-4)


def test_a_width_at_which_places_matter_is_refused(backbone, monkeypatch):
    batcher = Batcher(WIDTH)
    batcher.check(session_of(backbone, 0, batcher))

    def uneven(*given, denoise=backbone.denoise):
        latents = denoise(*given)
        latents[-1] *= 1 + 1e-6
        return latents

    monkeypatch.setattr(backbone, "denoise", uneven)
    with pytest.raises(RecapError, match="depend on its index"):
        batcher.check(session_of(backbone, 0, batcher))


def test_the_fast_path_gives_a_video_the_same_bits_in_any_batcher(backbone, joint):
    fast, batcher = accelerate(backbone, on_cpu=True), Batcher(WIDTH)
    assert isinstance(fast, FastWanBackbone)
    alone, first, second = (session_of(fast, number, batcher) for number in (0, 0, 1))
    first.step()
    expected = [alone.step() for _ in range(4)][1:]
    for wanted in expected:
        same_block(step_together([second, first])[1], wanted)
    same_state(first, alone)
    assert joint[-1] == 2


@pytest.mark.parametrize("width", [0, 65, True, 2.0])
def test_a_width_out_of_bounds_is_refused(width):
    with pytest.raises(RecapError, match="batch"):
        Batcher(width)


def test_a_session_notes_in_how_many_rows_its_blocks_were_generated(backbone):
    alone, wide, choosy = (
        session_of(backbone, 0, Batcher(width), memory)
        for width, memory in ((1, "recap"), (WIDTH, "recap"), (WIDTH, "deep-forcing"))
    )
    for session in (alone, wide, choosy):
        for _ in range(2):
            session.step()
    assert alone.snapshot().rows == {} and wide.snapshot().rows == {0: WIDTH}
    assert choosy.snapshot().rows == {}, "it is generated by itself in any batch"
    moved = session_of(backbone, 0, Batcher(4))
    moved.restore(wide.snapshot())
    moved.step()
    assert moved.snapshot().rows == {0: WIDTH, 2: 4}
    moved.rewind(1)
    moved.step()
    assert moved.snapshot().rows == {0: WIDTH, 1: 4}, "block 1 was generated again, in four rows"


@pytest.mark.parametrize("memory", ["sink", "recap"])
def test_blocks_are_read_in_as_many_rows_as_they_were_generated_in(backbone, memory):
    session = session_of(backbone, 0, Batcher(WIDTH), memory)
    session.prompt("two birds", 2)
    blocks = []
    for number in range(5):
        session.batcher = Batcher(WIDTH if number < 3 else 4)
        blocks.append(session.step())
    # As after a kill: nothing is left but latents and what the record says.
    other = session_of(backbone, 0, Batcher(1), memory)
    plain = other.snapshot()
    other.restore(replace(plain, cues=session.snapshot().cues, rows=session.snapshot().rows))
    for block in blocks:
        other.step(block.latents)
    same_state(other, session)
    again = session_of(backbone, 0, Batcher(1), memory)
    again.restore(replace(plain, cues=session.snapshot().cues))
    for block in blocks:
        again.step(block.latents)
    with pytest.raises(AssertionError):
        same_state(again, session)
