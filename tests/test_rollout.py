"""What a rollout does besides its plan: given frames, sent prompts, priors read again, noise from outside, turns."""

from __future__ import annotations

import gc
import weakref
from itertools import islice

import pytest
import torch

from recap.admission.flow import FlowNoveltyConfig
from recap.backbones.noise import block_noise
from recap.contracts import MemoryPolicy
from recap.fast.backbone import FastWanBackbone
from recap.memory.base import WindowMemory
from recap.memory.recap import RecapConfig
from recap.memory.rolling_sink import RollingSinkConfig
from recap.memory.sink import NoMemoryConfig, SinkConfig
from recap.memory.window import Window
from recap.plan import Shot, make_plan
from recap.rollout import BlockRun, Resume, reach, rollout
from recap.types import Role


class StillFlow:
    """Nothing moves."""

    def __call__(self, pictures):
        from recap.contracts import Flow

        shape = (pictures.shape[0], pictures.shape[1] - 1, 2, *pictures.shape[3:])
        return Flow(torch.zeros(shape), torch.zeros(shape))


def policy_of(config, backbone):
    spec = backbone.spec
    return config.build(spec, lambda: FlowNoveltyConfig().build(spec, StillFlow()))


def generate(backbone, config, shots, **more):
    plan = make_plan([shots], backbone.spec, more.pop("given_frames", 0))
    return list(rollout(backbone, policy_of(config, backbone), plan, seeds=[0], **more))


def latents(blocks):
    return torch.cat([made.latents for made in blocks], dim=1)


@pytest.mark.parametrize("config", [NoMemoryConfig(), SinkConfig(), RecapConfig()])
def test_given_frames_are_remembered_as_if_they_had_been_generated(backbone, config):
    shots = [Shot("a red boat", 6.0)]
    whole = generate(backbone, config, shots)
    again = generate(backbone, config, shots, resume=Resume(opening_latents=latents(whole[:3])))
    assert torch.equal(latents(again), latents(whole))
    assert all(not made.shares for made in again[:3])  # nothing was generated, so nothing was attended to
    assert torch.equal(
        torch.cat([made.pixels for made in again], 1), torch.cat([made.pixels for made in whole], 1)
    )


def test_where_nothing_is_new_a_bank_without_zero_scores_is_a_sink(backbone):
    """Until something fires it holds nothing, and what it holds nothing of is not attended to."""
    shots = [Shot("a red boat", 6.0)]
    empty = generate(backbone, RecapConfig(zero_scores_fill=False), shots)
    sink = generate(backbone, SinkConfig(reinforcement=5.0), shots)
    filled = generate(backbone, RecapConfig(), shots)
    if any(made.memory.fired.sum() for made in empty):
        pytest.fail("the flow is still and yet something fired: choose other pictures")
    torch.testing.assert_close(latents(empty), latents(sink), atol=1e-5, rtol=1e-4)
    assert (latents(filled) - latents(sink)).abs().max() > 1e-3
    assert all((made.memory.admitted.score == -1).all() for made in empty)


@pytest.mark.parametrize("frames", [1, 2, 3, 4, 8])
def test_given_frames_need_not_fill_blocks(backbone, frames):
    spec = backbone.spec
    opening = torch.randn(1, frames, spec.latent_channels, *spec.latent_size)
    resume = Resume(opening_latents=opening)
    made = generate(backbone, RecapConfig(), [Shot("a red boat", 4.5)], resume=resume, given_frames=frames)
    blocks = [each.block for each in made]
    assert blocks[0].num_frames == (frames % spec.frames_per_block or spec.frames_per_block)
    assert [b.first_frame for b in blocks[1:]] == [b.end_frame for b in blocks[:-1]]
    assert blocks[-1].end_frame == frames + 6 * spec.frames_per_block
    assert torch.equal(latents(made)[:, :frames], opening)
    pictures = sum(each.pixels.shape[1] for each in made)
    assert pictures == spec.num_pictures(blocks[-1].end_frame)
    shown = 0
    for each in made:
        assert each.first_pictures[0] == shown and len(each.first_pictures) == each.block.num_frames
        shown += each.pixels.shape[1]
    # The sink is the first given frame, and windows are full once there is enough to fill them.
    full = made[-1].memory.tokens
    assert full[Role.SINK] == spec.frame_tokens and full[Role.PRIOR] == 2 * spec.frame_tokens


def test_a_prompt_that_is_sent_holds_until_the_next_shot(backbone):
    shots = [Shot("a red boat", 3.0), Shot("a house", 1.5, cut=False)]
    plan = make_plan([shots], backbone.spec)
    planned = generate(backbone, SinkConfig(), shots)
    live = rollout(backbone, policy_of(SinkConfig(), backbone), plan, seeds=[0])
    made = [next(live), live.send("a blue tree"), *live]
    prompts = [each.block.prompts[0] for each in made]
    assert prompts == ["a red boat", "a blue tree", "a blue tree", "a blue tree", "a house", "a house"]
    assert torch.equal(made[0].latents, planned[0].latents)
    assert not torch.equal(made[1].latents, planned[1].latents)


def test_rereading_changes_the_prior_and_keeps_the_sink(backbone):
    plain = [Shot("a red boat", 3.0), Shot("a house", 1.5, cut=False)]
    reread = [plain[0], Shot("a house", 1.5, cut=False, reread=True)]
    kept, other = (policy_of(SinkConfig(), backbone) for _ in range(2))
    plan = [make_plan([shots], backbone.spec) for shots in (plain, reread)]
    one = list(rollout(backbone, kept, plan[0], seeds=[0]))
    two = list(rollout(backbone, other, plan[1], seeds=[0]))
    assert torch.equal(latents(one[:4]), latents(two[:4]))
    assert not torch.equal(one[4].latents, two[4].latents)
    assert torch.equal(kept.state()["sink.keys"], other.state()["sink.keys"])
    # Under the same prompt a prior read again is what it was, but for what it saw of its own past.
    same = [plain[0], Shot("a red boat", 1.5, cut=False, reread=True)]
    short = [Shot("a red boat", 4.5)]
    three, four = generate(backbone, SinkConfig(), same), generate(backbone, SinkConfig(), short)
    near = (three[4].latents - four[4].latents).abs().mean()
    assert near < (two[4].latents - four[4].latents).abs().mean()


def test_a_stopped_rollout_rereads_what_it_is_handed(backbone):
    shots = [Shot("a red boat", 2.25), Shot("a house", 1.5, cut=False, reread=True)]
    plan, spec = make_plan([shots], backbone.spec), backbone.spec
    whole = generate(backbone, SinkConfig(), shots)
    first = policy_of(SinkConfig(), backbone)
    *_, last = islice(rollout(backbone, first, plan, seeds=[0]), 3)
    second = policy_of(SinkConfig(), backbone)
    second.load_state(first.state())
    assert reach(spec) == 1
    resume = Resume(3, recent_latents=[last.latents])
    rest = list(rollout(backbone, second, plan, seeds=[0], resume=resume))
    assert torch.equal(latents(rest), latents(whole[3:]))
    with pytest.raises(ValueError, match="rereads the prior"):
        next(rollout(backbone, second, plan, seeds=[0], resume=Resume(3)))


def test_a_cut_leaves_nothing_to_reread():
    with pytest.raises(ValueError, match="reread"):
        Shot("a red boat", 1.0, cut=True, reread=True)


def test_a_memory_that_cannot_reread_is_refused_where_a_script_asks_for_it(backbone):
    class Plain(WindowMemory):
        reread = MemoryPolicy.reread

    plan = make_plan(
        [[Shot("a red boat", 0.75), Shot("a house", 0.75, cut=False, reread=True)]], backbone.spec
    )
    live = rollout(backbone, Plain(Window(backbone.spec)), plan, seeds=[0])
    next(live)
    with pytest.raises(ValueError, match=r"Plain.*reread"):
        next(live)


# --- noise from outside ---


def stream(spec, num_blocks, rows=1, seed=11):
    """As the public codes draw it: the whole video's start at once, then one draw per later step."""
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, 3 * num_blocks, spec.latent_channels, *spec.latent_size)
    start = torch.randn(shape, generator=generator)
    fresh = torch.randn((num_blocks, 3, rows, 3, *shape[2:]), generator=generator)
    asked = []

    def noise(block, draw):
        asked.append((block.index, draw))
        return start[:, block.first_frame : block.end_frame] if draw == 0 else fresh[block.index, draw - 1]

    return noise, asked


def test_noise_from_outside_replaces_the_seeds(backbone):
    plan = make_plan([[Shot("a red boat", 3.0)]] * 2, backbone.spec)

    def generated(seeds, noise=None):
        policy = policy_of(RecapConfig(), backbone)
        return latents(rollout(backbone, policy, plan, seeds=seeds, noise=noise))

    noise, asked = stream(backbone.spec, 4, rows=2)
    one = generated([0, 1], noise)
    assert asked == [(block, draw) for block in range(4) for draw in range(4)]
    assert torch.equal(one, generated([5, 9], noise))
    other, _ = stream(backbone.spec, 4, rows=2, seed=12)
    assert not torch.equal(one, generated([0, 1], other))
    assert not torch.equal(one, generated([0, 1]))


def test_the_seeds_own_noise_from_outside_gives_the_same_video(backbone):
    plan = make_plan([[Shot("a red boat", 3.0)]], backbone.spec)
    own = {}
    for block in plan.blocks:
        draw = block_noise(backbone.spec, [7], block)
        own[block.index] = [draw() for _ in range(4)]
    for config in (RecapConfig(), RollingSinkConfig(tiled_noise=True)):
        expected = latents(rollout(backbone, policy_of(config, backbone), plan, seeds=[7]))
        found = rollout(
            backbone,
            policy_of(config, backbone),
            plan,
            seeds=[0],
            noise=lambda block, draw: own[block.index][draw].double(),
        )
        assert torch.equal(latents(found), expected)


def test_a_stopped_rollout_continues_with_noise_from_outside(backbone):
    plan = make_plan([[Shot("a red boat", 4.5)]], backbone.spec)
    noise, asked = stream(backbone.spec, 6)
    whole = list(rollout(backbone, policy_of(RecapConfig(), backbone), plan, seeds=[0], noise=noise))
    first, decoder = policy_of(RecapConfig(), backbone), backbone.decoder()
    begun = list(islice(rollout(backbone, first, plan, seeds=[0], noise=noise, decoder=decoder), 3))
    second, decoder_again = policy_of(RecapConfig(), backbone), backbone.decoder()
    second.load_state(first.state())
    decoder_again.load_state(decoder.state())
    asked.clear()
    recent = [made.latents for made in begun[-reach(backbone.spec) :]]
    resume = Resume(3, recent_latents=recent, first_latent=begun[0].latents[:, :1])
    rest = rollout(backbone, second, plan, seeds=[0], noise=noise, decoder=decoder_again, resume=resume)
    assert torch.equal(latents([*begun, *rest]), latents(whole))
    assert asked[0] == (3, 0)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            lambda right: right[:, :2],
            r"noise is 'torch.float32 \(1, 2, 16, .*draw 0 of block 0 must be floats",
        ),
        (lambda right: right.expand(2, -1, -1, -1, -1), r"must be floats of shape \(1, 3, 16"),
        (lambda right: right[0], r"noise is 'torch.float32 \(3, 16"),
        (lambda right: right.int(), "noise is 'torch.int32"),
        (lambda right: right.numpy(), "noise is 'ndarray'"),
    ],
)
def test_noise_of_another_shape_is_refused(backbone, wrong, message):
    noise, _ = stream(backbone.spec, 2)
    plan = make_plan([[Shot("a red boat", 1.5)]], backbone.spec)
    policy = policy_of(SinkConfig(), backbone)
    with pytest.raises(ValueError, match=message):
        next(rollout(backbone, policy, plan, seeds=[0], noise=lambda block, draw: wrong(noise(block, draw))))


class Refusing:
    """A backbone that cannot read one word."""

    def __init__(self, backbone):
        self._backbone = backbone

    def __getattr__(self, name):
        return getattr(self._backbone, name)

    def condition(self, prompts):
        if "unicorn" in prompts[0]:
            raise ValueError("prompt: 'unicorn' is unknown")
        return self._backbone.condition(prompts)


def test_a_refused_prompt_leaves_the_rollout_as_it_was(backbone):
    shots = [Shot("a red boat", 3.0)]
    plan = make_plan([shots], backbone.spec)
    planned = generate(backbone, SinkConfig(), shots)
    live = rollout(Refusing(backbone), policy_of(SinkConfig(), backbone), plan, seeds=[0])
    made = [next(live), next(live)]
    for _ in range(2):
        with pytest.raises(ValueError, match="unicorn"):
            live.send("a unicorn")
    made += [next(live), live.send("a blue tree")]
    assert torch.equal(latents(made[:3]), latents(planned[:3]))
    assert [each.block.prompts[0] for each in made] == ["a red boat"] * 3 + ["a blue tree"]
    with pytest.raises(StopIteration):
        next(live)


def test_a_prompt_may_be_sent_before_the_first_block(backbone):
    plan = make_plan([[Shot("a red boat", 1.5)]], backbone.spec)
    live = rollout(backbone, policy_of(SinkConfig(), backbone), plan, seeds=[0])
    made = [live.send("a blue tree"), *live]
    assert torch.equal(latents(made), latents(generate(backbone, SinkConfig(), [Shot("a blue tree", 1.5)])))


@pytest.mark.parametrize("path", ["readable", "fast"])
def test_one_model_serves_rollouts_that_take_turns(backbone, path):
    """Other prompts, memories and lengths of window in turns: each generates what it does alone."""
    model = backbone if path == "readable" else FastWanBackbone(backbone)
    scripts = [(RecapConfig(), "a red boat"), (SinkConfig(), "a blue tree"), (RecapConfig(), "a house")]

    def begun():
        for config, prompt in scripts:
            plan = make_plan([[Shot(prompt, 3.0)]], model.spec)
            yield rollout(model, policy_of(config, model), plan, seeds=[0])

    alone = [latents(live) for live in begun()]
    in_turns = zip(*begun(), strict=True)
    for expected, found in zip(alone, zip(*in_turns, strict=True), strict=True):
        assert torch.equal(latents(found), expected)


@pytest.mark.parametrize("path", ["readable", "fast"])
def test_another_block_between_two_passes_changes_nothing(backbone, path):
    model = backbone if path == "readable" else FastWanBackbone(backbone)
    plan = make_plan([[Shot("a red boat", 2.25)]], model.spec)

    def state_after(disturb):
        policy, other = policy_of(SinkConfig(), model), policy_of(SinkConfig(), model)
        theirs = iter(rollout(model, other, make_plan([[Shot("a house", 2.25)]], model.spec), seeds=[1]))
        conditioning = model.condition(("a red boat",))
        with torch.no_grad():
            for block in plan.blocks:
                run = BlockRun(policy, model.spec, block)
                made = model.denoise(block_noise(model.spec, [0], block), conditioning, run.context)
                if disturb:
                    next(theirs)
                model.settle(made, conditioning, run.clean)
                run.commit(made, torch.zeros(1, 1, 3, 1, 1))
        return policy.state()

    expected, found = state_after(False), state_after(True)
    assert all(torch.equal(expected[name], value) for name, value in found.items())


@pytest.mark.parametrize("prompt", [1, b"a cat", ["a cat"], 1.5, {"prompt": "a cat"}, object(), True])
def test_only_text_can_be_sent_and_the_rollout_continues(backbone, prompt):
    plan = make_plan([[Shot("a red boat", 2.25)]], backbone.spec)
    live = rollout(backbone, policy_of(SinkConfig(), backbone), plan, seeds=[0])
    made = [next(live)]
    with pytest.raises(ValueError, match=r"prompt is .*must be text"):
        live.send(prompt)
    made += [live.send(None), *live]
    assert torch.equal(latents(made), latents(generate(backbone, SinkConfig(), [Shot("a red boat", 2.25)])))


def test_an_empty_text_is_a_prompt_and_not_silence(backbone):
    plan = make_plan([[Shot("a red boat", 1.5)]], backbone.spec)
    live = rollout(backbone, policy_of(SinkConfig(), backbone), plan, seeds=[0])
    assert [next(live).block.prompts, live.send("").block.prompts] == [("a red boat",), ("",)]


@pytest.mark.parametrize("seed", ["a", 1.5, None, True, 2.0])
def test_seeds_are_whole_numbers(backbone, seed):
    plan = make_plan([[Shot("a red boat", 1.0)]], backbone.spec)
    with pytest.raises(ValueError, match="whole numbers"):
        rollout(backbone, policy_of(SinkConfig(), backbone), plan, seeds=[seed])


@pytest.mark.parametrize("start", [-1, 4, 1.0, None, "1", True])
def test_a_rollout_starts_within_its_plan(backbone, start):
    """A start of -1 generated the last block without a word."""
    plan = make_plan([[Shot("a red boat", 2.25)]], backbone.spec)
    with pytest.raises(ValueError, match="blocks 0 to 2"):
        rollout(backbone, policy_of(SinkConfig(), backbone), plan, seeds=[0], resume=Resume(block=start))


@pytest.mark.parametrize("blocks", [1, 2])
def test_a_dropped_rollout_keeps_nothing(backbone, blocks):
    """Its decoder has gigabytes and recordings on a GPU: they must go at once, not when garbage is collected."""
    policy, decoder = SinkConfig().build(backbone.spec, lambda: None), backbone.decoder()
    plan = make_plan([[Shot("a boat", 2.25)]], backbone.spec)
    begun = rollout(backbone, policy, plan, seeds=[0], decoder=decoder)
    for _ in range(blocks):
        next(begun)
    kept = [weakref.ref(part) for part in (policy, decoder)]
    gc.disable()
    try:
        del begun, policy, decoder
        assert [part() for part in kept] == [None, None]
    finally:
        gc.enable()


def test_a_rollout_has_ended_after_an_error(backbone, monkeypatch):
    plan = make_plan([[Shot("a boat", 2.25)]], backbone.spec)
    policy, decoder = SinkConfig().build(backbone.spec, lambda: None), backbone.decoder()
    begun = rollout(backbone, policy, plan, seeds=[0], decoder=decoder)
    next(begun)

    def fail(latents):
        raise OSError("disk full")

    monkeypatch.setattr(decoder, "decode", fail)
    with pytest.raises(OSError, match="disk full"):
        next(begun)
    assert list(begun) == []
