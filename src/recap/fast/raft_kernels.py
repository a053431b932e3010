"""What stands between RAFT's convolutions as Triton kernels, one launch each; `recap.fast.raft_steps` is the meaning.

A convolution of so few channels takes some 15 us on an H200, and every pass over its result by itself 5 to 10: of a
call as one graph, passes were half. A place is a row of channels here; rows of all places lie evenly apart. Their
numbers are known when a kernel is compiled, so that places are found by shifts and read 16 bytes at a time.
"""

# No `from __future__ import annotations` here: Triton reads the annotations of a kernel.
import importlib
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from recap.fast.raft_steps import MOVED, STATE
from recap.flow.raft import HIDDEN

try:
    triton: Any = importlib.import_module("triton")
    tl: Any = importlib.import_module("triton.language")
except ImportError:  # it comes with CUDA builds of torch only, and every module must import
    triton, tl = SimpleNamespace(jit=lambda kernel: kernel), SimpleNamespace(constexpr=int)

AT_ONCE = 1024  # elements of a program
PARTS = 32  # of a picture, whose sums are made apart: enough programs for all of the chip
PLACES = 64  # rows of a program that sums or normalises


@triton.jit  # type: ignore[untyped-decorator]
def _sums(  # type: ignore[no-untyped-def]
    x, sums, places, channels: tl.constexpr, row: tl.constexpr, ROUNDS: tl.constexpr, PARTS: tl.constexpr,
    PLACES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    picture, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    channel = tl.arange(0, WIDTH)
    total = tl.zeros((WIDTH,), tl.float32)
    square = tl.zeros((WIDTH,), tl.float32)
    for turn in range(ROUNDS):
        place = (part * ROUNDS + turn) * PLACES + tl.arange(0, PLACES)
        inside = (place < places)[:, None] & (channel < channels)[None, :]
        value = tl.load(x + (picture * places + place[:, None]) * row + channel[None, :], inside, 0.0)
        value = value.to(tl.float32)
        total += tl.sum(value, 0)
        square += tl.sum(value * value, 0)
    to = sums + (picture * PARTS + part) * 2 * WIDTH + channel
    tl.store(to, total)
    tl.store(to + WIDTH, square)


@triton.jit  # type: ignore[untyped-decorator]
def _normalise(  # type: ignore[no-untyped-def]
    x, sums, residual, out, places, channels: tl.constexpr, row: tl.constexpr, residual_row: tl.constexpr, eps,
    RELU: tl.constexpr, ADDS: tl.constexpr,
    PARTS: tl.constexpr, PLACES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    picture = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * PLACES + tl.arange(0, PLACES)
    channel = tl.arange(0, WIDTH)
    at = sums + (picture * PARTS + tl.arange(0, PARTS)[:, None]) * 2 * WIDTH + channel[None, :]
    mean = tl.sum(tl.load(at), 0) / places
    variance = tl.maximum(tl.sum(tl.load(at + WIDTH), 0) / places - mean * mean, 0.0)
    scale = tl.rsqrt(variance + eps)
    inside = (place < places)[:, None] & (channel < channels)[None, :]
    entry = picture * places + place[:, None]
    value = tl.load(x + entry * row + channel[None, :], inside, 0.0).to(tl.float32)
    value = ((value - mean[None, :]) * scale[None, :]).to(out.dtype.element_ty).to(tl.float32)
    if RELU:
        value = tl.maximum(value, 0.0)
    if ADDS:
        value += tl.load(residual + entry * residual_row + channel[None, :], inside, 0.0).to(tl.float32)
        value = tl.maximum(value, 0.0)
    tl.store(out + entry * channels + channel[None, :], value.to(out.dtype.element_ty), inside)


@triton.jit  # type: ignore[untyped-decorator]
def _bias(  # type: ignore[no-untyped-def]
    x, bias, residual, out, count, channels: tl.constexpr, row: tl.constexpr, residual_row: tl.constexpr,
    RELU: tl.constexpr, ADDS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64) * AT_ONCE + tl.arange(0, AT_ONCE)
    inside = index < count
    place, channel = index // channels, index % channels
    value = tl.load(x + place * row + channel, inside, 0.0).to(tl.float32)
    value += tl.load(bias + channel, inside, 0.0).to(tl.float32)
    if RELU:
        value = tl.maximum(value, 0.0)
    if ADDS:
        value += tl.load(residual + place * residual_row + channel, inside, 0.0).to(tl.float32)
        value = tl.maximum(value, 0.0)
    tl.store(out + index, value.to(out.dtype.element_ty), inside)


@triton.jit  # type: ignore[untyped-decorator]
def _pair(  # type: ignore[no-untyped-def]
    first,
    second,
    bias,
    out,
    count,
    first_channels: tl.constexpr,
    channels: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64) * AT_ONCE + tl.arange(0, AT_ONCE)
    inside = index < count
    place, channel = index // channels, index % channels
    ahead = channel < first_channels
    value = tl.load(first + place * first_channels + channel, inside & ahead, 0.0).to(tl.float32)
    behind = second + place * (channels - first_channels) + channel - first_channels
    value += tl.load(behind, inside & (channel >= first_channels), 0.0).to(tl.float32)
    value = tl.maximum(value + tl.load(bias + channel, inside, 0.0).to(tl.float32), 0.0)
    tl.store(out + index, value.to(out.dtype.element_ty), inside)


@triton.jit  # type: ignore[untyped-decorator]
def _join(  # type: ignore[no-untyped-def]
    hidden, motion, bias, moved, out, count, hidden_row, HIDDEN: tl.constexpr, STATE: tl.constexpr,
    MOVED: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64) * AT_ONCE + tl.arange(0, AT_ONCE)
    inside = index < count
    place, channel = index // STATE, index % STATE
    seen = STATE - HIDDEN - MOVED
    of_motion = (channel >= HIDDEN) & (channel < HIDDEN + seen)
    heard = tl.load(motion + place * seen + channel - HIDDEN, inside & of_motion, 0.0).to(tl.float32)
    heard += tl.load(bias + channel - HIDDEN, inside & of_motion, 0.0).to(tl.float32)
    value = tl.load(hidden + place * hidden_row + channel, inside & (channel < HIDDEN), 0.0).to(tl.float32)
    tail = tl.load(moved + place * MOVED + channel - HIDDEN - seen, inside & (channel >= HIDDEN + seen), 0.0)
    value += tl.maximum(heard, 0.0) + tail.to(tl.float32)
    tl.store(out + index, value.to(out.dtype.element_ty), inside)


@triton.jit  # type: ignore[untyped-decorator]
def _gate(  # type: ignore[no-untyped-def]
    both, share, hidden, state, update, count, share_row, hidden_row, HIDDEN: tl.constexpr, STATE: tl.constexpr,
    AT_ONCE: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64) * AT_ONCE + tl.arange(0, AT_ONCE)
    inside = index < count
    place, channel = index // HIDDEN, index % HIDDEN
    mine, theirs = both + place * 2 * HIDDEN + channel, share + place * share_row + channel
    kept = tl.load(mine, inside, 0.0).to(tl.float32) + tl.load(theirs, inside, 0.0).to(tl.float32)
    tl.store(update + index, (1 / (1 + tl.exp(-kept))).to(update.dtype.element_ty), inside)
    reset = tl.load(mine + HIDDEN, inside, 0.0).to(tl.float32)
    reset += tl.load(theirs + HIDDEN, inside, 0.0).to(tl.float32)
    value = tl.load(hidden + place * hidden_row + channel, inside, 0.0).to(tl.float32) / (1 + tl.exp(-reset))
    tl.store(state + place * STATE + channel, value.to(state.dtype.element_ty), inside)


@triton.jit  # type: ignore[untyped-decorator]
def _mix(  # type: ignore[no-untyped-def]
    hidden, proposed, share, update, out, count, hidden_row, share_row, HIDDEN: tl.constexpr,
    AT_ONCE: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64) * AT_ONCE + tl.arange(0, AT_ONCE)
    inside = index < count
    place, channel = index // HIDDEN, index % HIDDEN
    raw = tl.load(proposed + index, inside, 0.0).to(tl.float32)
    raw += tl.load(share + place * share_row + channel, inside, 0.0).to(tl.float32)
    # tanh, which not every Triton has; at both ends the quotient runs into 1 and -1.
    fresh = 2 / (1 + tl.exp(-2 * raw)) - 1
    old = tl.load(hidden + place * hidden_row + channel, inside, 0.0).to(tl.float32)
    value = old + tl.load(update + index, inside, 0.0).to(tl.float32) * (fresh - old)
    tl.store(out + index, value.to(out.dtype.element_ty), inside)


@triton.jit  # type: ignore[untyped-decorator]
def _advance(  # type: ignore[no-untyped-def]
    flow, change, bias, new_flow, moved, count, change_row, MOVED: tl.constexpr, AT_ONCE: tl.constexpr
):
    index = tl.program_id(0).to(tl.int64) * AT_ONCE + tl.arange(0, AT_ONCE)
    inside = index < count
    place, channel = index // MOVED, index % MOVED
    real = inside & (channel < 2)
    step = tl.load(change + place * change_row + channel, real, 0.0).to(tl.float32)
    step += tl.load(bias + channel, real, 0.0).to(tl.float32)
    value = tl.load(flow + place * 2 + channel, real, 0.0) + step
    tl.store(new_flow + place * 2 + channel, value, real)
    tl.store(moved + index, value.to(moved.dtype.element_ty), inside)


def _row(x: Tensor) -> int:
    """How far places lie apart."""
    row = x.stride(3)
    even = len(x) == 1 or x.stride(0) == x.shape[2] * x.stride(2)
    assert even and x.stride(1) == 1 and x.stride(2) == x.shape[3] * row
    return row


def _dense(x: Tensor) -> Tensor:
    """Channels innermost and nothing between places; libraries lay results out so, but do not promise it."""
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
    out, places = _like(x, channels), height * width
    _sums[(pictures, PARTS)](
        x, sums, places, channels, _row(x), ROUNDS=-(-places // (PARTS * PLACES)), PARTS=PARTS, PLACES=PLACES,
        WIDTH=wide,
    )  # fmt: skip
    other = x if residual is None else _dense(residual)
    _normalise[(pictures, -(-places // PLACES))](
        x, sums, other, out, places, channels, _row(x), _row(other), eps, RELU=relu, ADDS=residual is not None,
        PARTS=PARTS, PLACES=PLACES, WIDTH=wide,
    )  # fmt: skip
    return out


def add_bias(x: Tensor, bias: Tensor, residual: Tensor | None = None, *, relu: bool = True) -> Tensor:
    x = _dense(x)
    out, other = _like(x, x.shape[1]), x if residual is None else _dense(residual)
    _bias[_programs(x.numel())](
        x, bias, other, out, x.numel(), x.shape[1], _row(x), _row(other), RELU=relu,
        ADDS=residual is not None, AT_ONCE=AT_ONCE,
    )  # fmt: skip
    return out


def pair(seen: Tensor, told: Tensor, bias: Tensor) -> Tensor:
    seen, told = _dense(seen), _dense(told)
    out = _like(seen, seen.shape[1] + told.shape[1])
    _pair[_programs(out.numel())](
        seen, told, bias, out, out.numel(), seen.shape[1], out.shape[1], AT_ONCE=AT_ONCE
    )
    return out


def join(hidden: Tensor, motion: Tensor, bias: Tensor, moved: Tensor) -> Tensor:
    motion, moved, out = _dense(motion), _dense(moved), _like(hidden, STATE)
    _join[_programs(out.numel())](
        hidden, motion, bias, moved, out, out.numel(), _row(hidden), HIDDEN=HIDDEN, STATE=STATE, MOVED=MOVED,
        AT_ONCE=AT_ONCE,
    )  # fmt: skip
    return out


def gate(both: Tensor, share: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    both, update = _dense(both), _like(hidden, HIDDEN)
    _gate[_programs(update.numel())](
        both, share, hidden, state, update, update.numel(), _row(share), _row(hidden), HIDDEN=HIDDEN, STATE=STATE,
        AT_ONCE=AT_ONCE,
    )  # fmt: skip
    return update, state


def mix(hidden: Tensor, proposed: Tensor, share: Tensor, update: Tensor) -> Tensor:
    proposed, out = _dense(proposed), _like(hidden, HIDDEN)
    _mix[_programs(out.numel())](
        hidden, proposed, share, update, out, out.numel(), _row(hidden), _row(share), HIDDEN=HIDDEN,
        AT_ONCE=AT_ONCE,
    )  # fmt: skip
    return out


def advance(flow: Tensor, change: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    change = _dense(change)
    moved, new_flow = _like(change, MOVED), torch.empty_like(flow)
    _advance[_programs(moved.numel())](
        flow, change, bias, new_flow, moved, moved.numel(), _row(change), MOVED=MOVED, AT_ONCE=AT_ONCE
    )
    return new_flow, moved
