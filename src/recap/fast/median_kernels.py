# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Triton evaluates annotations and knows none but its own.
"""Finds medians of long rows of numbers by Triton kernels, with the very values of `torch.median`.

torch lets one block of threads look at a whole row 16 times, two bits of the answer each: for the flow of a block of
pictures that is 24 of 132 multiprocessors, about 0.2 ms by estimate. Here many programs share a row, and each of
eight looks settles four bits: they count how many numbers are below 15 bounds. Counts are whole numbers, so the order
in which programs run changes nothing, and no program waits for another.
"""

# No `from __future__ import annotations` here: Triton reads the annotations of a kernel.
import torch
from torch import Tensor

from recap.fast.triton_import import tl, triton

BITS = 4
DIGITS = 2**BITS
# Numbers per program, at most: with 4 warps every thread has 32 loads in flight.
AT_ONCE = 4096


@triton.jit
def _ordered(value):
    # The bits of floating point numbers, as integers in the same order; this is its own inverse.
    bits = value.to(tl.int32, bitcast=True)
    return _flipped(bits)


@triton.jit
def _flipped(bits):
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _settled(counts, low, row, parts, wanted, shift, DIGITS: tl.constexpr, PARTS: tl.constexpr):
    # The highest of a look's bounds that has at most `wanted` numbers below it.
    part, digit = tl.arange(0, PARTS), tl.arange(0, DIGITS)
    at = counts + (row * parts + part[:, None]) * DIGITS + digit[None, :]
    below = tl.sum(tl.load(at, mask=(part < parts)[:, None] & (digit >= 0)[None, :], other=0), 0)
    num = tl.sum((below <= wanted).to(tl.int32), 0)
    return tl.load(low + row) + ((num - 1) << shift)


@triton.jit
def _look(
    values, counts, low, next_counts, next_low, length, parts, wanted, shift,
    FIRST: tl.constexpr, BITS: tl.constexpr, DIGITS: tl.constexpr, PARTS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0), tl.program_id(1)
    if FIRST:
        # The lowest integer there is.
        bound = tl.min((tl.arange(0, DIGITS) - DIGITS // 2) << shift, 0)
    else:
        bound = _settled(counts, low, row, parts, wanted, shift + BITS, DIGITS, PARTS)
    tl.store(next_low + row, bound, mask=part == 0)
    index = part * AT_ONCE + tl.arange(0, AT_ONCE)
    # Infinity pads the last part: a bound above it has all numbers below it, more than are wanted.
    padding = float("inf")
    value = tl.load(values + row.to(tl.int64) * length + index, mask=index < length, other=padding)
    key = _ordered(value)
    to = next_counts + (row * parts + part) * DIGITS
    # Below the bound itself are at most as many as are wanted: this entry only has to say so.
    tl.store(to, 0)
    for digit in tl.static_range(1, DIGITS):
        tl.store(to + digit, tl.sum((key < bound + (digit << shift)).to(tl.int32), 0))


@triton.jit
def _finish(counts, low, found, parts, wanted, DIGITS: tl.constexpr, PARTS: tl.constexpr):
    row = tl.program_id(0)
    bits = _flipped(_settled(counts, low, row, parts, wanted, 0, DIGITS, PARTS))
    tl.store(found + row, bits.to(tl.float32, bitcast=True))


def median(values: Tensor) -> Tensor:
    """Return `values.median(dim=-1).values` of float32 numbers; where one is NaN the result is some number."""
    length = values.shape[-1]
    at_once = min(AT_ONCE, max(128, int(triton.next_power_of_2(length))))
    rows, parts = values.numel() // length, -(-length // at_once)
    values = values.contiguous()
    found = torch.empty(values.shape[:-1], dtype=torch.float32, device=values.device)
    looks = 32 // BITS
    # Every look has its own, so that no program overwrites what another of the same look still reads.
    counts = torch.empty((looks, rows, parts, DIGITS), dtype=torch.int32, device=values.device)
    low = torch.empty((looks, rows), dtype=torch.int32, device=values.device)
    wanted, wide = (length - 1) // 2, int(triton.next_power_of_2(parts))
    for look in range(looks):
        before = max(look - 1, 0)
        _look[(rows, parts)](
            values, counts[before], low[before], counts[look], low[look], length, parts, wanted,
            32 - BITS * (look + 1), FIRST=look == 0, BITS=BITS, DIGITS=DIGITS, PARTS=wide, AT_ONCE=at_once,
        )  # fmt: skip
    _finish[(rows,)](counts[-1], low[-1], found, parts, wanted, DIGITS=DIGITS, PARTS=wide)
    return found
