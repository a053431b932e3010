from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from recap.backbones.wan.backbone import WanBackbone, build_untrained
from recap.backbones.wan.decoder import UpsampleDecoder
from recap.backbones.wan.taehv import Taehv
from recap.fast.accelerate import fast_decoder
from recap.fast.taehv import FastTaehv, FastTaehvStream


@pytest.fixture(scope="module")
def model() -> Taehv:
    torch.manual_seed(0)
    made = Taehv().eval().requires_grad_(False)
    for parameter in made.parameters():
        parameter.mul_(1.8)  # or hardly anything would come through all layers
    made.decoder[-1].bias.add_(0.5)  # and half of it below 0
    return made


def latents(frames: int, rows: int = 2) -> Tensor:
    return torch.randn(rows, frames, 16, 4, 6, generator=torch.Generator().manual_seed(frames))


@pytest.mark.parametrize("cut", [[3, 1, 2], [3, 3], [1, 1, 3], [2]])
@pytest.mark.parametrize("rows", [1, 2])
def test_blocks_of_any_length_equal_the_readable_stream(model: Taehv, cut: list[int], rows: int) -> None:
    video = latents(sum(cut), rows)
    expected = model.open_decoder().decode(video)
    assert expected.std() > 0.1
    stream = FastTaehv(model).open_decoder()
    pieces = [stream.decode(part) for part in video.split(cut, dim=1)]
    assert [part.shape[1] for part in pieces] == [4 * cut[0] - 3, *(4 * frames for frames in cut[1:])]
    made = torch.cat(pieces, dim=1)
    assert made.dtype == torch.float32 and all(part.is_contiguous() for part in pieces)
    torch.testing.assert_close(made, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("frames", [1, 3])
def test_states_are_those_of_the_readable_stream(model: Taehv, frames: int) -> None:
    """Either stream continues where the other stopped, and a state stays as it was."""
    fast = FastTaehv(model)
    head, tail = latents(frames), latents(2)
    ours, theirs = fast.open_decoder(), model.open_decoder()
    for stream in (ours, theirs):
        assert stream.state() == {}
        stream.decode(head)
    state, expected = ours.state(), theirs.state()
    assert state.keys() == expected.keys() and all(kept.is_contiguous() for kept in state.values())
    copies = {name: kept.clone() for name, kept in state.items()}
    again, taken, readable = fast.open_decoder(), fast.open_decoder(), model.open_decoder()
    for stream, given in ((again, state), (readable, state), (taken, expected)):
        stream.load_state(given)
    goal = ours.decode(tail)
    assert torch.equal(again.decode(tail), goal)
    for other in (theirs, readable, taken):
        torch.testing.assert_close(other.decode(tail), goal, rtol=0, atol=1e-5)
    assert all(torch.equal(state[name], copy) for name, copy in copies.items())


def test_wrong_states_are_refused_and_change_nothing(model: Taehv) -> None:
    stream = FastTaehv(model).open_decoder()
    stream.decode(latents(1))
    good = stream.state()
    first = next(iter(good))
    for wrong in (
        {"frames": torch.zeros(1)},
        {name: kept for name, kept in good.items() if name != first},
        {**good, first: good[first][0]},
        {**good, first: good[first][..., :3]},
    ):
        with pytest.raises(ValueError, match="decoder state"):
            stream.load_state(wrong)
    assert all(torch.equal(kept, good[name]) for name, kept in stream.state().items())


def test_half_precision_comes_as_close_as_the_readable_model(model: Taehv) -> None:
    half: Any = Taehv().requires_grad_(False)
    half.load_state_dict(model.state_dict())
    half = half.to(torch.bfloat16)
    exact = model.open_decoder().decode(latents(3))
    theirs = (half.open_decoder().decode(latents(3)) - exact).abs().mean()
    for fast in (FastTaehv(half), FastTaehv(model, torch.bfloat16)):
        ours = (fast.open_decoder().decode(latents(3)) - exact).abs().mean()
        assert 0 < ours < 1.2 * theirs


def test_a_backbone_s_own_autoencoder_gets_its_fast_version(model: Taehv) -> None:
    """However its streams are opened: a wrapper around `open_decoder` must not turn acceleration off."""
    plain = build_untrained()
    kept = WanBackbone(
        plain.model, lambda prompt: latents(1), lambda: model.open_decoder(), autoencoder=model
    )
    assert isinstance(fast_decoder(kept)(), FastTaehvStream)
    assert isinstance(fast_decoder(plain)(), UpsampleDecoder)
