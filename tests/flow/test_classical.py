"""OpenCV's flow keeps our contract."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.nn.functional as F

from recap.flow.classical import ClassicalFlow

pytest.importorskip("cv2")


@pytest.fixture
def drifting():
    """2 3 3 40 56: rows that move 2 to the right and 1 up per picture, and the opposite."""
    texture = F.interpolate(torch.rand(1, 3, 24, 30), size=(72, 90), mode="bicubic")[0].clamp(0, 1)
    row = torch.stack([texture[:, 10 + i : 50 + i, 10 - 2 * i : 66 - 2 * i] for i in range(3)])
    return torch.stack((row, row.flip(0)))


def test_error_on_a_real_pair(rubber_whale):
    assert rubber_whale.error(ClassicalFlow()(rubber_whale.pictures)) == pytest.approx(0.224, abs=0.01)


def test_directions_rows_and_pairs_are_in_order(drifting):
    flow = ClassicalFlow()(drifting)
    assert flow.forward.shape == flow.backward.shape == (2, 2, 2, 40, 56)
    assert flow.forward.dtype == torch.float32
    expected = torch.tensor([2.0, -1.0])
    for sign, part in (
        (1, flow.forward[0]),
        (-1, flow.backward[0]),
        (-1, flow.forward[1]),
        (1, flow.backward[1]),
    ):
        middle = part[..., 8:-8, 8:-8].flatten(-2).median(dim=-1).values
        torch.testing.assert_close(middle, (sign * expected).expand(2, 2), atol=0.2, rtol=0)


def test_threads_find_the_flow_that_one_search_finds(drifting, monkeypatch):
    found = []
    for threads in (1, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        found.append(ClassicalFlow()(drifting.repeat(3, 1, 1, 1, 1)))
    assert torch.equal(found[0].forward, found[1].forward)
    assert torch.equal(found[0].backward, found[1].backward)


def test_one_way_is_half_of_both(drifting):
    flow = ClassicalFlow()
    assert torch.equal(flow.forward(drifting), flow(drifting).forward)


@pytest.mark.parametrize("size", [(4, 4), (9, 200), (33, 35)])
def test_any_size_is_taken(size):
    flow = ClassicalFlow()(torch.rand(1, 2, 3, *size))
    assert flow.forward.shape == (1, 1, 2, *size) and flow.backward.isfinite().all()


def test_one_picture_is_refused():
    with pytest.raises(ValueError, match="at least 2"):
        ClassicalFlow()(torch.rand(1, 1, 3, 40, 40))


def test_without_opencv_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "cv2", None)
    with pytest.raises(ValueError, match="pip install opencv-python-headless"):
        ClassicalFlow()


@pytest.mark.cuda
def test_the_flow_is_where_the_pictures_are(drifting):
    assert ClassicalFlow()(drifting.cuda()).backward.is_cuda
