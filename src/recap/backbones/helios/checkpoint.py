"""diffusers' transformer from its folder, file by file, in the precision it runs in.

diffusers' own loader needs accelerate for a model that keeps some layers in fp32; and the published files are fp32
throughout, 54 GB, of which never more than one file need be at hand beside the model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from recap.backbones.helios.spec import HeliosSpec
from recap.backbones.wan.tensors import FETCH_AGAIN, extra, shards
from recap.errors import refuse

FIELD = "Helios transformer"
SHOWN = 3


def empty_transformer(folder: Path) -> Any:
    """The model of a folder's config, on the meta device."""
    kind = extra("diffusers").HeliosTransformer3DModel
    try:
        config = kind.load_config(folder)
    except (OSError, ValueError) as problem:
        limit = f"config.json cannot be read ({str(problem).partition(chr(10))[0]})"
        raise refuse(FIELD, str(folder), limit, "pass a complete diffusers folder") from problem
    with torch.device("meta"):
        return kind.from_config(config)


def load_transformer(folder: Path, spec: HeliosSpec, dtype: torch.dtype) -> Any:
    """The transformer on the CPU, strictly: what is missing, unknown or misshapen is named."""
    model = empty_transformer(folder)
    config = model.config
    found = (len(model.blocks), config.num_attention_heads, config.attention_head_dim, config.text_dim)
    if found != (spec.layers, spec.heads, spec.head_dim, spec.text_dim):
        limit = f"its layers, heads, channels of a head and of text are not those of {spec.name}"
        raise refuse(FIELD, found, limit, f"pass the folder of {spec.repository}, not {folder}")
    whole = set(model._keep_in_fp32_modules)
    expected, state, wrong = model.state_dict(), {}, []
    for file in shards(folder, FIELD):
        for name, tensor in _read(file).items():
            if name not in expected:
                wrong.append(f"{name} is not part of the model")
            elif tensor.shape != expected[name].shape:
                wrong.append(f"{name} is {tuple(tensor.shape)}, not {tuple(expected[name].shape)}")
            else:
                state[name] = tensor.to(torch.float32 if whole.intersection(name.split(".")) else dtype)
    wrong += [f"{name} is missing" for name in expected if name not in state]
    if wrong:
        more = f"; and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
        limit = f"the tensors do not fit: {'; '.join(wrong[:SHOWN])}{more}"
        raise refuse(FIELD, str(folder), limit, "pass the weights of this very model")
    model.load_state_dict(state, assign=True)
    # Its frequencies are no part of any file, and were made without storage.
    model.rope = type(model.rope)(rope_dim=config.rope_dim, theta=config.rope_theta)
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    return model


def _read(file: Path) -> dict[str, Tensor]:
    try:
        return dict(load_file(file))
    except (OSError, SafetensorError) as problem:
        reason = str(problem).partition("\n")[0]
        raise refuse(FIELD, str(file), f"cannot be read ({reason})", FETCH_AGAIN) from problem
