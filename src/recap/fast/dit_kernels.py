"""The element-wise work of the transformer as Triton kernels; `recap.fast.dit` says what each means.

One program per token: a row of all channels is read once, reduced, and written once. The compiler's own fusions
read rows twice and split the second kernel in four (H200: 26 and 60 us where these need 14 and 21 by bandwidth).
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from recap.attention.rope import Rotation
from recap.fast import dit

try:
    triton: Any = importlib.import_module("triton")
    tl: Any = importlib.import_module("triton.language")
except ImportError:  # it comes with CUDA builds of torch only, and every module must import
    triton, tl = SimpleNamespace(jit=lambda kernel: kernel), SimpleNamespace(constexpr=int)


@triton.jit  # type: ignore[untyped-decorator]
def _norm(  # type: ignore[no-untyped-def]
    x, added, gate, scale, shift, kept, out, size, eps, ADDS: tl.constexpr, GATES: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * size
    place = tl.arange(0, WIDTH)
    inside = place < size
    value = tl.load(x + row + place, inside, 0.0).to(tl.float32)
    if ADDS:
        more = tl.load(added + row + place, inside, 0.0).to(tl.float32)
        if GATES:
            more = more * tl.load(gate + place, inside, 0.0).to(tl.float32)
        stored = (value + more).to(kept.dtype.element_ty)
        tl.store(kept + row + place, stored, inside)
        value = stored.to(tl.float32)
    mean = tl.sum(value, 0) / size
    centred = tl.where(inside, value - mean, 0.0)
    normed = centred * tl.rsqrt(tl.sum(centred * centred, 0) / size + eps)
    scaled = normed * tl.load(scale + place, inside, 0.0) + tl.load(shift + place, inside, 0.0)
    tl.store(out + row + place, scaled.to(out.dtype.element_ty), inside)


@triton.jit  # type: ignore[untyped-decorator]
def _split_turn(  # type: ignore[no-untyped-def]
    qkv, norm_q, norm_k, cos, sin, turned, query, keys, own_keys, own_values, size, half, tokens, row_stride,
    eps, KEEP: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    token, row = tl.program_id(0), tl.program_id(1)
    entry = (row * tokens + token).to(tl.int64)
    place = tl.arange(0, WIDTH)
    inside = place < size
    own = row.to(tl.int64) * row_stride + token.to(tl.int64) * size + place
    source = qkv + entry * 3 * size + place
    tl.store(own_values + own, tl.load(source + 2 * size, inside), inside)
    pair = tl.arange(0, WIDTH // 2)
    angle = token * half + pair % half
    real_turn = tl.load(cos + angle, pair < size // 2, 0.0)
    imaginary_turn = tl.load(sin + angle, pair < size // 2, 0.0)
    for part in tl.static_range(2):
        value = tl.load(source + part * size, inside, 0.0).to(tl.float32)
        normed = value * tl.rsqrt(tl.sum(value * value, 0) / size + eps)
        weight = tl.load((norm_q if part == 0 else norm_k) + place, inside, 0.0).to(tl.float32)
        # Rounded before it is turned, as the keys are that the memory keeps.
        plain = (normed.to(turned.dtype.element_ty).to(tl.float32) * weight).to(turned.dtype.element_ty)
        if KEEP:
            tl.store((query if part == 0 else keys) + entry * size + place, plain, inside)
        real, imaginary = tl.split(tl.reshape(plain.to(tl.float32), (WIDTH // 2, 2)))
        both = tl.join(
            real * real_turn - imaginary * imaginary_turn, real * imaginary_turn + imaginary * real_turn
        )
        rotated = tl.reshape(both, (WIDTH,)).to(turned.dtype.element_ty)
        if part == 0:
            tl.store(turned + entry * size + place, rotated, inside)
        else:
            tl.store(own_keys + own, rotated, inside)


@triton.jit  # type: ignore[untyped-decorator]
def _merge(  # type: ignore[no-untyped-def]
    first, second, first_mass, second_mass, bias, out, shares, tokens, heads, channels,
    HEADS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    token, row, rows = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    head, channel = tl.arange(0, HEADS), tl.arange(0, CHANNELS)
    real = head < heads
    # Masses are B H N: one weight per head, by which all of its channels are mixed.
    mass = (row * heads + head).to(tl.int64) * tokens + token
    ahead = tl.load(first_mass + mass, real, 0.0) + bias - tl.load(second_mass + mass, real, 0.0)
    weight = 1 / (1 + tl.exp(-ahead))
    # Outputs lie as the queries do, B N H D.
    start = (row * tokens + token).to(tl.int64) * heads * channels
    entry = start + head[:, None] * channels + channel[None, :]
    inside = real[:, None] & (channel < channels)[None, :]
    here = tl.load(first + entry, inside, 0.0).to(tl.float32)
    there = tl.load(second + entry, inside, 0.0).to(tl.float32)
    mixed = weight[:, None] * here + (1 - weight)[:, None] * there
    tl.store(out + entry, mixed.to(out.dtype.element_ty), inside)
    share = tl.sum(tl.where(real, weight, 0.0), 0) / heads
    tl.store(shares + row * tokens + token, share)
    tl.store(shares + (rows + row) * tokens + token, 1 - share)


@triton.jit  # type: ignore[untyped-decorator]
def _rms(  # type: ignore[no-untyped-def]
    x, weight, out, size, eps, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * size
    place = tl.arange(0, WIDTH)
    inside = place < size
    value = tl.load(x + row + place, inside, 0.0).to(tl.float32)
    normed = value * tl.rsqrt(tl.sum(value * value, 0) / size + eps)
    rounded = normed.to(out.dtype.element_ty).to(tl.float32)
    scaled = rounded * tl.load(weight + place, inside, 0.0).to(tl.float32)
    tl.store(out + row + place, scaled.to(out.dtype.element_ty), inside)


@triton.jit  # type: ignore[untyped-decorator]
def _fill(  # type: ignore[no-untyped-def]
    keys, values, cos, sin, new_keys, new_values, size, half, from_stride, token_stride, turn_stride, to_stride,
    WIDTH: tl.constexpr,
):  # fmt: skip
    token, row = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    place = tl.arange(0, WIDTH)
    inside = place < size
    source = row * from_stride + token * token_stride + place
    target = row * to_stride + token * size + place
    tl.store(new_values + target, tl.load(values + source, inside), inside)
    pair = tl.arange(0, WIDTH // 2)
    angle = row * turn_stride + token * half + pair % half
    real_turn = tl.load(cos + angle, pair < size // 2, 0.0)
    imaginary_turn = tl.load(sin + angle, pair < size // 2, 0.0)
    value = tl.load(keys + source, inside, 0.0).to(tl.float32)
    real, imaginary = tl.split(tl.reshape(value, (WIDTH // 2, 2)))
    both = tl.join(
        real * real_turn - imaginary * imaginary_turn, real * imaginary_turn + imaginary * real_turn
    )
    tl.store(new_keys + target, tl.reshape(both, (WIDTH,)).to(new_keys.dtype.element_ty), inside)


def _width(size: int) -> int:
    return int(triton.next_power_of_2(size))


def norm(
    x: Tensor,
    scale: Tensor,
    shift: Tensor,
    eps: float,
    added: Tensor | None = None,
    gate: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """x + gate added, and its norm over channels, scaled and shifted by fp32 vectors."""
    size = x.shape[-1]
    out = torch.empty_like(x)
    kept = x if added is None else torch.empty_like(x)
    _norm[(x.numel() // size,)](
        x, x if added is None else added, x if gate is None else gate, scale, shift, kept, out, size, eps,
        ADDS=added is not None, GATES=gate is not None, WIDTH=_width(size), num_warps=8,
    )  # fmt: skip
    return kept, out


def split_turn(
    qkv: Tensor,
    norms: tuple[Tensor, Tensor],
    turn: Rotation,
    own: tuple[Tensor, Tensor],
    eps: float,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `recap.fast.dit.split_turn`; unturned queries and keys are made only if kept."""
    rows, tokens, heads, channels = own[0].shape
    size = heads * channels
    assert own[0].stride()[1:] == own[1].stride()[1:] == (size, channels, 1)
    turned = qkv.new_empty((rows, tokens, heads, channels))
    query, keys = (torch.empty_like(turned) if keep else turned for _ in range(2))
    _split_turn[(tokens, rows)](
        qkv, *norms, turn.cos, turn.sin, turned, query, keys, *own, size, channels // 2, tokens,
        own[0].stride(0), eps, KEEP=keep, WIDTH=_width(size), num_warps=8,
    )  # fmt: skip
    return turned, query, keys


def merge(outputs: list[Tensor], masses: list[Tensor], biases: list[float]) -> tuple[Tensor, Tensor]:
    """Two parts B H N D with their log-sum-exps and biases -> B N (H D), and each part's share of the mass, 2 B N."""
    if len(outputs) != 2:
        return dit.merge(
            outputs, masses, biases
        )  # no memory of ours has two biases, so no kernel is worth it
    rows, heads, tokens, channels = outputs[0].shape
    # The library lays outputs out as the queries are; a copy would cost what this kernel does.
    first, second = (output.transpose(1, 2).contiguous() for output in outputs)
    out = first.new_empty((rows, tokens, heads * channels))
    shares = torch.empty((2, rows, tokens), dtype=torch.float32, device=out.device)
    _merge[(tokens, rows)](
        first, second, *(mass.contiguous() for mass in masses), biases[0] - biases[1], out, shares, tokens, heads,
        channels, HEADS=_width(heads), CHANNELS=_width(channels), num_warps=8,
    )  # fmt: skip
    return out, shares


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square norm over channels."""
    size = x.shape[-1]
    out = torch.empty_like(x)
    _rms[(x.numel() // size,)](x, weight, out, size, eps, WIDTH=_width(size), num_warps=8)
    return out


def fill(keys: Tensor, values: Tensor, turn: Rotation, new_keys: Tensor, new_values: Tensor) -> None:
    """Keys B N H D, turned, and values into their places in a window; one token may stand for all N."""
    rows, tokens, heads, channels = keys.shape
    size = heads * channels
    for pair in ((keys, values), (new_keys, new_values)):
        assert pair[0].stride() == pair[1].stride() and pair[0].stride()[2:] == (channels, 1)
    assert new_keys.stride(1) == size
    _fill[(tokens, rows)](
        keys, values, turn.cos, turn.sin, new_keys, new_values, size, channels // 2, keys.stride(0), keys.stride(1),
        turn.cos.stride(0) if len(turn.cos) > 1 else 0, new_keys.stride(0), WIDTH=_width(size), num_warps=8,
    )  # fmt: skip
