"""Novelty's Triton kernels mean what the plain steps say. Run on a GPU, or by Triton's interpreter on a CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from recap.admission.flow import FlowNovelty, FlowNoveltyConfig
from recap.admission.flow_keys import FlowKeysConfig
from recap.admission.flow_texture import FlowTextureConfig
from recap.fast.accelerate import accelerate_admission
from recap.registry import load_backbone
from tests.fast.novelty_scenes import PER_FRAME, Sways

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Where there is a GPU it is the compiled kernels that count, so `make test-gpu` runs this, too.
pytestmark = [pytest.mark.cuda] if DEVICE == "cuda" else []

CHECK = """
import torch
from recap.admission.flow import FlowNovelty, FlowNoveltyConfig
from recap.admission.flow_texture import FlowTexture, FlowTextureConfig
from recap.fast import novelty_kernels
from recap.fast.median_kernels import median
from tests.fast.novelty_scenes import Sways, watcher

device = "cuda" if torch.cuda.is_available() else "cpu"


def alike(mine, meant, share=1e-3):
    # A decision may fall the other way where a value is within rounding of its threshold.
    off = ~torch.isclose(mine, meant, atol=1e-5, rtol=1e-5)
    assert mine.shape == meant.shape and mine.dtype == meant.dtype
    assert off.float().mean() <= share, f"{int(off.sum())} of {off.numel()} differ"


def compare_states(mine, meant):
    mine, meant = mine.state(), meant.state()
    assert mine.keys() == meant.keys()
    for name in mine:
        # Medians, steps and the canvas leave nothing to rounding.
        alike(mine[name], meant[name], 0 if name.startswith(("last", "surroundings")) else 1e-3)


def compare(scene, kind, config, token_pixels, swap=None):
    mine, meant = (watcher(scene, kind, config, token_pixels) for _ in range(2))
    mine.faster[device] = novelty_kernels
    fired = 0
    for number, block in enumerate(scene.blocks()):
        if number == swap:
            # Either continues what the other began, and neither changes the state it was given.
            states = mine.state(), meant.state()
            kept = [{name: value.clone() for name, value in state.items()} for state in states]
            mine.load_state(states[1]), meant.load_state(states[0])
        found, right = mine.notice(block), meant.notice(block)
        alike(found.fired, right.fired)
        compare_states(mine, meant)
        fired += int((right.fired > 0).sum())
        if number == swap:
            for state, before in zip(states, kept):
                assert all(torch.equal(state[name], before[name]) for name in before)
    return fired, meant


torch.manual_seed(0)
for values in (torch.randn(2, 2, 37), torch.randn(1, 2, 5000).round(), torch.randn(1, 4097) * 1e-40):
    values = values.to(device)
    assert torch.equal(median(values), values.median(dim=-1).values)
infinite = torch.tensor([[-torch.inf, -1.0, -0.0, 0.0, torch.inf, torch.inf]], device=device)
assert torch.equal(median(infinite), infinite.median(dim=-1).values)
if device == "cpu":
    # The interpreter would need most of the time for this kernel, which has just been compared.
    novelty_kernels.median = lambda values: values.median(dim=-1).values

# 667 pixels are two tiles, the second one short; 375 are less than one.
for rows, size, token_pixels, length, cut, claims in (
    (1, (23, 29), 1, 21, 17, "traced"),
    (3, (15, 25), 5, 13, 8, "carried"),
):
    scene = Sways(rows, length, size, cut=cut).to(device)
    fired = {}
    for borders in ("seen", "literal"):
        config = FlowNoveltyConfig(flow_downscale=1, claims=claims, borders=borders)
        fired[borders], rule = compare(scene, FlowNovelty, config, token_pixels, swap=length // 8)
        if borders == "seen":
            mark = rule.state()["surroundings"][:, 3]
    assert 0 < fired["seen"] < 0.95 * fired["literal"], "what came back was known"
    assert mark.sum() > 1.05 * rows * size[0] * size[1] and (mark == 0).any(), "it had been elsewhere"
config = FlowTextureConfig(flow_downscale=1, restless_everywhere=0.01)
compare(Sways(2, 13, (16, 24), cut=9).to(device), FlowTexture, config, 8)
print("alike")
"""


def test_kernels_equal_their_meaning() -> None:
    """In a process of its own: whether kernels are compiled or interpreted is decided when they are imported."""
    settings = {**os.environ, "TRITON_INTERPRET": "0" if DEVICE == "cuda" else "1"}
    root = Path(__file__).resolve().parents[2]
    found = subprocess.run(
        [sys.executable, "-c", CHECK], capture_output=True, text=True, env=settings, check=False, cwd=root
    )
    assert found.returncode == 0, found.stderr
    assert "alike" in found.stdout


@pytest.mark.parametrize("config", [FlowNoveltyConfig(), FlowTextureConfig(), FlowKeysConfig()])
def test_every_rule_by_flow_gets_them_on_a_gpu_alone(config) -> None:
    spec = load_backbone("untrained").spec
    plain, fast = (accelerate_admission(config.build(spec, None), device) for device in ("cpu", "cuda:1"))
    used = [getattr(rule, "by_flow", rule).faster for rule in (plain, fast)]
    assert used[0] == {} and used[1].keys() == {"cuda"}
    assert used[1]["cuda"].__name__ == "recap.fast.novelty_kernels"


@pytest.mark.cuda
def test_at_real_size_the_same_tokens_fire_and_nobody_waits() -> None:
    scene = Sways(1, 45, (240, 416), cut=24).to("cuda")
    mine, meant = (FlowNovelty(FlowNoveltyConfig(), scene.flow(), (30, 52), 16, PER_FRAME) for _ in range(2))
    accelerate_admission(mine, "cuda")
    assert mine.faster and not meant.faster
    differ, fires, count = 0, 0, 0
    for number, block in enumerate(scene.blocks()):
        large = block.repeat_interleave(2, -1).repeat_interleave(2, -2)
        right = meant.notice(large).score > 0
        # The first two blocks compile: one has fewer pictures, and no canvas before it.
        torch.cuda.set_sync_debug_mode("default" if number < 2 else "error")
        try:
            found = mine.notice(large).score > 0
        finally:
            torch.cuda.set_sync_debug_mode("default")
        differ, fires, count = differ + (found != right).sum(), fires + right.sum(), count + right.numel()
    assert 0.01 * count < fires < 0.9 * count
    assert differ < 1e-3 * count
    torch.testing.assert_close(mine.state()["surroundings"], meant.state()["surroundings"], rtol=0, atol=0)
