from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from recap.backbones.wan.taehv import Taehv, load_taehv

BLOCK = [f"conv.{index}.{kind}" for index in (0, 2, 4) for kind in ("weight", "bias")]


def public_names() -> set[str]:
    """The decoder's table of the published files, written out."""
    names = {"decoder.1.weight", "decoder.1.bias", "decoder.22.weight", "decoder.22.bias"}
    names |= {f"decoder.{index}.conv.weight" for index in (7, 13, 19)}
    names |= {f"decoder.{index}.weight" for index in (8, 14, 20)}
    blocks = (3, 4, 5, 9, 10, 11, 15, 16, 17)
    return names | {f"decoder.{index}.{part}" for index in blocks for part in BLOCK}


@pytest.fixture(scope="module")
def model() -> Taehv:
    torch.manual_seed(5)
    return Taehv().eval().requires_grad_(False)


def latents(frames: int, rows: int = 2) -> Tensor:
    return 2 * torch.randn(rows, frames, 16, 4, 6, generator=torch.Generator().manual_seed(frames))


def remembering(weights: dict[str, Tensor], name: str, frames: list[Tensor]) -> list[Tensor]:
    """One memory block over a list of pictures, one after the other."""
    made, before = [], torch.zeros_like(frames[0])
    for x in frames:
        y = torch.cat([x, before], 1)
        for index in (0, 2, 4):
            y = F.conv2d(
                y, weights[f"{name}.conv.{index}.weight"], weights[f"{name}.conv.{index}.bias"], padding=1
            )
            y = y.relu() if index < 4 else (y + x).relu()
        made.append(y)
        before = x
    return made


def decode_plainly(weights: dict[str, Tensor], video: Tensor) -> Tensor:
    """The sheet of facts, picture by picture, with loops in place of layers."""
    w = {name.removeprefix("decoder."): tensor for name, tensor in weights.items()}
    frames = [(3 * torch.tanh(x / 3)) for x in video.unbind(1)]
    frames = [F.conv2d(x, w["1.weight"], w["1.bias"], padding=1).relu() for x in frames]
    for start, grown in ((3, 1), (9, 2), (15, 2)):
        for index in range(start, start + 3):
            frames = remembering(w, str(index), frames)
        grow, narrow = w[f"{start + 4}.conv.weight"], w[f"{start + 5}.weight"]
        large = [x.repeat_interleave(2, -1).repeat_interleave(2, -2) for x in frames]
        parts = [part for x in large for part in F.conv2d(x, grow).chunk(grown, dim=1)]
        frames = [F.conv2d(x, narrow, padding=1) for x in parts]
    pictures = [F.conv2d(x.relu(), w["22.weight"], w["22.bias"], padding=1) for x in frames]
    return torch.stack(pictures[3:], 1).clamp(0, 1)


def test_names_and_sizes_are_those_of_the_public_files(model: Taehv) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert set(shapes) == public_names()
    assert shapes["decoder.13.conv.weight"] == (256, 128, 1, 1)
    assert shapes["decoder.3.conv.0.weight"] == (256, 512, 3, 3)
    assert sum(parameter.numel() for parameter in model.parameters()) == 9_844_611


def test_decoding_is_that_of_the_sheet(model: Taehv) -> None:
    video = latents(4)
    made = model.open_decoder().decode(video)
    assert made.shape == (2, 13, 3, 32, 48)
    torch.testing.assert_close(made, decode_plainly(model.state_dict(), video), atol=1e-5, rtol=0)
    assert made.std() > 0.01


def test_streaming_equals_all_frames_at_once_bit_for_bit(model: Taehv) -> None:
    video = latents(5)
    stream = model.open_decoder()
    pieces = torch.cat([stream.decode(part) for part in video.split([3, 1, 1], dim=1)], 1)
    with torch.no_grad():
        parallel, kept = model.decoder(video, {})
    assert torch.equal(pieces, parallel[:, 3:].clamp(0, 1))
    assert all(torch.equal(kept[name], tensor) for name, tensor in stream.state().items())


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_public_files_load_and_larger_growth_keeps_the_latest(
    model: Taehv, tmp_path: Path, suffix: str
) -> None:
    """Index 7 of a file may be trained to make two pictures where the decoder wants one; the encoder is not read."""
    weights = {name: tensor.half() for name, tensor in model.state_dict().items()}
    grown = torch.cat([torch.randn(256, 256, 1, 1).half(), weights["decoder.7.conv.weight"]])
    path = tmp_path / f"taew2_1{suffix}"
    encoder = {"encoder.0.weight": torch.randn(64, 3, 3, 3)}
    stored = {**weights, **encoder, "decoder.7.conv.weight": grown}
    torch.save(stored, path) if suffix == ".pth" else save_file(stored, path)
    loaded = load_taehv(path)
    assert all(torch.equal(tensor, weights[name].float()) for name, tensor in loaded.state_dict().items())
    assert load_taehv(path, dtype=torch.bfloat16).like().dtype == torch.bfloat16


def test_foreign_weights_are_refused_by_name(model: Taehv, tmp_path: Path) -> None:
    path = tmp_path / "taew2_1.pth"
    weights = dict(model.state_dict())
    weights["decoder.7.conv.weight"] = weights["decoder.7.conv.weight"][:128]
    torch.save(weights, path)
    message = r"decoder\.7\.conv\.weight \[128, 256, 1, 1\] for \[256, 256, 1, 1\]"
    with pytest.raises(ValueError, match=message):
        load_taehv(path)
    torch.save({**model.state_dict(), "other.weight": torch.zeros(1)}, path)
    with pytest.raises(ValueError, match=r"1 unknown \(other\.weight\)"):
        load_taehv(path)
    torch.save({"decoder.1.weight": torch.zeros(256, 48, 3, 3)}, path)
    with pytest.raises(ValueError, match=r"\d+ missing"):
        load_taehv(path)


def test_other_precisions_and_layouts_come_close(model: Taehv, tmp_path: Path) -> None:
    path = tmp_path / "taew2_1.safetensors"
    save_file(dict(model.state_dict()), path)
    video, exact = latents(3), model.open_decoder().decode(latents(3))
    half = load_taehv(path, dtype=torch.bfloat16).open_decoder().decode(video)
    assert half.dtype == torch.float32 and 0 < (half - exact).abs().mean() < 0.01
    nhwc = load_taehv(path).to(memory_format=torch.channels_last)
    stream, resumed = nhwc.open_decoder(), nhwc.open_decoder()
    torch.testing.assert_close(stream.decode(video), exact, atol=1e-5, rtol=0)
    resumed.load_state(stream.state())
    assert torch.equal(stream.decode(video), resumed.decode(video))


def test_real_latents_are_of_the_scale_the_soft_clamp_expects(model: Taehv, shared_data: Path) -> None:
    """Normalised latents of Wan 2.1: unit scale, all but a few below the clamp's 3, in a stream of 16 frames."""
    path = shared_data / "latents" / "test_latents_wan.pth"
    real = torch.load(path, map_location="cpu", weights_only=True).float().transpose(1, 2)
    assert 0.8 < real.std() < 1.1 and (real.abs() > 3).float().mean() < 1e-3
    pixels = model.open_decoder().decode(real[..., :8, :8])
    assert pixels.shape == (1, 61, 3, 64, 64)
