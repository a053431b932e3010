"""diffusers' transformer from its folder, tensor by tensor, in the precision it runs in.

diffusers' own loader needs accelerate for a model that keeps some layers in fp32; and the published files are fp32
throughout, 54 GB, which stay on the disk, mapped, while they are converted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from recap.backbones.helios.spec import HeliosSpec
from recap.errors import refuse
from recap.io.extras import import_extra
from recap.io.weights import fill, open_tensors

FIELD = "Helios transformer"


def empty_transformer(folder: Path) -> Any:
    """The model of a folder's config, on the meta device."""
    kind = import_extra("diffusers", "Helios", "helios").HeliosTransformer3DModel
    try:
        config = kind.load_config(folder)
    except (OSError, ValueError) as problem:
        limit = f"config.json cannot be read ({str(problem).partition(chr(10))[0]})"
        raise refuse(FIELD, str(folder), limit, "pass a complete diffusers folder") from problem
    with torch.device("meta"):
        return kind.from_config(config)


def load_transformer(folder: Path, spec: HeliosSpec, dtype: torch.dtype) -> Any:
    """The transformer on the CPU, filled strictly."""
    model = empty_transformer(folder)
    config = model.config
    sizes = (len(model.blocks), config.num_attention_heads, config.attention_head_dim, config.text_dim)
    if sizes != (spec.layers, spec.heads, spec.head_dim, spec.text_dim):
        limit = f"its layers, heads, channels of a head and of text are not those of {spec.name}"
        raise refuse(FIELD, sizes, limit, f"pass the folder of {spec.repository}, not {folder}")
    whole = set(model._keep_in_fp32_modules)

    def precision(name: str) -> torch.dtype:
        return torch.float32 if whole.intersection(name.split(".")) else dtype

    found = open_tensors(folder, FIELD)
    fill(model, found, path=folder, field=FIELD, dtype=precision, what=spec.name, copy=False)
    # Its frequencies are no part of any file, and were made without storage.
    model.rope = type(model.rope)(rope_dim=config.rope_dim, theta=config.rope_theta)
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    return model
