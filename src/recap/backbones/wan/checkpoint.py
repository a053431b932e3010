"""This module fills a causal Wan transformer from the files in which such models are published.

They are a torch pickle of a trainer (`generator_ema`, `generator`, `model`) or a bare state dict; safetensors in
one file, in shards with an index or in a folder; a folder in the layout of diffusers; what `recap convert` writes.
Names are cleaned of wrappers, and every tensor must be there, fit and be a float: nothing is skipped or filled in.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recap.backbones.wan.lora import Lora
from recap.backbones.wan.model import CausalWan, empty_model
from recap.backbones.wan.names import ONLY_DIFFUSERS, clean, to_diffusers
from recap.backbones.wan.spec import WanSpec
from recap.errors import refuse
from recap.io.weights import SHOWN, Stored, files_of, list_faults, listing, open_tensors, read_json_object

FIELD = "checkpoint"
EMA, PLAIN, MODEL = "generator_ema", "generator", "model"
"""A trainer's file has these keys: averaged weights, those of the last step, and LongLive's other name of these."""

# A longer axis means a damaged file, and its products would overflow.
LARGEST_SIZE = 1 << 20


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Holds the tensors of a transformer under the cleaned names of its files, not read yet."""

    files: tuple[Path, ...]
    # The chosen key of a trainer's file.
    key: str | None
    # Whether the names are those of diffusers.
    diffusers: bool
    # From a folder in the layout of diffusers.
    config: dict[str, Any] | None
    tensors: dict[str, Stored]

    def in_file(self, name: str) -> str:
        """Return the name here of a tensor of ours."""
        return to_diffusers(name) if self.diffusers else name

    def __str__(self) -> str:
        return str(self.files[0] if len(self.files) == 1 else self.files[0].parent)


def load_checkpoint(
    model: CausalWan,
    path: Path,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    ema: bool | None = None,
    loras: Sequence[Lora] = (),
) -> None:
    """Fill a model, best made by `empty_model`, tensor by tensor, so that memory stays near one copy.

    `ema` chooses between the two sets of weights of a trainer's file: None takes the averaged ones if they are
    there. LoRAs are merged in fp32, one after the other, and the sum is rounded once.
    """
    tensors = fit_tensors(open_checkpoint(path, ema), model.spec)
    filled = {name: tensor.to(device) for name, tensor in read_tensors(tensors, dtype, loras)}
    model.load_state_dict(filled, assign=True)


def open_checkpoint(path: Path, ema: bool | None) -> Checkpoint:
    """Find the tensors of a path."""
    path = path / "transformer" if (path / "transformer").is_dir() else path
    files, keys = files_of(path, FIELD), []

    def choose(found: Mapping[str, Any], file: Path) -> Mapping[str, Any]:
        key, chosen = _state_dict(found, file, ema)
        keys.append(key)
        return chosen

    if ema is not None and files[0].suffix == ".safetensors":
        raise _no_choice(files[0])
    tensors = open_tensors(path, FIELD, choose=choose, clean=clean)
    diffusers = any(name.startswith(ONLY_DIFFUSERS) for name in tensors)
    config = files[0].parent / "config.json"
    return Checkpoint(
        files=tuple(files),
        key=keys[0] if keys else None,
        diffusers=diffusers,
        config=read_json_object(config, FIELD) if diffusers and config.is_file() else None,
        tensors=tensors,
    )


def fit_tensors(checkpoint: Checkpoint, spec: WanSpec) -> dict[str, Stored]:
    """Return the tensors under our names; refuses a checkpoint that is not, tensor for tensor, one of this model."""
    wanted = {checkpoint.in_file(name): tensor for name, tensor in empty_model(spec).state_dict().items()}
    faults = list_faults(checkpoint.tensors, wanted)
    if settings := _config_faults(checkpoint.config, spec):
        faults.append(listing("settings of config.json that differ", settings))
    if faults:
        limit = f"does not fit the {len(wanted)} tensors of {spec.name}: {'; '.join(faults)}"
        raise refuse(FIELD, str(checkpoint), limit, "name a checkpoint of this model")
    return {name: checkpoint.tensors[checkpoint.in_file(name)] for name in shapes_of(spec)}


def inferred_spec(checkpoint: Checkpoint) -> WanSpec:
    """Return the sizes of the transformer in a file; heads do not show in its shapes and are one without a config."""
    dim, channels, frames, rows, columns = _shape(checkpoint, "patch_embedding.weight", 5)
    (ffn_dim, _), (_, freq_dim), (_, text_dim), (outputs, _) = (
        _shape(checkpoint, f"{name}.weight", 2)
        for name in ("blocks.0.ffn.0", "time_embedding.0", "text_embedding.0", "head.head")
    )
    blocks = {name.split(".")[1] for name in checkpoint.tensors if name.startswith("blocks.")}
    heads = (checkpoint.config or {}).get("num_attention_heads")
    try:
        return WanSpec(
            name="a Wan transformer",
            dim=dim,
            ffn_dim=ffn_dim,
            heads=heads if isinstance(heads, int) else 1,
            layers=len(blocks),
            freq_dim=freq_dim,
            text_dim=text_dim,
            in_channels=channels,
            out_channels=outputs // (frames * rows * columns),
            patch=(frames, rows, columns),
            latent_size=(rows, columns),
            token_pixels=rows,
        )
    except ValueError as error:
        limit = f"not a text-to-video Wan transformer that can generate ({error})"
        raise refuse(FIELD, str(checkpoint), limit, "name another checkpoint") from error


@lru_cache(maxsize=8)
def shapes_of(spec: WanSpec) -> Mapping[str, torch.Size]:
    """Return the shape of every tensor of a model of these sizes."""
    return {name: tensor.shape for name, tensor in empty_model(spec).state_dict().items()}


def read_tensors(
    tensors: Mapping[str, Stored], dtype: torch.dtype, loras: Sequence[Lora]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in the order of their names, one at a time, each in memory of its own."""
    for name, stored in sorted(tensors.items()):
        tensor = stored.read()
        for lora in loras:
            tensor = lora.merge(name, tensor)
        # Copied even where nothing changes: a mapped tensor would keep its file open.
        yield name, tensor.to(dtype, copy=True, memory_format=torch.contiguous_format)


def _state_dict(
    found: Mapping[str, Any], file: Path, ema: bool | None
) -> tuple[str | None, Mapping[str, Any]]:
    """Return the chosen state dict of a pickle and its key, which is None for a bare state dict."""
    keys = ", ".join(sorted(found)[:SHOWN])
    plain = MODEL if PLAIN not in found and isinstance(found.get(MODEL), Mapping) else PLAIN
    present = [key for key in (EMA, plain) if key in found]
    if not present:
        if any(isinstance(value, Tensor) for value in found.values()):
            if ema is not None:
                raise _no_choice(file)
            return None, found
        limit = f"it has none of {EMA}, {PLAIN} and {MODEL}; its keys are {keys}"
        raise refuse(FIELD, str(file), limit, "name the checkpoint of a generator")
    key = present[0] if ema is None else EMA if ema else plain
    if key not in present:
        limit = f"it has no {key}; its keys are {keys}"
        raise refuse(FIELD, str(file), limit, f"ask {'without' if ema else 'with'} EMA")
    chosen = found[key]
    if not isinstance(chosen, Mapping) or not chosen:
        raise refuse(FIELD, str(file), f"its {key} is no state dict", "fetch the file again")
    return key, chosen


def _no_choice(file: Path) -> ValueError:
    limit = "it holds one set of weights and does not say whether they are averaged (EMA)"
    return refuse(FIELD, str(file), limit, "make no choice of EMA")


def _shape(checkpoint: Checkpoint, name: str, axes: int) -> tuple[int, ...]:
    stored = checkpoint.tensors.get(checkpoint.in_file(name))
    if stored is None:
        others = listing("tensors", sorted(part.name for part in checkpoint.tensors.values()))
        limit = f"not a Wan transformer: it has no {checkpoint.in_file(name)}, but {others}"
        raise refuse(FIELD, str(checkpoint), limit, "name the checkpoint of a generator")
    if len(stored.shape) != axes or not all(0 < size <= LARGEST_SIZE for size in stored.shape):
        limit = f"not a Wan transformer: {stored.name} has the shape {list(stored.shape)}"
        raise refuse(FIELD, str(checkpoint), limit, "name the checkpoint of a generator")
    return stored.shape


def _config_faults(config: Mapping[str, Any] | None, spec: WanSpec) -> list[str]:
    if config is None:
        return []
    wanted: dict[str, Any] = {
        "num_attention_heads": spec.heads,
        "attention_head_dim": spec.head_dim,
        "in_channels": spec.in_channels,
        "out_channels": spec.out_channels,
        "text_dim": spec.text_dim,
        "freq_dim": spec.freq_dim,
        "ffn_dim": spec.ffn_dim,
        "num_layers": spec.layers,
        "patch_size": list(spec.patch),
        "eps": spec.eps,
        "cross_attn_norm": True,
        "qk_norm": "rms_norm_across_heads",
        "image_dim": None,
        "added_kv_proj_dim": None,
    }
    return [
        f"{key} {config.get(key)!r} for {value!r}"
        for key, value in wanted.items()
        if config.get(key) != value
    ]
