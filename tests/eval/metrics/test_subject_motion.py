"""The path and the change of shape of a square, on synthetic pictures with known answers."""

from __future__ import annotations

import numpy as np
import pytest
from made_clips import texture

from recap.eval.judged import build_motion_judge
from recap.eval.metrics.presence import presence, stretches
from recap.eval.metrics.subject_motion import camera_motion, camera_steps, outline_change, subject_motion
from recap.eval.sampling import Sampled, Span
from recap.io.trace import BlockTrace

CELL = 16
# In cells: 96 x 160 pixels.
ROWS, COLUMNS = 6, 10
JUDGE = build_motion_judge()


def made(corners, *, pan=0, sizes=None):
    """Show a textured square at these (row, column) cells, half a second apart; None means that it is hidden.

    The background moves to the left by `pan` pixels from each picture to the next.
    """
    background, square = texture(0, (96, 480)), texture(7)
    pictures = np.stack([background[:, 80 + i * pan : 240 + i * pan] for i in range(len(corners))]).copy()
    shares = np.zeros((len(corners), ROWS, COLUMNS), np.float32)
    sizes = sizes or [(2, 2)] * len(corners)
    for picture, cells, corner, size in zip(pictures, shares, corners, sizes, strict=True):
        if corner is not None:
            (top, left), (down, across) = corner, size
            cells[top : top + down, left : left + across] = 1
            high, wide = down * CELL, across * CELL
            picture[top * CELL :, left * CELL :][:high, :wide] = square[:high, :wide]
    return Sampled(np.arange(len(corners)) / 2, pictures, len(corners) / 2), shares


def measure(sampled, shares, cuts=()):
    camera = camera_steps(sampled, JUDGE.flow, shares, cuts)
    path, shape = subject_motion(sampled, shares, camera, ("squares", JUDGE.backend))
    assert (path.name, shape.name) == ("subject_path", "subject_shape_change")
    assert (path.backend, shape.backend) == ("squares and dis", "squares")
    assert path.n == shape.n
    return path.value, shape.value, path.n


def test_a_frozen_subject_scores_zero():
    assert measure(*made([(2, 3)] * 5)) == (0, 0, 4)


def test_a_moving_square_has_its_path_and_keeps_its_shape():
    """It moves by a cell, a tenth of the width, each half second."""
    path, shape, pairs = measure(*made([(2, 1), (2, 2), (2, 3), (2, 4)]))
    assert path == pytest.approx(0.2, abs=0.01) and shape == 0 and pairs == 3


def test_to_and_fro_is_a_path_too_and_down_counts_in_widths():
    path, _, _ = measure(*made([(1, 4), (2, 4), (1, 4), (2, 4)]))
    assert path == pytest.approx(0.2, abs=0.01)


def test_the_camera_is_not_the_subject():
    """A square that moves with the background stands still; one that does not is walking."""
    with_it = measure(*made([(2, 6), (2, 5), (2, 4), (2, 3)], pan=CELL))
    against = measure(*made([(2, 4)] * 4, pan=CELL // 2))
    assert with_it[0] == pytest.approx(0, abs=0.01) and with_it[1] == 0
    assert against[0] == pytest.approx(0.1, abs=0.01) and against[1] == 0


def camera_path(sampled, shares=None, cuts=()):
    (score,) = camera_motion(sampled, camera_steps(sampled, JUDGE.flow, shares, cuts), JUDGE.backend)
    assert (score.name, score.backend) == ("camera_path", "dis")
    return score.value, score.n


def test_the_subject_is_not_the_camera():
    """The background moves by a tenth of the width a second, whatever the subject does and wherever nobody is."""
    for corners in ([(2, 4)] * 4, [(2, 6), (2, 5), (2, 4), (2, 3)], [None, (2, 4), None, None]):
        path, pairs = camera_path(*made(corners, pan=CELL // 2))
        assert path == pytest.approx(0.1, abs=0.01) and pairs == 3
    # One so large that it would be taken for the camera if nobody said what it is.
    large = made([(0, 0), (0, 1), (0, 2)], sizes=[(6, 7)] * 3)
    assert camera_path(*large)[0] == pytest.approx(0, abs=0.01)
    assert camera_path(large[0])[0] == pytest.approx(0.2, abs=0.02)


def test_the_camera_needs_a_pair_without_a_cut():
    sampled, shares = made([(2, 4)] * 4, pan=CELL // 2)
    path, pairs = camera_path(sampled, shares, cuts=[0.5, 0.7])
    assert path == pytest.approx(0.1, abs=0.01) and pairs == 1
    assert camera_path(sampled, shares, cuts=[0.5, 1.0, 1.5]) == (None, 0)
    assert camera_path(*made([(2, 4)])) == (None, 0)


def test_a_change_of_shape_is_seen_wherever_the_square_is():
    """It grows from 2 x 2 cells to 2 x 4 and back: half of the larger outline is in both."""
    sizes = [(2, 2), (2, 4), (2, 2)]
    for corners in ([(2, 3), (2, 2), (2, 3)], [(1, 1), (3, 4), (1, 1)]):
        assert measure(*made(corners, sizes=sizes))[1] == pytest.approx(0.5)


def test_pairs_need_the_subject_twice_and_no_cut_between():
    corners = [(2, 1), None, (2, 2), (2, 3), (2, 8)]
    assert measure(*made(corners), cuts=[1.75])[2] == 1
    # The picture at the cut belongs to the next scene.
    path, shape, pairs = measure(*made(corners), cuts=[2.0])
    assert path == pytest.approx(0.2, abs=0.01) and shape == 0 and pairs == 1
    assert measure(*made([(2, 1), None, (2, 2)])) == (None, None, 0)
    assert measure(*made([(2, 1), (2, 2)]), cuts=[0.5]) == (None, None, 0)


def test_outlines_are_laid_over_each_other_in_whole_cells():
    one, other = np.zeros((2, 4, 6), bool)
    one[1:3, 0:2] = other[2:4, 3:5] = True
    assert outline_change(one, other, np.array([1.0, 3.0])) == 0
    # The best of the whole shifts around it counts.
    assert outline_change(one, other, np.array([0.6, 2.5])) == 0
    assert outline_change(one, other, np.array([1.0, 2.0])) == pytest.approx(1 - 2 / 6)
    assert outline_change(one, other, np.array([0.0, 0.0])) == 1


def line(block, prompt, *, cut=False):
    first = [max(0, 4 * frame - 3) for frame in range(3 * block, 3 * block + 3)]
    count = 12 - 3 * (block == 0)
    return BlockTrace(block, 3 * block, tuple(first), count, prompts=(prompt,), clears_prior=cut)


def test_stretches_end_where_the_prompt_changes_and_at_cuts():
    prompts = ["a fox", "a fox", "a fox and a bus", "a fox", "a fox"]
    found = stretches([line(i, text, cut=i == 4) for i, text in enumerate(prompts)], 16, 3.5)
    assert [(each.prompt, each.first_block) for each in found] == [
        ("a fox", 0), ("a fox and a bus", 2), ("a fox", 3), ("a fox", 4)
    ]  # fmt: skip
    assert [each.span for each in found] == [
        (0, 21 / 16), (21 / 16, 33 / 16), (33 / 16, 45 / 16), (45 / 16, 3.5)
    ]  # fmt: skip
    assert found[1].without_first(0.125) == (23 / 16, 33 / 16)
    # At most a third is left out.
    assert found[1].without_first(9) == (25 / 16, 33 / 16)


def test_presence_is_a_share_of_all_moments_of_all_spans():
    sampled = Sampled(np.arange(10) / 2, np.zeros((10, 2, 2, 3), np.uint8), 5)
    found = np.arange(10) >= 7
    score = presence(sampled, found, [Span(0, 1), Span(3, 5)], "haunting", "squares")
    assert score.value == 3 / 6 and score.n == 6 and score.backend == "squares"
    assert score.details == {"spans_s": [[0, 1], [3, 5]], "found_share": [0, 3 / 4]}
    nothing = presence(sampled, found, [Span(0.1, 0.2)], "haunting", "squares")
    assert nothing.value is None and nothing.n == 0
