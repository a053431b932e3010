from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recap.backbones.tiny.autoencoder import EMBEDDED_AUTOENCODER, Autoencoder, StreamingDecoder
from recap.backbones.wan.spec import EMBEDDED

SMALL = replace(EMBEDDED_AUTOENCODER, widths=(8, 12, 16), depths=(1, 2, 2), remembered=(6, 8))


@pytest.fixture(scope="module")
def model() -> Autoencoder:
    """Every parameter random, so that nothing hides behind a zero."""
    torch.manual_seed(0)
    made = Autoencoder(SMALL).eval().requires_grad_(False).to(memory_format=torch.channels_last)
    for parameter in made.parameters():
        parameter.add_(0.05 * torch.randn_like(parameter))
    made.latent_mean.normal_()
    made.latent_std.uniform_(0.5, 2.0)
    return made


def latents(frames: int, rows: int = 2) -> torch.Tensor:
    return torch.randn(rows, frames, 16, 4, 6, generator=torch.Generator().manual_seed(frames))


def test_geometry_is_wans(model: Autoencoder) -> None:
    encoded = model.encode(torch.rand(2, 9, 3, 32, 48))
    assert encoded.shape == (2, 3, 16, 4, 6)
    assert model.decode(encoded).shape == (2, 9, 3, 32, 48)
    spec, row = EMBEDDED_AUTOENCODER, EMBEDDED.backbone_spec()
    assert (spec.latent_channels, spec.pictures_per_frame) == (row.latent_channels, row.pictures_per_frame)
    assert tuple(8 * side for side in row.latent_size) == row.picture_size == (128, 208)


@settings(max_examples=15, deadline=None)
@given(cuts=st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_streaming_equals_decoding_at_once(model: Autoencoder, cuts: list[int]) -> None:
    video = latents(sum(cuts))
    stream = StreamingDecoder(model)
    pieces = torch.cat([stream.decode(part) for part in video.split(cuts, dim=1)], 1)
    assert torch.equal(pieces, StreamingDecoder(model).decode(video))
    assert pieces.shape[1] == 1 + 4 * (sum(cuts) - 1)
    torch.testing.assert_close(pieces, model.decode(video), atol=1e-5, rtol=0)


def test_the_future_does_not_reach_the_past(model: Autoencoder) -> None:
    pixels = torch.rand(1, 13, 3, 16, 16)
    changed = pixels.clone()
    changed[:, 9:] = 0
    before, after = model.encode(pixels), model.encode(changed)
    torch.testing.assert_close(before[:, :3], after[:, :3])
    assert not torch.allclose(before[:, 3], after[:, 3])


def test_a_still_clip_has_one_latent_and_one_picture(model: Autoencoder) -> None:
    """The first picture is encoded and decoded as any other, so its colours cannot be off on their own."""
    still = torch.rand(1, 1, 3, 16, 16).expand(-1, 9, -1, -1, -1)
    encoded = model.encode(still)
    torch.testing.assert_close(encoded[:, :1].expand_as(encoded), encoded, atol=1e-4, rtol=1e-4)
    decoded = model.decode(encoded)
    torch.testing.assert_close(decoded[:, [0, 0]], decoded[:, [4, 8]], atol=1e-4, rtol=1e-4)


def test_normalised_latents_decode_as_raw_ones_do(model: Autoencoder) -> None:
    pixels = torch.rand(1, 5, 3, 16, 16)
    raw = model.encode_raw(pixels)
    torch.testing.assert_close(model.decode(model.encode(pixels)), model.decode_raw(raw).clamp(0, 1))


def test_sizes_of_the_shipped_autoencoder() -> None:
    with torch.device("meta"):
        made = Autoencoder()
    encoder, decoder = (sum(p.numel() for p in part.parameters()) for part in (made.encoder, made.decoder))
    assert 1.5e6 < encoder < 2.5e6 and 1.5e6 < decoder < 2.5e6


def test_wrong_shapes_are_refused(model: Autoencoder) -> None:
    for wrong in (torch.rand(1, 8, 3, 16, 16), torch.rand(1, 5, 3, 12, 16), torch.rand(5, 3, 16, 16)):
        with pytest.raises(ValueError, match=r"pixels\.shape"):
            model.encode(wrong)
    decoder = StreamingDecoder(model)
    for wrong in (latents(3)[0], latents(3)[:, :, :8], latents(3)[:, :0]):
        with pytest.raises(ValueError, match=r"latents\.shape"):
            decoder.decode(wrong)
    decoder.decode(latents(3))
    with pytest.raises(ValueError, match="began with"):
        decoder.decode(latents(3, rows=1))
    with pytest.raises(ValueError, match="decoder state"):
        decoder.load_state({"last": torch.zeros(1)})
