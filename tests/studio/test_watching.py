"""What the page shows of attention agrees with what the model measures, and watching changes nothing."""

from __future__ import annotations

import pytest
import torch

from recap import RunConfig, Session
from recap.attention.context import BlockContext
from recap.fast.accelerate import accelerate
from recap.studio import messages as say
from recap.studio.watching import WatchingKernels
from recap.types import Role
from tests.studio.conftest import PROMPT, wait_for


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


def test_several_subjects_of_a_cast_are_read_together(every_read):
    kernels = WatchingKernels()
    made = session(kernels=kernels)
    made.step()
    made.pin([1, 2], "fox")
    made.pin([3], "bus")
    kernels.begin()
    shares = made.step().shares
    assert kernels.shares()["cast"] == pytest.approx(float(shares[Role.CAST][0]), rel=0.3)
    for at_place in zip(*kernels.maps(made.backbone.spec.grid).values(), strict=True):
        assert sum(at_place) == pytest.approx(1, abs=0.001)


@pytest.fixture
def fast(backbone):
    return accelerate(backbone, on_cpu=True)


def test_the_fast_path_shows_what_the_readable_one_reads_in_the_clean_pass(backbone, fast, monkeypatch):
    monkeypatch.setattr("recap.studio.watching.EVERY", 1)
    known = session(backbone=backbone)
    latents = [known.step().latents for _ in range(4)]
    found = []
    for model in (backbone, fast):
        kernels = WatchingKernels()
        made = session(backbone=model, kernels=kernels)
        for given in latents:
            kernels.begin()
            # Of a block whose latents are known there is the clean pass alone.
            made.step(given)
        assert kernels.clean_only == (model is fast)
        found.append((kernels.maps(made.backbone.spec.grid), kernels.slots()))
    (maps, slots), (fast_maps, fast_slots) = found
    assert maps.keys() == fast_maps.keys() >= {"bank", "sink", "prior", "current"}
    for role, values in maps.items():
        assert fast_maps[role] == pytest.approx(values, abs=2e-4)
    assert fast_slots == pytest.approx(slots, abs=1e-5)


def test_watching_the_fast_path_changes_no_bit(fast):
    plain, watched = session(backbone=fast), session(backbone=fast, kernels=WatchingKernels())
    for _ in range(3):
        assert torch.equal(plain.step().latents, watched.step().latents)


def test_the_studio_shows_overlay_and_shares_of_a_fast_model(studio, fast, monkeypatch):
    """As on a GPU, where the fast kernels measure the share of the reinforced first picture alone."""
    monkeypatch.setattr("recap.studio.watching.EVERY", 1)
    measured = BlockContext.measured

    def sink_alone(self, shares):
        measured(self, {role: share for role, share in shares.items() if role is Role.SINK})

    monkeypatch.setattr(BlockContext, "measured", sink_alone)
    # After the studio has loaded its own.
    studio.engine.call(lambda: setattr(studio, "_backbone", fast)).result()
    live = studio.create(say.NewSession(prompt=PROMPT))
    wait_for(lambda: live.store.count("main", 0) == 2, "two blocks")
    info = live.store.read_info("main", 0, 1)
    assert info["overlay"]["measured"] == "clean pass"
    assert set(info["shares"]) == set(info["overlay"]["roles"]) >= {"sink", "bank", "current"}
    assert sum(info["shares"].values()) == pytest.approx(1, abs=1e-3)
    assert all(slot["share"] is not None for slot in info["bank"] if slot["block"] == 0)
