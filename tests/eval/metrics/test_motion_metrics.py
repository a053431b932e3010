"""Flickering, dynamic degree and the camera-object split on clips whose motion is known."""

from __future__ import annotations

import numpy as np
import pytest
from made_clips import SIZE, one_mover, shifting, still, write

from recap.eval.metrics.dynamics import clip_flickering, clip_moves, dynamic_degree, temporal_flickering
from recap.eval.metrics.motion import motion, split_flow, spreads
from recap.flow import ClassicalFlow
from recap.io.video import open_clip


@pytest.fixture(scope="module")
def flow():
    return ClassicalFlow().forward


def values(scores):
    return {score.name: score.value for score in scores}


def test_flickering_of_a_still_clip_is_one_and_of_known_steps_is_known(tmp_path):
    assert clip_flickering(still(4)) == 1.0
    flat = np.zeros((5, 8, 8, 3), np.uint8)
    # Each step is a fifth of the range.
    flat[1::2] = 51
    assert clip_flickering(flat) == pytest.approx(0.8)
    score = temporal_flickering(open_clip(write(tmp_path / "a.mp4", still(70))))
    assert score.value > 0.999 and score.n == 3 and score.backend == "native"
    with pytest.raises(ValueError, match="at least 2"):
        clip_flickering(still(1))


def test_a_noisier_clip_flickers_more():
    generator = np.random.default_rng(0)
    noisy = [
        np.clip(still(8) + generator.normal(0, sd, (8, *SIZE, 3)), 0, 255).astype(np.uint8)
        for sd in (0, 5, 20)
    ]
    scores = [clip_flickering(each) for each in noisy]
    assert scores == sorted(scores, reverse=True) and scores[0] > scores[2] + 0.02


def test_dynamic_degree_of_still_and_shifting_clips(flow, tmp_path):
    """The limit at this size is 2.25 px between every other picture."""
    assert not clip_moves(still(32), 16, flow) and not clip_moves(still(3), 16, flow)
    assert clip_moves(shifting(32, 3), 16, flow)
    assert not clip_moves(shifting(32, 1), 16, flow)
    half = np.concatenate([still(32), shifting(32, 3)])
    score = dynamic_degree(open_clip(write(tmp_path / "a.mp4", half)), flow, "dis")
    assert score.value == 0.5 and score.details["clips"] == [False, True] and score.backend == "dis"


def test_a_small_fast_mover_makes_a_clip_dynamic(flow):
    """VBench uses the top 5 % of flow, so a tenth of the picture is enough."""
    assert clip_moves(one_mover(32, 3)[0], 16, flow)


def test_the_split_of_exact_flow():
    """A pan is camera motion only; a square moving over a still background is object motion only."""
    pan = np.broadcast_to(np.array([3.0, 4.0], np.float32)[:, None, None], (2, *SIZE)).copy()
    camera, moved, explained = split_flow(pan)
    assert camera == pytest.approx(5, abs=1e-4) and moved == pytest.approx(0, abs=1e-4) and explained
    lone = np.zeros((2, *SIZE), np.float32)
    lone[0, 20:60, 20:60] = 8
    camera, moved, _ = split_flow(lone)
    assert camera == pytest.approx(0, abs=1e-4)
    assert moved == pytest.approx(8 * 40 * 40 / (SIZE[0] * SIZE[1]), rel=1e-4)


def test_flow_that_no_camera_explains_is_object_motion():
    generator = np.random.default_rng(0)
    _, moved, explained = split_flow(generator.normal(0, 30, (2, *SIZE)).astype(np.float32))
    assert not explained and moved > 30


def test_motion_of_pictures(flow):
    nothing = values(motion(still(20), flow, "dis"))
    assert nothing["total_flow"] < 1e-6 and nothing["object_fraction"] is None
    pan = values(motion(shifting(20, 3, 2), flow, "dis"))
    assert pan["camera_flow"] == pytest.approx(13**0.5, abs=0.2) and pan["object_flow"] < 0.3
    lone = motion(one_mover(20, 6)[0], flow, "dis")
    assert all(score.backend == "dis" and score.n == 3 for score in lone)
    found = values(lone)
    # Dense inverse search blurs the square's edge over a few pixels of the still background.
    assert found["camera_flow"] < 0.2 and found["object_fraction"] > 0.75
    assert found["object_flow"] == pytest.approx(6 * 40 * 40 / (SIZE[0] * SIZE[1]), rel=0.5)
    with pytest.raises(ValueError, match="at least 2"):
        motion(still(1), flow, "dis")


def test_statistics_of_the_flows_of_many_videos():
    flows = np.array([2.0, 4.0, 2.0, 10.0])
    found = {name: spread(flows) for name, spread in spreads([1.0, 1.0, 1.0]).items()}
    # 10 is above twice their median of 3; 4 and 10 are above twice 1.
    assert found["drift_tail"] == 1 / 4 and found["drift_tail_of_baseline"] == 2 / 4
    assert found["total_flow_sd"] == pytest.approx(np.std([2, 4, 2, 10]))
