"""The look-up of correlations as one Triton launch; `recap.fast.correlation` holds its plain twin.

Imported only when a CUDA device is at hand. Without Triton the module still imports, as every module must.
"""

# No `from __future__ import annotations` here: Triton reads the annotations of a kernel.
import importlib
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from recap.flow.raft import LEVELS, RADIUS

try:
    triton: Any = importlib.import_module("triton")
    tl: Any = importlib.import_module("triton.language")
except ImportError:
    triton, tl = SimpleNamespace(jit=lambda kernel: kernel), SimpleNamespace(constexpr=int)

AVAILABLE = hasattr(triton, "language")
PLACES = 16  # per program; with 64 window slots and 4 warps every thread has 32 loads under way


@triton.jit  # type: ignore[untyped-decorator]
def read_windows(  # type: ignore[no-untyped-def]
    volume,  # (N y x) row: every level of one place's correlations behind one another
    flow,  # (N y x) 2, float32
    out,  # (N y x) channels
    num_places,
    height,
    width,
    row,
    channels,
    levels: tl.constexpr,
    radius: tl.constexpr,
    places: tl.constexpr,
    slots: tl.constexpr,
):
    side = 2 * radius + 1
    window = side * side
    place = tl.program_id(0) * places + tl.arange(0, places)
    level = tl.program_id(1)
    live = place < num_places
    cell = place % (height * width)
    start = 0
    for finer in tl.static_range(levels - 1):
        start += tl.where(finer < level, (height >> finer) * (width >> finer), 0)
    tall, wide = height >> level, width >> level
    shrink = 1.0 / (1 << level).to(tl.float32)
    x = (tl.load(flow + 2 * place, mask=live, other=0.0) + (cell % width).to(tl.float32)) * shrink
    y = (tl.load(flow + 2 * place + 1, mask=live, other=0.0) + (cell // width).to(tl.float32)) * shrink
    # Beyond these bounds every tap is outside; a wild flow must not overflow the integers below.
    x = tl.minimum(tl.maximum(x, -radius - 2.0), wide + radius + 1.0)
    y = tl.minimum(tl.maximum(y, -radius - 2.0), tall + radius + 1.0)
    left, top = tl.floor(x), tl.floor(y)
    right_part, lower_part = (x - left)[:, None], (y - top)[:, None]
    slot = tl.arange(0, slots)
    # The trained order of the window is x first, y second.
    column = left.to(tl.int32)[:, None] + (slot // side - radius)[None, :]
    line = top.to(tl.int32)[:, None] + (slot % side - radius)[None, :]
    wanted = live[:, None] & (slot < window)[None, :]
    at = volume + place.to(tl.int64)[:, None] * row + start + line * wide + column
    above, below = wanted & (line >= 0) & (line < tall), wanted & (line >= -1) & (line < tall - 1)
    here, beside = (column >= 0) & (column < wide), (column >= -1) & (column < wide - 1)
    a = tl.load(at, mask=above & here, other=0.0).to(tl.float32)
    b = tl.load(at + 1, mask=above & beside, other=0.0).to(tl.float32)
    c = tl.load(at + wide, mask=below & here, other=0.0).to(tl.float32)
    d = tl.load(at + wide + 1, mask=below & beside, other=0.0).to(tl.float32)
    upper = a + (b - a) * right_part
    lower = c + (d - c) * right_part
    read = upper + (lower - upper) * lower_part
    channel = level * window + slot
    # The last level also writes the zeros that fill up the channels.
    end = tl.where(level == levels - 1, channels, (level + 1) * window)
    target = out + place.to(tl.int64)[:, None] * channels + channel[None, :]
    tl.store(target, read.to(out.dtype.element_ty), mask=live[:, None] & (channel < end)[None, :])


def launch(volume: Tensor, flow: Tensor, channels: int) -> Tensor:
    """Windows N y x channels of a volume N (y x) row at flow N y x 2; channels beyond the windows are 0."""
    num, height, width = flow.shape[:3]
    volume, flow = volume.contiguous(), flow.contiguous()
    out = torch.empty((num, height, width, channels), dtype=volume.dtype, device=volume.device)
    count = num * height * width
    grid = (-(-count // PLACES), LEVELS)
    read_windows[grid](
        volume, flow, out, count, height, width, volume.shape[-1], channels,
        levels=LEVELS, radius=RADIUS, places=PLACES, slots=triton.next_power_of_2((2 * RADIUS + 1) ** 2),
        num_warps=4,
    )  # fmt: skip
    return out
