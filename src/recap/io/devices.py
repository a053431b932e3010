"""This module measures the free memory of a device, places text encoders, and sets how torch reserves memory."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import torch

from recap.io.report import Notice

SPARE_BYTES = 1e9
"""What a model needs next to its weights, to encode a text."""


GROWING = "expandable_segments:True"
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def let_segments_grow(device: torch.device | str) -> None:
    """Let torch enlarge what it has reserved of a card instead of reserving more, unless the user has set it up.

    Tensors of different sizes then share room: a run with the full decoder reserves 3 GB less.
    """
    chosen = any(os.environ.get(name) for name in ALLOCATOR_VARIABLES)
    if torch.device(device).type != "cuda" or sys.platform != "linux" or chosen:
        return
    # Neither name is public: the first is that of newer versions. Where it cannot be done, more is reserved.
    change = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    change = change or getattr(torch.cuda.memory, "_set_allocator_settings", None)
    if change is not None:
        with suppress(RuntimeError, ValueError):
            change(GROWING)


def free_on(device: torch.device | str) -> float | None:
    """Return the bytes that this process may still use of a CUDA device; None for other devices."""
    if torch.device(device).type != "cuda":
        return None
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return float(torch.cuda.mem_get_info(device)[0] + cached)


def has_room(size: float, free: float) -> bool:
    """Tell whether a text encoder of this size fits into the free bytes of a device."""
    return size + SPARE_BYTES <= free


def place_encoder(files: Iterable[Path], device: torch.device, notice: Notice) -> torch.device:
    """Return where a text encoder with these weights runs: on the device if that has room, else on the CPU."""
    size, free = sum(file.stat().st_size for file in files), free_on(device)
    if free is None or has_room(size, free):
        return device
    limit = f"{size / 1e9:.1f} GB do not fit into the {free / 1e9:.1f} GB that are free on {device}"
    notice(f"text encoder: {limit}, so it runs on the CPU, which takes longer")
    return torch.device("cpu")
