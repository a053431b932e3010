"""What the page shows of attention agrees with what the model measures, and watching changes nothing."""

from __future__ import annotations

import pytest
import torch

from recap import RunConfig, Session
from recap.studio.watching import WatchingKernels


def session(**more):
    shots = [{"prompt": "a red boat", "seconds": 1.0}]
    plain = {"shots": shots, "backbone": "untrained", "flow": "classical", "device": "cpu"}
    return Session(RunConfig.from_dict(plain), **more)


@pytest.fixture
def every_read(monkeypatch):
    monkeypatch.setattr("recap.studio.watching.EVERY", 1)


def test_watching_changes_no_bit():
    plain, watched = session(), session(kernels=WatchingKernels())
    for _ in range(3):
        assert torch.equal(plain.step().latents, watched.step().latents)


def test_maps_average_to_the_shares_that_the_model_measures(every_read):
    kernels = WatchingKernels()
    made = session(kernels=kernels)
    grid = made.backbone.spec.grid
    # The clean pass is not among the model's shares; what it reads is close, not equal.
    for _ in range(3):
        kernels.begin()
        block = made.step()
        maps = kernels.maps(grid)
        assert set(maps) == {str(role) for role in block.shares}
        for role, share in block.shares.items():
            assert len(maps[str(role)]) == grid[0] * grid[1]
            assert sum(maps[str(role)]) / len(maps[str(role)]) == pytest.approx(float(share[0]), abs=0.1)
    assert sum(kernels.slots()) == pytest.approx(sum(maps["bank"]) / len(maps["bank"]), abs=0.002)


def test_the_places_of_a_picture_share_out_all_attention(every_read):
    kernels = WatchingKernels()
    made = session(kernels=kernels)
    made.step()
    kernels.begin()
    made.step()
    for at_place in zip(*kernels.maps(made.backbone.spec.grid).values(), strict=True):
        assert sum(at_place) == pytest.approx(1, abs=0.001)


def test_a_bank_that_grew_is_watched_from_then_on(every_read):
    """Blocks that are read again after a change of mind come one after another, without a beginning between them."""
    kernels = WatchingKernels()
    made = session(kernels=kernels)
    for _ in range(2):
        made.step()
    before = len(kernels.slots())
    made.set(capacity_frames=2.0)
    for _ in range(2):
        made.step()
    assert len(kernels.slots()) == 2 * before == len(made.bank)
