from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from recap.backbones.wan.decoder import UpsampleDecoder, colour_mixtures
from recap.backbones.wan.spec import UNTRAINED

SPEC = UNTRAINED.backbone_spec()


def latents(frames: int, rows: int = 2, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(frames)
    return torch.randn(rows, frames, SPEC.latent_channels, *SPEC.latent_size, generator=generator).to(dtype)


@settings(max_examples=15, deadline=None)
@given(cuts=st.lists(st.integers(1, 4), min_size=1, max_size=4), half=st.booleans())
def test_streaming_equals_decoding_at_once(cuts: list[int], half: bool) -> None:
    video = latents(sum(cuts), dtype=torch.bfloat16 if half else torch.float32)
    stream = UpsampleDecoder(SPEC)
    pieces = [stream.decode(part) for part in torch.split(video, cuts, dim=1)]
    whole = UpsampleDecoder(SPEC).decode(video)
    assert torch.equal(torch.cat(pieces, 1), whole)
    assert whole.shape[1] == SPEC.num_pictures(sum(cuts))


def test_pixels_lie_in_range_and_vary() -> None:
    pixels = UpsampleDecoder(SPEC).decode(latents(3))
    assert pixels.dtype == torch.float32 and pixels.min() >= 0 and pixels.max() <= 1 and pixels.std() > 0.05


def test_a_frame_fades_in_from_the_one_before() -> None:
    """The last of four pictures shows the frame itself; a repeated frame gives four equal pictures."""
    video = latents(2)
    fade = UpsampleDecoder(SPEC).decode(video)
    assert torch.equal(fade[:, 4], UpsampleDecoder(SPEC).decode(video[:, 1:])[:, 0])
    halfway = fade[:, [0, 2, 4]].logit()
    torch.testing.assert_close(halfway[:, 1], (halfway[:, 0] + halfway[:, 2]) / 2, atol=1e-4, rtol=1e-4)
    repeated = UpsampleDecoder(SPEC).decode(video[:, [0, 0]])
    torch.testing.assert_close(repeated, repeated[:, :1].expand_as(repeated))


def test_mixtures_are_orthonormal() -> None:
    mixtures = colour_mixtures(16)
    torch.testing.assert_close(mixtures @ mixtures.T, torch.eye(3))


def test_wrong_shapes_are_refused() -> None:
    decoder = UpsampleDecoder(SPEC)
    for wrong in (latents(3)[0], latents(3)[:, :, :8], latents(3)[..., :6], latents(3)[:, :0]):
        with pytest.raises(ValueError, match=r"latents\.shape"):
            decoder.decode(wrong)
    decoder.decode(latents(3))
    with pytest.raises(ValueError, match="began with 2 rows"):
        decoder.decode(latents(3, rows=1))
    with pytest.raises(ValueError, match="decoder state"):
        decoder.load_state({"frames": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"decoder state last.*must have the shape"):
        decoder.load_state({"last": torch.zeros(1, 16, 4, 4)})
