"""Every memory of the registry on every backbone that needs no weights: the promises of `MemoryPolicy`.

What takes many blocks runs on `untrained` alone; `every_backbone` marks what the others must hold too.
"""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from recap.admission.base import ScoredAdmission
from recap.backbones.helios.spec import ROWS as HELIOS
from recap.backbones.noise import block_noise
from recap.backbones.wan.backbone import UntrainedConfig
from recap.backbones.wan.spec import RELEASED
from recap.contracts import MemoryPolicy
from recap.io.trace import BlockTrace
from recap.memory.recap import RecapConfig
from recap.memory.sink import SinkConfig
from recap.plan import Shot, make_plan
from recap.registry import BACKBONES, MEMORIES, load_backbone
from recap.rollout import Resume, rollout
from recap.types import Card, Role

# Settings with which three blocks already compress, fold and replay; a memory without a row runs as it is.
QUICK = {
    "deep-forcing": {"window_frames": 7, "budget_frames": 7, "sink_frames": 2},
    "memrope": {"window_frames": 7, "sink_frames": 1},
    "rolling-sink": {"window_frames": 9, "replayed_frames": 3},
}
CONFIGS = {name: kind(**QUICK.get(name, {})) for name, kind in MEMORIES.items()}


class SeededAdmission(ScoredAdmission):
    """Scores by row seed and block: an admission without pictures, so that laws hold for any scores."""

    def __init__(self, spec, seeds=(0,)):
        super().__init__(spec.grid)
        self.seeds = seeds

    def score(self, block, pixels):
        tokens = block.num_frames * self._grid[0] * self._grid[1]
        generators = [torch.Generator().manual_seed(1000 * seed + block.index) for seed in self.seeds]
        return torch.stack([torch.rand(tokens, generator=g) for g in generators]).round(decimals=1)


PROMPT = "a boat on the sea"  # understood by every backbone
SECONDS = 2.25  # three blocks, or nine of one frame, fill window and bank
WITHOUT_WEIGHTS = [name for name in BACKBONES if name not in {*RELEASED, *HELIOS}]


@pytest.fixture(scope="module", params=[*WITHOUT_WEIGHTS, "blocks-of-1"])
def every_backbone(request):
    if request.param == "blocks-of-1":
        return UntrainedConfig(frames_per_block=1).build(device="cpu", dtype=torch.float32)
    return load_backbone(request.param)


def lasting(spec, blocks):
    """Seconds of so many blocks."""
    return blocks * spec.frames_per_block * spec.pictures_per_frame / spec.pictures_per_second


def generate(backbone, config, *, seconds=None, seeds=(0,), shots=None):
    policy = config.build(backbone.spec, lambda: SeededAdmission(backbone.spec, seeds))
    shots = shots or [Shot(PROMPT, seconds or SECONDS)]
    plan = make_plan([shots] * len(seeds), backbone.spec)
    return list(rollout(backbone, policy, plan, seeds=seeds)), policy


def same(one, other):
    return all(torch.equal(a.latents, b.latents) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_memory_of_the_registry_has_a_card_and_asks_for_an_admission_if_it_keeps_a_bank(backbone, name):
    asked = []
    policy = CONFIGS[name].build(backbone.spec, lambda: asked.append(1) or SeededAdmission(backbone.spec))
    assert isinstance(policy, MemoryPolicy) and isinstance(CONFIGS[name].card, Card)
    assert bool(asked) == CONFIGS[name].keeps_bank


@pytest.mark.parametrize("name", CONFIGS)
def test_policy_runs_and_its_trace_adds_up(every_backbone, name):
    backbone = every_backbone
    blocks, _ = generate(backbone, CONFIGS[name], seeds=(0, 1))
    for made in blocks:
        assert torch.isfinite(made.latents).all()
        assert made.pixels.min() >= 0 and made.pixels.max() <= 1
        assert set(made.shares) == set(made.memory.tokens)
        torch.testing.assert_close(sum(made.shares.values()), torch.ones(2), rtol=0, atol=1e-5)
    record = BlockTrace.of(blocks[-1])
    attended = sum(record.tokens.values()) / backbone.spec.frame_tokens
    budgets, filled = CONFIGS[name].attended_frames(backbone.spec), blocks[-1].block.end_frame
    assert attended in budgets or attended == filled < max(budgets)


@pytest.mark.parametrize("name", CONFIGS)
def test_stopping_and_continuing_changes_nothing(every_backbone, name):
    backbone, spec = every_backbone, every_backbone.spec
    plan = make_plan([[Shot(PROMPT, SECONDS)]], spec)

    def fresh():
        return CONFIGS[name].build(spec, lambda: SeededAdmission(spec)), backbone.decoder()

    policy, decoder = fresh()
    straight = list(rollout(backbone, policy, plan, seeds=[3], decoder=decoder))
    for stop in sorted({1, 2, len(plan.blocks) // 2, len(plan.blocks) - 1}):
        first, first_decoder = fresh()
        begun = rollout(backbone, first, plan, seeds=[3], decoder=first_decoder)
        head = [next(begun) for _ in range(stop)]
        second, second_decoder = fresh()
        second.load_state(first.state())
        second_decoder.load_state(first_decoder.state())
        tail = list(rollout(backbone, second, plan, seeds=[3], decoder=second_decoder, resume=Resume(stop)))
        assert same(straight, head + tail)
        assert [BlockTrace.of(b) for b in straight] == [BlockTrace.of(b) for b in head + tail]
        assert all(torch.equal(policy.state()[n], v) for n, v in second.state().items())


def test_reinforcement_1_and_capacity_0_give_sink_bit_for_bit(every_backbone):
    backbone = every_backbone
    sink, _ = generate(backbone, SinkConfig(), seeds=(5,))
    recap, _ = generate(backbone, RecapConfig(reinforcement=1.0, capacity_frames=0.0), seeds=(5,))
    assert same(sink, recap)
    reinforced, _ = generate(backbone, SinkConfig(reinforcement=5.0), seeds=(5,))
    without_bank, _ = generate(backbone, RecapConfig(capacity_frames=0.0), seeds=(5,))
    assert same(reinforced, without_bank)
    assert not same(reinforced, sink)


def test_an_empty_bank_and_reinforcement_1_equal_the_plain_window_plus_sink(backbone):
    """A sink of a whole block owns block 0, so block 1 meets a bank that has capacity and holds nothing."""
    whole = backbone.spec.frames_per_block
    spec = dataclasses.replace(backbone.spec, window_frames=3 * whole)
    plan = make_plan([[Shot("a red boat", lasting(spec, 2))]], spec)
    outcomes = []
    for config in (SinkConfig(sink_frames=whole), RecapConfig(sink_frames=whole, reinforcement=1.0)):
        policy = config.build(spec, lambda: SeededAdmission(spec))
        outcomes.append(list(rollout(backbone, policy, plan, seeds=[0])))
    assert len(outcomes[0]) == 2
    assert Role.BANK not in outcomes[1][1].memory.tokens
    assert same(*outcomes)


def test_memory_changes_what_is_generated(every_backbone):
    names = ("none", "sink", "recap", "relax-forcing", *QUICK)
    results = [generate(every_backbone, CONFIGS[name])[0] for name in names]
    for one, other in itertools.combinations(range(len(results)), 2):
        assert torch.equal(results[one][0].latents, results[other][0].latents)  # nothing to remember yet
        assert not torch.equal(results[one][-1].latents, results[other][-1].latents)


def test_reinforcement_moves_mass_to_the_sink(backbone):
    shares = [
        generate(backbone, SinkConfig(reinforcement=factor))[0][-1].shares[Role.SINK].item()
        for factor in (1, 3, 5, 8)
    ]
    assert shares == sorted(shares) and shares[-1] > 2 * shares[0]


def test_bank_keys_are_what_the_clean_pass_wrote(backbone):
    """Every slot holds the exact key and value its token wrote, in every layer."""
    written = {}

    class Watching:
        def __init__(self, policy):
            self.policy = policy

        def __getattr__(self, name):
            return getattr(self.policy, name)

        def write(self, layer, tokens):
            written.setdefault(layer, []).append((tokens.keys.clone(), tokens.values.clone()))
            self.policy.write(layer, tokens)

    spec = backbone.spec
    policy = RecapConfig().build(spec, lambda: SeededAdmission(spec, (0, 1)))
    plan = make_plan([[Shot("a red boat", 4.0)]] * 2, spec)
    list(rollout(backbone, Watching(policy), plan, seeds=[0, 1]))
    kept = policy.bank.entries.source
    flat = (kept[..., 0] * spec.grid[0] + kept[..., 1]) * spec.grid[1] + kept[..., 2]
    for layer in range(spec.layers):
        keys, values = (torch.cat(parts, dim=1) for parts in zip(*written[layer], strict=True))
        for row in range(2):
            assert torch.equal(policy.bank.keys[layer, row], keys[row, flat[row]])
            assert torch.equal(policy.bank.values[layer, row], values[row, flat[row]])
    assert (kept[..., 0] >= 1).all()  # the sink owns frame 0


def test_bank_is_read_at_phase_0_with_its_own_place(backbone):
    spec = backbone.spec
    policy = RecapConfig().build(spec, lambda: SeededAdmission(spec))
    plan = make_plan([[Shot("a red boat", 3.0)]], spec)
    for made in rollout(backbone, policy, plan, seeds=[0]):
        last = made.block
    policy.begin(dataclasses.replace(last, index=last.index + 1, first_frame=last.end_frame))
    bank = next(s for s in policy.arrange(1, []) if s.role is Role.BANK)
    assert (bank.positions[..., 0] == 0).all()
    assert torch.equal(bank.positions[..., 1:], policy.bank.entries.source[..., 1:].double())
    assert bank.keys.shape[1] == spec.frame_tokens
    assert policy.arrange(1, [])[0] is bank  # the same object all block long: rotated once


def test_shots_clear_the_prior_and_keep_sink_and_bank(backbone):
    shots = [Shot("a red boat", 3.0), Shot("a blue house", 3.0), Shot("a blue house, closer", 3.0, cut=False)]
    blocks, _ = generate(backbone, RecapConfig(), shots=shots)
    assert [b.block.clears_prior for b in blocks].count(True) == 1
    at = next(i for i, b in enumerate(blocks) if b.block.clears_prior)
    frame, own = backbone.spec.frame_tokens, backbone.spec.frames_per_block
    prior = backbone.spec.window_frames - own - 1
    assert blocks[at - 1].memory.tokens[Role.PRIOR] == prior * frame
    assert blocks[at].memory.tokens == {Role.SINK: frame, Role.BANK: frame, Role.CURRENT: own * frame}
    assert blocks[at + 1].memory.tokens[Role.PRIOR] == min(own, prior) * frame


def test_noise_of_a_block_depends_on_seed_and_block_only(backbone):
    spec = backbone.spec
    short, _ = generate(backbone, SinkConfig(), seconds=lasting(spec, 10))
    long, _ = generate(backbone, SinkConfig(), seconds=lasting(spec, 40))
    assert (len(short), len(long)) == (10, 40)
    assert same(short, long[:10])

    def noise_of(seeds, index):
        return block_noise(spec, seeds, long[index].block)

    first, again, other_block, other_seed = (
        noise_of(seeds, index) for seeds, index in (([7], 4), ([1, 7], 4), ([7], 5), ([8], 4))
    )
    assert not torch.equal(noise_of([1], 0)(), noise_of([0], 1)())
    for _ in range(4):  # the start and every later step
        noise = first()
        assert torch.equal(noise[0], again()[1])
        assert not torch.equal(noise, other_block()) and not torch.equal(noise, other_seed())


def test_rows_of_a_batch_match_their_single_runs(backbone):
    batch, _ = generate(backbone, RecapConfig(), seeds=(0, 1), seconds=3)
    for row in (0, 1):
        single, _ = generate(backbone, RecapConfig(), seeds=(row,), seconds=3)
        for one, many in zip(single, batch, strict=True):
            torch.testing.assert_close(one.latents[0], many.latents[row], rtol=1e-3, atol=1e-4)


def test_wrong_number_of_seeds_is_refused(backbone):
    policy = SinkConfig().build(backbone.spec, lambda: None)
    plan = make_plan([[Shot("a red boat", 1.0)]] * 2, backbone.spec)
    with pytest.raises(ValueError, match="the plan has 2 rows"):
        next(rollout(backbone, policy, plan, seeds=[0]))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_memory_made_again_from_latents_is_the_memory_that_was_there(every_backbone, name):
    """A run whose state is lost has its latents: most memories are made of clean pass and commit alone."""
    shots = [Shot(PROMPT, SECONDS), Shot("a house on the sea", SECONDS, cut=False)]
    plan = make_plan([shots], every_backbone.spec)

    def begun(**more):
        policy = CONFIGS[name].build(every_backbone.spec, lambda: SeededAdmission(every_backbone.spec))
        decoder = every_backbone.decoder()
        return rollout(every_backbone, policy, plan, seeds=[0], decoder=decoder, **more), policy, decoder

    blocks, *parts = begun()
    count = 15 // every_backbone.spec.frames_per_block
    made = list(itertools.islice(blocks, count))
    replayed, *again = begun(resume=Resume(latents_of=lambda block: made[block.index].latents))
    assert len(list(itertools.islice(replayed, count))) == count
    for one, other in zip(parts, again, strict=True):
        found, wanted = other.state(), one.state()
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[key], wanted[key]) for key in wanted)
