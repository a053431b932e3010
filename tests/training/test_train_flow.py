from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from recap.contracts import Flow
from recap.flow import RAFT_SMALL
from recap.flow.exact import ExactFlow
from recap.flow.raft import RaftFlow, load_raft_small
from recap.flow.warp import backtrace, sample
from recap.flow.world import WorldFlowNet, load_world_flow
from training.flow_clips import FlowClips, FlowPool, halve, load_recode, open_flow_world
from training.flow_quality import (
    actor_tokens,
    best_tokens,
    end_point_errors,
    hidden_next,
    judge,
    notice_clip,
)
from training.records import save_weights
from training.train_flow import (
    FILE_NAME,
    Options,
    Trainer,
    actor_weights,
    flow_loss,
    make_optimisers,
    still_flow,
    vary,
)

HEIGHT, WIDTH, PICTURES = 32, 48, 21


def sliding_world(count: int, seed: int) -> FlowClips:
    """Slide a textured square over another texture that drifts, by whole, even numbers of pixels."""
    generator = torch.Generator().manual_seed(seed)

    def texture() -> Tensor:
        small = torch.rand(1, 3, 20, 24, generator=generator)
        return functional.interpolate(small, scale_factor=8, mode="bilinear")[0]

    pictures = torch.empty(count, PICTURES, 3, HEIGHT, WIDTH)
    instances = torch.zeros(count, PICTURES, HEIGHT, WIDTH, dtype=torch.uint8)
    # The last forward and the first backward flow are not used.
    forward, backward = torch.empty(2, count, PICTURES, 2, HEIGHT, WIDTH)
    for row in range(count):
        background, square = texture(), texture()[:, :14, :14]
        drift, slide = (2 * torch.randint(-1, 2, (2,), generator=generator) for _ in range(2))
        left, top, came = 18, 10, torch.zeros(2, dtype=torch.int64)
        for t in range(PICTURES):
            x, y = (60 - t * drift).tolist()
            box = (..., slice(top, top + 14), slice(left, left + 14))
            pictures[row, t] = background[:, y : y + HEIGHT, x : x + WIDTH]
            pictures[row, t][box] = square
            instances[row, t][box] = 1
            # It turns back before it leaves the picture.
            goes = slide if t % 8 < 4 else -slide
            for flow, far, near in ((forward, drift, goes), (backward, -drift, -came)):
                flow[row, t] = far[:, None, None]
                flow[row, t][box] = near[:, None, None].float()
            left, top, came = left + int(goes[0]), top + int(goes[1]), goes
    return FlowClips(pictures, forward[:, :-1], backward[:, 1:], instances)


def unchanged(pictures: Tensor) -> Tensor:
    return pictures


def darkened(pictures: Tensor) -> Tensor:
    return pictures * 0.25


def options(out: Path, seconds: float, **changes) -> Options:
    settings = {
        "batch": 8, "pool": 8, "start_pool": 8, "fresh": 4, "fresh_every": 100, "eval_clips": 2, "warmup_s": 0.2,
        "reserve_s": 0.0, "eval_every_s": 1e9, "mean_decay": 0.9,
    }  # fmt: skip
    return replace(Options(seconds / 60, Path("none"), out), **{**settings, **changes})


def few_clips(count: int, seed: int) -> FlowClips:
    return sliding_world(count, seed % 2)


def warp_error(clips: FlowClips) -> float:
    """Return the largest difference between pixels and the targets of their exact flow, if both are visible."""
    first, second = clips.pictures[:, :-1], clips.pictures[:, 1:]
    visible = ~hidden_next(clips.instances[:, :-1], clips.forward, clips.instances[:, 1:])
    off = (sample(second, backtrace(clips.forward)) - first).abs().mean(dim=2)
    back_visible = ~hidden_next(clips.instances[:, 1:], clips.backward, clips.instances[:, :-1])
    back_off = (sample(first, backtrace(clips.backward)) - second).abs().mean(dim=2)
    return max((off * visible).max().item(), (back_off * back_visible).max().item())


def test_the_loss_falls_on_few_clips(tmp_path: Path) -> None:
    trainer = Trainer(options(tmp_path, 600, seed=1), few_clips, unchanged, "cpu")
    before = trainer.evaluate()
    # Steps count here, not seconds.
    trainer.clock.rate = lambda: 1.0  # type: ignore[method-assign]
    losses = []
    for _ in range(60):
        trainer.clock.apply(trainer.optimisers)
        losses.append(trainer.step()[0].item())
    after = trainer.evaluate()
    assert sum(losses[-10:]) < 0.85 * sum(losses[:10])
    assert after["error_px"] < 0.7 * before["error_px"]


def test_everything_is_written_and_resumes(tmp_path: Path) -> None:
    first = Trainer(options(tmp_path / "a", 1), few_clips, unchanged, "cpu")
    measured = first.run()
    record = json.loads((tmp_path / "a" / "record.json").read_text())
    assert record["lines"][-1]["error_px"] == pytest.approx(measured["error_px"], rel=1e-3)
    assert record["settings"]["autoencoder"] == "none" and record["settings"]["batch"] == 8
    references = [line["name"] for line in record["lines"] if line["event"] == "reference"]
    assert references == ["still", "classical"]
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["record.json", FILE_NAME]
    saved = load_world_flow(tmp_path / "a" / FILE_NAME).state_dict()
    resumed = Trainer(options(tmp_path / "b", 1, resume=tmp_path / "a"), few_clips, unchanged, "cpu")
    for name, tensor in resumed.model.state_dict().items():
        assert torch.equal(tensor, saved[name])
    assert resumed.evaluate()["error_px"] == pytest.approx(measured["error_px"], rel=1e-2)


@pytest.mark.slow
def test_a_teacher_takes_the_place_of_the_exact_flow(tmp_path: Path, random_raft: Path) -> None:
    file = random_raft / RAFT_SMALL.file_name
    trainer = Trainer(options(tmp_path, 600, teacher=file), few_clips, unchanged, "cpu")
    # The first draw renders; those after it only choose.
    trainer.pool.draw(8)
    before = torch.get_rng_state()
    clips = vary(trainer.pool.draw(8), trainer.options.pixel_noise)
    forward, backward = RaftFlow(load_raft_small(file))(clips.pictures)
    _, wanted = flow_loss(trainer.model, replace(clips, forward=forward, backward=backward), trainer.options)
    _, exact = flow_loss(trainer.model, clips, trainer.options)
    torch.set_rng_state(before)
    found = trainer.step()[1].item()
    assert found == pytest.approx(wanted.item(), rel=1e-4) and abs(found - exact.item()) > 1e-2


def test_halved_clips_match_their_flow() -> None:
    """The toy world moves by even steps, so halved pictures match exactly too, mirrored or in another light."""
    clips = sliding_world(4, 3)
    assert warp_error(clips) < 1e-5
    small = halve(clips)
    assert small.pictures.shape == (4, PICTURES, 3, HEIGHT // 2, WIDTH // 2)
    assert small.forward.abs().max() == 1
    assert warp_error(small) < 1e-5
    pool = FlowPool(sliding_world, unchanged, capacity=8, fresh=4, every=1, decoded_share=0.0, seed=3)
    pairs = pool.draw(32)
    assert pairs.pictures.shape == (32, 2, 3, HEIGHT // 2, WIDTH // 2) and warp_error(pairs) < 0.01
    torch.manual_seed(0)
    varied = vary(pairs, pixel_noise=0.0)
    mirrored = (varied.forward[:, 0, 0] + pairs.forward[:, 0, 0].flip(-1)).flatten(1).abs().amax(1) == 0
    # Pairs without motion count as mirrored.
    assert 4 < mirrored.sum() < 32
    # Light flickers by a hundredth, times contrast and tint.
    assert warp_error(varied) < 0.05
    assert (varied.pictures - pairs.pictures).abs().max() > 0.05


def test_the_share_of_decoded_clips() -> None:
    def mean_light(share: float) -> Tensor:
        pool = FlowPool(sliding_world, darkened, capacity=8, fresh=8, every=9, decoded_share=share, seed=0)
        return pool.draw(400).pictures.mean(dim=(1, 2, 3, 4))

    assert mean_light(0.0).min() > 0.3
    assert mean_light(1.0).max() < 0.2
    assert 0.65 < (mean_light(0.75) < 0.2).float().mean() < 0.85


def test_the_network_trains_in_half_precision() -> None:
    """On a GPU everything except the flow itself is rounded to bfloat16."""
    clips, model = halve(sliding_world(2, 1)), WorldFlowNet()
    pairs = FlowClips(
        clips.pictures[:, :2], clips.forward[:, :1], clips.backward[:, :1], clips.instances[:, :2]
    )
    whole, _ = flow_loss(model, pairs, options(Path("none"), 1))
    with torch.autocast("cpu", torch.bfloat16):
        loss, error = flow_loss(model, pairs, options(Path("none"), 1))
    loss.backward()
    assert loss.dtype == error.dtype == torch.float32
    assert loss.item() == pytest.approx(whole.item(), rel=0.05)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_flow_from_an_actor_weighs_more() -> None:
    instances = torch.zeros(2, 2, 4, 6, dtype=torch.uint8)
    # Forward flow of the first pair and backward flow of the second start on an actor here.
    instances[0, 0, 1, 2] = 3
    instances[1, 1, 3, 4] = 1
    weight = actor_weights(instances, most=4.0)
    assert weight.shape == (4, 4, 6) and weight.mean().item() == pytest.approx(1)
    assert weight.max().item() == pytest.approx(5 * weight.min().item())
    heavy = weight > 2 * weight.min()
    assert heavy.nonzero().tolist() == [[0, 1, 2], [3, 3, 4]]


def test_every_parameter_has_one_rate(tmp_path: Path) -> None:
    model, settings = WorldFlowNet(), options(tmp_path, 1)
    groups = [group for each in make_optimisers(model, settings) for group in each.param_groups]
    listed = [id(p) for group in groups for p in group["params"]]
    assert sorted(listed) == sorted(id(p) for p in model.parameters())
    rates = {id(p): group["lr"] for group in groups for p in group["params"]}
    assert rates[id(model.first.correct.weight)] == settings.head_rate
    assert rates[id(model.weigh.weight)] == settings.muon_rate
    assert rates[id(model.weigh.bias)] == settings.adam_rate


def test_old_clips_are_replaced() -> None:
    seeds: list[int] = []

    def counted(count: int, seed: int) -> FlowClips:
        seeds.append(seed)
        clips = sliding_world(count, seed)
        return replace(clips, pictures=torch.full_like(clips.pictures, seed / 255))

    pool = FlowPool(counted, unchanged, capacity=8, fresh=4, every=2, decoded_share=0.0, seed=0)
    pool.fill(100)
    assert seeds == [1, 2]
    shown = [set((pool.draw(64).pictures * 255).round().flatten().tolist()) for _ in range(3)]
    assert seeds == [1, 2, 3, 4] and shown == [{2, 3}, {2, 3}, {3, 4}]


def test_hidden_pixels_go_behind_something_or_out() -> None:
    instances = torch.zeros(1, 1, 4, 6, dtype=torch.uint8)
    target = instances.clone()
    target[0, 0, :, 3] = 1
    right = torch.tensor([1.0, 0.0]).view(1, 1, 2, 1, 1).expand(1, 1, 2, 4, 6)
    hidden = hidden_next(instances, right, target)[0, 0]
    assert hidden.all(dim=0).tolist() == [False, False, True, False, False, True]
    assert not hidden[:, [0, 1, 3, 4]].any()


def test_errors_of_actors_are_separate() -> None:
    clips = halve(sliding_world(3, 5))
    assert set(end_point_errors(Flow(clips.forward, clips.backward), clips).values()) == {0.0}
    on_actors = (clips.instances > 0)[:, :-1, None] * torch.tensor([3.0, 4.0]).view(2, 1, 1)
    errors = end_point_errors(Flow(clips.forward + on_actors, clips.backward), clips)
    # One of two directions is off by 5.
    assert errors["error_actors_px"] == pytest.approx(2.5, rel=0.01)
    assert 0 < errors["error_px"] < 1


def test_exact_flow_agrees_with_itself_and_none_does_not() -> None:
    clips = sliding_world(4, 7)
    small = halve(clips)
    own = judge(ExactFlow(small.forward, small.backward), clips)
    assert own["fired_iou"] == own["bank_iou"] == own["fired_ratio"] == 1 and own["error_px"] == 0
    assert own["fired_on_actors"] == own["fired_on_actors_exact"]
    none = judge(still_flow, clips)
    assert none["fired_iou"] < 0.9 and none["error_px"] > 0.3
    scores, _ = notice_clip(ExactFlow(small.forward, small.backward), clips.pictures)
    assert (scores > 0).any() and not (scores[:, 0] > 0).any()


def test_a_bank_keeps_the_best_tokens_that_fired() -> None:
    scores = torch.zeros(1, 3, 2, 2)
    scores[0, 1] = torch.tensor([[0.5, 0.4], [0.3, 0.2]])
    scores[0, 2, 0, 0] = 1.0
    kept = best_tokens(scores)
    assert kept.sum() == 4 and kept[0, 2, 0, 0] and not kept[0, 1, 1, 1]
    assert best_tokens(scores * (scores > 0.45)).sum() == 2
    instances = torch.zeros(1, 5, 32, 48, dtype=torch.uint8)
    instances[0, 3, 20, 40] = 2
    assert actor_tokens(instances).nonzero().tolist() == [[0, 1, 1, 2]]


def test_the_sprite_world_is_rendered_with_its_motion(atlas, monkeypatch) -> None:
    monkeypatch.setattr("training.flow_clips.load_atlas", lambda: atlas)
    clips = open_flow_world("cpu")(1, 5)
    small = halve(clips)
    assert small.pictures.shape == (1, 81, 3, 64, 104) and small.forward.shape == (1, 80, 2, 64, 104)
    measured = judge(ExactFlow(small.forward, small.backward), clips)
    assert measured["fired_iou"] == 1 and measured["error_px"] == 0


def test_recoding_returns_decoded_pictures(tmp_path: Path) -> None:
    from recap.backbones.tiny.autoencoder import Autoencoder

    torch.manual_seed(0)
    model = Autoencoder()
    save_weights(tmp_path / "autoencoder.safetensors", model.state_dict())
    model.load_state_dict({name: tensor.half().float() for name, tensor in model.state_dict().items()})
    pictures = torch.rand(3, 5, 3, 16, 24)
    plain = load_recode(tmp_path / "autoencoder.safetensors", "cpu", noise=0.0, at_once=2)(pictures)
    with torch.no_grad():
        expected = model.decode(model.encode(pictures))
    torch.testing.assert_close(plain, expected, atol=1e-4, rtol=0)
    noisy = load_recode(tmp_path / "autoencoder.safetensors", "cpu", noise=0.5)(pictures)
    assert noisy.shape == pictures.shape and (noisy - expected).abs().max() > 1e-3
