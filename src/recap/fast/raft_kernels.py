"""The steps between RAFT's convolutions as Triton kernels, one launch each; `recap.fast.raft_steps` defines them.

A convolution with so few channels takes about 15 us on an H200, and every separate pass over its result 5 to 10: in
a call as one graph, half of the time were such passes. A pixel is a run of channels, and pixels are a constant
stride apart. Channels and strides are known when a kernel is compiled, so pixels are found by shifts and read 16
bytes at a time.
"""

# No `from __future__ import annotations` here: Triton reads the annotations of a kernel.
import torch
from torch import Tensor

from recap.fast.raft_steps import MOVED, STATE
from recap.fast.triton_import import tl, triton
from recap.flow.raft import HIDDEN

# Elements per program.
AT_ONCE = 1024
# Parts of a picture that are summed separately: enough programs to fill the chip.
PARTS = 32
# Pixels per program that sums or normalises.
PIXELS = 64


@triton.jit  # type: ignore[untyped-decorator]
def _sums(  # type: ignore[no-untyped-def]
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


@triton.jit  # type: ignore[untyped-decorator]
def _normalise(  # type: ignore[no-untyped-def]
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


@triton.jit  # type: ignore[untyped-decorator]
def _bias(  # type: ignore[no-untyped-def]
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


@triton.jit  # type: ignore[untyped-decorator]
def _pair(  # type: ignore[no-untyped-def]
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


@triton.jit  # type: ignore[untyped-decorator]
def _join(  # type: ignore[no-untyped-def]
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


@triton.jit  # type: ignore[untyped-decorator]
def _gate(  # type: ignore[no-untyped-def]
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


@triton.jit  # type: ignore[untyped-decorator]
def _mix(  # type: ignore[no-untyped-def]
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


@triton.jit  # type: ignore[untyped-decorator]
def _advance(  # type: ignore[no-untyped-def]
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
