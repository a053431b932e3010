"""This module rewrites a published checkpoint as one safetensors file, with a manifest of where it came from."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from recap.backbones.wan.checkpoint import (
    fit_tensors,
    inferred_spec,
    open_checkpoint,
    read_tensors,
    shapes_of,
)
from recap.backbones.wan.lora import LoraChoice, open_lora
from recap.backbones.wan.spec import ROWS, WAN_1_3B
from recap.errors import refuse
from recap.io.files import sha256_of, staged_folder
from recap.io.report import SILENT, Reporter

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_CODES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
FILES = ("model.safetensors", "manifest.json")
SIZES = ("dim", "ffn_dim", "layers", "freq_dim", "text_dim", "in_channels", "out_channels", "patch")
"""These fields of a spec decide the shapes of its tensors."""


def convert(
    source: Path,
    out: Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    ema: bool | None = None,
    loras: Sequence[LoraChoice] = (),
    reporter: Reporter = SILENT,
) -> dict[str, Any]:
    """Write `out`/model.safetensors and `out`/manifest.json, whole or not at all; returns the manifest.

    Progress is in bytes, reading and writing together.
    """
    if out.exists():
        raise refuse("OUT", str(out), "it is there already", "name a folder that is not")
    checkpoint = open_checkpoint(source, ema)
    spec = inferred_spec(checkpoint)
    tensors = fit_tensors(checkpoint, spec)
    shapes = shapes_of(spec)
    changes = [open_lora(choice, shapes) for choice in loras]
    for change in changes:
        reporter.notice(str(change))
    inputs = [*checkpoint.files, *(file for change in changes for file in change.files)]
    parameters = sum(shape.numel() for shape in shapes.values())
    total = sum(file.stat().st_size for file in inputs) + parameters * dtype.itemsize
    advance = reporter.counter(total)

    def about(file: Path) -> dict[str, Any]:
        return {"file": file.name, "bytes": file.stat().st_size, "sha256": sha256_of(file, advance)}

    sizes = {name: getattr(spec, name) for name in SIZES}
    rows = (WAN_1_3B, *ROWS.values())
    with staged_folder(out, ()) as folder:
        manifest = {
            "sources": [about(file) for file in checkpoint.files],
            "key": checkpoint.key,
            "names": "diffusers" if checkpoint.diffusers else "wan",
            "loras": [
                {"sources": [about(file) for file in change.files], **change.describe()} for change in changes
            ],
            "dtype": str(dtype).removeprefix("torch."),
            "tensors": len(shapes),
            "parameters": parameters,
            "sizes": sizes,
            "fits": [row.name for row in rows if {name: getattr(row, name) for name in SIZES} == sizes],
        }
        with (folder / FILES[0]).open("xb") as file:
            file.write(_header(shapes, dtype))
            for _, tensor in read_tensors(tensors, dtype, changes):
                # As bytes, since numpy does not know bfloat16.
                file.write(tensor.view(torch.uint8).numpy().data)
                advance(tensor.nbytes)
        (folder / FILES[1]).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    return manifest


def _header(shapes: Mapping[str, torch.Size], dtype: torch.dtype) -> bytes:
    """Return the head of a safetensors file whose tensors follow in the order of their names.

    The library's own writer wants all tensors at once, and its words for a full disk are not an OSError.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in sorted(shapes.items()):
        start, end = end, end + shape.numel() * dtype.itemsize
        header[name] = {"dtype": _CODES[dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    # Tensors start at a multiple of eight.
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text
