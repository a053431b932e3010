from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from recap.backbones.wan.vae import WanVae
from recap.fast.vae import FastVae


@pytest.fixture(scope="module")
def vae() -> WanVae:
    """Wan's autoencoder with 8 channels; the published one has 96."""
    from diffusers import AutoencoderKLWan

    torch.manual_seed(0)
    model: Any = AutoencoderKLWan(base_dim=8)
    for name, parameter in model.named_parameters():
        if name.endswith("gamma"):  # scales begin at 1, where a slip would not show
            parameter.data += 0.1 * torch.randn_like(parameter)
    return WanVae(model)


def latents(frames: int, rows: int = 2) -> Tensor:
    return torch.randn(rows, frames, 16, 4, 6, generator=torch.Generator().manual_seed(frames))


@pytest.mark.parametrize("cut", [[3, 3, 3], [1, 3, 2], [1, 1, 1, 2], [2, 3], [6]])
@pytest.mark.parametrize("rows", [1, 2])
def test_blocks_of_any_length_equal_the_readable_stream(vae: WanVae, cut: list[int], rows: int) -> None:
    video = latents(sum(cut), rows)
    expected = vae.open_decoder().decode(video)
    stream = FastVae.of(vae).open_decoder()
    pieces = [stream.decode(part) for part in video.split(cut, dim=1)]
    assert [part.shape[1] for part in pieces] == [4 * cut[0] - 3, *(4 * frames for frames in cut[1:])]
    made = torch.cat(pieces, dim=1)
    assert made.dtype == torch.float32 and made.is_contiguous()
    torch.testing.assert_close(made, expected, rtol=0, atol=1e-5)


def test_decoded_pixels_are_not_overwritten(vae: WanVae) -> None:
    stream = FastVae.of(vae).open_decoder()
    stream.decode(latents(1))
    second = stream.decode(latents(3))
    copy = second.clone()
    stream.decode(latents(3))
    assert torch.equal(second, copy)


@pytest.mark.parametrize("frames", [1, 2, 4])
def test_states_are_those_of_the_readable_stream(vae: WanVae, frames: int) -> None:
    """Either stream continues where the other stopped, and a state stays as it was."""
    fast = FastVae.of(vae)
    head, tail = latents(frames), latents(3)
    ours, theirs = fast.open_decoder(), vae.open_decoder()
    for stream in (ours, theirs):
        stream.decode(head)
    state, expected = ours.state(), theirs.state()
    assert torch.equal(state["kinds"], expected["kinds"]) and state.keys() == expected.keys()
    again, taken, readable = fast.open_decoder(), fast.open_decoder(), vae.open_decoder()
    for stream, given in ((again, state), (readable, state), (taken, expected)):
        stream.load_state(given)
    copies = {name: tensor.clone() for name, tensor in state.items()}
    goal = ours.decode(tail)
    assert torch.equal(again.decode(tail), goal)
    for other in (theirs, readable, taken):
        torch.testing.assert_close(other.decode(tail), goal, rtol=0, atol=1e-5)
    assert all(torch.equal(state[name], copy) for name, copy in copies.items())
    ours.load_state({})
    assert ours.state() == {} == fast.open_decoder().state()
    assert torch.equal(ours.decode(head), fast.open_decoder().decode(head))


def test_the_past_keeps_its_address(vae: WanVae) -> None:
    """A recorded graph knows tensors by their addresses."""
    stream: Any = FastVae.of(vae).open_decoder()
    stream.decode(latents(1))
    places = [past.data_ptr() for past in stream._kept]
    for frames in (3, 3, 1):
        stream.decode(latents(frames))
        assert [past.data_ptr() for past in stream._kept] == places


def test_no_value_is_read_on_the_host(vae: WanVae) -> None:
    """On the meta device there are no values: whatever asked for one would fail."""
    network = FastVae.of(vae).to("meta")
    pasts = [torch.zeros(shape, device="meta") for shape in network.pasts((2, 4, 6))]
    assert network(latents(3).to("meta"), pasts, True).shape == (2, 9, 3, 32, 48)
    assert network(latents(3).to("meta"), pasts, False).shape == (2, 12, 3, 32, 48)


def test_half_precision_comes_as_close_as_the_readable_model(vae: WanVae) -> None:
    from diffusers import AutoencoderKLWan

    model: Any = AutoencoderKLWan(base_dim=8)
    model.load_state_dict(vae.model.state_dict())
    half = WanVae(model.to(torch.bfloat16))
    exact = vae.open_decoder().decode(latents(4))
    ours = (FastVae.of(half).open_decoder().decode(latents(4)) - exact).abs().mean()
    theirs = (half.open_decoder().decode(latents(4)) - exact).abs().mean()
    assert 0 < ours < 1.2 * theirs


def test_wrong_latents_and_states_are_refused(vae: WanVae) -> None:
    stream = FastVae.of(vae).open_decoder()
    for shape in ((1, 3, 8, 4, 6), (1, 0, 16, 4, 6), (3, 16, 4, 6)):
        with pytest.raises(ValueError, match=r"latents\.shape"):
            stream.decode(torch.randn(shape))
    stream.decode(latents(1))
    for shape in ((1, 3, 16, 4, 6), (2, 3, 16, 6, 4)):
        with pytest.raises(ValueError, match="open a decoder per batch and size"):
            stream.decode(torch.randn(shape))
    good = stream.state()
    shorter = {**good, "kinds": good["kinds"][:-1]}
    unknown = {**good, "kinds": torch.where(good["kinds"] == 1, 7, good["kinds"])}
    without = {name: kept for name, kept in good.items() if name != "3"}
    larger = {**good, "3": good["3"][..., :3]}
    for wrong in (shorter, unknown, without, larger):
        with pytest.raises(ValueError, match="decoder state"):
            stream.load_state(wrong)


def test_another_autoencoder_is_refused() -> None:
    from diffusers import AutoencoderKLWan

    for other in ({"num_res_blocks": 1}, {"dim_mult": [1, 2, 2, 4]}):
        with pytest.raises(ValueError, match=r"not the decoder of Wan 2\.1"):
            FastVae.of(WanVae(AutoencoderKLWan(base_dim=4, **other)))
