"""The look-up of correlations as one Triton launch; `recap.fast.correlation` has the plain version."""

# No `from __future__ import annotations` here: Triton reads the annotations of a kernel.
import torch
from torch import Tensor

from recap.fast.triton_import import tl, triton
from recap.flow.raft import LEVELS, RADIUS

# Pixels per program: with 64 window slots and 4 warps every thread has 32 loads in flight.
PIXELS = 16


@triton.jit  # type: ignore[untyped-decorator]
def read_windows(  # type: ignore[no-untyped-def]
    volume, flow, out, num_pixels, height, width, stride, channels,
    levels: tl.constexpr, radius: tl.constexpr, pixels: tl.constexpr, slots: tl.constexpr,
):  # fmt: skip
    # The volume is (N y x) stride with all levels of a pixel's correlations concatenated, the flow (N y x) 2 in
    # float32, the output (N y x) channels.
    side = 2 * radius + 1
    window = side * side
    pixel = tl.program_id(0) * pixels + tl.arange(0, pixels)
    level = tl.program_id(1)
    live = pixel < num_pixels
    cell = pixel % (height * width)
    start = 0
    for finer in tl.static_range(levels - 1):
        start += tl.where(finer < level, (height >> finer) * (width >> finer), 0)
    tall, wide = height >> level, width >> level
    shrink = 1.0 / (1 << level).to(tl.float32)
    x = (tl.load(flow + 2 * pixel, mask=live, other=0.0) + (cell % width).to(tl.float32)) * shrink
    y = (tl.load(flow + 2 * pixel + 1, mask=live, other=0.0) + (cell // width).to(tl.float32)) * shrink
    # Beyond these bounds everything read is outside; an extreme flow must not overflow the integers below.
    x = tl.minimum(tl.maximum(x, -radius - 2.0), wide + radius + 1.0)
    y = tl.minimum(tl.maximum(y, -radius - 2.0), tall + radius + 1.0)
    left, top = tl.floor(x), tl.floor(y)
    right_part, lower_part = (x - left)[:, None], (y - top)[:, None]
    slot = tl.arange(0, slots)
    # As in training, a window counts x first and y second.
    column = left.to(tl.int32)[:, None] + (slot // side - radius)[None, :]
    row = top.to(tl.int32)[:, None] + (slot % side - radius)[None, :]
    wanted = live[:, None] & (slot < window)[None, :]
    source = volume + pixel.to(tl.int64)[:, None] * stride + start + row * wide + column
    above, below = wanted & (row >= 0) & (row < tall), wanted & (row >= -1) & (row < tall - 1)
    at_left, at_right = (column >= 0) & (column < wide), (column >= -1) & (column < wide - 1)
    a = tl.load(source, mask=above & at_left, other=0.0).to(tl.float32)
    b = tl.load(source + 1, mask=above & at_right, other=0.0).to(tl.float32)
    c = tl.load(source + wide, mask=below & at_left, other=0.0).to(tl.float32)
    d = tl.load(source + wide + 1, mask=below & at_right, other=0.0).to(tl.float32)
    upper = a + (b - a) * right_part
    lower = c + (d - c) * right_part
    read = upper + (lower - upper) * lower_part
    channel = level * window + slot
    # The last level also writes the zeros after the windows.
    end = tl.where(level == levels - 1, channels, (level + 1) * window)
    target = out + pixel.to(tl.int64)[:, None] * channels + channel[None, :]
    tl.store(target, read.to(out.dtype.element_ty), mask=live[:, None] & (channel < end)[None, :])


def launch(volume: Tensor, flow: Tensor, channels: int) -> Tensor:
    """Read windows N y x channels of a volume N (y x) S at flow N y x 2; channels after the windows are 0."""
    num, height, width = flow.shape[:3]
    volume, flow = volume.contiguous(), flow.contiguous()
    out = torch.empty((num, height, width, channels), dtype=volume.dtype, device=volume.device)
    count = num * height * width
    grid = (-(-count // PIXELS), LEVELS)
    read_windows[grid](
        volume, flow, out, count, height, width, volume.shape[-1], channels,
        levels=LEVELS, radius=RADIUS, pixels=PIXELS, slots=triton.next_power_of_2((2 * RADIUS + 1) ** 2),
        num_warps=4,
    )  # fmt: skip
    return out
