"""Deep Forcing against its tables (facts 2.4) and against a cache kept token by token, as the release keeps it."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from rival_driving import absolute, drive, frames_of, generate_block, random_block

from recap.memory.deep_forcing import DeepForcingConfig, choose, participation
from recap.types import Role

# block: (compresses, frames attended, where the sink's first frame is read, recent frames)
RELEASE = {
    0: (False, 3, 0, []),
    1: (False, 6, 0, []),
    2: (False, 9, 0, []),
    3: (False, 12, 0, []),
    4: (False, 15, 0, [10, 11]),
    5: (False, 18, 0, [10, 11, 12, 13, 14]),
    6: (False, 21, 0, [*range(10, 18)]),
    7: (True, 16, 5, [20]),
    8: (False, 19, 5, [20, 21, 22, 23]),
    9: (True, 16, 11, [26]),
    10: (False, 19, 11, [26, 27, 28, 29]),
    11: (True, 16, 17, [32]),
    12: (False, 19, 17, [32, 33, 34, 35]),
    13: (True, 16, 23, [38]),
    14: (False, 19, 23, [38, 39, 40, 41]),
    15: (True, 16, 29, [44]),
}


def test_cache_of_the_release_block_by_block(spec):
    policy = DeepForcingConfig().build(absolute(spec), None)
    for block, phases, seen, trace in drive(policy, spec, 16):
        compresses, attended, sink_at, recent = RELEASE[block.index]
        assert phases.tolist() == [*range(block.first_frame, block.end_frame)]
        assert trace.notes == {"compressed": compresses}
        assert sum(trace.tokens.values()) == attended * spec.frame_tokens
        for segments in seen.values():
            sink, at = frames_of(segments, Role.SINK, spec)
            assert sink == [*range(min(10, block.first_frame))]
            assert at == [sink_at + frame for frame in sink]
            assert frames_of(segments, Role.PRIOR, spec) == (recent, recent)
            chosen = [s for s in segments if s.role is Role.BANK]
            assert [s.keys.shape[1] for s in chosen] == [2 * spec.frame_tokens] * (block.index >= 7)
            for segment in chosen:  # at their own frame and place
                assert torch.equal(segment.positions[0, :, 0].float(), segment.values[0, :, 0, 0])
                spot = segment.positions[0, :, 1] * spec.grid[1] + segment.positions[0, :, 2]
                assert torch.equal(spot.float(), segment.values[0, :, 0, 1])


def test_deep_sink_only_slides_with_a_gap_of_a_block(spec):
    policy = DeepForcingConfig(variant="sink-only").build(absolute(spec), None)
    for block, _, seen, trace in drive(policy, spec, 14):
        first = block.first_frame
        at = max(0, first - 21)
        assert frames_of(seen[1], Role.SINK, spec)[1] == [*range(at, at + min(10, first))]
        recent = [*range(max(10, first - 8), first)]
        assert frames_of(seen[1], Role.PRIOR, spec) == (recent, recent)
        assert sum(trace.tokens.values()) == min(first + 3, 21) * spec.frame_tokens


def test_paper_variant_has_no_gap_in_time(spec):
    policy = DeepForcingConfig(variant="paper").build(absolute(spec), None)
    for block, _, seen, _ in drive(policy, spec, 16):
        times = sorted(t for s in seen[0] for t in s.positions[0, :, 0].tolist())
        times = times[:: spec.frame_tokens]
        assert times == [*range(block.first_frame - len(times), block.first_frame)]


@pytest.mark.parametrize("variant", ["release", "paper", "sink-only"])
def test_phases_in_the_window_are_the_absolute_ones_moved_together(spec, variant):
    config = DeepForcingConfig(variant=variant)
    here, there = config.build(spec, None), config.build(absolute(spec), None)
    for one, other in zip(drive(here, spec, 14), drive(there, spec, 14), strict=True):
        moved = (other[1] - one[1]).unique()
        assert moved.tolist() == [max(0, one[0].first_frame - 18)]
        for layer in one[2]:
            for a, b in zip(one[2][layer], other[2][layer], strict=True):
                assert torch.equal(a.keys, b.keys) and torch.equal(a.values, b.values)
                assert torch.equal(a.positions[..., 0] + moved, b.positions[..., 0])


def turned(x, time, spot, spec):
    """One token's H D channels as complex numbers at its place: the formula of facts section 1, in float64."""
    pairs = spec.head_dim // 2
    side = pairs // 3
    place = (time, spot // spec.grid[1], spot % spec.grid[1])
    angles = np.concatenate(
        [
            p * 10000.0 ** (-np.arange(n) / n)
            for p, n in zip(place, (pairs - 2 * side, side, side), strict=True)
        ]
    )
    x = x.double().numpy().reshape(x.shape[0], pairs, 2)
    return (x[..., 0] + 1j * x[..., 1]) * np.exp(1j * angles)


class ReleaseCache:
    """One layer and row of facts 2.3, a dict per token; counts, queries and places kept as the release does."""

    def __init__(self, spec, config):
        self.spec, self.config = spec, config
        self.tokens, self.queries, self.sink_base, self.compressed = [], [], 0, False

    def run_pass(self, first, block, query, key, value):
        size, config = self.spec.frame_tokens, self.config
        count = len(key)
        place = [(block + i // size, i % size) for i in range(count)]
        if not first and config.recent_frames > 2 * self.spec.frames_per_block:
            # Here we differ: of a block before the current one only the clean queries count.
            del self.queries[-count:]
        self.queries += [turned(q, *p, self.spec) for q, p in zip(query, place, strict=True)]
        self.queries = self.queries[-config.recent_frames * size :]
        new = [
            {"key": k, "value": v, "time": t, "spot": s, "count": 0}
            for k, v, (t, s) in zip(key, value, place, strict=True)
        ]
        if not first:
            self.tokens[-count:] = new
            return
        self.compressed = len(self.tokens) + count > config.window_frames * size
        self.tokens += new
        if self.compressed:
            self.compress(block)

    def compress(self, block):
        size, config = self.spec.frame_tokens, self.config
        sink, recent = config.sink_frames * size, config.recent_frames * size
        middle = self.tokens[sink:-recent]
        total = np.sum(self.queries, axis=0)
        scale = self.spec.heads * math.sqrt(self.spec.head_dim)
        for token in middle:
            key = turned(token["key"], token["time"], token["spot"], self.spec)
            token["phi"] = float((total * key.conj()).real.sum()) / scale
        free = [t for t in middle if config.variant == "paper" or t["count"] < config.reuse_cap]
        room = (config.budget_frames - config.sink_frames - config.recent_frames) * size
        best = sorted(free, key=lambda t: -t["phi"])[:room]
        chosen = [t for t in middle if any(t is b for b in best)]
        assert len(chosen) == room
        self.sink_base = block - config.budget_frames
        if config.variant == "paper":
            self.sink_base += self.spec.frames_per_block
            for slot, token in enumerate(chosen):
                token["time"] = self.sink_base + config.sink_frames + slot // size
        for token in chosen:
            token["count"] += 1
        self.tokens = self.tokens[:sink] + chosen + self.tokens[-recent:]

    def view(self, own):
        """(key, value, time, spot) of all past tokens, the sink at its place."""
        sink = self.config.sink_frames * self.spec.frame_tokens
        return [
            (t["key"], t["value"], t["time"] + (self.sink_base if i < sink else 0), t["spot"])
            for i, t in enumerate(self.tokens[:-own])
        ]


@pytest.mark.parametrize(
    ("config", "frames"),
    [
        (DeepForcingConfig(), 3),
        (DeepForcingConfig(reuse_cap=1), 3),
        (DeepForcingConfig(variant="paper"), 3),
        (DeepForcingConfig(window_frames=9, budget_frames=9, sink_frames=3, recent_frames=5), 3),
        (
            DeepForcingConfig(
                variant="paper", window_frames=12, budget_frames=9, sink_frames=3, recent_frames=3
            ),
            3,
        ),
        (DeepForcingConfig(window_frames=12, budget_frames=12, sink_frames=2, recent_frames=8), 3),
        (DeepForcingConfig(window_frames=9, budget_frames=7, sink_frames=2), 1),
    ],
    ids=[
        "release", "cap 1", "paper", "every block", "noisy queries only", "three blocks' queries",
        "blocks of one frame",
    ],
)  # fmt: skip
def test_selection_equals_a_cache_kept_token_by_token(spec, config, frames):
    """Per layer and row, for 14 blocks, with the queries of every pass going through the release's own buffer."""
    rows, spec = 2, dataclasses.replace(spec, frames_per_block=frames)
    policy = config.build(absolute(spec), None)
    caches = {(layer, row): ReleaseCache(spec, config) for layer in range(spec.layers) for row in range(rows)}
    differ = 0
    for index in range(14):
        block, passes = random_block(spec, index, rows=rows)
        _, seen, trace = generate_block(policy, spec, block, passes)
        picked = set()
        for (layer, row), cache in caches.items():
            for number, made in enumerate(passes):
                cache.run_pass(
                    number == 0, block.first_frame, made.queries[layer][row], made.keys[layer][row],
                    made.values[layer][row],
                )  # fmt: skip
            assert trace.notes["compressed"] is cache.compressed
            expected = cache.view(len(made.keys[layer][row]))
            mine = [
                (key, value, int(place[0]), int(place[1]) * spec.grid[1] + int(place[2]))
                for s in seen[layer]
                for key, value, place in zip(
                    s.keys[row], s.values[row], s.positions[row % len(s.positions)], strict=True
                )
            ]
            for a, b in zip(mine, expected, strict=True):
                assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) and a[2:] == b[2:]
            picked.add(tuple(tuple(v[0, :2].tolist()) for _, v, *_ in mine))
        differ += len(picked) > 1
    assert differ > 0, "layers and rows choose for themselves"


def test_participation_is_the_mean_recent_query_against_each_rotated_key(spec):
    asked, keys = torch.randn(2, 2, 12, dtype=torch.float64), torch.randn(2, 7, 2, 12, dtype=torch.float64)
    positions = torch.randint(0, 40, (2, 7, 3)).double()
    wide = dataclasses.replace(spec, grid=(50, 50))
    phi = participation(asked, keys, positions)
    for row in range(2):
        for token in range(7):
            t, h, w = positions[row, token].tolist()
            key = turned(keys[row, token], t, int(h) * 50 + int(w), wide)
            query = asked[row].reshape(2, 6, 2)
            plain = (torch.complex(query[..., 0], query[..., 1]).numpy() * key.conj()).real.sum()
            assert math.isclose(phi[row, token].item(), plain / (2 * math.sqrt(12)), rel_tol=1e-9)


def test_choice_bars_what_was_chosen_often_and_breaks_ties_by_age():
    score = torch.tensor([[5.0, 1.0, 3.0, 3.0, 4.0]])
    never = torch.zeros(1, 5, dtype=torch.int64)
    assert choose(score, never, 3, 0).tolist() == [[0, 2, 4]]
    count = torch.tensor([[7, 0, 6, 0, 8]])
    assert choose(score, count, 2, 7).tolist() == [[2, 3]]
    assert choose(score, count, 2, 0).tolist() == [[0, 4]]
    assert choose(score, count, 4, 7).tolist() == [
        [0, 1, 2, 3]
    ]  # barred ones only where nothing else is left


def test_no_token_outlives_seven_choices(spec):
    """42 frames, 10.5 s at four a second: what the sheet derives from the cap."""
    policy = DeepForcingConfig().build(absolute(spec), None)
    for block, _, seen, _ in drive(policy, spec, 60):
        for segment in seen[0]:
            if segment.role is Role.BANK:
                oldest = segment.values[0, :, 0, 0].min().item()
                assert block.first_frame - oldest <= 11 + 6 * 6 + 3
    counts = policy.state()["chosen.count"]
    assert counts.max() <= 7


def test_a_cut_keeps_the_sink_right_before_the_new_shot(spec):
    seen_after = []
    policy = DeepForcingConfig().build(absolute(spec), None)
    for index in range(18):
        if index == 12:
            policy.clear_prior()
        block, passes = random_block(spec, index)
        _, seen, trace = generate_block(policy, spec, block, passes)
        seen_after.append((frames_of(seen[0], Role.SINK, spec)[1][:1], trace.tokens, trace.notes))
    size = spec.frame_tokens
    assert seen_after[12] == ([26], {Role.SINK: 10 * size, Role.CURRENT: 3 * size}, {"compressed": False})
    assert seen_after[13][:2] == ([26], {Role.SINK: 10 * size, Role.PRIOR: 3 * size, Role.CURRENT: 3 * size})
    assert [notes["compressed"] for *_, notes in seen_after[12:]] == [False, False, False, True, False, True]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sink_frames": 19}, "sink_frames is 19: must be 0 to 18"),
        (
            {"sink_frames": 18},
            "sink_frames is 18: with recent_frames 4 it exceeds the window of 21; use 17 or less",
        ),
        ({"sink_frames": -1}, "sink_frames is -1: must be 0 to 18"),
        ({"budget_frames": 13}, "budget_frames is 13: must be 14 to 21"),
        ({"budget_frames": 22}, "budget_frames is 22: must be 14 to 21"),
        ({"recent_frames": 2}, "recent_frames is 2: must be 3 to 21"),
        ({"recent_frames": 22}, "recent_frames is 22: must be 3 to 21"),
        ({"window_frames": 2}, "window_frames is 2: a block of 3 frames must fit"),
        ({"reuse_cap": 0}, "reuse_cap is 0: a token must be allowed"),
        ({"variant": "papr"}, "variant is 'papr': no such name; did you mean 'paper'"),
        ({"variant": "sink-only", "sink_frames": 19}, "sink_frames is 19"),
    ],
)
def test_settings_that_cannot_be_are_refused_with_numbers(spec, settings, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        DeepForcingConfig(**settings).build(spec, None)
