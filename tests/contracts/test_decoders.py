"""Every decoder: the promises of `Decoder`, on small models with random weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save
from torch import Tensor

from recap.backbones.tiny.autoencoder import EMBEDDED_AUTOENCODER, Autoencoder, StreamingDecoder
from recap.backbones.wan.decoder import UpsampleDecoder
from recap.backbones.wan.spec import UNTRAINED
from recap.backbones.wan.taehv import Taehv
from recap.backbones.wan.vae import WanVae

SPEC = replace(UNTRAINED, latent_size=(4, 6)).backbone_spec()


def upsample() -> Callable[[], Any]:
    return lambda: UpsampleDecoder(SPEC)


def embedded() -> Callable[[], Any]:
    small = replace(EMBEDDED_AUTOENCODER, widths=(8, 12, 16), depths=(1, 2, 2), remembered=(6, 8))
    model = Autoencoder(small).eval().requires_grad_(False)
    # Some parameters begin at zero, and what they do would not be seen.
    for parameter in model.parameters():
        parameter.add_(0.05 * torch.randn_like(parameter))
    return lambda: StreamingDecoder(model)


def wan_vae() -> Callable[[], Any]:
    from diffusers import AutoencoderKLWan

    return WanVae(AutoencoderKLWan(base_dim=4)).open_decoder


def taehv() -> Callable[[], Any]:
    # The random weights of most seeds give pictures with hardly any contrast.
    torch.manual_seed(5)
    return Taehv().eval().open_decoder


FAMILIES = {"upsample": upsample, "embedded": embedded, "wan vae": wan_vae, "taehv": taehv}


@cache
def opener(name: str) -> Callable[[], Any]:
    torch.manual_seed(0)
    return FAMILIES[name]()


@pytest.fixture(params=FAMILIES)
def open_decoder(request: pytest.FixtureRequest) -> Callable[[], Any]:
    return opener(request.param)


def latents(frames: int, rows: int = 2, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, frames, 16, 4, 6, generator=generator)


def test_a_block_is_nine_pictures_and_later_ones_twelve(open_decoder: Callable[[], Any]) -> None:
    decoder = open_decoder()
    made = [decoder.decode(latents(3, seed=seed)) for seed in range(3)]
    assert [tuple(pixels.shape) for pixels in made] == [(2, n, 3, 32, 48) for n in (9, 12, 12)]
    for pixels in made:
        assert pixels.dtype == torch.float32 and pixels.min() >= 0 and pixels.max() <= 1
        assert pixels.std() > 0.01 and not pixels.requires_grad


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=6, deadline=None)
@given(cuts=st.lists(st.integers(1, 3), min_size=1, max_size=3))
def test_streaming_equals_decoding_at_once(name: str, cuts: list[int]) -> None:
    video = latents(sum(cuts))
    stream = opener(name)()
    pieces = [stream.decode(part) for part in video.split(cuts, dim=1)]
    whole = opener(name)().decode(video)
    assert torch.equal(torch.cat(pieces, 1), whole)
    assert whole.shape[1] == SPEC.num_pictures(sum(cuts))


@pytest.mark.parametrize("stop", [1, 2, 4])
def test_state_goes_through_a_file_and_resumes_bit_for_bit(
    open_decoder: Callable[[], Any], stop: int
) -> None:
    """After one frame too: some decoders are then in a state that they never come back to."""
    video = latents(6)
    one = open_decoder()
    assert one.state() == {}
    one.decode(video[:, :stop])
    saved = load(save(one.state()))
    handed_out = one.state()
    rest = one.decode(video[:, stop:])
    assert all(torch.equal(handed_out[name], kept) for name, kept in saved.items()), "a state is a copy"
    for _ in range(2):
        other = open_decoder()
        other.load_state(saved)
        assert torch.equal(other.decode(video[:, stop:]), rest)
        assert all(torch.equal(kept, one.state()[name]) for name, kept in other.state().items())
    other.load_state({})
    assert torch.equal(other.decode(video), open_decoder().decode(video))


def test_streams_do_not_disturb_each_other(open_decoder: Callable[[], Any]) -> None:
    first, second = latents(4, seed=1), latents(4, rows=1, seed=2)
    one, other = open_decoder(), open_decoder()
    mixed = [(one.decode(first[:, i : i + 1]), other.decode(second[:, i : i + 1])) for i in range(4)]
    for alone, pieces in zip((first, second), zip(*mixed, strict=True), strict=True):
        assert torch.equal(torch.cat(pieces, 1), open_decoder().decode(alone))


def test_the_past_reaches_the_present_and_the_future_does_not(open_decoder: Callable[[], Any]) -> None:
    video = latents(4)
    straight = open_decoder().decode(video)
    for changed, first in ((0, 0), (2, SPEC.num_pictures(2))):
        other = video.clone()
        other[:, changed] = 0
        pixels = open_decoder().decode(other)
        assert torch.equal(pixels[:, :first], straight[:, :first])
        following = slice(SPEC.num_pictures(changed + 1), SPEC.num_pictures(changed + 2))
        assert not torch.allclose(pixels[:, following], straight[:, following], atol=1e-4)


def test_rows_of_a_batch_are_videos_of_their_own(open_decoder: Callable[[], Any]) -> None:
    video = latents(3)
    together = open_decoder().decode(video)
    alone = torch.cat([open_decoder().decode(row[None]) for row in video])
    torch.testing.assert_close(together, alone, atol=1e-4, rtol=0)


def test_the_latents_stay_the_callers(open_decoder: Callable[[], Any]) -> None:
    video = latents(6)
    one, other = open_decoder(), open_decoder()
    block = video[:, :3].clone()
    one.decode(block)
    assert torch.equal(block, video[:, :3])
    other.decode(video[:, :3])
    block.zero_()
    assert torch.equal(one.decode(video[:, 3:]), other.decode(video[:, 3:]))


def test_what_cannot_be_decoded_is_refused_and_changes_nothing(open_decoder: Callable[[], Any]) -> None:
    video, decoder = latents(4), open_decoder()
    for wrong in (video[0], video[:, :, :8], video[:, :0]):
        with pytest.raises(ValueError, match=r"latents\.shape"):
            decoder.decode(wrong)
    head = decoder.decode(video[:, :2])
    for wrong in (video[:1], video[..., :4]):
        with pytest.raises(ValueError, match=r"latents\.shape"):
            decoder.decode(wrong)
    for wrong in ({"frames": torch.zeros(1)}, {**decoder.state(), "more": torch.zeros(1)}):
        with pytest.raises(ValueError, match="decoder state"):
            decoder.load_state(wrong)
    assert torch.equal(torch.cat([head, decoder.decode(video[:, 2:])], 1), open_decoder().decode(video))
