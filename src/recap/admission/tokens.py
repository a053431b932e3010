"""Naming the tokens of a block, for rules that do not score pixel by pixel."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from recap.types import Block, frame_positions


def sources(block: Block, grid: tuple[int, int], like: Tensor) -> Tensor:
    """Source B N 3 of every token of the block, frame by frame, row-major; batch and device are those of `like`."""
    frames = torch.arange(block.first_frame, block.end_frame, device=like.device)
    return frame_positions(frames, grid).long().expand(like.shape[0], -1, -1)


def place_of(source: Tensor) -> Tensor:
    """One whole number B N per token, in order of age and then row-major."""
    frame, row, column = source.unbind(-1)
    return (frame << 40) + (row << 20) + column


def seeded(seed: int, frame: int) -> torch.Generator:
    """A generator of its own for every (seed, frame), on the CPU, so that all devices draw alike."""
    digest = hashlib.sha256(f"{seed}:{frame}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
