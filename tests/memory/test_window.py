"""Which frames a block sees, at which phases: section 4.2 of the released codes' eviction, and the paper's layout."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from recap.memory.window import Window
from recap.types import Block, Role, Tokens


def block_of(index, prompts=("",)):
    return Block(index, 3 * index, 3, prompts)


def run(window, spec, index):
    """One block whose keys carry their frame number; returns {role: (frames, phases)} and its own phases."""
    block = block_of(index)
    own = window.begin(block)
    seen = {}
    for segment in window.arrange(1, []):
        frames = segment.keys[0, :: spec.frame_tokens, 0, 0].int().tolist()
        seen[segment.role] = (frames, segment.positions[0, :: spec.frame_tokens, 0].tolist())
    stamp = torch.arange(3 * index, 3 * index + 3).repeat_interleave(spec.frame_tokens).float()
    keys = stamp[None, :, None, None].expand(1, -1, spec.heads, spec.head_dim)
    for layer in range(spec.layers):
        window.write(layer, Tokens(keys, keys, keys, torch.zeros(1, keys.shape[1], 3)))
    window.slide(block)
    return seen, own.tolist()


def frames_seen(window, spec, blocks):
    result = []
    for index in range(blocks):
        seen, _ = run(window, spec, index)
        result.append(sorted(frame for frames, _ in seen.values() for frame in frames))
    return result


def test_paper_layout_sink_1_prior_2_current_3(spec):
    window = Window(spec, sink_frames=1)
    assert run(window, spec, 0) == ({}, [0, 1, 2])
    assert run(window, spec, 1) == ({Role.SINK: ([0], [0]), Role.PRIOR: ([1, 2], [1, 2])}, [3, 4, 5])
    for index in (2, 3, 9):
        last = 3 * index - 1
        if index == 9:  # the window forgets nothing it should not: skip ahead
            for between in range(4, 9):
                run(window, spec, between)
        seen, own = run(window, spec, index)
        assert seen == {Role.SINK: ([0], [0]), Role.PRIOR: ([last - 1, last], [1, 2])}
        assert own == [3, 4, 5]


@pytest.mark.parametrize(
    ("window_frames", "sink_frames", "expected"),
    [
        (6, 0, [[], [0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]),
        (6, 1, [[], [0, 1, 2], [0, 4, 5], [0, 7, 8], [0, 10, 11]]),
        (12, 3, [[], [0, 1, 2], [*range(6)], [*range(9)], [0, 1, 2, *range(6, 12)]]),
        (7, 0, [[], [0, 1, 2], [2, 3, 4, 5], [5, 6, 7, 8], [8, 9, 10, 11]]),
        (7, 3, [[], [0, 1, 2], [0, 1, 2, 5], [0, 1, 2, 8], [0, 1, 2, 11]]),
        (9, 5, [[], [0, 1, 2], [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 8], [0, 1, 2, 3, 4, 11]]),
        (3, 0, [[], [], [], []]),
    ],
)
def test_eviction(spec, window_frames, sink_frames, expected):
    spec = dataclasses.replace(spec, window_frames=window_frames)
    assert frames_seen(Window(spec, sink_frames=sink_frames), spec, len(expected)) == expected


def test_phases_of_a_filling_window_run_on(spec):
    spec = dataclasses.replace(spec, window_frames=12)
    window = Window(spec, sink_frames=1)
    owns, priors = [], []
    for index in range(5):
        seen, own = run(window, spec, index)
        owns.append(own)
        priors.append(seen.get(Role.PRIOR, ([], []))[1])
    assert owns == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11], [9, 10, 11]]
    assert priors == [[], [1, 2], [1, 2, 3, 4, 5], [*range(1, 9)], [*range(1, 9)]]


def test_absolute_phases_as_released(spec):
    spec = dataclasses.replace(spec, phases="absolute")
    window = Window(spec, sink_frames=1)
    for index in range(4):
        seen, own = run(window, spec, index)
    assert own == [9, 10, 11]
    assert seen == {Role.SINK: ([0], [0]), Role.PRIOR: ([7, 8], [7, 8])}


def test_a_cut_drops_the_prior_and_leaves_the_sink_where_it_was(spec):
    window = Window(spec, sink_frames=1)
    for index in range(3):
        run(window, spec, index)
    window.keep_prior(0)
    assert run(window, spec, 3) == ({Role.SINK: ([0], [0])}, [3, 4, 5])
    assert run(window, spec, 4)[0][Role.PRIOR] == ([10, 11], [1, 2])


def test_a_cut_in_a_long_window_refills_from_the_new_shot_only(spec):
    spec = dataclasses.replace(spec, window_frames=12)
    window = Window(spec, sink_frames=1)
    for index in range(5):
        run(window, spec, index)
    window.keep_prior(0)
    run(window, spec, 5)
    assert run(window, spec, 6)[0][Role.PRIOR] == ([15, 16, 17], [6, 7, 8])


@pytest.mark.parametrize("sink_frames", [-1, 4])
def test_a_sink_that_does_not_fit_is_refused(spec, sink_frames):
    with pytest.raises(ValueError, match=f"sink_frames is {sink_frames}: 0 to 3 fit"):
        Window(spec, sink_frames=sink_frames)


@pytest.mark.parametrize("factor", [0.0, -1.0, float("nan"), float("inf")])
def test_a_reinforcement_that_is_no_factor_is_refused(spec, factor):
    with pytest.raises(ValueError, match=r"reinforcement is .*must be above 0"):
        Window(spec, sink_frames=1, reinforcement=factor)


@pytest.mark.parametrize(
    ("blocks", "first", "frames", "sink", "prior"),
    [
        (1, 0, 3, [100], [101, 102]),  # all there is, so the sink too
        (4, 3, 9, [0], [110, 111]),
        (4, 0, 12, [100], [110, 111]),
        (4, 11, 1, [0], [10, 111]),  # less than is stored
    ],
)
def test_recomputed_frames_replace_those_kept_and_the_sink_only_by_its_own(
    spec, blocks, first, frames, sink, prior
):
    window = Window(spec, sink_frames=1)
    for index in range(blocks):
        run(window, spec, index)
    stamp = 100 + torch.arange(first, first + frames).repeat_interleave(spec.frame_tokens).float()
    keys = stamp[None, None, :, None, None].expand(spec.layers, 1, -1, spec.heads, spec.head_dim)
    window.refresh(first, keys, keys + 0.5)
    window.begin(block_of(blocks))
    for layer in range(spec.layers):
        for segment, expected in zip(window.arrange(layer, []), (sink, prior), strict=True):
            stamps = segment.keys[0, :: spec.frame_tokens, 0, 0]
            assert stamps.tolist() == expected
            halves = segment.values[0, :: spec.frame_tokens, 0, 0] - stamps
            assert halves.tolist() == [0.5 if frame >= 100 else 0.0 for frame in expected]


def test_refreshing_an_empty_window_does_nothing(spec):
    window = Window(spec, sink_frames=1)
    window.refresh(0, torch.ones(2, 1, 18, 2, 12), torch.ones(2, 1, 18, 2, 12))
    assert run(window, spec, 0) == ({}, [0, 1, 2])
