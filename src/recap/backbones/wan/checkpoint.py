"""Fill a causal Wan transformer from the files in which such models are published.

A torch pickle of a trainer (`generator_ema`, `generator`, `model`) or a bare state dict; safetensors in one file, in
shards with an index or in a folder; a folder in the layout of diffusers; what `recap convert` writes. Names are
cleaned of wrappers, and every tensor must be there, fit and be a float: nothing is skipped or filled in.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recap.backbones.wan.lora import Lora, open_lora
from recap.backbones.wan.model import CausalWan
from recap.backbones.wan.names import clean, is_diffusers, to_diffusers, to_ours
from recap.backbones.wan.spec import WAN_1_3B, WanSpec
from recap.errors import refuse
from recap.io.weights import (
    SHOWN,
    Shape,
    Stored,
    files_of,
    list_faults,
    listing,
    open_file,
    read_json_object,
)

FIELD = "checkpoint"
EMA, PLAIN, MODEL = "generator_ema", "generator", "model"
"""Keys of a trainer's file: the averaged weights, those of the last step, and LongLive's other name for these."""

LARGEST_SIZE = 1 << 20  # of one axis: more is a damaged file, and its products would overflow


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The tensors of a transformer under our names, not read yet."""

    files: tuple[Path, ...]
    key: str | None  # of a trainer's file
    diffusers: bool  # whether the file uses the names of diffusers
    config: dict[str, Any] | None  # of a folder in the layout of diffusers
    tensors: dict[str, Stored]

    def in_file(self, name: str) -> str:
        """What the file calls a tensor of ours, so that a reader finds it there."""
        if name in self.tensors:
            return self.tensors[name].name
        return to_diffusers(name) or name if self.diffusers else name

    def __str__(self) -> str:
        return str(self.files[0] if len(self.files) == 1 else self.files[0].parent)


def load_checkpoint(
    model: CausalWan,
    path: Path | Sequence[Path],
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    ema: bool | None = None,
    lora: Path | None = None,
    lora_alpha: float | None = None,
) -> None:
    """Fill a model, best made on the meta device, tensor by tensor, so that memory stays near one copy.

    `ema` chooses between the two sets of weights of a trainer's file: None takes the averaged ones if they are
    there. `lora` is merged in fp32; `lora_alpha` is for files that do not contain their alpha.
    """
    checkpoint = open_checkpoint(path, ema)
    check_fit(checkpoint, model.spec)
    changes = None if lora is None else open_lora(lora, shapes_of(model.spec), lora_alpha)
    filled = {name: tensor.to(device) for name, tensor in read_tensors(checkpoint, dtype, changes)}
    model.load_state_dict(filled, assign=True)


def open_checkpoint(path: Path | Sequence[Path], ema: bool | None) -> Checkpoint:
    """Find the tensors of a path, or of several that make up one model."""
    paths = [Path(path)] if isinstance(path, str | Path) else [Path(part) for part in path]
    inner = (part / "transformer" if (part / "transformer").is_dir() else part for part in paths)
    files = [file for part in inner for file in files_of(part, FIELD)]
    if not files:
        raise refuse(FIELD, path, "no file is named", "name at least one")
    keys: list[str | None] = []

    def choose(found: Mapping[str, Any], file: Path) -> Mapping[str, Any]:
        key, chosen = _state_dict(found, file, ema)
        keys.append(key)
        return chosen

    cleaned: dict[str, Stored] = {}
    for file in files:
        if ema is not None and file.suffix == ".safetensors":
            raise _no_choice(file)
        for name, stored in open_file(file, FIELD, choose=choose).items():
            bare = clean(name)
            if bare in cleaned:
                also = f"{cleaned[bare].name} in {cleaned[bare].file.name}"
                limit = f"{name} is there twice, also as {also}"
                raise refuse(FIELD, str(file), limit, "name one file of one model")
            cleaned[bare] = stored
    diffusers = sum(map(is_diffusers, cleaned)) > sum(to_ours(name) is None for name in cleaned)
    config = files[0].parent / "config.json"
    return Checkpoint(
        files=tuple(files),
        key=keys[0] if keys else None,
        diffusers=diffusers,
        config=read_json_object(config, FIELD) if diffusers and config.is_file() else None,
        tensors=_ours(cleaned) if diffusers else cleaned,
    )


def check_fit(checkpoint: Checkpoint, spec: WanSpec) -> None:
    """Refuse a checkpoint that is not, tensor for tensor, one of this model."""
    wanted = _empty(spec).state_dict()
    faults = list_faults(checkpoint.tensors, wanted, checkpoint.in_file)
    if settings := _config_faults(checkpoint.config, spec):
        faults.append(listing("settings of config.json that differ", settings))
    if faults:
        limit = f"does not fit the {len(wanted)} tensors of {spec.name}: {'; '.join(faults)}"
        raise refuse(FIELD, str(checkpoint), limit, "name a checkpoint of this model")


def inferred_spec(checkpoint: Checkpoint) -> WanSpec:
    """The sizes of the transformer in a file; heads leave no trace in its shapes and are one without a config."""
    patch, text, time, ffn, head = (
        _shape(checkpoint, name, axes)
        for name, axes in (
            ("patch_embedding.weight", 5),
            ("text_embedding.0.weight", 2),
            ("time_embedding.0.weight", 2),
            ("blocks.0.ffn.0.weight", 2),
            ("head.head.weight", 2),
        )
    )
    blocks = {found[1] for name in checkpoint.tensors if (found := re.match(r"blocks\.(\d+)\.", name))}
    frames, rows, columns = patch[2:]
    heads = (checkpoint.config or {}).get("num_attention_heads")
    try:
        return replace(
            WAN_1_3B,
            name="a Wan transformer",
            dim=patch[0],
            ffn_dim=ffn[0],
            heads=heads if isinstance(heads, int) else 1,
            layers=len(blocks),
            freq_dim=time[1],
            text_dim=text[1],
            in_channels=patch[1],
            out_channels=head[0] // (frames * rows * columns),
            patch=(frames, rows, columns),
            latent_size=(rows, columns),
            token_pixels=rows,
        )
    except ValueError as error:
        limit = f"not a text-to-video Wan transformer that can generate ({error})"
        raise refuse(FIELD, str(checkpoint), limit, "name another checkpoint") from error


def shapes_of(spec: WanSpec) -> dict[str, Shape]:
    """The shape of every tensor of a model of these sizes."""
    return {name: tuple(tensor.shape) for name, tensor in _empty(spec).state_dict().items()}


def read_tensors(
    checkpoint: Checkpoint, dtype: torch.dtype, lora: Lora | None
) -> Iterator[tuple[str, Tensor]]:
    """The tensors in the order of their names, one at a time, each in memory of its own."""
    for name, stored in sorted(checkpoint.tensors.items()):
        tensor = stored.read() if lora is None else lora.merge(name, stored.read())
        # Copied even where nothing changes: a mapped tensor would keep its file open.
        yield name, tensor.to(dtype, copy=True, memory_format=torch.contiguous_format)


def _empty(spec: WanSpec) -> CausalWan:
    with torch.device("meta"):
        return CausalWan(spec)


def _state_dict(
    found: Mapping[str, Any], file: Path, ema: bool | None
) -> tuple[str | None, Mapping[str, Any]]:
    plain = MODEL if PLAIN not in found and isinstance(found.get(MODEL), Mapping) else PLAIN
    present = [key for key in (EMA, plain) if key in found]
    if not present:
        if any(isinstance(value, Tensor) for value in found.values()):
            if ema is not None:
                raise _no_choice(file)
            return None, found
        limit = f"it has none of {EMA}, {PLAIN} and {MODEL}; its keys are {_keys(found)}"
        raise refuse(FIELD, str(file), limit, "name the checkpoint of a generator")
    key = present[0] if ema is None else EMA if ema else plain
    if key not in present:
        limit = f"it has no {key}; its keys are {_keys(found)}"
        raise refuse(FIELD, str(file), limit, f"ask {'without' if ema else 'with'} EMA")
    chosen = found[key]
    if not isinstance(chosen, Mapping) or not chosen:
        raise refuse(FIELD, str(file), f"its {key} is no state dict", "fetch the file again")
    return key, chosen


def _keys(found: Mapping[str, Any]) -> str:
    return ", ".join(sorted(found)[:SHOWN])


def _no_choice(file: Path) -> ValueError:
    limit = "it holds one set of weights and does not say whether they are averaged (EMA)"
    return refuse(FIELD, str(file), limit, "make no choice of EMA")


def _ours(cleaned: Mapping[str, Stored]) -> dict[str, Stored]:
    """The tensors of diffusers under our names; unknown ones keep a name that is unknown to us too."""
    return {to_ours(name) or f"{name} (not of diffusers)": stored for name, stored in cleaned.items()}


def _shape(checkpoint: Checkpoint, name: str, axes: int) -> Shape:
    stored = checkpoint.tensors.get(name)
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
