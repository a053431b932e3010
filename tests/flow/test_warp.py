"""Functions that follow a flow field equal loops over pixels."""

from __future__ import annotations

import math

import pytest
import torch

from recap.flow.warp import backtrace, inside, sample


def read_slowly(image, x, y):
    """Read one position bilinearly, after clamping it to the picture."""
    height, width = image.shape[-2:]
    x, y = min(max(x, 0.0), width - 1.0), min(max(y, 0.0), height - 1.0)
    left, top = math.floor(x), math.floor(y)
    right, bottom = min(left + 1, width - 1), min(top + 1, height - 1)
    fx, fy = x - left, y - top
    above = image[:, top, left] * (1 - fx) + image[:, top, right] * fx
    below = image[:, bottom, left] * (1 - fx) + image[:, bottom, right] * fx
    return above * (1 - fy) + below * fy


def test_positions_are_x_first():
    flow = torch.zeros(2, 3, 4)
    flow[0], flow[1] = 0.5, -1
    at = backtrace(flow)
    assert at[:, 2, 1].tolist() == [1.5, 1.0]


def test_half_precision_flow_gives_full_precision_positions():
    at = backtrace(torch.zeros(2, 1, 4100, dtype=torch.bfloat16))
    assert at.dtype == torch.float32 and at[0, 0, 4099] == 4099


def test_whole_shift_moves_pixels():
    image = torch.rand(3, 6, 9)
    flow = torch.zeros(2, 6, 9)
    flow[0], flow[1] = 2, -1  # each pixel looks two to the right and one up
    moved = sample(image, backtrace(flow))
    torch.testing.assert_close(moved[:, 1:, :-2], image[:, :-1, 2:])


@pytest.mark.parametrize("size", [(6, 9), (1, 9), (6, 1), (1, 1)])
def test_any_flow_equals_loops(size):
    image, flow = torch.rand(2, *size), torch.randn(2, *size) * 4
    at = backtrace(flow)
    expected = torch.stack(
        [
            torch.stack([read_slowly(image, *at[:, y, x].tolist()) for x in range(size[1])], dim=-1)
            for y in range(size[0])
        ],
        dim=-2,
    )
    torch.testing.assert_close(sample(image, at), expected)


def test_beyond_the_border_the_border_counts():
    image = torch.arange(12.0).reshape(1, 3, 4)
    at = torch.tensor([[-50.0, 3.4, 60.0], [-0.3, 1.0, 90.0]]).reshape(2, 1, 3)
    assert sample(image, at).flatten().tolist() == [0.0, 7.0, 11.0]


def test_leading_dimensions_are_independent():
    image, at = torch.rand(2, 3, 4, 5, 6), torch.rand(2, 3, 2, 7, 8) * 5
    read = sample(image, at)
    assert read.shape == (2, 3, 4, 7, 8)
    torch.testing.assert_close(read[1, 2], sample(image[1, 2], at[1, 2]))


def test_the_image_keeps_its_type():
    assert sample(torch.rand(1, 4, 4).bfloat16(), torch.rand(2, 4, 4)).dtype == torch.bfloat16


def test_inside_reaches_half_a_pixel_beyond_centres():
    x = torch.tensor([-0.51, -0.5, 0.0, 5.5, 5.51])
    at = torch.stack((x, torch.zeros(5)))[:, None]
    assert inside(at, (3, 6)).flatten().tolist() == [False, True, True, True, False]
    assert inside(at.flip(0), (6, 3)).flatten().tolist() == [False, True, True, True, False]


@pytest.mark.cuda
def test_nothing_waits_for_the_device():
    image, flow = torch.rand(2, 3, 8, 8, device="cuda"), torch.rand(2, 2, 8, 8, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        at = backtrace(flow)
        sample(image, at) * inside(at, (8, 8))[:, None]
    finally:
        torch.cuda.set_sync_debug_mode("default")
