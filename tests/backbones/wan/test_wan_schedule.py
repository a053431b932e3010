from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from recap.backbones.wan.schedule import clean_estimate, model_time, renoise, warp
from recap.backbones.wan.spec import WAN_1_3B


def test_warped_steps() -> None:
    sigmas = warp(WAN_1_3B.steps, WAN_1_3B.shift)
    assert sigmas == pytest.approx((1.0, 0.9375, 0.8333333333, 0.625))
    assert [model_time(sigma) for sigma in sigmas] == pytest.approx([1000, 937.5, 833.3333333, 625])


def test_another_shift_gives_other_times() -> None:
    assert [1000 * s for s in warp((1000, 750, 500, 250), 8.0)] == pytest.approx(
        [1000, 960, 888.8889, 727.2727]
    )


def test_step_zero_is_clean() -> None:
    assert warp((0,), 5.0) == (0.0,)


def test_levels_fall_from_one_and_never_reach_zero() -> None:
    levels = warp(tuple(range(1000, 0, -1)), 5.0)
    assert (len(levels), levels[0]) == (1000, 1.0)
    assert all(a > b > 0 for a, b in pairwise(levels))
    assert levels[-1] == pytest.approx(0.00498008, abs=1e-8)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_clean_estimate_undoes_renoise_under_the_true_flow(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    clean, noise = torch.randn(2, 4, 5, generator=generator, dtype=torch.float64).to(dtype).unbind(0)
    noisy = renoise(clean, noise, 0.625)
    back = clean_estimate(noisy, noise - clean, 0.625)
    assert noisy.dtype == back.dtype == dtype
    assert (back - clean).abs().max() < 20 * torch.finfo(dtype).eps


def test_half_precision_is_rounded_once() -> None:
    """x - sigma v in bf16 throughout would round the product before the difference."""
    noisy, flow = torch.tensor([1.0078125]).bfloat16(), torch.tensor([1.0078125]).bfloat16()
    exact = torch.tensor([1.0078125 - 0.8333333 * 1.0078125]).bfloat16()
    assert torch.equal(clean_estimate(noisy, flow, 0.8333333), exact)


def test_renoise_at_the_ends() -> None:
    clean, noise = torch.ones(3), torch.full((3,), 7.0)
    assert torch.equal(renoise(clean, noise, 0.0), clean)
    assert torch.equal(renoise(clean, noise, 1.0), noise)
