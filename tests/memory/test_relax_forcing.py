"""Relax Forcing against a twin that keeps every frame, and its layout of seven frames."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from rival_driving import absolute, drive, frames_of, generate_block, random_block

from recap.memory.relax_forcing import RelaxForcingConfig, candidate_frames
from recap.types import Role


def test_layout_is_seven_frames_packed_before_the_tail(spec):
    for rule in (spec, absolute(spec)):
        policy = RelaxForcingConfig().build(rule, None)
        for block, phases, seen, trace in drive(policy, rule, 16):
            first = block.first_frame
            start = first if rule.phases == "absolute" else min(first, 4)
            assert phases.tolist() == [start, start + 1, start + 2]
            if first == 0:
                continue
            late = first >= 4
            assert frames_of(seen[1], Role.SINK, spec) == ([0, 1], [start - 4, start - 3] if late else [0, 1])
            assert frames_of(seen[1], Role.PRIOR, spec) == ([first - 1], [start - 1])
            history, at = frames_of(seen[1], Role.BANK, spec)
            assert at == [start - 2] * late and len(history) == late
            # newer half of what lies between sink and tail
            assert all((2 + first - 1) // 2 <= frame <= first - 2 for frame in history)
            assert sum(trace.tokens.values()) == (7 if late else 6) * spec.frame_tokens


def released_candidates(first, end, count=4):
    """The rule of the released code, written out: float32 points, truncated, the newest dropped."""
    middle = end - first
    points = min(count, middle - middle // 2)
    if points == 1:
        return [first + middle // 2]
    chosen = torch.linspace(middle // 2, middle - 1, points + 1).long().unique()[:-1]
    return [first + frame for frame in chosen.tolist()]


@pytest.mark.parametrize(
    ("block", "frames"),
    [
        (6, [3]),  # the middle is frames 2, 3, 4
        (9, [5, 6]),
        (12, [6, 7, 8, 9]),
        (15, [8, 9, 10, 11]),
        (84, [42, 52, 62, 72]),
        (117, [59, 73, 87, 101]),  # 114 frames, the most there are
        (120, [62, 76, 90, 104]),  # the middle now begins at 5
        (240, [182, 196, 210, 224]),
    ],
)
def test_candidates_are_those_of_the_release(block, frames):
    """The golden frames of a video whose current block begins there; sink 2, tail 1, reservoir 120."""
    end = block - 1
    first = max(2, end - (120 - 3 - 2 - 1))
    assert candidate_frames(first, end, 4).unique().tolist() == frames


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7])
def test_candidates_equal_the_released_formula_at_every_length(count):
    for end in range(3, 130):
        ours = candidate_frames(2, end, count)
        assert ours.unique().tolist() == released_candidates(2, end, count), end


def cosine(a, b):
    return float(a @ b / np.sqrt((a @ a) * (b @ b)))


@pytest.mark.parametrize(
    "config", [RelaxForcingConfig(), RelaxForcingConfig(reservoir_frames=23, sink_frames=1)]
)
def test_history_equals_a_twin_that_keeps_every_frame(spec, config):
    """Per row, for 30 blocks, a cut among them: likeness to the sink minus twice that to the tail."""
    policy, frames, cut = config.build(spec, None), {}, 12
    chosen = set()
    for index in range(30):
        if index == cut:
            policy.clear_prior()
        block, passes = random_block(spec, index, rows=2)
        _, seen, _ = generate_block(policy, spec, block, passes)
        first, sink = block.first_frame, config.sink_frames
        tail = 0 if index in (0, cut) else 1
        end = first - tail
        oldest = max(sink, end - (config.reservoir_frames - sink - config.tail_frames - 3))
        for row in range(2):
            history = [s for s in seen[0] if s.role is Role.BANK]
            if end <= oldest:
                assert not history
                continue
            means = {f: keys[0][row].double().mean((0, 1)).numpy() for f, (keys, _) in frames.items()}
            opening = np.mean([means[f] for f in range(sink)], axis=0)

            def score(frame, means=means, opening=opening, first=first, tail=tail):
                like = cosine(means[frame], opening)
                return like - 2 * cosine(means[frame], means[first - 1]) if tail else like

            best = max(released_candidates(oldest, end), key=score)
            chosen.add((row, first - best))
            for layer in range(spec.layers):
                (mine,) = (s for s in seen[layer] if s.role is Role.BANK)
                assert torch.equal(mine.keys[row], frames[best][0][layer][row])
                assert torch.equal(mine.values[row], frames[best][1][layer][row])
        for frame in range(3):
            part = slice(frame * spec.frame_tokens, (frame + 1) * spec.frame_tokens)
            clean = passes[-1]
            frames[first + frame] = (
                [k[:, part] for k in clean.keys],
                [v[:, part] for v in clean.values],
            )
    assert len(chosen) > 8, "rows choose for themselves, near and far"


@pytest.mark.parametrize(("block", "oldest"), [(117, 2), (120, 5)])
def test_the_reservoir_counts_the_current_block(spec, block, oldest):
    """With one candidate the first frame of the newer half is read, so it tells where the middle begins."""
    policy = RelaxForcingConfig(num_candidates=1).build(spec, None)
    for generated, _, seen, _ in drive(policy, spec, block // 3 + 1):
        if generated.first_frame == block:
            frames, _ = frames_of(seen[0], Role.BANK, spec)
            assert frames == [oldest + 114 // 2]


def test_heads_are_averaged_before_frames_are_compared(spec):
    """Frames whose heads point against each other have no direction of their own, side by side they would have."""
    one = torch.eye(spec.head_dim)[0]
    other = torch.eye(spec.head_dim)[1]
    signs = torch.where(torch.arange(spec.heads) % 2 == 0, 1.0, -1.0)[:, None]
    opposed = 10 * signs * one + 0.1 * one + 0.2 * other
    agreed = (one + other).expand(spec.heads, -1)
    # Block 3 may choose frames 5 and 6. Frame 5 is like the opening only with heads averaged.
    pattern = {5: one.expand(spec.heads, -1), 6: opposed}
    policy = RelaxForcingConfig(tail_weight=0.0).build(spec, None)
    for index in range(4):
        block, passes = random_block(spec, index)
        for keys in passes[-1].keys:
            for frame in range(3):
                part = slice(frame * spec.frame_tokens, (frame + 1) * spec.frame_tokens)
                default = 10 * signs * one + 0.1 * one if index == 0 else agreed
                keys[:, part] = pattern.get(block.first_frame + frame, default)
        _, seen, _ = generate_block(policy, spec, block, passes)
    assert frames_of(seen[0], Role.BANK, spec)[0] == [5]


def test_the_card_names_what_is_kept(spec):
    """At 1.3B: 1,560 tokens a frame, 30 layers of 1,536 channels, keys and values of two bytes."""
    policy = RelaxForcingConfig().build(spec, None)
    list(drive(policy, spec, 1))
    frames = policy.state()["ring.keys"].shape[2] // spec.frame_tokens
    gigabytes = frames * 1560 * 30 * 1536 * 2 * 2 / 1e9
    assert f"the newer {frames} frames: {gigabytes:.1f} GB" in RelaxForcingConfig.card.extra_memory
    assert frames == 57 + 4


def test_a_reservoir_on_the_host_reads_the_same(spec):
    one, other = (RelaxForcingConfig(reservoir_on_host=h).build(spec, None) for h in (False, True))
    for a, b in zip(drive(one, spec, 14), drive(other, spec, 14), strict=True):
        for layer in a[2]:
            assert all(
                torch.equal(x.keys, y.keys) and torch.equal(x.positions, y.positions)
                for x, y in zip(a[2][layer], b[2][layer], strict=True)
            )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sink_frames": 0}, "sink_frames is 0: must be 1 or more"),
        ({"tail_frames": 4}, "tail_frames is 4: at most a block of 3"),
        ({"num_candidates": 0}, "num_candidates is 0: must be 1 or more"),
        ({"reservoir_frames": 6}, "reservoir_frames is 6: must be 7 to 10000"),
        ({"tail_weight": float("nan")}, "tail_weight is nan: must be finite"),
    ],
)
def test_settings_that_cannot_be_are_refused_with_numbers(spec, settings, message):
    with pytest.raises(ValueError, match=message):
        RelaxForcingConfig(**settings).build(spec, None)
