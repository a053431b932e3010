"""What every memory without a bank promises: exact resumption, cuts, rereading, refreshing, no growth."""

from __future__ import annotations

import ast
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from rival_driving import drive, generate_block, random_block
from safetensors.torch import load, save
from torch.utils._python_dispatch import TorchDispatchMode

import recap
from recap.contracts import MemoryPolicy
from recap.io.files import append_line
from recap.io.trace import BlockTrace, read_trace
from recap.memory.deep_forcing import DeepForcingConfig
from recap.memory.memrope import MemRopeConfig
from recap.memory.relax_forcing import RelaxForcingConfig
from recap.memory.rolling_sink import RollingSinkConfig
from recap.memory.sink import NoMemoryConfig, SinkConfig
from recap.memory.store import Store
from recap.plan import Shot, make_plan
from recap.registry import ADMISSIONS, MEMORIES, load_backbone
from recap.rollout import Resume, rollout
from recap.types import Role

SOURCE = Path(recap.__file__).parent
DEFAULTS = {name: kind() for name, kind in MEMORIES.items() if not kind.keeps_bank}
VARIANTS = {
    **DEFAULTS,
    "deep-forcing, paper": DeepForcingConfig(variant="paper"),
    "deep-forcing, sink only": DeepForcingConfig(variant="sink-only", sink_frames=14),
    "memrope, release": MemRopeConfig(accumulation="bfloat16", drops_first_frames=True),
    "rolling-sink, tiled noise": RollingSinkConfig(tiled_noise=True),
    "relax-forcing, host": RelaxForcingConfig(reservoir_on_host=True),
}
EQUAL_BUDGET = {  # docs/memories.md, "Equal budgets"
    "deep-forcing, 7": (7, DeepForcingConfig(window_frames=7, budget_frames=7, sink_frames=2)),
    "deep-forcing sink only, 7": (7, DeepForcingConfig(variant="sink-only", window_frames=7, sink_frames=3)),
    "memrope, 7": (7, MemRopeConfig(window_frames=7, sink_frames=1)),
    "rolling-sink, 9": (9, RollingSinkConfig(window_frames=9, replayed_frames=3)),
    "relax-forcing, 7": (7, RelaxForcingConfig()),
}
EVERY = {**VARIANTS, **{name: config for name, (_, config) in EQUAL_BUDGET.items()}}
FILLS = {
    "deep-forcing": 21,
    "memrope": 12,
    "rolling-sink": 21,
}  # frames generated before anything is rewritten
CUTS = [Shot("a red boat", 8.25), Shot("a blue house", 6.0), Shot("a blue house, closer", 4.5, cut=False)]


def generate(backbone, config, shots, rows=1, **more):
    policy = config.build(backbone.spec, None)
    plan = make_plan([shots] * rows, backbone.spec)
    return list(rollout(backbone, policy, plan, seeds=more.pop("seeds", range(rows)), **more)), policy


@pytest.mark.parametrize("name", FILLS)
def test_until_the_window_is_full_every_query_sees_what_the_plain_window_shows(spec, name):
    """Keys, values and phases bit for bit; in the trace they go by other roles."""
    frames = FILLS[name]
    rival = DEFAULTS[name].build(spec, None)
    plain = NoMemoryConfig().build(replace(spec, window_frames=frames), None)

    def in_order(segments):
        if not segments:
            return []
        parts = [torch.cat([getattr(s, p)[0] for s in segments]) for p in ("keys", "values", "positions")]
        order = sorted(range(len(parts[2])), key=lambda i: tuple(parts[2][i].tolist()))
        return [part[order] for part in parts]

    blocks = frames // spec.frames_per_block
    for mine, other in zip(drive(rival, spec, blocks), drive(plain, spec, blocks), strict=True):
        assert torch.equal(mine[1], other[1])
        for layer in range(spec.layers):
            pairs = zip(in_order(mine[2][layer]), in_order(other[2][layer]), strict=True)
            assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("name", FILLS)
def test_until_the_window_is_full_the_video_is_the_plain_window_s(backbone, name):
    seconds = FILLS[name] / 4
    wide = replace(backbone.spec, window_frames=FILLS[name])
    mine, _ = generate(backbone, DEFAULTS[name], [Shot("a red boat", seconds + 0.75)])
    plan = make_plan([[Shot("a red boat", seconds + 0.75)]], wide)
    plain = list(rollout(backbone, NoMemoryConfig().build(wide, None), plan, seeds=[0]))
    for one, other in zip(mine[:-1], plain[:-1], strict=True):
        torch.testing.assert_close(one.latents, other.latents, rtol=1e-4, atol=1e-4)
    if name != "rolling-sink":  # which replays frames where they stood, until its opening turns round
        assert (mine[-1].latents - plain[-1].latents).abs().max() > 1e-3
        sink = SinkConfig(sink_frames=DEFAULTS[name].sink_frames).build(wide, None)
        exact = list(rollout(backbone, sink, plan, seeds=[0]))
        assert all(torch.equal(a.latents, b.latents) for a, b in zip(mine[:-1], exact[:-1], strict=True))


@pytest.mark.parametrize("name", EVERY)
def test_cuts_and_stopping_anywhere_around_them(backbone, name):
    """A cut leaves no prior and keeps the sink; a state, through the bytes of a file, continues bit for bit."""
    config, plan = EVERY[name], make_plan([CUTS] * 2, backbone.spec)
    policy, decoder = config.build(backbone.spec, None), backbone.decoder()
    whole, states = [], []
    for made in rollout(backbone, policy, plan, seeds=[0, 1], decoder=decoder):
        whole.append(made)
        states.append((load(save(policy.state())), decoder.state()))
    (at,) = (i for i, made in enumerate(whole) if made.block.clears_prior)
    before, tokens, after = (whole[i].memory.tokens for i in (at - 1, at, at + 1))
    assert Role.PRIOR in before and Role.PRIOR not in tokens and Role.PRIOR in after
    assert tokens.get(Role.SINK) == before.get(Role.SINK)
    for stop in (1, 7, at, at + 1):
        again, other = config.build(backbone.spec, None), backbone.decoder()
        again.load_state(states[stop - 1][0])
        other.load_state(states[stop - 1][1])
        tail = rollout(backbone, again, plan, seeds=[0, 1], decoder=other, resume=Resume(stop))
        for made, known in zip(islice(tail, 3), whole[stop:], strict=False):
            assert torch.equal(made.latents, known.latents)
            assert BlockTrace.of(made) == BlockTrace.of(known)
        end = states[stop + 2][0]
        assert set(end) == set(again.state())
        assert all(torch.equal(end[n], v) for n, v in again.state().items())


@pytest.mark.parametrize("name", EVERY)
def test_a_state_is_a_copy_and_an_empty_memory_has_one_too(spec, name):
    policy = EVERY[name].build(spec, None)
    empty = policy.state()
    *_, _ = drive(policy, spec, 9)
    state = policy.state()
    before = {n: v.clone() for n, v in state.items()}
    block, passes = random_block(spec, 9)
    _, seen, _ = generate_block(policy, spec, block, passes)
    assert all(torch.equal(state[n], v) for n, v in before.items())
    again = EVERY[name].build(spec, None)
    again.load_state(state)
    _, same, _ = generate_block(again, spec, block, passes)
    for a, b in zip(seen[1], same[1], strict=True):
        assert torch.equal(a.keys, b.keys) and torch.equal(a.positions, b.positions)
    again.load_state(empty)
    fresh, first = EVERY[name].build(spec, None), random_block(spec, 0)
    generate_block(again, spec, *first)
    generate_block(fresh, spec, *first)
    assert all(torch.equal(v, again.state()[n]) for n, v in fresh.state().items())


@pytest.mark.parametrize("name", EVERY)
def test_sixty_blocks_hold_no_more_than_the_first_ten(spec, name):
    """The same storage, nothing new in the state, the same tokens attended to in turn."""
    config, policy = EVERY[name], EVERY[name].build(spec, None)
    parts = [*vars(policy).values(), *vars(policy.window).values()]
    stores = [part for part in parts if isinstance(part, Store)]
    sizes, places, attended = [], [], []
    for *_, trace in drive(policy, spec, 60):
        sizes.append({n: v.shape for n, v in policy.state().items()})
        places.append([(s.keys.data_ptr(), s.values.data_ptr()) for s in stores if s._keys is not None])
        attended.append(sum(trace.tokens.values()) / spec.frame_tokens)
    assert all(size == sizes[8] for size in sizes[8:])
    assert all(place == places[8] for place in places[8:])
    assert set(attended[8:]) == set(config.attended_frames(spec))
    if name in EQUAL_BUDGET:
        assert max(attended) == EQUAL_BUDGET[name][0]


@pytest.mark.parametrize("name", EQUAL_BUDGET)
def test_same_seed_same_result_and_rows_do_not_know_each_other(backbone, name):
    shots, (_, config) = [Shot("a red boat", 4.5)], EQUAL_BUDGET[name]
    once, _ = generate(backbone, config, shots, rows=2)
    again, _ = generate(backbone, config, shots, rows=2)
    assert all(torch.equal(a.latents, b.latents) for a, b in zip(once, again, strict=True))
    for row in (0, 1):
        single, _ = generate(backbone, config, shots, seeds=[row])
        for one, many in zip(single, once, strict=True):
            torch.testing.assert_close(one.latents[0], many.latents[row], rtol=1e-3, atol=1e-3)


class NoWaiting(TorchDispatchMode):
    """Refuses what makes the host wait for the device: reading a value, or a shape that depends on values."""

    WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal.default")

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert not any(name in str(function) for name in self.WAITS), function
        if "aten.index" in str(function):
            assert not any(t is not None and t.dtype is torch.bool for t in args[1]), "a mask as an index"
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", EVERY)
def test_no_verb_of_a_block_waits_for_the_device(spec, name, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "tolist", None, raising=False)  # which no mode can see
    policy = EVERY[name].build(spec, None)
    for index in range(12):
        block, passes = random_block(spec, index, rows=2)
        with NoWaiting():
            generate_block(policy, spec, block, passes)


@pytest.mark.parametrize("name", EVERY)
def test_a_row_is_bit_equal_whatever_stands_next_to_it(spec, name):
    """With keys given, not computed in a batch, not even rounding may differ."""
    together, alone = (EVERY[name].build(spec, None) for _ in range(2))
    for index in range(14):
        block, passes = random_block(spec, index, rows=3)
        _, many, _ = generate_block(together, spec, block, passes)
        rows = [
            type(p)(*([part[1:2] for part in parts] for parts in (p.queries, p.keys, p.values)))
            for p in passes
        ]
        _, one, _ = generate_block(alone, spec, replace(block, prompts=("",)), rows)
        for layer in range(spec.layers):
            for a, b in zip(many[layer], one[layer], strict=True):
                assert torch.equal(a.keys[1], b.keys[0]) and torch.equal(a.values[1], b.values[0])
                assert torch.equal(a.positions[1 % len(a.positions)], b.positions[0])


@pytest.mark.parametrize("name", [*DEFAULTS, *EQUAL_BUDGET])
def test_scripts_that_read_the_prior_again_go_on(backbone, name):
    for seconds in (1.5, 6.0):
        plain = [Shot("a red boat", seconds), Shot("a house", 1.5, cut=False)]
        reread = [plain[0], replace(plain[1], reread=True)]
        one, kept = generate(backbone, EVERY[name], plain)
        two, policy = generate(backbone, EVERY[name], reread)
        before = round(seconds / 0.75)
        assert all(torch.equal(a.latents, b.latents) for a, b in zip(one[:before], two[:before], strict=True))
        assert not torch.equal(one[before].latents, two[before].latents)
        if seconds == 6.0 and "sink.keys" in kept.state():
            assert torch.equal(kept.state()["sink.keys"], policy.state()["sink.keys"])


@pytest.mark.parametrize("seconds", [3.0, 9.0])
@pytest.mark.parametrize("name", [*DEFAULTS, *EQUAL_BUDGET, "small reservoir"])
def test_a_long_prior_is_read_again_without_a_look_ahead(name, seconds):
    """On a row whose own window reaches back six blocks; every kept token must be older than the block."""
    config = EVERY.get(name, RelaxForcingConfig(reservoir_frames=7))
    backbone = load_backbone("untrained")
    backbone.spec = spec = replace(backbone.spec, window_frames=21)
    policy, written = config.build(spec, None), {}

    class Watching:
        def __getattr__(self, name):
            return getattr(policy, name)

        def begin(self, block):
            self.first = block.first_frame
            return policy.begin(block)

        def write(self, layer, tokens):
            for frame, keys in enumerate(tokens.keys[0].unflatten(0, (-1, spec.frame_tokens))):
                written.setdefault(self.first + frame, []).append(keys)
            policy.write(layer, tokens)

        def arrange(self, layer, own):
            kept = policy.arrange(layer, own)
            later = [keys[0, 0] for f, made in written.items() if f >= self.first for keys in made]
            if later and layer == 0:
                seen = torch.cat([later[0].new_empty(0, len(later[0])), *(s.keys[0, :, 0] for s in kept)])
                assert not (seen[:, None] == torch.stack(later)).all(-1).any()
            return kept

    shots = [Shot("a red boat", seconds), Shot("a house", 1.5, cut=False, reread=True)]
    made = list(rollout(backbone, Watching(), make_plan([shots], spec), seeds=[0]))
    assert torch.isfinite(made[-1].latents).all()


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("given", [1, 2])
def test_a_first_block_of_given_frames_may_be_short(spec, name, given):
    policy, attended = EVERY[name].build(spec, None), []
    for index in range(14):
        first, frames = (given + 3 * (index - 1), 3) if index else (0, given)
        block, passes = random_block(spec, index, first=first, frames=frames)
        phases, seen, trace = generate_block(policy, spec, block, passes)
        assert len(phases) == frames
        stamps = torch.cat([s.values[0, :, 0, 0] for s in seen[0]]) if seen[0] else torch.zeros(0)
        assert (stamps < first).all(), "nobody sees the present or the future as past"
        attended.append(sum(trace.tokens.values()) / spec.frame_tokens)
    assert set(attended[9:]) <= set(EVERY[name].attended_frames(spec))


@pytest.mark.parametrize("name", EVERY)
def test_recomputed_keys_replace_the_recent_past(spec, name):
    """What attach does where a checkout recomputes its past for a new prompt."""
    policy = EVERY[name].build(spec, None)
    *_, _ = drive(policy, spec, 9)
    fresh = torch.full((spec.layers, 1, 6 * spec.frame_tokens, spec.heads, spec.head_dim), 7.0)
    policy.refresh(21, fresh, fresh)
    block, passes = random_block(spec, 9)
    _, seen, _ = generate_block(policy, spec, block, passes)
    for segment in seen[0]:
        known = (segment.keys == 7.0).all(dim=(2, 3))[0]
        if segment.role is Role.PRIOR:
            newest = min(6 * spec.frame_tokens, known.numel())
            assert known[-newest:].all() and not known[:-newest].any()
        elif segment.role is not Role.BANK:  # tokens chosen later may come from the recomputed frames
            assert not known.any()


HALF = [
    pytest.param("cpu", torch.bfloat16),
    pytest.param("cuda", torch.bfloat16, marks=pytest.mark.cuda),
    pytest.param("cuda", torch.float32, marks=pytest.mark.cuda),
]


@pytest.mark.parametrize(("device", "dtype"), HALF)
def test_other_precisions_and_devices_work_too(device, dtype):
    backbone = load_backbone("untrained", device=device, dtype=dtype)
    for name, config in EVERY.items():
        plan = make_plan([[Shot("a red boat", 7.5)]], backbone.spec)
        policy = config.build(backbone.spec, None)
        *_, made = rollout(backbone, policy, plan, seeds=[0])
        assert torch.isfinite(made.latents).all() and made.latents.dtype == dtype, name
        stored = {n: v for n, v in policy.state().items() if n.endswith((".keys", ".values"))}
        kept = {n: v.dtype for n, v in stored.items() if not n.startswith("means")}
        assert set(kept.values()) == {dtype}, name
        home = {v.device.type for n, v in stored.items() if not n.startswith("ring")}
        assert home == {device}, name


@pytest.fixture(scope="module")
def embedded():
    return load_backbone("embedded")


@pytest.mark.parametrize("name", DEFAULTS)
def test_sixty_blocks_on_the_embedded_backbone(embedded, name):
    """All but the last block are given, so that a minute takes its clean passes only."""
    spec = embedded.spec
    opening = torch.randn(1, 59 * 3, spec.latent_channels, *spec.latent_size)
    policy = DEFAULTS[name].build(spec, None)
    plan = make_plan([[Shot("a boat on the sea", 0.75)]], spec, opening.shape[1])
    *_, made = rollout(
        embedded, policy, plan, seeds=[0], resume=Resume(opening_latents=opening), decoder=Undecoded()
    )
    assert made.block.index == 59 and torch.isfinite(made.latents).all()
    frames = sum(made.memory.tokens.values()) / spec.frame_tokens
    assert frames in DEFAULTS[name].attended_frames(spec)
    assert set(made.shares) == set(made.memory.tokens)


class Undecoded:
    """Pictures are not what is tested here, and take longer than the rest."""

    def decode(self, latents):
        return latents.new_zeros((len(latents), 1, 3, 1, 1))


@pytest.mark.parametrize("admission", ADMISSIONS)
@pytest.mark.parametrize("memory", MEMORIES)
def test_every_memory_with_every_admission_by_name(backbone, tmp_path, dino, memory, admission):
    shots = [
        {"prompt": "a boat on the sea", "seconds": 0.75},
        {"prompt": "a boat on the sea", "seconds": 0.75},
    ]
    rule = {"name": admission} | ({"model": dino} if admission == "diversity" else {})
    settings = {"shots": shots, "memory": memory, "admission": rule, "flow": "classical"}
    config = recap.RunConfig.from_dict(settings)
    assert recap.RunConfig.from_dict(config.to_dict()) == config
    policy = recap.build_memory(config, backbone.spec)
    plan = recap.make_plan([config.shots], backbone.spec)
    for made in recap.rollout(backbone, policy, plan, seeds=[0]):
        append_line(tmp_path / "trace.jsonl", BlockTrace.of(made).to_json())
    lines = read_trace(tmp_path / "trace.jsonl")
    assert [line.clears_prior for line in lines] == [False, True]
    assert all(line.tokens["current"] == backbone.spec.block_tokens for line in lines)


def test_each_memory_file_stands_alone():
    """No memory imports another, and none is known by name outside the registry."""
    configs = [kind for name, kind in MEMORIES.items() if name not in ("none", "sink", "recap")]
    homes = {kind.__module__ for kind in MEMORIES.values()}
    for path in (SOURCE / "memory").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert node.module not in homes, path
    for path in SOURCE.rglob("*.py"):
        # A table is data about experiments, and names what it compares.
        if path.name != "registry.py" and path.parent.name not in ("memory", "tables"):
            text = path.read_text()
            assert not any(kind.__name__ in text for kind in configs), path


def test_only_those_memories_differ_that_must(spec):
    built = {name: config.build(spec, None) for name, config in VARIANTS.items()}
    assert {name for name, policy in built.items() if policy.needs_queries} == {
        "deep-forcing", "deep-forcing, paper", "deep-forcing, sink only",
    }  # fmt: skip
    block, _ = random_block(spec, 5)
    tiled = {name for name, policy in built.items() if policy.noise_block(block) != 5}
    assert tiled == {"rolling-sink, tiled noise"}


def test_a_memory_that_cannot_read_again_refuses(spec):
    class Bare(MemoryPolicy):
        begin = arrange = write = commit = clear_prior = state = load_state = None

    block, _ = random_block(spec, 1)
    for call in (lambda: Bare().reread(block), lambda: Bare().refresh(0, None, None)):
        with pytest.raises(ValueError, match="memory is 'Bare': it cannot"):
            call()
