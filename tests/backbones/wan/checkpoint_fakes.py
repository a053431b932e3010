"""Small checkpoints in the exact layouts of the public ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from recap.backbones.wan import model
from recap.backbones.wan.checkpoint import shapes_of
from recap.backbones.wan.lora import Lora, LoraChoice, open_lora
from recap.backbones.wan.model import CausalWan
from recap.backbones.wan.names import to_diffusers
from recap.backbones.wan.spec import UNTRAINED, WanSpec

State = dict[str, Tensor]

MINI = replace(
    UNTRAINED, name="mini", dim=8, heads=2, layers=2, ffn_dim=12, freq_dim=4, text_dim=6, text_len=3
)
LORA_MODULES = [f"{kind}_attn.{name}" for kind in ("self", "cross") for name in "qkvo"] + ["ffn.0", "ffn.2"]


def make_state(spec: WanSpec = MINI, seed: int = 0) -> State:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes_of(spec).items()}


def empty_model(spec: WanSpec = MINI) -> CausalWan:
    return model.empty_model(spec)


def same(model: CausalWan, state: State, dtype: torch.dtype = torch.float32) -> bool:
    found = model.state_dict()
    return found.keys() == state.keys() and all(torch.equal(found[n], state[n].to(dtype)) for n in state)


def wrapped(name: str) -> str:
    """As fully sharded training leaves the names of Infinite-Forcing: wrappers of the model and of each block."""
    head, dot, tail = name.partition(".")
    if head == "blocks":
        index, _, tail = tail.partition(".")
        return f"model._fsdp_wrapped_module.blocks.{index}._fsdp_wrapped_module._checkpoint_wrapped_module.{tail}"
    return f"model._fsdp_wrapped_module.{head}{dot}{tail}"


def diffusers_config(spec: WanSpec = MINI) -> dict[str, object]:
    return {
        "_class_name": "WanTransformer3DModel",
        "num_attention_heads": spec.heads,
        "attention_head_dim": spec.head_dim,
        "in_channels": spec.in_channels,
        "out_channels": spec.out_channels,
        "text_dim": spec.text_dim,
        "freq_dim": spec.freq_dim,
        "ffn_dim": spec.ffn_dim,
        "num_layers": spec.layers,
        "cross_attn_norm": True,
        "qk_norm": "rms_norm_across_heads",
        "eps": 1e-6,
        "patch_size": [1, 2, 2],
        "rope_max_seq_len": 1024,
        "image_dim": None,
        "added_kv_proj_dim": None,
    }


def self_forcing(folder: Path, state: State) -> Path:
    path = folder / "self_forcing_dmd.pt"
    torch.save({"generator_ema": {f"model.{name}": tensor for name, tensor in state.items()}}, path)
    return path


def infinite_forcing(folder: Path, state: State) -> Path:
    path = folder / "ema_model.pt"
    torch.save({"generator_ema": {wrapped(name): tensor for name, tensor in state.items()}, "step": 3}, path)
    return path


def longlive(folder: Path, state: State) -> Path:
    path = folder / "longlive_base.pt"
    torch.save({"generator": {f"model.{name}": tensor for name, tensor in state.items()}}, path)
    return path


def bare(folder: Path, state: State) -> Path:
    path = folder / "bare.pth"
    torch.save({f"module._orig_mod.{name}": tensor for name, tensor in state.items()}, path)
    return path


def legacy(folder: Path, state: State) -> Path:
    path = folder / "legacy.pt"
    torch.save({"generator_ema": state}, path, _use_new_zipfile_serialization=False)
    return path


def one_safetensors(folder: Path, state: State) -> Path:
    path = folder / "diffusion_pytorch_model.safetensors"
    save_file(state, path)
    return path


def sharded(folder: Path, state: State, stem: str = "diffusion_pytorch_model") -> Path:
    names = sorted(state)
    parts = {
        f"{stem}-00001-of-00002.safetensors": names[: len(names) // 2],
        f"{stem}-00002-of-00002.safetensors": names[len(names) // 2 :],
    }
    for file, names_there in parts.items():
        save_file({name: state[name] for name in names_there}, folder / file)
    index = folder / f"{stem}.safetensors.index.json"
    weight_map = {name: file for file, names_there in parts.items() for name in names_there}
    index.write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map}))
    return index


def shard_folder(folder: Path, state: State) -> Path:
    return sharded(folder, state).parent


def unindexed_folder(folder: Path, state: State) -> Path:
    sharded(folder, state).unlink()
    return folder


def diffusers_folder(folder: Path, state: State) -> Path:
    inner = folder / "transformer"
    inner.mkdir()
    (inner / "config.json").write_text(json.dumps(diffusers_config()))
    save_file({to_diffusers(n): t for n, t in state.items()}, inner / "diffusion_pytorch_model.safetensors")
    return folder


FORMATS: dict[str, Callable[[Path, State], Path]] = {
    make.__name__: make
    for make in (
        self_forcing, infinite_forcing, longlive, bare, legacy, one_safetensors, sharded, shard_folder,
        unindexed_folder, diffusers_folder,
    )
}  # fmt: skip


def make_lora(spec: WanSpec = MINI, rank: int = 3, seed: int = 1) -> State:
    """Names without prefix: blocks.0.ffn.0.lora_A and so on."""
    generator, shapes, lora = torch.Generator().manual_seed(seed), shapes_of(spec), {}
    for layer in range(spec.layers):
        for module in LORA_MODULES:
            out, inner = shapes[f"blocks.{layer}.{module}.weight"]
            lora[f"blocks.{layer}.{module}.lora_A"] = torch.randn(rank, inner, generator=generator)
            lora[f"blocks.{layer}.{module}.lora_B"] = torch.randn(out, rank, generator=generator)
    return lora


def opened(
    path: Path, alpha: float | None = None, *, whole: bool = True, strength: float = 1.0
) -> list[Lora]:
    """The LoRA of a path for the small model, as `load_checkpoint` takes it."""
    return [open_lora(LoraChoice(path, strength, alpha, whole), shapes_of(MINI))]


def save_lora(path: Path, lora: State, name: str = "base_model.model.{}.weight") -> Path:
    content = {name.format(key): tensor for key, tensor in lora.items()}
    if path.suffix == ".safetensors":
        save_file(content, path)
    else:
        torch.save({"generator_lora": content, "critic_lora": {"other": torch.ones(1)}, "step": 3}, path)
    return path
