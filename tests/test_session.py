"""What a session generates depends on its config and its timeline alone, whichever way it came there."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from recap.config import RunConfig
from recap.io.cast import Subject, write_cast
from recap.plan import Shot, make_plan
from recap.rollout import rollout
from recap.run import build_memory
from recap.session import Session
from recap.types import Role

PROMPTS = ("a red boat", "a blue house", "two birds")
MEMORIES = ("none", "sink", "recap", "recap-plus", "deep-forcing", "memrope", "rolling-sink", "relax-forcing")


ONE_SHOT = (Shot("a red boat", 3.0),)


def config_of(memory="recap", shots=ONE_SHOT, **more):
    plain = {
        "shots": [
            {"prompt": s.prompt, "seconds": s.seconds, "cut": s.cut, "reread": s.reread} for s in shots
        ],
        "backbone": {"name": "untrained"},
        "memory": {"name": memory},
        "flow": "classical",
        **more,
    }
    return RunConfig.from_dict(plain)


def session_of(backbone, config=None, **more):
    return Session(config or config_of(), backbone=backbone, **more)


def steps(session, count):
    return [session.step() for _ in range(count)]


def latents(blocks):
    return torch.cat([made.latents for made in blocks], dim=1)


def same_state(one, other):
    a, b = one.snapshot().memory, other.snapshot().memory
    for left, right in ((a.policy, b.policy), (a.decoder, b.decoder)):
        assert left.keys() == right.keys()
        assert all(torch.equal(left[name], right[name]) for name in left), "a state differs"


@pytest.mark.parametrize("memory", MEMORIES)
def test_a_session_generates_what_a_rollout_does_and_then_continues(backbone, memory):
    shots = (
        Shot("a red boat", 2.0),
        Shot("two birds", 2.0),
        Shot("a blue house", 2.0, cut=False, reread=True),
    )
    config = config_of(memory, shots)
    plan = make_plan([config.shots], backbone.spec)
    policy = build_memory(config, backbone.spec, lambda _: None)
    planned = list(rollout(backbone, policy, plan, seeds=config.seeds))
    session = session_of(backbone, config)
    stepped = steps(session, len(planned))
    assert torch.equal(latents(stepped), latents(planned))
    assert torch.equal(stepped[-1].pixels, planned[-1].pixels)
    assert [made.block for made in stepped] == [made.block for made in planned]
    assert all(
        torch.equal(policy.state()[name], value) for name, value in session.snapshot().memory.policy.items()
    )
    assert session.step().block.prompts == ("a blue house",)


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("states_bytes", [0, 10**9])
def test_going_back_anywhere_and_forward_again_changes_no_bit(backbone, memory, states_bytes):
    shots = (Shot("a red boat", 2.0), Shot("two birds", 2.0))
    session = session_of(backbone, config_of(memory, shots), states_bytes=states_bytes)
    whole = steps(session, 7)
    end = session.fork()
    for block in (6, 3, 0, 5):
        session.rewind(block)
        assert session.next_block == block
        again = steps(session, 7 - block)
        assert torch.equal(latents(again), latents(whole[block:])), block
        same_state(session, end)


def test_a_fork_under_the_same_prompts_is_the_original(backbone):
    session = session_of(backbone)
    steps(session, 2)
    early = session.fork(1)
    session.prompt("two birds", cut=True)
    whole = steps(session, 3)
    early.step()
    early.prompt("two birds", cut=True)
    assert torch.equal(latents(steps(early, 3)), latents(whole))
    same_state(session, early)


def test_forks_do_not_touch_each_other(backbone):
    session = session_of(backbone)
    steps(session, 2)
    fork, kept = session.fork(), session.snapshot()
    fork.prompt("a blue house")
    other = steps(fork, 2)
    own = steps(session, 2)
    assert not torch.equal(latents(own), latents(other))
    session.restore(kept)
    assert torch.equal(latents(steps(session, 2)), latents(own))
    assert list(fork.cues.values()) != list(session.cues.values())


COMMANDS = st.one_of(
    st.just(("step",)),
    st.just(("step",)),
    st.tuples(
        st.just("prompt"), st.sampled_from(PROMPTS), st.integers(0, 3), st.sampled_from(["", "cut", "reread"])
    ),
    st.tuples(st.just("rewind"), st.floats(0, 1)),
    st.tuples(st.just("fork"), st.floats(0, 1)),
    st.tuples(st.just("set"), st.sampled_from([1.0, 5.0, "5@heads:top-0.5", "5@gate:0.25", "share:0.3"])),
    st.just(("snapshot",)),
    st.just(("restore",)),
)


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.sampled_from(["sink", "recap"]), st.sampled_from([0, 10**6, 10**9]), st.lists(COMMANDS, max_size=14)
)
def test_whatever_is_commanded_the_video_is_a_function_of_its_timeline(
    backbone, memory, states_bytes, commands
):
    """A session that is stepped through the final timeline from the start generates the same, bit for bit."""
    session = session_of(backbone, config_of(memory), states_bytes=states_bytes)
    kept = session.snapshot()
    for name, *values in commands:
        if name == "step":
            session.step()
        elif name == "prompt":
            text, later, kind = values
            session.prompt(text, session.next_block + later, cut=kind == "cut", reread=kind == "reread")
        elif name == "rewind":
            session.rewind(round(values[0] * session.next_block))
        elif name == "fork":
            session = session.fork(round(values[0] * session.next_block))
        elif name == "set":
            session.set(reinforcement=values[0])
        elif name == "snapshot":
            kept = session.snapshot()
        else:
            session.restore(kept)
    made = session.step()
    plain = session_of(backbone, config_of(memory))
    plain._cues, plain._reinforcements = dict(session._cues), dict(session._reinforcements)
    expected = steps(plain, session.next_block)
    assert torch.equal(made.latents, expected[-1].latents)
    assert torch.equal(made.pixels, expected[-1].pixels)
    same_state(session, plain)


def test_a_refused_command_changes_nothing(backbone):
    session = session_of(backbone)
    steps(session, 2)
    before = session.snapshot()
    for command, field in (
        (lambda: session.prompt(7), "prompt"),
        (lambda: session.prompt("  "), "prompt"),
        (lambda: session.prompt("two birds", at=1), "at"),
        (lambda: session.prompt("two birds", at=True), "at"),
        (lambda: session.prompt("two birds", cut=True, reread=True), "reread"),
        (lambda: session.rewind(3), "block"),
        (lambda: session.rewind(-1), "block"),
        (lambda: session.fork(1.0), "block"),
        (lambda: session.set(reinforcement=0.0), "reinforcement"),
        (lambda: session.set(reinforcement=float("nan")), "reinforcement"),
        (lambda: session.set(reinforcement="5@layers:99"), "reinforcement"),
        (lambda: session.drop_cue(0), "cue"),
        (lambda: session.restore(session_of(backbone, config_of("sink")).snapshot()), "snapshot"),
    ):
        with pytest.raises(ValueError, match=f"^{field} is"):
            command()
    after = session.snapshot()
    assert (after.cues, after.reinforcements, after.block) == (
        before.cues,
        before.reinforcements,
        before.block,
    )
    session.step()


def test_reinforcement_takes_effect_from_the_next_block_on(backbone):
    session = session_of(backbone)
    weak = session.fork()
    weak.set(reinforcement=1.0)
    strong, plain = steps(session, 3)[-1], steps(weak, 3)[-1]
    assert strong.shares[Role.SINK].item() > 1.5 * plain.shares[Role.SINK].item()


@pytest.mark.parametrize("text", ["5@layers:last-half", "5@heads:top-0.5@gate:0.25", "share:0.3"])
def test_a_schedule_of_lambda_is_part_of_the_timeline(backbone, text):
    """Also where states are few, and blocks in between are read from their latents."""
    session = session_of(backbone, states_bytes=0)
    session.step()
    session.set(reinforcement=text)
    whole = steps(session, 5)
    session.rewind(4)
    assert torch.equal(latents(steps(session, 2)), latents(whole[-2:]))
    never = session_of(backbone)
    assert not torch.equal(latents(steps(never, 6)[-1:]), latents(whole[-1:]))


def test_scheduled_prompts_begin_where_they_should_and_can_be_dropped(backbone):
    session = session_of(backbone)
    session.prompt("two birds", at=2)
    session.prompt("a blue house", at=4)
    assert [made.block.prompts[0] for made in steps(session, 3)] == ["a red boat", "a red boat", "two birds"]
    session.drop_cue(4)
    assert session.step().block.prompts == session.step().block.prompts == ("two birds",)


def test_the_history_is_bounded_and_says_how_far_it_goes(backbone):
    session = session_of(backbone, history_s=4.0)
    steps(session, 40)
    block_s = 3 * 4 / 16
    assert 40 - session.oldest_block >= 4.0 / block_s
    assert len(session._latents) <= 12
    assert len(session._states) <= 8
    with pytest.raises(ValueError, match=f"{session.oldest_block} to 40"):
        session.rewind(session.oldest_block - 1)
    expected = session.fork().step()
    session.rewind(session.oldest_block)
    again = steps(session, 40 - session.next_block)
    assert len(again) > 4
    assert torch.equal(session.step().latents, expected.latents)


def test_fewer_states_are_kept_where_they_are_large(backbone):
    size = session_of(backbone)
    steps(size, 2)
    large = size.snapshot().memory.num_bytes
    session = session_of(backbone, history_s=30.0, states_bytes=5 * large)
    steps(session, 40)
    assert sum(state.num_bytes for state in session._states.values()) <= 7 * large


def test_a_loop_ends_when_the_session_is_paused(backbone):
    session = session_of(backbone)
    for made in session:
        if made.block.index == 2:
            session.pause()
    assert session.next_block == 3
    session.play()
    assert next(iter(session)).block.index == 3


def fox_of(backbone, made, name="fox"):
    """A subject cut out of a finished block."""
    spec = backbone.spec
    mask = torch.zeros(spec.frames_per_block, *spec.grid, dtype=torch.bool)
    mask[-1, 0] = True
    picture = np.zeros((4, 4, 3), dtype=np.uint8)
    return Subject(name, f"a {name}", made.latents[0].clone(), mask, mask.float(), picture)


def test_pinned_and_forgotten_slots_come_back_with_a_rebuilt_memory(backbone):
    """Whether blocks are reached by stepping, or rebuilt from latents, the memory was changed at the same block."""
    session = session_of(backbone, states_bytes=0)
    steps(session, 2)
    first, second, third = (slot.number for slot in session.bank[:3])
    session.pin([first, second], "fox")
    session.forget([third])
    assert {slot.number for slot in session.bank}.isdisjoint({first, second, third})
    later = steps(session, 3)
    assert later[0].memory.tokens[Role.CAST] == 2
    fork = session.fork(4)
    same_state(fork, session.fork(4))
    assert torch.equal(latents(steps(fork, 1)), latents(later[2:]))
    kept = session.snapshot()
    session.rewind(2)
    assert session.fork().bank != () and Role.CAST not in session.step().memory.tokens
    session.restore(kept)
    same_state(session, fork)


def test_a_subject_joins_and_leaves(backbone):
    session = session_of(backbone)
    made = session.step()
    session.cast(fox_of(backbone, made))
    count = backbone.spec.grid[1]
    assert session.step().memory.tokens[Role.CAST] == count
    session.prompt("@fox and two birds")
    block = session.step().block
    assert block.prompts == ("a fox and two birds",) and block.subjects == ("fox",)
    with pytest.raises(ValueError, match="that name is in use"):
        session.cast(fox_of(backbone, made))
    with pytest.raises(ValueError, match="the cast has fox"):
        session.prompt("@wolf")
    session.cast(fox_of(backbone, made, "bus"))
    assert session.step().memory.tokens[Role.CAST] == count, "the prompt names the fox alone"
    session.prompt("two birds")
    assert session.step().memory.tokens[Role.CAST] == 2 * count
    session.drop_cast("fox")
    assert session.step().memory.tokens[Role.CAST] == count
    other = session.fork(1)
    other.cast(fox_of(backbone, made))
    assert other.step().memory.tokens[Role.CAST] == count


def test_a_cast_changes_what_is_generated_and_its_first_block_sees_it(backbone, tmp_path):
    plain = session_of(backbone)
    opening = plain.step()
    write_cast(tmp_path / "fox.cast", [fox_of(backbone, opening)])
    config = config_of(cast=[str(tmp_path / "fox.cast")])
    session = session_of(backbone, config)
    made = session.step()
    assert made.memory.tokens[Role.CAST] == backbone.spec.grid[1]
    assert not torch.equal(made.latents, opening.latents)
    session.step()
    session.rewind(0)
    assert torch.equal(session.step().latents, made.latents)


def test_a_memory_without_a_bank_takes_no_cast(backbone):
    session = session_of(backbone, config_of("sink"))
    made = session.step()
    assert session.bank == ()
    with pytest.raises(ValueError, match="choose recap"):
        session.cast(fox_of(backbone, made))
    session.step()


@pytest.mark.parametrize("admission", ["flow", "flow-texture", "random", "recent", "diversity-keys"])
@pytest.mark.parametrize("states_bytes", [0, 10**9])
def test_the_size_of_the_bank_changes_at_a_block_and_is_rebuilt_there(backbone, admission, states_bytes):
    session = session_of(backbone, config_of(admission=admission), states_bytes=states_bytes)
    steps(session, 2)
    small = len(session.bank)
    session.set(capacity_frames=2.0)
    assert len(session.bank) == small, "a larger bank has what the smaller one had"
    steps(session, 2)
    large = session.bank
    assert len(large) > small
    session.set(capacity_frames=0.5)
    assert len(session.bank) == backbone.spec.frame_tokens // 2
    assert {slot.source for slot in session.bank} <= {slot.source for slot in large}
    kept = session.snapshot()
    later = steps(session, 3)
    gone = {(t, h, w) for t, h, w in later[0].memory.evicted.source[0].tolist() if t >= 0}
    assert len(gone) >= len(large) - backbone.spec.frame_tokens // 2, "the trace says what left"
    session.restore(kept)
    assert torch.equal(latents(steps(session, 3)), latents(later))
    end = session.fork()
    session.rewind(5)
    assert torch.equal(latents(steps(session, 2)), latents(later[1:]))
    same_state(session, end)
    session.rewind(3)
    session.step()
    assert session.bank == large, "going back undid the second change, not the first"


def test_sizes_that_cannot_be_are_refused_and_change_nothing(backbone):
    session = session_of(backbone)
    steps(session, 2)
    before = session.bank
    for size in (-1.0, 1e9, float("nan")):
        with pytest.raises(ValueError, match="capacity_frames"):
            session.set(capacity_frames=size)
    assert session.bank == before and session._edits == {}
    with pytest.raises(ValueError, match="has no bank"):
        session_of(backbone, config_of("sink")).set(capacity_frames=1.0)


def test_a_bank_of_no_size_is_empty_and_can_grow_again(backbone):
    session = session_of(backbone)
    steps(session, 2)
    session.set(capacity_frames=0.0)
    assert session.bank == () and Role.BANK not in session.step().memory.tokens
    session.set(capacity_frames=1.0)
    steps(session, 2)
    assert len(session.bank) > 0


def test_who_left_is_still_who_earlier_prompts_named(backbone):
    """Going back to a block whose past names a subject that has left since."""
    session = session_of(backbone)
    made = session.step()
    session.cast(fox_of(backbone, made))
    session.prompt("@fox and two birds")
    steps(session, 2)
    session.prompt("two birds")
    session.drop_cast("fox")
    later = steps(session, 2)
    for block in (4, 3):
        fork = session.fork(block)
        if block == 3:
            fork.drop_cast("fox")
        assert torch.equal(latents(steps(fork, 5 - block)), latents(later[block - 3 :]))


def test_a_subject_can_join_as_it_was_read_under_an_earlier_prompt(backbone):
    session = session_of(backbone)
    made = session.step()
    other = session.fork()
    session.cast(fox_of(backbone, made))
    read_under = other.prompt_at(1)
    other.prompt("two birds")
    other.cast(fox_of(backbone, made), prompt=read_under)
    session.prompt("two birds")
    assert torch.equal(session.step().latents, other.step().latents)


@pytest.mark.parametrize("edit", ["forget", "pin"])
def test_long_after_an_edit_a_snapshot_still_continues_bit_for_bit(backbone, edit):
    """The emptied slots are full again by then; the bank must be read as it was all along."""
    session = session_of(backbone)
    session.step()
    getattr(session, edit)([1, 2])
    steps(session, 2)
    other = session.fork()
    later = steps(session, 2)
    assert torch.equal(latents(steps(other, 2)), latents(later))
    session.rewind(4)
    assert torch.equal(session.step().latents, later[1].latents)
    same_state(session, other)
