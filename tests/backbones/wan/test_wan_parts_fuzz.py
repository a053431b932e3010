"""Damaged and hostile files of text encoder and autoencoders give a ValueError that names the file; nothing runs."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from umt5_fakes import TEXT_DIM, TEXT_LEN, make_encoder, wan_tensors

from recap.backbones.text import load_prompt_embeds, load_umt5
from recap.backbones.wan.taehv import Taehv, load_taehv
from recap.backbones.wan.vae import load_wan_vae, published_name
from recap.errors import RecapError

State = dict[str, Tensor]


def vae_state() -> State:
    from diffusers import AutoencoderKLWan

    state = AutoencoderKLWan(base_dim=4).state_dict()
    return {published_name(name): tensor for name, tensor in state.items()}


PARTS: dict[str, tuple[Callable[[], State], Callable[[Path], Any]]] = {
    "text encoder": (lambda: wan_tensors(make_encoder()), lambda path: load_umt5(path, TEXT_DIM)),
    "autoencoder": (vae_state, load_wan_vae),
    "tiny decoder": (lambda: dict(Taehv().state_dict()), load_taehv),
    "embeddings": (
        lambda: {"prompt_embeds": torch.randn(1, TEXT_LEN, TEXT_DIM)},
        lambda path: load_prompt_embeds(path, TEXT_LEN, TEXT_DIM),
    ),
}


@pytest.fixture(scope="module")
def states() -> dict[str, State]:
    return {
        name: {n: t.detach().clone().contiguous() for n, t in make().items()}
        for name, (make, _) in PARTS.items()
    }


def write(state: State, path: Path) -> Path:
    save_file(state, path) if path.suffix == ".safetensors" else torch.save(state, path)
    return path


def refused(load: Callable[[Path], Any], path: Path, *words: str) -> None:
    with pytest.raises(ValueError) as refusal:  # noqa: PT011 (the name is checked)
        load(path)
    assert type(refusal.value) is RecapError
    for word in (path.name, *words):
        assert word in str(refusal.value), str(refusal.value)


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
@pytest.mark.parametrize("part", PARTS)
def test_damaged_files_are_refused_by_name(
    part: str, suffix: str, states: dict[str, State], tmp_path: Path
) -> None:
    load = PARTS[part][1]
    path = write(states[part], tmp_path / f"whole{suffix}")
    load(path)
    whole = path.read_bytes()
    for size in {
        0,
        1,
        8,
        64,
        len(whole) // 2,
        len(whole) - 1,
        *random.Random(1).sample(range(len(whole)), 8),
    }:
        path.write_bytes(whole[:size])
        refused(load, path)
    dice = random.Random(2)
    for text in (b"hello\n", b"\x80\x02}.", b"PK\x03\x04", *(dice.randbytes(40) for _ in range(40))):
        path.write_bytes(text)
        refused(load, path)
    path.unlink()
    refused(load, path)
    path.mkdir()
    refused(load, path)


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
@pytest.mark.parametrize("part", PARTS)
def test_tensors_that_do_not_fit_are_named(
    part: str, suffix: str, states: dict[str, State], tmp_path: Path
) -> None:
    load, state = PARTS[part][1], states[part]
    name = min(each for each in state if state[each].dim() >= 2)
    wrong = {
        "missing": {n: t for n, t in state.items() if n != name},
        "whole numbers": {**state, name: torch.ones(state[name].shape, dtype=torch.int64)},
        "another rank": {**state, name: state[name].flatten()},
        "another size": {**state, name: torch.cat([state[name]] * 3, dim=-1)},
        "another name": {**{n: t for n, t in state.items() if n != name}, "nonsense": state[name]},
    }
    for what, tensors in wrong.items():
        path = write(
            {n: t.clone() for n, t in tensors.items()}, tmp_path / f"{what.replace(' ', '-')}{suffix}"
        )
        # Embeddings have one tensor, which may be the one that is not there.
        words = () if part == "embeddings" else (name,)
        refused(load, path, *words)


class Trap:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


@pytest.mark.parametrize("part", PARTS)
def test_code_in_a_pickle_is_not_run(part: str, states: dict[str, State], tmp_path: Path) -> None:
    mark = tmp_path / "sprung"
    torch.save({**states[part], "extra": Trap(mark)}, tmp_path / "trap.pth")
    refused(PARTS[part][1], tmp_path / "trap.pth")
    assert not mark.exists()
    torch.load(tmp_path / "trap.pth", weights_only=False)
    assert mark.exists()  # the trap would have sprung
