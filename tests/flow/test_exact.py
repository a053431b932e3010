"""Known flow is returned in the order of the clip."""

from __future__ import annotations

import pytest
import torch

from recap.flow.exact import ExactFlow


@pytest.fixture
def truth():
    return torch.rand(2, 5, 2, 4, 6), torch.rand(2, 5, 2, 4, 6)


def test_calls_follow_the_stream(truth):
    forward, backward = truth
    estimate = ExactFlow(forward, backward)
    first, second = estimate(torch.zeros(2, 3, 3, 4, 6)), estimate(torch.zeros(2, 4, 3, 4, 6))
    assert torch.equal(torch.cat((first.forward, second.forward), dim=1), forward)
    assert torch.equal(torch.cat((first.backward, second.backward), dim=1), backward)


def test_beyond_the_end_is_refused_and_nothing_is_used_up(truth):
    estimate = ExactFlow(*truth)
    estimate(torch.zeros(2, 4, 3, 4, 6))
    with pytest.raises(ValueError, match="T must be 2 to 3 with 2 of 5 pairs left"):
        estimate(torch.zeros(2, 4, 3, 4, 6))
    assert torch.equal(estimate(torch.zeros(2, 3, 3, 4, 6)).forward, truth[0][:, 3:])


@pytest.mark.parametrize("shape", [(2, 2, 3, 4, 5), (1, 2, 3, 4, 6), (2, 1, 3, 4, 6)])
def test_other_sizes_are_refused(truth, shape):
    with pytest.raises(ValueError, match="pictures is"):
        ExactFlow(*truth)(torch.zeros(shape))


def test_odd_truth_is_refused(truth):
    with pytest.raises(ValueError, match="not B P 2 Y X"):
        ExactFlow(truth[0][0], truth[1][0])
    with pytest.raises(ValueError, match="backward is"):
        ExactFlow(truth[0], truth[1][:, 1:])
