"""world-flow: its parts against plain twins, the contract of an estimator, its files."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from recap.backbones.wan.spec import EMBEDDED
from recap.flow.network import pad_to_network
from recap.flow.warp import sample
from recap.flow.world import (
    PICTURE_SIZE,
    RADIUS,
    WORLD,
    FlowEstimate,
    WorldFlow,
    WorldFlowNet,
    correlate,
    enlarge,
    load_world_flow,
    read_windows,
)
from recap.memory.sink import NoMemoryConfig
from recap.plan import Shot, make_plan
from recap.registry import load_backbone
from recap.rollout import rollout


@pytest.fixture(scope="module")
def model():
    """Random weights, whose corrections are not next to nothing: two pictures must differ in the flow."""
    torch.manual_seed(0)
    net = WorldFlowNet()
    for step in (net.first, net.second, net.third):
        torch.nn.init.normal_(step.correct.weight, std=0.01)
    return net


@pytest.fixture
def clip():
    """1 4 3 64 104: a texture that drifts, at the size the embedded model's pictures have for flow."""
    generator = torch.Generator().manual_seed(1)
    small = torch.rand(1, 3, 20, 30, generator=generator)
    texture = F.interpolate(small, size=(80, 120), mode="bicubic").clamp(0, 1)
    return torch.stack([texture[0, :, i : i + 64, 3 * i : 3 * i + 104] for i in range(4)])[None]


def test_windows_equal_reading_place_by_place():
    source, target = torch.randn(2, 2, 8, 6, 9).unbind()
    centres = torch.rand(2, 2, 6, 9) * 16 - 4  # some of them outside
    maps = correlate(source, target)
    plain = torch.einsum("ncyx,ncuv->nyxuv", source, target) / 8**0.5
    ringed = F.pad(plain, (1, 1, 1, 1)).flatten(0, 2)[:, None]
    reach = torch.arange(-RADIUS, RADIUS + 1.0)
    window = torch.stack((reach.expand(len(reach), -1), reach[:, None].expand(-1, len(reach))))
    places = centres.movedim(1, -1).reshape(-1, 2, 1, 1) + window + 1
    expected = sample(ringed, places).reshape(2, 6, 9, -1).movedim(-1, 1)
    torch.testing.assert_close(read_windows(maps, centres), expected, atol=1e-5, rtol=1e-5)


def test_a_match_is_seen_where_it_is():
    """What moved by (2, -1) correlates best two columns to the right and a row above the middle of its window."""
    features = F.normalize(torch.randn(1, 32, 10, 14), dim=1) * 32**0.5
    moved = features.roll((-1, 2), dims=(2, 3))
    middle = torch.stack((torch.full((10, 14), 0.0), torch.full((10, 14), 0.0)))[None]
    grid = torch.stack(torch.meshgrid(torch.arange(10.0), torch.arange(14.0), indexing="ij")[::-1])
    best = read_windows(correlate(features, moved), middle + grid)[0, :, 3:-3, 3:-3].argmax(dim=0)
    side = 2 * RADIUS + 1
    assert (best == (RADIUS - 1) * side + RADIUS + 2).all()


def test_one_motion_is_the_same_at_every_size(model):
    """Also at the border, where zeros around the picture would pull it down."""
    motion = torch.tensor([1.5, -0.5]).view(1, 2, 1, 1).expand(1, 2, 6, 8)
    torch.testing.assert_close(enlarge(motion, 2), 2 * motion[:, :, :1, :1].expand(1, 2, 12, 16))
    sharp = model.sharpen(FlowEstimate(motion, motion, motion, torch.randn(1, 64, 6, 8)))
    torch.testing.assert_close(sharp, 4 * motion[:, :, :1, :1].expand(1, 2, 24, 32))


def test_sharpening_puts_pixels_where_they_belong(model):
    """With all weight on the middle of the nine, every pixel has the flow of its own square of four by four."""
    flow = torch.randn(1, 2, 3, 5)
    model.weigh.weight.data, kept = torch.zeros_like(model.weigh.weight), model.weigh.weight.data
    bias, model.weigh.bias.data = model.weigh.bias.data, torch.zeros(9 * 16)
    model.weigh.bias.data.view(9, 16)[4] = 50.0
    sharp = model.sharpen(FlowEstimate(flow, flow, flow, torch.randn(1, 64, 3, 5)))
    model.weigh.weight.data, model.weigh.bias.data = kept, bias
    torch.testing.assert_close(sharp, 4 * flow.repeat_interleave(4, -1).repeat_interleave(4, -2))


def test_shapes_and_directions(model, clip):
    estimate = WorldFlow(model)
    both = torch.cat((clip, clip.flip(-1)))
    flow = estimate(both)
    assert flow.forward.shape == flow.backward.shape == (2, 3, 2, 64, 104)
    assert flow.forward.dtype == torch.float32
    torch.testing.assert_close(estimate.forward(both), flow.forward, atol=1e-4, rtol=0)
    reverse = estimate(both.flip(1)).forward.flip(1)
    torch.testing.assert_close(flow.backward, reverse, atol=1e-4, rtol=0)
    assert (flow.forward - flow.backward).abs().max() > 0.05  # so the lines above compare something


def test_a_block_equals_its_pairs(model, clip):
    estimate = WorldFlow(model)
    whole = estimate(clip)
    for pair in range(3):
        alone = estimate(clip[:, pair : pair + 2])
        for name in ("forward", "backward"):
            expected = getattr(alone, name)[:, 0]
            torch.testing.assert_close(getattr(whole, name)[:, pair], expected, atol=1e-4, rtol=0)
    assert (whole.forward[:, 0] - whole.forward[:, 1]).abs().max() > 0.05


def test_rows_and_parts_do_not_matter(model, clip):
    """Two rows in one call, and a bound on memory so low that each direction of each pair goes alone."""
    both = torch.cat((clip, clip.flip(-1)))
    at_once = WorldFlow(model)(both)
    in_parts = WorldFlow(model, volume_bytes=1)(both)
    one_row = WorldFlow(model)(both[1:])
    torch.testing.assert_close(at_once.forward, in_parts.forward, atol=1e-4, rtol=0)
    torch.testing.assert_close(at_once.backward[1:], one_row.backward, atol=1e-4, rtol=0)


def test_every_picture_is_encoded_once(model, clip):
    seen = []
    hook = model.encode.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].shape))
    WorldFlow(model)(clip)
    hook.remove()
    assert seen == [(4, 3, 64, 104)]  # and nothing is added to a size that fits


@pytest.mark.parametrize("size", [(8, 8), (61, 99), (72, 40)])
def test_other_sizes_are_padded(model, size):
    pictures = torch.rand(1, 2, 3, *size)
    flow = WorldFlow(model)(pictures)
    assert flow.forward.shape == (1, 1, 2, *size) and flow.forward.isfinite().all()
    padded, crop = pad_to_network(pictures[0], smallest=16)
    again = WorldFlow(model)(padded[None]).forward[(..., *crop)]
    torch.testing.assert_close(flow.forward, again, atol=1e-4, rtol=0)


def test_one_picture_is_refused(model):
    with pytest.raises(ValueError, match="at least 2"):
        WorldFlow(model)(torch.rand(1, 1, 3, 64, 104))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_picture_that_is_not_finite_shows_in_the_flow(model, clip, bad):
    """So novelty refuses it; places that do not exist are never read."""
    clip[0, 1, 0, 30, 40] = bad
    flow = WorldFlow(model)(clip)
    assert not flow.forward[:, :2].isfinite().all(dim=(2, 3, 4)).any()
    assert flow.forward[:, 2].isfinite().all()


def test_it_is_small_and_its_file_loads_as_it_was(model, tmp_path, clip):
    path = tmp_path / "world-flow.safetensors"
    halves = {name: tensor.half().contiguous() for name, tensor in model.state_dict().items()}
    save_file(halves, path)
    assert path.stat().st_size <= 2e6
    again = load_world_flow(path)
    assert all(torch.equal(again.state_dict()[name], tensor.float()) for name, tensor in halves.items())
    assert WorldFlow(again)(clip).forward.isfinite().all()


@torch.no_grad()
def test_the_shipped_weights_know_their_world():
    """A picture of the embedded model, moved as its camera does: nearly every pixel not cut off has that motion."""
    assert (EMBEDDED.name, EMBEDDED.backbone_spec().picture_size) == (WORLD, PICTURE_SIZE)
    backbone = load_backbone(WORLD)
    plan = make_plan([[Shot("a fox on a beach by day", 0.5)]], backbone.spec)
    (block,) = rollout(backbone, NoMemoryConfig().build(backbone.spec, pytest.fail), plan, seeds=[0])
    picture = F.avg_pool2d(block.pixels[0, -1:], 2)
    flow = WorldFlow(load_world_flow())(torch.stack((picture, picture.roll(3, -1)), dim=1))
    for found, motion in ((flow.forward, 3.0), (flow.backward, -3.0)):
        away = (found[0, 0] - torch.tensor([motion, 0.0]).view(2, 1, 1)).norm(dim=0)[8:-8, 8:-8]
        # It was taught by RAFT-small, which follows flat sky and ground less closely than what has edges.
        assert away.median() < 0.2 and (away < 0.7).float().mean() > 0.9


def test_wrong_tensors_are_listed(model, tmp_path):
    content = {name: tensor.clone().contiguous() for name, tensor in model.state_dict().items()}
    del content["first.correct.bias"]
    content["first.odd"] = torch.zeros(1)
    content["weigh.bias"] = torch.zeros(143)
    path = tmp_path / "odd.safetensors"
    save_file(content, path)
    with pytest.raises(ValueError, match=r"does not fit the .* tensors of world-flow") as refusal:
        load_world_flow(path)
    for part in (
        str(path),
        "1 missing (first.correct.bias)",
        "1 unknown (first.odd)",
        "1 misshapen (weigh.bias [143] for [144])",
        "training.train_flow",
    ):
        assert part in str(refusal.value)


def test_missing_and_broken_files_are_refused(model, tmp_path):
    with pytest.raises(ValueError, match=r"no such file.*training\.train_flow"):
        load_world_flow(tmp_path / "none.safetensors")
    path = tmp_path / "cut.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, path)
    path.write_bytes(path.read_bytes()[:100_000])
    with pytest.raises(ValueError, match=r"cut\.safetensors.*cannot be read.*training\.train_flow"):
        load_world_flow(path)
