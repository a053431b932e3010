"""Which fused kernel reads which heads, and that all of them agree with one softmax."""

from __future__ import annotations

import math

import pytest
import torch
from one_softmax import DEVICES, random_segments, reference, relative_error

from recap.attention import attend as attend_module
from recap.attention.attend import Kernel, attend, choose_kernel


@pytest.mark.parametrize(
    ("device", "dtype", "channels", "shortest", "cudnn", "kernel"),
    [
        ("cpu", torch.bfloat16, 12, 9, False, Kernel.CPU),
        ("cpu", torch.float64, 128, 9, False, Kernel.CPU),
        # The public models, on Hopper and before it.
        ("cuda", torch.bfloat16, 128, 9, True, Kernel.CUDNN),
        ("cuda", torch.float16, 64, 9, True, Kernel.CUDNN),
        ("cuda", torch.bfloat16, 128, 9, False, Kernel.FLASH),
        ("cuda", torch.float32, 128, 9, False, Kernel.EFFICIENT),
        # Not for single tokens, nor for heads wider than it takes.
        ("cuda", torch.bfloat16, 128, 1, True, Kernel.FLASH),
        ("cuda", torch.bfloat16, 256, 9, True, Kernel.FLASH),
        ("cuda", torch.bfloat16, 264, 9, True, Kernel.PLAIN),
        # Half precisions want channels by the eight, fp32 by the four.
        ("cuda", torch.bfloat16, 12, 9, True, Kernel.PLAIN),
        ("cuda", torch.float16, 12, 9, False, Kernel.PLAIN),
        ("cuda", torch.bfloat16, 132, 1, True, Kernel.PLAIN),
        ("cuda", torch.float32, 12, 9, False, Kernel.EFFICIENT),
        ("cuda", torch.float32, 14, 9, False, Kernel.PLAIN),
        ("cuda", torch.float64, 128, 9, False, Kernel.PLAIN),
        ("mps", torch.float16, 128, 9, False, Kernel.PLAIN),
    ],
)
def test_no_kernel_is_asked_for_heads_it_does_not_take(device, dtype, channels, shortest, cudnn, kernel):
    assert choose_kernel(device, dtype, channels, shortest, cudnn=cudnn) is kernel


def assert_exact(query, segments, tolerance):
    wide = [s._replace(keys=s.keys.double(), values=s.values.double()) for s in segments]
    exact, found = reference(query.double(), wide), attend(query, segments)
    assert found.output.dtype == query.dtype
    assert relative_error(found.output, exact.output) < tolerance
    for role, share in found.shares.items():
        torch.testing.assert_close(share.double(), exact.shares[role], rtol=0, atol=tolerance)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 5e-3)]
)
@pytest.mark.parametrize("channels", [6, 12, 14, 24, 36, 128, 136, 256, 264])
@pytest.mark.parametrize("queries", [1, 9])
def test_heads_of_any_size_are_read(device, dtype, tolerance, channels, queries):
    segments = random_segments(
        [40, 7, 33, 9], channels=channels, dtype=dtype, device=device, bias=math.log(5)
    )
    query = torch.randn(2, queries, 3, channels, dtype=torch.float64).to(device, dtype)
    assert_exact(query, segments, tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.bfloat16, 5e-3)])
def test_without_a_fused_kernel_half_precisions_are_summed_in_fp32(monkeypatch, dtype, tolerance):
    monkeypatch.setattr(attend_module, "choose_kernel", lambda *_, **__: Kernel.PLAIN)
    segments = random_segments([400, 70, 330, 90], dtype=dtype, bias=math.log(5))
    query = torch.randn(2, 9, 3, 12, dtype=torch.float64).to(dtype)
    assert_exact(query, segments, tolerance)
    _, mass = attend_module.fused_kernel(*(s.transpose(1, 2) for s in (query, *segments[0][1:3])))
    assert mass.dtype == torch.promote_types(dtype, torch.float32)
