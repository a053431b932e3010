# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Triton evaluates annotations and knows none but its own.
"""Computes the steps of `recap.fast.raft_steps`, which defines them, by Triton kernels with one launch each.

A convolution with so few channels takes about 15 us on an H200, and every separate pass over its result 5 to 10: in
a call as one graph, half of the time were such passes. A pixel is a run of channels, and pixels are a constant
stride apart. Channels and strides are known when a kernel is compiled, so pixels are found by shifts and read 16
bytes at a time.
"""

# No `from __future__ import annotations` here: Triton reads the annotations of a kernel.
import torch
from torch import Tensor

from recap.fast.raft_steps import MOVED, STATE, WINDOWS
from recap.fast.triton_import import tl, triton
from recap.flow.raft import HIDDEN, LEVELS, RADIUS

# Elements per program.
AT_ONCE = 1024
# Parts of a picture that are summed separately: enough programs to fill the chip.
PARTS = 32
# Pixels per program that sums or normalises.
PIXELS = 64
# Pixels per program that reads windows: with 64 window slots and 4 warps every thread has 32 loads in flight.
READ_PIXELS = 16


@triton.jit
def _read(
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
    mixed = upper + (lower - upper) * lower_part
    channel = level * window + slot
    # The last level also writes the zeros after the windows.
    end = tl.where(level == levels - 1, channels, (level + 1) * window)
    target = out + pixel.to(tl.int64)[:, None] * channels + channel[None, :]
    tl.store(target, mixed.to(out.dtype.element_ty), mask=live[:, None] & (channel < end)[None, :])


@triton.jit
def _sums(
    x, sums, pixels, channels: tl.constexpr, stride: tl.constexpr, ROUNDS: tl.constexpr, PARTS: tl.constexpr,
    PIXELS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    picture, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    channel = tl.arange(0, WIDTH)
    total = tl.zeros((WIDTH,), tl.float32)
    square = tl.zeros((WIDTH,), tl.float32)
    for step in range(ROUNDS):
        pixel = (part * ROUNDS + step) * PIXELS + tl.arange(0, PIXELS)
        inside = (pixel < pixels)[:, None] & (channel < channels)[None, :]
        value = tl.load(x + (picture * pixels + pixel[:, None]) * stride + channel[None, :], inside, 0.0)
        value = value.to(tl.float32)
        total += tl.sum(value, 0)
        square += tl.sum(value * value, 0)
    to = sums + (picture * PARTS + part) * 2 * WIDTH + channel
    tl.store(to, total)
    tl.store(to + WIDTH, square)


@triton.jit
def _normalise(
    x, sums, residual, out, pixels, channels: tl.constexpr, stride: tl.constexpr, residual_stride: tl.constexpr, eps,
    RELU: tl.constexpr, ADDS: tl.constexpr,
    PARTS: tl.constexpr, PIXELS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    picture = tl.program_id(0).to(tl.int64)
    pixel = tl.program_id(1) * PIXELS + tl.arange(0, PIXELS)
    channel = tl.arange(0, WIDTH)
    at = sums + (picture * PARTS + tl.arange(0, PARTS)[:, None]) * 2 * WIDTH + channel[None, :]
    mean = tl.sum(tl.load(at), 0) / pixels
    variance = tl.maximum(tl.sum(tl.load(at + WIDTH), 0) / pixels - mean * mean, 0.0)
    scale = tl.rsqrt(variance + eps)
    inside = (pixel < pixels)[:, None] & (channel < channels)[None, :]
    entry = picture * pixels + pixel[:, None]
    value = tl.load(x + entry * stride + channel[None, :], inside, 0.0).to(tl.float32)
    value = ((value - mean[None, :]) * scale[None, :]).to(out.dtype.element_ty).to(tl.float32)
    if RELU:
        value = tl.maximum(value, 0.0)
    if ADDS:
        value += tl.load(residual + entry * residual_stride + channel[None, :], inside, 0.0).to(tl.float32)
        value = tl.maximum(value, 0.0)
    tl.store(out + entry * channels + channel[None, :], value.to(out.dtype.element_ty), inside)


@triton.jit
def _bias(
    x, bias, residual, out, count, channels: tl.constexpr, stride: tl.constexpr, residual_stride: tl.constexpr,
    RELU: tl.constexpr, ADDS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64) * AT_ONCE + tl.arange(0, AT_ONCE)
    inside = index < count
    pixel, channel = index // channels, index % channels
    value = tl.load(x + pixel * stride + channel, inside, 0.0).to(tl.float32)
    value += tl.load(bias + channel, inside, 0.0).to(tl.float32)
    if RELU:
        value = tl.maximum(value, 0.0)
    if ADDS:
        value += tl.load(residual + pixel * residual_stride + channel, inside, 0.0).to(tl.float32)
        value = tl.maximum(value, 0.0)
    tl.store(out + index, value.to(out.dtype.element_ty), inside)


@triton.jit
def _pair(
    first, second, bias, out, count, first_channels: tl.constexpr, channels: tl.constexpr, AT_ONCE: tl.constexpr
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64) * AT_ONCE + tl.arange(0, AT_ONCE)
    inside = index < count
    pixel, channel = index // channels, index % channels
    ahead = channel < first_channels
    value = tl.load(first + pixel * first_channels + channel, inside & ahead, 0.0).to(tl.float32)
    behind = second + pixel * (channels - first_channels) + channel - first_channels
    value += tl.load(behind, inside & (channel >= first_channels), 0.0).to(tl.float32)
    value = tl.maximum(value + tl.load(bias + channel, inside, 0.0).to(tl.float32), 0.0)
    tl.store(out + index, value.to(out.dtype.element_ty), inside)


@triton.jit
def _join(
    hidden, motion, bias, moved, out, count, hidden_stride, HIDDEN: tl.constexpr, STATE: tl.constexpr,
    MOVED: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64) * AT_ONCE + tl.arange(0, AT_ONCE)
    inside = index < count
    pixel, channel = index // STATE, index % STATE
    size = STATE - HIDDEN - MOVED
    of_motion = (channel >= HIDDEN) & (channel < HIDDEN + size)
    middle = tl.load(motion + pixel * size + channel - HIDDEN, inside & of_motion, 0.0).to(tl.float32)
    middle += tl.load(bias + channel - HIDDEN, inside & of_motion, 0.0).to(tl.float32)
    value = tl.load(hidden + pixel * hidden_stride + channel, inside & (channel < HIDDEN), 0.0).to(tl.float32)
    tail = tl.load(moved + pixel * MOVED + channel - HIDDEN - size, inside & (channel >= HIDDEN + size), 0.0)
    value += tl.maximum(middle, 0.0) + tail.to(tl.float32)
    tl.store(out + index, value.to(out.dtype.element_ty), inside)


@triton.jit
def _gate(
    both, share, hidden, state, update, count, share_stride, hidden_stride, HIDDEN: tl.constexpr, STATE: tl.constexpr,
    AT_ONCE: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64) * AT_ONCE + tl.arange(0, AT_ONCE)
    inside = index < count
    pixel, channel = index // HIDDEN, index % HIDDEN
    of_state, of_context = both + pixel * 2 * HIDDEN + channel, share + pixel * share_stride + channel
    kept = tl.load(of_state, inside, 0.0).to(tl.float32) + tl.load(of_context, inside, 0.0).to(tl.float32)
    tl.store(update + index, (1 / (1 + tl.exp(-kept))).to(update.dtype.element_ty), inside)
    reset = tl.load(of_state + HIDDEN, inside, 0.0).to(tl.float32)
    reset += tl.load(of_context + HIDDEN, inside, 0.0).to(tl.float32)
    value = tl.load(hidden + pixel * hidden_stride + channel, inside, 0.0).to(tl.float32) / (
        1 + tl.exp(-reset)
    )
    tl.store(state + pixel * STATE + channel, value.to(state.dtype.element_ty), inside)


@triton.jit
def _mix(
    hidden, proposed, share, update, out, count, hidden_stride, share_stride, HIDDEN: tl.constexpr,
    AT_ONCE: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64) * AT_ONCE + tl.arange(0, AT_ONCE)
    inside = index < count
    pixel, channel = index // HIDDEN, index % HIDDEN
    raw = tl.load(proposed + index, inside, 0.0).to(tl.float32)
    raw += tl.load(share + pixel * share_stride + channel, inside, 0.0).to(tl.float32)
    # tanh, which not every Triton has; at both ends the quotient tends to 1 and -1.
    fresh = 2 / (1 + tl.exp(-2 * raw)) - 1
    old = tl.load(hidden + pixel * hidden_stride + channel, inside, 0.0).to(tl.float32)
    value = old + tl.load(update + index, inside, 0.0).to(tl.float32) * (fresh - old)
    tl.store(out + index, value.to(out.dtype.element_ty), inside)


@triton.jit
def _advance(
    flow, change, bias, new_flow, moved, count, change_stride, MOVED: tl.constexpr, AT_ONCE: tl.constexpr
):
    index = tl.program_id(0).to(tl.int64) * AT_ONCE + tl.arange(0, AT_ONCE)
    inside = index < count
    pixel, channel = index // MOVED, index % MOVED
    real = inside & (channel < 2)
    step = tl.load(change + pixel * change_stride + channel, real, 0.0).to(tl.float32)
    step += tl.load(bias + channel, real, 0.0).to(tl.float32)
    value = tl.load(flow + pixel * 2 + channel, real, 0.0) + step
    tl.store(new_flow + pixel * 2 + channel, value, real)
    tl.store(moved + index, value.to(moved.dtype.element_ty), inside)


def _stride(x: Tensor) -> int:
    """Return the distance between neighbouring pixels, in elements."""
    stride = x.stride(3)
    even = len(x) == 1 or x.stride(0) == x.shape[2] * x.stride(2)
    assert even and x.stride(1) == 1 and x.stride(2) == x.shape[3] * stride
    return stride


def _dense(x: Tensor) -> Tensor:
    """Return x with channels innermost and no gaps; libraries usually use this layout, but do not promise it."""
    return x.contiguous(memory_format=torch.channels_last)


def _like(x: Tensor, channels: int) -> Tensor:
    shape = (x.shape[0], channels, *x.shape[2:])
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)


def _programs(count: int) -> tuple[int]:
    return (-(-count // AT_ONCE),)


def read(volume: Tensor, flow: Tensor) -> Tensor:
    num, height, width = flow.shape[:3]
    volume, flow = volume.contiguous(), flow.contiguous()
    out = torch.empty((num, height, width, WINDOWS), dtype=volume.dtype, device=volume.device)
    count = num * height * width
    _read[(-(-count // READ_PIXELS), LEVELS)](
        volume, flow, out, count, height, width, volume.shape[-1], WINDOWS,
        levels=LEVELS, radius=RADIUS, pixels=READ_PIXELS, slots=triton.next_power_of_2((2 * RADIUS + 1) ** 2),
        num_warps=4,
    )  # fmt: skip
    return out


def normalise(x: Tensor, eps: float, residual: Tensor | None = None, *, relu: bool = True) -> Tensor:
    x = _dense(x)
    pictures, channels, height, width = x.shape
    wide = int(triton.next_power_of_2(channels))
    sums = torch.empty((pictures, PARTS, 2, wide), dtype=torch.float32, device=x.device)
    out, pixels = _like(x, channels), height * width
    _sums[(pictures, PARTS)](
        x, sums, pixels, channels, _stride(x), ROUNDS=-(-pixels // (PARTS * PIXELS)), PARTS=PARTS, PIXELS=PIXELS,
        WIDTH=wide,
    )  # fmt: skip
    other = x if residual is None else _dense(residual)
    _normalise[(pictures, -(-pixels // PIXELS))](
        x, sums, other, out, pixels, channels, _stride(x), _stride(other), eps, RELU=relu, ADDS=residual is not None,
        PARTS=PARTS, PIXELS=PIXELS, WIDTH=wide,
    )  # fmt: skip
    return out


def add_bias(x: Tensor, bias: Tensor, residual: Tensor | None = None, *, relu: bool = True) -> Tensor:
    x = _dense(x)
    out, other = _like(x, x.shape[1]), x if residual is None else _dense(residual)
    _bias[_programs(x.numel())](
        x, bias, other, out, x.numel(), x.shape[1], _stride(x), _stride(other), RELU=relu,
        ADDS=residual is not None, AT_ONCE=AT_ONCE,
    )  # fmt: skip
    return out


def pair(of_windows: Tensor, of_flow: Tensor, bias: Tensor) -> Tensor:
    first, second = _dense(of_windows), _dense(of_flow)
    out = _like(first, first.shape[1] + second.shape[1])
    _pair[_programs(out.numel())](
        first, second, bias, out, out.numel(), first.shape[1], out.shape[1], AT_ONCE=AT_ONCE
    )
    return out


def join(hidden: Tensor, motion: Tensor, bias: Tensor, moved: Tensor) -> Tensor:
    motion, moved, out = _dense(motion), _dense(moved), _like(hidden, STATE)
    _join[_programs(out.numel())](
        hidden, motion, bias, moved, out, out.numel(), _stride(hidden), HIDDEN=HIDDEN, STATE=STATE, MOVED=MOVED,
        AT_ONCE=AT_ONCE,
    )  # fmt: skip
    return out


def gate(both: Tensor, share: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    both, update = _dense(both), _like(hidden, HIDDEN)
    _gate[_programs(update.numel())](
        both, share, hidden, state, update, update.numel(), _stride(share), _stride(hidden), HIDDEN=HIDDEN,
        STATE=STATE, AT_ONCE=AT_ONCE,
    )  # fmt: skip
    return update, state


def mix(hidden: Tensor, proposed: Tensor, share: Tensor, update: Tensor) -> Tensor:
    proposed, out = _dense(proposed), _like(hidden, HIDDEN)
    _mix[_programs(out.numel())](
        hidden, proposed, share, update, out, out.numel(), _stride(hidden), _stride(share), HIDDEN=HIDDEN,
        AT_ONCE=AT_ONCE,
    )  # fmt: skip
    return out


def advance(flow: Tensor, change: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    change = _dense(change)
    moved, new_flow = _like(change, MOVED), torch.empty_like(flow)
    _advance[_programs(moved.numel())](
        flow, change, bias, new_flow, moved, moved.numel(), _stride(change), MOVED=MOVED, AT_ONCE=AT_ONCE
    )
    return new_flow, moved
