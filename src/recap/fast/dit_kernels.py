# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Triton evaluates annotations and knows none but its own.
"""Does the transformer's element-wise work by Triton kernels; `recap.fast.dit` defines what each one computes.

One program handles one token: its channels are read once, reduced, and written once. The compiler's own fusions
read them twice and split the second kernel in four (H200: 26 and 60 us, where bandwidth allows these 14 and 21).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from recap.attention.rope import Rotation
from recap.backbones.wan.quantised import Float8Linear, Float8Tokens, Int8Linear
from recap.fast import dit
from recap.fast.dit import Hidden
from recap.fast.quantised_kernels import empty_tokens, restore, store_float8
from recap.fast.quantised_kernels import quantise_tokens as quantise_tokens
from recap.fast.quantised_kernels import widen as widen_float8
from recap.fast.triton_import import tl, triton
from recap.fast.windows import Pair


@triton.jit
def _norm(
    x, added, gate, scale, shift, kept, out, out_scale, size, eps, ADDS: tl.constexpr, GATES: tl.constexpr,
    FLOAT8: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * size
    channel = tl.arange(0, WIDTH)
    inside = channel < size
    value = tl.load(x + token + channel, inside, 0.0).to(tl.float32)
    if ADDS:
        more = tl.load(added + token + channel, inside, 0.0).to(tl.float32)
        if GATES:
            more = more * tl.load(gate + channel, inside, 0.0).to(tl.float32)
        stored = (value + more).to(kept.dtype.element_ty)
        tl.store(kept + token + channel, stored, inside)
        value = stored.to(tl.float32)
    mean = tl.sum(value, 0) / size
    centred = tl.where(inside, value - mean, 0.0)
    normed = centred * tl.rsqrt(tl.sum(centred * centred, 0) / size + eps)
    scaled = normed * tl.load(scale + channel, inside, 0.0) + tl.load(shift + channel, inside, 0.0)
    if FLOAT8:
        # Rounded before, as in the readable path.
        rounded = scaled.to(x.dtype.element_ty).to(tl.float32)
        store_float8(rounded, out + token + channel, out_scale + tl.program_id(0), inside)
    else:
        tl.store(out + token + channel, scaled.to(out.dtype.element_ty), inside)


@triton.jit
def _split_rotate(
    qkv, norm_q, norm_k, cos, sin, rotated_query, query, keys, own_keys, own_values, size, half, tokens, row_stride,
    eps, KEEP: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    token, row = tl.program_id(0), tl.program_id(1)
    entry = (row * tokens + token).to(tl.int64)
    channel = tl.arange(0, WIDTH)
    inside = channel < size
    own = row.to(tl.int64) * row_stride + token.to(tl.int64) * size + channel
    source = qkv + entry * 3 * size + channel
    tl.store(own_values + own, tl.load(source + 2 * size, inside), inside)
    pair = tl.arange(0, WIDTH // 2)
    angle = token * half + pair % half
    cosine = tl.load(cos + angle, pair < size // 2, 0.0)
    sine = tl.load(sin + angle, pair < size // 2, 0.0)
    for part in tl.static_range(2):
        value = tl.load(source + part * size, inside, 0.0).to(tl.float32)
        normed = value * tl.rsqrt(tl.sum(value * value, 0) / size + eps)
        weight = tl.load((norm_q if part == 0 else norm_k) + channel, inside, 0.0).to(tl.float32)
        # Rounded before the rotation, as are the keys that the memory keeps.
        plain = (normed.to(rotated_query.dtype.element_ty).to(tl.float32) * weight).to(
            rotated_query.dtype.element_ty
        )
        if KEEP:
            tl.store((query if part == 0 else keys) + entry * size + channel, plain, inside)
        real, imaginary = tl.split(tl.reshape(plain.to(tl.float32), (WIDTH // 2, 2)))
        both = tl.join(real * cosine - imaginary * sine, real * sine + imaginary * cosine)
        rotated = tl.reshape(both, (WIDTH,)).to(rotated_query.dtype.element_ty)
        if part == 0:
            tl.store(rotated_query + entry * size + channel, rotated, inside)
        else:
            tl.store(own_keys + own, rotated, inside)


@triton.jit
def _mass(mass, bias, entry, head, real, BIASED: tl.constexpr):
    found = tl.load(mass + entry, real, 0.0)
    if BIASED:
        found += tl.load(bias + head, real, 0.0)
    return found


@triton.jit
def _merge(
    first, second, third, first_mass, second_mass, third_mass, first_bias, second_bias, third_bias, out, out_scale,
    shares, tokens, heads, channels, FIRST: tl.constexpr, SECOND: tl.constexpr, THIRD: tl.constexpr,
    THREE: tl.constexpr, FLOAT8: tl.constexpr, HEADS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    token, row, rows = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    head, channel = tl.arange(0, HEADS), tl.arange(0, CHANNELS)
    real = head < heads
    # Log-sum-exps are B H N: one weight per head mixes all of its channels.
    mass = (row * heads + head).to(tl.int64) * tokens + token
    ahead = _mass(first_mass, first_bias, mass, row * heads + head, real, FIRST)
    behind = _mass(second_mass, second_bias, mass, row * heads + head, real, SECOND)
    # Outputs have the layout of the queries, B N H D.
    start = (row * tokens + token).to(tl.int64) * heads * channels
    entry = start + head[:, None] * channels + channel[None, :]
    inside = real[:, None] & (channel < channels)[None, :]
    here = tl.load(first + entry, inside, 0.0).to(tl.float32)
    there = tl.load(second + entry, inside, 0.0).to(tl.float32)
    share = shares + row * tokens + token
    if THREE:
        last = _mass(third_mass, third_bias, mass, row * heads + head, real, THIRD)
        top = tl.maximum(ahead, tl.maximum(behind, last))
        ahead, behind, last = tl.exp(ahead - top), tl.exp(behind - top), tl.exp(last - top)
        total = ahead + behind + last
        weight, other = ahead / total, behind / total
        rest = tl.load(third + entry, inside, 0.0).to(tl.float32)
        mixed = weight[:, None] * here + other[:, None] * there + (last / total)[:, None] * rest
        second_share = tl.sum(tl.where(real, other, 0.0), 0) / heads
        first_share = tl.sum(tl.where(real, weight, 0.0), 0) / heads
        tl.store(share + 2 * rows * tokens, 1 - first_share - second_share)
    else:
        weight = 1 / (1 + tl.exp(behind - ahead))
        mixed = weight[:, None] * here + (1 - weight)[:, None] * there
        first_share = tl.sum(tl.where(real, weight, 0.0), 0) / heads
        second_share = 1 - first_share
    if FLOAT8:
        rounded = mixed.to(first.dtype.element_ty).to(tl.float32)
        store_float8(rounded, out + entry, out_scale + row * tokens + token, inside)
    else:
        tl.store(out + entry, mixed.to(out.dtype.element_ty), inside)
    tl.store(share, first_share)
    tl.store(share + rows * tokens, second_share)


@triton.jit
def _rms(
    x, weight, out, size, eps, WIDTH: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * size
    channel = tl.arange(0, WIDTH)
    inside = channel < size
    value = tl.load(x + token + channel, inside, 0.0).to(tl.float32)
    normed = value * tl.rsqrt(tl.sum(value * value, 0) / size + eps)
    rounded = normed.to(out.dtype.element_ty).to(tl.float32)
    scaled = rounded * tl.load(weight + channel, inside, 0.0).to(tl.float32)
    tl.store(out + token + channel, scaled.to(out.dtype.element_ty), inside)


@triton.jit
def _fill(
    keys, values, cos, sin, new_keys, new_values, size, half, from_stride, token_stride, rope_stride, to_stride,
    WIDTH: tl.constexpr,
):  # fmt: skip
    token, row = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    channel = tl.arange(0, WIDTH)
    inside = channel < size
    source = row * from_stride + token * token_stride + channel
    target = row * to_stride + token * size + channel
    tl.store(new_values + target, tl.load(values + source, inside), inside)
    pair = tl.arange(0, WIDTH // 2)
    angle = row * rope_stride + token * half + pair % half
    cosine = tl.load(cos + angle, pair < size // 2, 0.0)
    sine = tl.load(sin + angle, pair < size // 2, 0.0)
    value = tl.load(keys + source, inside, 0.0).to(tl.float32)
    real, imaginary = tl.split(tl.reshape(value, (WIDTH // 2, 2)))
    both = tl.join(real * cosine - imaginary * sine, real * sine + imaginary * cosine)
    tl.store(new_keys + target, tl.reshape(both, (WIDTH,)).to(new_keys.dtype.element_ty), inside)


def _width(size: int) -> int:
    return int(triton.next_power_of_2(size))


def _empty(x: Tensor, shape: tuple[int, ...], float8: bool) -> tuple[Hidden, Pair]:
    """Return storage for tokens of a shape, and its two parts as kernels take them."""
    if float8:
        tokens = empty_tokens(x, shape)
        return tokens, (tokens.values, tokens.scale)
    out = x.new_empty(shape)
    return out, (out, out)


def norm(
    x: Tensor,
    affine: Pair,
    eps: float,
    added: Tensor | None = None,
    gate: Tensor | None = None,
    float8: bool = False,
) -> tuple[Tensor, Hidden]:
    """Compute `recap.fast.dit.norm`."""
    size = x.shape[-1]
    out, parts = _empty(x, x.shape, float8)
    kept = x if added is None else torch.empty_like(x)
    _norm[(x.numel() // size,)](
        x, x if added is None else added, x if gate is None else gate, *affine, kept, *parts, size, eps,
        ADDS=added is not None, GATES=gate is not None, FLOAT8=float8, WIDTH=_width(size), num_warps=8,
    )  # fmt: skip
    return kept, out


def split_rotate(
    qkv: Tensor, norms: Pair, rope: Rotation, own: Pair, eps: float, keep: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `recap.fast.dit.split_rotate`; queries and keys without rotation are written only with `keep`."""
    rows, tokens, heads, channels = own[0].shape
    size = heads * channels
    assert own[0].stride()[1:] == own[1].stride()[1:] == (size, channels, 1)
    rotated_query = qkv.new_empty((rows, tokens, heads, channels))
    query, keys = (torch.empty_like(rotated_query) if keep else rotated_query for _ in range(2))
    _split_rotate[(tokens, rows)](
        qkv, *norms, rope.cos, rope.sin, rotated_query, query, keys, *own, size, channels // 2, tokens,
        own[0].stride(0), eps, KEEP=keep, WIDTH=_width(size), num_warps=8,
    )  # fmt: skip
    return rotated_query, query, keys


def merge(
    outputs: Sequence[Tensor],
    masses: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    float8: bool = False,
) -> tuple[Hidden, Tensor]:
    """Compute `recap.fast.dit.merge`."""
    if len(outputs) not in (2, 3):
        return dit.merge(outputs, masses, biases, float8)
    rows, heads, tokens, channels = outputs[0].shape
    # The library's outputs have the layout of the queries, so this copies nothing.
    found = [output.transpose(1, 2).contiguous() for output in outputs]
    out, parts = _empty(found[0], (rows, tokens, heads * channels), float8)
    shares = torch.empty((len(found), rows, tokens), dtype=torch.float32, device=found[0].device)
    known = [bias if bias is not None else shares for bias in biases]
    assert all(bias.is_contiguous() for bias in known)
    weighed = [mass.contiguous() for mass in masses]
    # Where there are two parts, nothing is read of a third.
    three = [(*each, each[-1])[:3] for each in (found, weighed, known)]
    is_biased = [bias is not None for bias in (*biases, None)[:3]]
    _merge[(tokens, rows)](
        *three[0], *three[1], *three[2], *parts, shares, tokens, heads, channels, FIRST=is_biased[0],
        SECOND=is_biased[1], THIRD=is_biased[2], THREE=len(found) == 3, FLOAT8=float8, HEADS=_width(heads),
        CHANNELS=_width(channels), num_warps=8,
    )  # fmt: skip
    return out, shares


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute `recap.fast.dit.rms`."""
    size = x.shape[-1]
    out = torch.empty_like(x)
    _rms[(x.numel() // size,)](x, weight, out, size, eps, WIDTH=_width(size), num_warps=8)
    return out


def linear(x: Hidden, layer: Callable[[Hidden], Tensor]) -> Tensor:
    """Compute `recap.fast.dit.linear`."""
    if isinstance(layer, Int8Linear) and isinstance(x, Tensor):
        return functional.linear(x, restore(layer), layer.bias)
    return layer(x)


def widen(x: Hidden, layer: nn.Module) -> Hidden:
    """Compute `recap.fast.dit.widen`; the library applies the GELU before it writes the product, but for 8 bits."""
    if isinstance(x, Float8Tokens):
        assert isinstance(layer, Float8Linear)
        return widen_float8(x, layer)
    weight, bias = restore(layer) if isinstance(layer, Int8Linear) else layer.weight, layer.bias
    assert isinstance(weight, Tensor) and isinstance(bias, Tensor)
    flat = torch._addmm_activation(bias, x.flatten(0, 1), weight.t(), use_gelu=True)
    wide: Tensor = flat.unflatten(0, x.shape[:2])
    return wide


def fill(keys: Tensor, values: Tensor, rope: Rotation, new_keys: Tensor, new_values: Tensor) -> None:
    """Compute `recap.fast.dit.fill`; one token may stand for all N."""
    rows, tokens, heads, channels = keys.shape
    size = heads * channels
    for pair in ((keys, values), (new_keys, new_values)):
        assert pair[0].stride() == pair[1].stride() and pair[0].stride()[2:] == (channels, 1)
    assert new_keys.stride(1) == size
    _fill[(tokens, rows)](
        keys, values, rope.cos, rope.sin, new_keys, new_values, size, channels // 2, keys.stride(0), keys.stride(1),
        rope.cos.stride(0) if len(rope.cos) > 1 else 0, new_keys.stride(0), WIDTH=_width(size), num_warps=8,
    )  # fmt: skip
