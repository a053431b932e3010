"""Rolling Sink against its closed form, its table (facts 4.3), and the release's cache that is written over."""

from __future__ import annotations

from itertools import chain, cycle, islice

import pytest
import torch
from rival_driving import absolute, drive, frames_of, generate_block, random_block

from recap.backbones.noise import block_noise
from recap.io.trace import BlockTrace
from recap.memory.rolling_sink import RollingSinkConfig, replayed_frame, replayed_runs
from recap.plan import Shot, make_plan
from recap.rollout import rollout
from recap.types import Role

# first frame of the block: what stands in its window before the last three frames, which are real
GOLDEN = {
    21: [*range(3, 18)],
    24: [*range(6, 18), 17, 16, 15],
    39: [*range(14, -1, -1)],
    42: [*range(11, -1, -1), 0, 1, 2],
    60: [*range(6, 18), 17, 16, 15],
}


@pytest.mark.parametrize("period", [18, 6, 3, 1])
def test_the_replayed_frame_is_a_ping_pong_for_a_thousand_places(period):
    walked = islice(cycle(chain(range(period), reversed(range(period)))), 1000)
    assert [replayed_frame(p, period) for p in range(1000)] == list(walked)


@pytest.mark.parametrize("period", [18, 6])
def test_runs_are_the_places_one_by_one(period):
    for first in range(100):
        for length in range(1, period + 1):
            runs = replayed_runs(first, first + length, period)
            pairs = [(time, stored + i) for stored, times in runs for i, time in enumerate(times)]
            assert sorted(pairs) == [(p, replayed_frame(p, period)) for p in range(first, first + length)]
            assert len(runs) <= 2


class ReleaseCache:
    """Facts 4.3, by frame numbers: a FIFO of 21 places; after a block, the one before it is written over."""

    def __init__(self):
        self.places = []  # (time, content), content None for what is real

    def begin(self, first):
        if first >= 21:
            self.places = self.places[3:]
        view = list(self.places)
        self.places += [(p, p) for p in range(first, first + 3)]
        return view

    def end(self, first):
        if first >= 21:
            for i, (time, _) in enumerate(self.places):
                if first - 3 <= time < first:
                    turn, rest = divmod(time, 18)
                    self.places[i] = (time, 17 - rest if turn % 2 else rest)


def test_windows_equal_the_cache_of_the_release_for_forty_blocks(spec):
    policy, cache = RollingSinkConfig().build(absolute(spec), None), ReleaseCache()
    for block, phases, seen, trace in drive(policy, spec, 40):
        first = block.first_frame
        view = cache.begin(first)
        cache.end(first)
        for segments in seen.values():
            parts = [frames_of(segments, role, spec) for role in (Role.SINK, Role.PRIOR)]
            frames, times = parts[0][0] + parts[1][0], parts[0][1] + parts[1][1]
            assert list(zip(times, frames, strict=True)) == view
            assert parts[1][0] == [*range(max(0, first - 3), first)]
            if first in GOLDEN:
                assert parts[0][0] == GOLDEN[first]
        assert phases.tolist() == [first, first + 1, first + 2]
        assert sum(trace.tokens.values()) == min(block.end_frame, 21) * spec.frame_tokens
        if first >= 21:
            counts = {role: count // spec.frame_tokens for role, count in trace.tokens.items()}
            assert counts == {Role.SINK: 15, Role.PRIOR: 3, Role.CURRENT: 3}


def test_replayed_keys_and_values_are_those_the_opening_wrote(spec):
    policy, written = RollingSinkConfig().build(spec, None), {}
    for index in range(24):
        block, passes = random_block(spec, index, rows=2)
        _, seen, _ = generate_block(policy, spec, block, passes)
        for layer in range(spec.layers):
            for frame in range(3):
                part = slice(frame * spec.frame_tokens, (frame + 1) * spec.frame_tokens)
                clean = passes[-1]
                written[layer, 3 * index + frame] = clean.keys[layer][:, part], clean.values[layer][:, part]
            for s in seen[layer]:
                for token in range(0, s.keys.shape[1], spec.frame_tokens):
                    part = slice(token, token + spec.frame_tokens)
                    keys, values = written[layer, int(s.values[0, token, 0, 0])]
                    assert torch.equal(s.keys[:, part], keys) and torch.equal(s.values[:, part], values)


@pytest.mark.parametrize(("window", "replayed"), [(9, 3), (21, 9), (12, 9), (6, 3)])
def test_other_budgets_keep_the_rest_real(spec, window, replayed):
    policy = RollingSinkConfig(window_frames=window, replayed_frames=replayed).build(absolute(spec), None)
    past, real = window - 3, window - 3 - replayed
    for block, _, seen, trace in drive(policy, spec, 20):
        first = block.first_frame
        times = [*range(max(0, first - past), max(0, first - real))]
        assert frames_of(seen[0], Role.SINK, spec) == ([replayed_frame(t, past) for t in times], times)
        recent = [*range(max(0, first - real), first)]
        assert frames_of(seen[0], Role.PRIOR, spec) == (recent, recent)
        assert sum(trace.tokens.values()) == min(block.end_frame, window) * spec.frame_tokens


def test_phases_in_the_window_are_the_absolute_ones_moved_together(spec):
    here, there = (RollingSinkConfig().build(s, None) for s in (spec, absolute(spec)))
    for one, other in zip(drive(here, spec, 14), drive(there, spec, 14), strict=True):
        moved = max(0, one[0].first_frame - 18)
        assert (other[1] - one[1]).unique().tolist() == [moved]
        for a, b in zip(one[2][0], other[2][0], strict=True):
            assert torch.equal(a.positions[..., 0] + moved, b.positions[..., 0])


def test_a_cut_drops_the_real_block_and_continues_replaying(spec):
    policy = RollingSinkConfig().build(absolute(spec), None)
    for index in range(14):
        if index in (3, 10):
            policy.clear_prior()
        block, passes = random_block(spec, index)
        _, seen, trace = generate_block(policy, spec, block, passes)
        assert (Role.PRIOR in trace.tokens) is (index not in (0, 3, 10))
        first = block.first_frame
        times = [*range(max(0, first - 18), max(0, first - 3))]
        assert frames_of(seen[0], Role.SINK, spec) == ([replayed_frame(t, 18) for t in times], times)


def test_tiled_noise_starts_every_block_alike_and_is_in_the_trace(backbone):
    plan = make_plan([[Shot("a red boat", 3.0)]], backbone.spec)
    generated = {}
    for tiled in (False, True):
        policy = RollingSinkConfig(tiled_noise=tiled).build(backbone.spec, None)
        generated[tiled] = list(rollout(backbone, policy, plan, seeds=[0]))
        assert all(BlockTrace.of(made).notes == {"tiled_noise": tiled} for made in generated[tiled])
    assert RollingSinkConfig().tiled_noise is False
    assert torch.equal(generated[True][0].latents, generated[False][0].latents)
    assert not torch.equal(generated[True][1].latents, generated[False][1].latents)
    zero, two = plan.blocks[0], plan.blocks[2]
    start, own, tiled = block_noise(backbone.spec, [0, 5], zero), *(
        block_noise(backbone.spec, [0, 5], two, first) for first in (None, 0)
    )  # fmt: skip
    first = start()
    assert torch.equal(tiled(), first) and not torch.equal(own(), first)
    for _ in range(3):
        assert torch.equal(tiled(), own()), "the noise of later steps is the block's own"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"window_frames": 7}, "window_frames is 7: not divisible by 3.*use 6 or 9"),
        ({"replayed_frames": 16}, "replayed_frames is 16: not divisible by 3.*use 15 or 18"),
        ({"replayed_frames": 21}, "replayed_frames is 21: must be 3 to 18"),
        ({"replayed_frames": 0}, "replayed_frames is 0: must be 3 to 18"),
        ({"window_frames": 3}, "window_frames is 3: a block of 3 needs at least one other"),
    ],
)
def test_settings_that_cannot_be_are_refused_with_numbers(spec, settings, message):
    with pytest.raises(ValueError, match=message):
        RollingSinkConfig(**settings).build(spec, None)
