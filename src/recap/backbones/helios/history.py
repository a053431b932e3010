"""This module says what a Helios forward sees next to its chunk: which latents, at which indices, as which keys.

Sequence of every forward, with the indices of the released setting:
    long    16 frames, 4 x 4 x 4 tokens to one        1..16    PRIOR
    mid      2 frames, 2 x 2 x 2 tokens to one       17..18    PRIOR
    opening  the video's first frame, whole               0    SINK (zeros in the first chunk of text-to-video: PRIOR)
    newest   the last frame, whole                       19    PRIOR
    current  the chunk, at its stage's resolution    20..28    CURRENT
Indices never change: every chunk stands as if it were frames 20 to 28 of the video.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from recap.types import Past, Role

POOLED = (4, 2)
"""One token of long and of mid history stands for this many tokens along each axis."""
PLACEHOLDER = 4
"""The chunk is this much smaller in the current part of the clean pass, where nobody reads it."""


@dataclass(frozen=True, slots=True)
class Slices:
    """Says where each part lies on the key axis."""

    # In order.
    parts: tuple[tuple[Role, slice], ...]
    # The frames of the short history behind the opening: a clean pass has its chunk there.
    whole: slice
    current: slice


def slices(grid: tuple[int, int], history: tuple[int, int, int], current: int, *, real: bool) -> Slices:
    """Return the parts of a sequence that ends with `current` tokens of the chunk; `history` counts their frames."""
    rows, columns = grid
    long, mid = (
        -(-frames // n) * -(-rows // n) * -(-columns // n) for frames, n in zip(history, POOLED, strict=False)
    )
    frame = rows * columns
    ends = list(accumulate((long, mid, frame, history[2] * frame, current)))
    cut = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
    roles = (Role.PRIOR, Role.PRIOR, Role.SINK if real else Role.PRIOR, Role.PRIOR, Role.CURRENT)
    return Slices(tuple(zip(roles, cut, strict=True)), cut[3], cut[4])


def denoising_arguments(
    past: Past, history: tuple[int, int, int], shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> dict[str, Any]:
    """Return history and indices of every forward of a chunk of latents `shape`, B C F rows columns."""
    batch, channels, frames, rows, columns = shape
    # fp32 as the released loop has it, whatever the latents come in.
    buffer = torch.zeros(batch, channels, sum(history), rows, columns, device=device)
    if past.recent is not None:
        buffer = torch.cat([buffer, past.recent.transpose(1, 2).to(device)], dim=2)[:, :, -sum(history) :]
    opening = buffer.new_zeros(batch, channels, 1, rows, columns)
    if past.opening is not None:
        opening = past.opening.transpose(1, 2).to(opening)
    long, mid, newest = buffer.split(history, dim=2)
    short = torch.cat([opening, newest], dim=2)
    first, *parts = torch.arange(1 + sum(history) + frames).split([1, *history, frames])
    indices = {
        "indices_latents_history_long": parts[0],
        "indices_latents_history_mid": parts[1],
        "indices_latents_history_short": torch.cat([first, parts[2]]),
        "indices_hidden_states": parts[3],
    }
    return {
        **{name: index.unsqueeze(0) for name, index in indices.items()},
        "latents_history_long": long.to(dtype),
        "latents_history_mid": mid.to(dtype),
        "latents_history_short": short.to(dtype),
    }


def clean_arguments(denoising: dict[str, Any], latents: Tensor, opening: Tensor | None) -> dict[str, Any]:
    """Return the clean pass of a finished chunk, B C F rows columns: its frames as short history, whole, at time 0.

    Later chunks read a past frame in that role, not as a current frame: its own embedding, its time 0, no text. Long
    and mid are those of the chunk's own steps. There must be something in the current part; a small copy of the chunk
    is. Without an opening the chunk's own first frame is one.
    """
    dtype = denoising["latents_history_short"].dtype
    whole = latents.to(dtype)
    first = whole[:, :, :1] if opening is None else opening.to(whole)
    rows, columns = (max(side // PLACEHOLDER, 2) for side in whole.shape[-2:])
    small = functional.adaptive_avg_pool3d(whole, (whole.shape[2], rows, columns))
    places = denoising["indices_hidden_states"]
    return {
        **denoising,
        "hidden_states": small,
        "timestep": torch.zeros(whole.shape[0], dtype=torch.int64, device=whole.device),
        "latents_history_short": torch.cat([first, whole], dim=2),
        "indices_latents_history_short": torch.cat([torch.zeros_like(places[:, :1]), places], dim=1),
    }
