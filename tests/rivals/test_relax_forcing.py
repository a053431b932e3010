"""Relax Forcing against a twin that keeps every frame, and its layout of seven frames."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from rival_driving import absolute, draw_block, drive, frames_of, random_block

from recap.rivals.relax_forcing import RelaxForcingConfig, candidate_frames
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


@pytest.mark.parametrize(
    ("first", "end", "frames"),
    [(2, 5, [3, 4]), (2, 8, [5, 6, 7]), (2, 11, [6, 7, 9, 10]), (2, 101, [51, 67, 84, 100]), (4, 5, [4])],
)
def test_candidates_lie_evenly_in_the_newer_half(first, end, frames):
    assert candidate_frames(first, end, 4).unique().tolist() == frames


def cosine(a, b):
    return float(a @ b / np.sqrt((a @ a) * (b @ b)))


@pytest.mark.parametrize(
    "config", [RelaxForcingConfig(), RelaxForcingConfig(reservoir_frames=20, sink_frames=1)]
)
def test_history_equals_a_twin_that_keeps_every_frame(spec, config):
    """Per row, for 30 blocks, a cut among them: likeness to the sink minus twice that to the tail."""
    policy, frames, cut = config.build(spec, None), {}, 12
    chosen = set()
    for index in range(30):
        if index == cut:
            policy.clear_prior()
        block, passes = random_block(spec, index, rows=2)
        _, seen, _ = draw_block(policy, spec, block, passes)
        first, sink = block.first_frame, config.sink_frames
        tail = 0 if index in (0, cut) else 1
        end = first - tail
        oldest = max(sink, end - (config.reservoir_frames - sink - config.tail_frames))
        for row in range(2):
            history = [s for s in seen[0] if s.role is Role.BANK]
            if end <= oldest:
                assert not history
                continue
            means = {f: keys[0][row].double().mean(0).flatten().numpy() for f, (keys, _) in frames.items()}
            opening = np.mean([means[f] for f in range(sink)], axis=0)

            def score(frame, means=means, opening=opening, first=first, tail=tail):
                like = cosine(means[frame], opening)
                return like - 2 * cosine(means[frame], means[first - 1]) if tail else like

            best = max(candidate_frames(oldest, end, 4).tolist(), key=score)
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


def test_a_reservoir_on_the_host_reads_the_same(spec):
    one, other = (RelaxForcingConfig(reservoir_on_host=h).build(spec, None) for h in (False, True))
    for a, b in zip(drive(one, spec, 14), drive(other, spec, 14), strict=True):
        for layer in a[2]:
            assert all(
                torch.equal(x.keys, y.keys) and torch.equal(x.positions, y.positions)
                for x, y in zip(a[2][layer], b[2][layer], strict=True)
            )


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"sink_frames": 0}, "sink_frames is 0: must be 1 or more"),
        ({"tail_frames": 4}, "tail_frames is 4: at most a block of 3"),
        ({"num_candidates": 0}, "num_candidates is 0: must be 1 or more"),
        ({"reservoir_frames": 3}, "reservoir_frames is 3: must be 4 to 10000"),
        ({"tail_weight": float("nan")}, "tail_weight is nan: must be finite"),
    ],
)
def test_settings_that_cannot_be_are_refused_with_numbers(spec, settings, said):
    with pytest.raises(ValueError, match=said):
        RelaxForcingConfig(**settings).build(spec, None)
