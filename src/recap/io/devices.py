"""Tells how much room a device has, and whether something fits there."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from recap.io.report import Notice

SPARE_BYTES = 1e9
"""What a model needs next to its weights, to encode a text."""


def free_on(device: torch.device | str) -> float | None:
    """Return the bytes that this process may still use of a CUDA device; None for other devices."""
    if torch.device(device).type != "cuda":
        return None
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return float(torch.cuda.mem_get_info(device)[0] + cached)


def place_encoder(files: Iterable[Path], device: torch.device, notice: Notice) -> torch.device:
    """Return where a text encoder with these weights runs: on the device if that has room, else on the CPU.

    So it is next to a transformer, for a prompt that comes later, only on a card that has room for both.
    """
    size, free = sum(file.stat().st_size for file in files), free_on(device)
    if free is None or size + SPARE_BYTES <= free:
        return device
    limit = f"{size / 1e9:.1f} GB do not fit into the {free / 1e9:.1f} GB that are free on {device}"
    notice(f"text encoder: {limit}, so it runs on the CPU, which takes longer")
    return torch.device("cpu")
