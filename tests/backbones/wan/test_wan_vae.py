from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from recap.backbones.wan.vae import PASSED, WanVae, _width, load_wan_vae, published_name

MEAN = (-0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508,
        0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921)  # fmt: skip
STD = (2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743,
       3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160)  # fmt: skip


def per_channel(numbers: tuple[float, ...]) -> Tensor:
    return torch.tensor(numbers).view(1, -1, 1, 1, 1)


@pytest.fixture(scope="module")
def model() -> Any:
    """Wan's autoencoder with 4 channels where the published one has 96."""
    from diffusers import AutoencoderKLWan

    torch.manual_seed(0)
    return AutoencoderKLWan(base_dim=4).eval().requires_grad_(False)


@pytest.fixture
def published(model: Any, tmp_path: Path) -> Path:
    """The same weights as Wan's authors would have published them."""
    path = tmp_path / "Wan2.1_VAE.pth"
    torch.save({published_name(name): tensor for name, tensor in model.state_dict().items()}, path)
    return path


def latents(frames: int, rows: int = 2) -> Tensor:
    return torch.randn(rows, frames, 16, 4, 6, generator=torch.Generator().manual_seed(frames))


def test_streamed_blocks_equal_the_whole_decode_of_diffusers(model: Any) -> None:
    video = latents(7)
    raw = video.transpose(1, 2) * per_channel(STD) + per_channel(MEAN)
    whole = model.decode(raw).sample.transpose(1, 2) * 0.5 + 0.5
    stream = WanVae(model).open_decoder()
    pieces = [stream.decode(part) for part in video.split([3, 3, 1], dim=1)]
    assert [part.shape[1] for part in pieces] == [9, 12, 4]
    assert torch.equal(torch.cat(pieces, 1), whole)


def test_encoding_equals_that_of_diffusers(model: Any) -> None:
    pixels = torch.rand(2, 13, 3, 32, 48)
    mode = model.encode(pixels.transpose(1, 2) * 2 - 1).latent_dist.mode()
    expected = ((mode - per_channel(MEAN)) / per_channel(STD)).transpose(1, 2)
    made = WanVae(model).encode(pixels)
    assert made.shape == (2, 4, 16, 4, 6) and torch.equal(made, expected)


def test_encoding_leaves_an_open_stream_alone(model: Any) -> None:
    vae, video = WanVae(model), latents(4)
    stream = vae.open_decoder()
    head = stream.decode(video[:, :2])
    vae.encode(torch.rand(1, 5, 3, 32, 48))
    model.decode(torch.randn(1, 16, 2, 4, 6))
    tail = stream.decode(video[:, 2:])
    assert torch.equal(torch.cat([head, tail], 1), vae.open_decoder().decode(video))


def test_state_tells_features_marks_and_nothing_apart(model: Any) -> None:
    """Thirty-three causal convolutions: one is a shortcut that keeps nothing, two wait for the second frame."""
    stream = WanVae(model).open_decoder()
    stream.decode(latents(1))
    kinds = stream.state()["kinds"].tolist()
    assert (kinds.count(0), kinds.count(1), kinds.count(2)) == (1, 2, 30)
    other = WanVae(model).open_decoder()
    other.load_state(stream.state())
    assert [entry for entry in other._cache if not isinstance(entry, Tensor)] == [PASSED, PASSED, None]
    stream.decode(latents(1))
    assert stream.state()["kinds"].tolist().count(2) == 32


def test_damaged_states_are_refused(model: Any) -> None:
    stream = WanVae(model).open_decoder()
    stream.decode(latents(1))
    good = stream.state()
    shorter = {**good, "kinds": good["kinds"][:-1]}
    unknown = {**good, "kinds": torch.where(good["kinds"] == 1, 7, good["kinds"])}
    without = {name: kept for name, kept in good.items() if name != "3"}
    for wrong in (shorter, unknown, without):
        with pytest.raises(ValueError, match="decoder state"):
            stream.load_state(wrong)


def test_names_are_those_diffusers_converts_from(model: Any) -> None:
    from diffusers.loaders.single_file_utils import convert_wan_vae_to_diffusers

    names = list(model.state_dict())
    published = {published_name(name): name for name in names}
    assert len(names) == len(published) == 194
    converted = convert_wan_vae_to_diffusers(published)
    assert {new: old for new, old in converted.items() if new != old} == {} and set(converted) == set(names)
    some = {"conv1.weight", "encoder.downsamples.2.resample.1.weight", "decoder.upsamples.4.shortcut.bias"}
    some |= {"decoder.middle.1.to_qkv.weight", "decoder.head.2.bias", "decoder.upsamples.7.time_conv.weight"}
    assert some <= set(published)


def test_the_default_width_is_that_of_the_published_file() -> None:
    """Wan2.1_VAE.pth has 507,609,880 bytes: tensors in fp32, and a container of 200 bytes for each."""
    from diffusers import AutoencoderKLWan

    with torch.device("meta"):
        made = AutoencoderKLWan(base_dim=_width({}))
    container = 507_609_880 - 4 * sum(parameter.numel() for parameter in made.parameters())
    assert 0 < container < 300 * len(made.state_dict())


def test_the_published_file_and_a_diffusers_folder_give_one_model(
    model: Any, published: Path, tmp_path: Path
) -> None:
    video = latents(3)
    expected = WanVae(model).open_decoder().decode(video)
    model.save_pretrained(tmp_path / "wan" / "vae")
    safe = tmp_path / "Wan2.1_VAE.safetensors"
    save_file(torch.load(published, weights_only=True), safe)
    for place in (published, safe, tmp_path / "wan", tmp_path / "wan" / "vae"):
        loaded = load_wan_vae(place)
        assert torch.equal(loaded.open_decoder().decode(video), expected), place
        assert not any(parameter.requires_grad for parameter in loaded.model.parameters())


def test_half_precision_comes_close(model: Any, published: Path) -> None:
    half = load_wan_vae(published, dtype=torch.bfloat16)
    pixels = half.open_decoder().decode(latents(3).bfloat16())
    assert pixels.dtype == torch.float32
    exact = WanVae(model).open_decoder().decode(latents(3).bfloat16().float())
    assert 0 < (pixels - exact).abs().mean() < 0.02
    assert half.encode(torch.rand(1, 5, 3, 16, 16)).dtype == torch.float32


def test_foreign_weights_are_refused_by_name(model: Any, published: Path, tmp_path: Path) -> None:
    tensors = torch.load(published, weights_only=True)
    del tensors["decoder.head.0.gamma"]
    tensors["decoder.head.0.beta"] = torch.ones(4)
    torch.save(tensors, published)
    message = r"1 missing \(decoder\.head\.0\.gamma\); 1 unknown \(decoder\.head\.0\.beta\)"
    with pytest.raises(ValueError, match=message):
        load_wan_vae(published)
    torch.save({"dit.weight": torch.ones(2)}, published)
    with pytest.raises(ValueError, match=r"and \d+ more"):
        load_wan_vae(published)
    model.save_pretrained(tmp_path / "vae")
    (tmp_path / "vae" / "config.json").unlink()
    with pytest.raises(ValueError, match=r"config\.json"):
        load_wan_vae(tmp_path)
    (tmp_path / "vae" / "config.json").write_text('{"is_residual": true, "z_dim": 48, "patch_size": 2}')
    with pytest.raises(ValueError, match=r"not the autoencoder of Wan 2\.1"):
        load_wan_vae(tmp_path)


def test_wrong_pictures_are_refused(model: Any) -> None:
    vae = WanVae(model)
    for shape in ((1, 8, 3, 16, 16), (1, 0, 3, 16, 16), (1, 5, 3, 12, 16), (5, 3, 16, 16), (1, 5, 4, 16, 16)):
        with pytest.raises(ValueError, match=r"pixels\.shape"):
            vae.encode(torch.rand(shape))


def test_a_failing_decode_leaves_the_stream_where_it_was(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    vae, video = WanVae(model), latents(4)
    stream = vae.open_decoder()
    stream.decode(video[:, :1])
    real, calls = vae.decode_frame, []

    def tired(frame: Tensor, cache: Any) -> Tensor:
        calls.append(frame)
        if len(calls) == 2:
            raise RuntimeError("out of memory")
        return real(frame, cache)

    monkeypatch.setattr(vae, "decode_frame", tired)
    with pytest.raises(RuntimeError):
        stream.decode(video[:, 1:])
    assert torch.equal(stream.decode(video[:, 1:]), WanVae(model).open_decoder().decode(video)[:, 1:])
