"""This module attends over segments, each with a log-bias: eq. (sink) of the paper.

    alpha_j = softmax_j(q.k_j / sqrt(d) + beta_j),   beta_j = ln(lambda) for the sink, 0 elsewhere

A bias that is constant over a group of keys factors out of the softmax. So the fused path runs one ordinary
kernel per group, adds the bias to the group's log-sum-exp and merges. The merge weights are the share of
attention mass each group receives: the lambda figure costs no extra pass.

Tests compare it with one softmax over all keys. Keys and queries come rotated.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

from recap.attention.heads import ALL_HEADS, Heads
from recap.types import Role

HALF = (torch.bfloat16, torch.float16)


class Readable(NamedTuple):
    """Carries a segment as the kernels read it: keys already rotated."""

    role: Role | None  # None where several are joined
    keys: Tensor  # B N H D
    values: Tensor  # B N H D
    log_bias: float
    token_bias: Tensor | None = None  # B N
    head_bias: Tensor | None = None  # B H
    measured: bool = False  # its share without any bias is wanted, by head


class Attended(NamedTuple):
    """Carries the result of attention, and which roles it went to."""

    output: Tensor  # B N H D, in the query's dtype
    # Role -> B: mean over heads and queries; sums to one over roles, if all are measured.
    shares: dict[Role, Tensor]
    # B H: the share of the measured segment without any bias, the mean over queries; None if there is none.
    plain: Tensor | None = None


def attend(
    query: Tensor, segments: Sequence[Readable], *, by_role: bool = True, heads: Heads = ALL_HEADS
) -> Attended:
    """Compute attention by one kernel per group of equal role and bias, merged by log-sum-exp.

    With `by_role` off, groups are of equal bias only: fewer kernels and less to merge, and a group of several roles
    has no share. `heads` says which heads these are: shares are the mean of all heads, all else is about these.
    """
    groups = _grouped(segments, by_role)
    q = query.transpose(1, 2)
    parts = [read_group(q, g.keys.transpose(1, 2), g.values.transpose(1, 2), g.token_bias) for g in groups]
    if len(parts) == 1:
        alone = {} if groups[0].role is None else {groups[0].role: query.new_ones(query.shape[0])}
        return Attended(parts[0][0].transpose(1, 2), alone)
    biased = [_biased(mass, g) for g, (_, mass) in zip(groups, parts, strict=True)]
    stacked = torch.stack(biased)
    weights = (stacked - stacked.logsumexp(dim=0)).exp()
    merged = _merge([output for output, _ in parts], weights)
    shares: dict[Role, Tensor] = {}
    for group, mass in zip(groups, heads.join(weights, 2).mean(dim=(2, 3)), strict=True):
        if group.role is not None:
            shares[group.role] = shares[group.role] + mass if group.role in shares else mass
    asked = [index for index, group in enumerate(groups) if group.measured]
    plain = plain_share([mass for _, mass in parts], asked[0]) if asked else None
    return Attended(merged.to(query.dtype).transpose(1, 2), shares, plain)


def plain_share(masses: Sequence[Tensor], index: int) -> Tensor:
    """Return the share of one group without any bias, B H, the mean over queries, from log-sum-exps B H N."""
    rest = torch.stack([mass for other, mass in enumerate(masses) if other != index]).logsumexp(dim=0)
    return (masses[index] - rest).sigmoid().mean(dim=-1).float()


def _biased(mass: Tensor, group: Readable) -> Tensor:
    """Add a group's biases to its log-sum-exp B H N."""
    mass = mass + group.log_bias if group.log_bias else mass
    return mass if group.head_bias is None else mass + group.head_bias.unsqueeze(-1)


def _merge(outputs: list[Tensor], weights: Tensor) -> Tensor:
    """Return the sum of parts B H N D, weighted by B H N each."""
    if len(outputs) == 2 and outputs[0].dtype in HALF:
        # Sums in fp32 without a tensor in fp32: a fifth of the bytes.
        part = torch.mul(outputs[1], weights[1].unsqueeze(-1), out=torch.empty_like(outputs[1]))
        return torch.addcmul(part, weights[0].unsqueeze(-1), outputs[0], out=part)
    merged = weights[0].unsqueeze(-1) * outputs[0]
    for weight, output in zip(weights[1:], outputs[1:], strict=True):
        merged.addcmul_(weight.unsqueeze(-1), output.to(merged.dtype))
    return merged


def _grouped(segments: Sequence[Readable], by_role: bool) -> list[Readable]:
    """Join segments that share bias and perhaps role, drop empty ones (kernels do not take zero keys)."""
    groups: dict[tuple[Role | None, float, bool, int, bool], list[Readable]] = {}
    for segment in segments:
        if segment.keys.shape[1]:
            own, by_head = segment.token_bias is not None, segment.head_bias is not None
            role = segment.role if by_role or own or by_head or segment.measured else None
            key = (role, segment.log_bias, own, id(segment.head_bias) if by_head else 0, segment.measured)
            groups.setdefault(key, []).append(segment)
    if not groups:
        raise ValueError("segments have 0 keys: attention needs at least 1; pass the block's own segment")
    return [
        Readable(
            group[0].role if len({g.role for g in group}) == 1 else None,
            group[0].keys if len(group) == 1 else torch.cat([g.keys for g in group], dim=1),
            group[0].values if len(group) == 1 else torch.cat([g.values for g in group], dim=1),
            bias,
            torch.cat([g.token_bias for g in group if g.token_bias is not None], dim=1) if own else None,
            group[0].head_bias,
            measured,
        )
        for (_, bias, own, _, measured), group in groups.items()
    ]


def read_group(q: Tensor, k: Tensor, v: Tensor, token_bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return attention B H N D and its log-sum-exp B H N over the keys of one group; token_bias B N."""
    if token_bias is None:
        return fused_kernel(q, k, v)
    # The fused kernels differ in which biases they take; a biased group is a small one, and not the default.
    logits = (q @ k.transpose(-1, -2)).float() * q.shape[-1] ** -0.5 + token_bias[:, None, None]
    mass = logits.logsumexp(dim=-1)
    return (logits - mass.unsqueeze(-1)).exp().to(v.dtype) @ v, mass


class Kernel(Enum):
    """Names the kernels that attention can run on."""

    CPU = "flash for the CPU"
    CUDNN = "cuDNN"
    FLASH = "flash"
    EFFICIENT = "memory-efficient"
    PLAIN = "one operation after another"


def choose_kernel(device: str, dtype: torch.dtype, channels: int, shortest: int, *, cudnn: bool) -> Kernel:
    """Return the fastest kernel for heads with this number of channels.

    The operators are called directly, so nothing else pads heads or falls back. `shortest` is the number of queries
    or of keys, the smaller one; `cudnn` whether it is there and the faster one.
    """
    if device == "cpu":
        return Kernel.CPU
    if device == "cuda" and dtype in HALF and channels % 8 == 0 and channels <= 256:
        return Kernel.CUDNN if cudnn and shortest > 1 and channels <= 128 else Kernel.FLASH
    if device == "cuda" and dtype == torch.float32 and channels % 4 == 0:
        return Kernel.EFFICIENT
    return Kernel.PLAIN


def fused_kernel(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return attention B H N D and its log-sum-exp B H N, by whatever fused kernel the device has.

    The public call does not return the log-sum-exp, so the operators under it are called directly.
    """
    cudnn = q.is_cuda and q.dtype in HALF and _prefers_cudnn(q.device)
    shortest = min(q.shape[2], k.shape[2])
    kernel = choose_kernel(q.device.type, q.dtype, q.shape[-1], shortest, cudnn=cudnn)
    if kernel is Kernel.CPU:
        output, mass = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)
    elif kernel is Kernel.CUDNN:
        output, mass = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True)[:2]
        mass = mass.reshape(q.shape[:-1])
    elif kernel is Kernel.FLASH:
        output, mass = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v)[:2]
    elif kernel is Kernel.EFFICIENT:
        output, mass = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, True)[:2]
        # This kernel pads its log-sum-exp to a multiple of 32 queries.
        mass = mass[..., : q.shape[2]]
    else:
        output, mass = _plain(q, k, v)
    return output, mass


def _plain(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Do the same without a fused kernel; half precisions are summed in fp32, as the kernels do."""
    exact = torch.promote_types(q.dtype, torch.float32)
    logits = q.to(exact) @ k.to(exact).transpose(-1, -2) * q.shape[-1] ** -0.5
    output = logits.softmax(dim=-1) @ v.to(exact)
    return output.to(q.dtype), logits.logsumexp(dim=-1)


def _prefers_cudnn(device: torch.device) -> bool:
    # On Hopper 0.61 ms where flash takes 1.04 (H200, 4,680 x 10,920, 12 heads of 128); not for single tokens.
    return torch.cuda.get_device_capability(device) >= (9, 0) and torch.backends.cuda.cudnn_sdp_enabled()
