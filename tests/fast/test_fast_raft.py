"""The fast RAFT-small is the readable one: same weights, same flow, same refusals."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from recap.fast.raft import FastRaftFlow, widened_conv
from recap.fast.raft_steps import WINDOWS, correlate, normalise, pool_levels, read
from recap.flow.raft import RaftFlow, RaftSmall, correlation_pyramid, look_up
from recap.flow.warp import backtrace


@pytest.fixture(scope="module")
def readable():
    torch.manual_seed(0)
    return RaftFlow(RaftSmall(), num_updates=5)


def clip(rows, num, height, width):
    """A texture that drifts."""
    coarse = torch.rand(rows, 3, height // 4 + 8, width // 4 + 8)
    texture = F.interpolate(coarse, scale_factor=4, mode="bicubic").clamp(0, 1)
    return torch.stack(
        [texture[:, :, 2 * t : 2 * t + height, 3 * t : 3 * t + width] for t in range(num)], dim=1
    )


def furthest(one, two):
    return max((a - b).norm(dim=2).max().item() for a, b in zip(one, two, strict=True))


SHAPES = [(1, 2, 128, 128), (1, 4, 128, 144), (2, 3, 133, 171), (3, 2, 40, 129), (1, 3, 1, 1)]


@pytest.mark.parametrize("shape", SHAPES)
def test_it_equals_the_readable_one(readable, shape):
    pictures = clip(*shape)
    expected, found = readable(pictures), FastRaftFlow(readable, dtype=torch.float32)(pictures)
    assert found.forward.shape == (shape[0], shape[1] - 1, 2, *shape[2:])
    assert found.forward.dtype == torch.float32
    assert expected.forward.abs().max() > 0.1
    assert furthest(expected, found) < 1e-4


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float16, 0.02), (torch.bfloat16, 0.2)])
def test_half_precision_stays_near(readable, dtype, bound):
    pictures = clip(1, 2, 128, 128)
    expected, found = readable(pictures), FastRaftFlow(readable, dtype=dtype)(pictures)
    assert found.forward.dtype == torch.float32
    assert 0 < furthest(expected, found) < bound


def test_a_bound_on_memory_changes_nothing(readable):
    pictures = clip(2, 3, 128, 136)
    whole = FastRaftFlow(readable, dtype=torch.float32)
    tight = FastRaftFlow(
        RaftFlow(readable.model, num_updates=readable.num_updates, volume_bytes=1), dtype=torch.float32
    )
    assert furthest(whole(pictures), tight(pictures)) < 1e-4


def test_the_readable_one_is_left_as_it_was(readable):
    before = {name: tensor.clone() for name, tensor in readable.model.state_dict().items()}
    pictures = clip(1, 2, 128, 128)
    expected = readable(pictures)
    FastRaftFlow(readable)(pictures)
    after = readable.model.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert torch.equal(readable(pictures).forward, expected.forward)


@pytest.mark.parametrize("size", [(16, 16), (17, 22), (30, 19)])
def test_windows_equal_those_of_the_readable_look_up(size):
    """Also far outside the picture, and where a wild flow points nowhere at all."""
    source, target = torch.randn(2, 3, 128, *size).unbind()
    flow = torch.rand(3, *size, 2) * 60 - 30
    flow[0, 0, 0], flow[1, 1, 1], flow[2, 2, 2] = 1e9, -1e9, 0.0
    expected = look_up(correlation_pyramid(source, target), backtrace(flow.movedim(-1, 1)))
    found = read(correlate(source.flatten(2).mT, pool_levels(target)), flow)
    assert found.shape == (3, *size, WINDOWS)
    torch.testing.assert_close(found[..., : expected.shape[1]].movedim(-1, 1), expected, atol=1e-4, rtol=1e-4)
    assert not found[..., expected.shape[1] :].any()


def test_the_norm_keeps_its_statistics_in_fp32():
    """Sums of a half-precision picture overflow long before its values do."""
    x = torch.randn(2, 5, 40, 50) * 100 + 300
    expected = F.instance_norm(x.half().float())
    found = normalise(x.half(), 1e-5, relu=False)
    assert found.dtype == torch.half
    torch.testing.assert_close(found.float(), expected, atol=2e-3, rtol=1e-3)


def test_zero_channels_change_no_convolution():
    conv = torch.nn.Conv2d(5, 6, 3, stride=2, padding=1)
    wide = widened_conv(conv, inputs=8, outputs=16)
    x = torch.randn(2, 5, 9, 10)
    padded = torch.cat((x, torch.randn(2, 3, 9, 10)), dim=1)
    torch.testing.assert_close(wide(padded)[:, :6], conv(x))
    assert not wide(padded)[:, 6:].any()


def test_bad_input_is_refused(readable):
    with pytest.raises(ValueError, match="at least 2"):
        FastRaftFlow(readable)(torch.rand(1, 1, 3, 128, 128))


@pytest.mark.cuda
def test_a_graph_gives_fresh_flow_for_fresh_pictures(readable):
    there = RaftFlow(RaftSmall().cuda(), num_updates=5)
    there.model.load_state_dict(readable.model.state_dict())
    fast = FastRaftFlow(there, captured=True)
    for _ in range(2):
        fast(clip(1, 3, 128, 136).cuda())
    clips = [clip(1, 3, 128, 136), clip(1, 3, 128, 136)]
    found = [fast(pictures.cuda()) for pictures in clips]
    for pictures, flow in zip(clips, found, strict=True):
        assert furthest(readable(pictures), [part.cpu() for part in flow]) < 0.02
