"""Options of the bank, each by its law: a reinforced bank is a bank of repeated keys."""

from __future__ import annotations

import math

import pytest
import torch

from recap.fast.backbone import FastWanBackbone
from recap.memory.recap import RecapConfig, RecapMemory
from recap.plan import Shot, make_plan
from recap.rollout import rollout
from recap.types import Role
from tests.contracts.test_policies import SeededAdmission


def memory_of(backbone, **settings):
    return RecapConfig(**settings).build(backbone.spec, lambda: SeededAdmission(backbone.spec))


def begin_rollout(backbone, policy, seconds=4.5, **resume):
    plan = make_plan([[Shot("a red boat", seconds), Shot("a blue house", seconds)]], backbone.spec)
    return rollout(backbone, policy, plan, seeds=[0], **resume)


def repeat_bank(policy: RecapMemory, times: int) -> None:
    """Let every block see the bank and what is pinned so many times, with no bias."""
    begin = policy.begin

    def begin_repeated(block):
        phases = begin(block)
        for seen in policy.window.segments:
            kept = [segment for segment in seen if segment.role in (Role.BANK, Role.CAST)]
            seen.extend(kept * (times - 1))
        return phases

    policy.begin = begin_repeated


@pytest.mark.parametrize("path", ["readable", "fast"])
@pytest.mark.parametrize(
    ("times", "settings"),
    [(2, {}), (3, {"zero_scores_fill": False}), (5, {"reinforcement": 5.0}), (2, {"reinforcement": 1.0})],
)
def test_a_reinforced_bank_equals_its_keys_repeated(backbone, path, times, settings):
    model = FastWanBackbone(backbone) if path == "fast" else backbone
    policy = memory_of(backbone, bank_reinforcement=float(times), **settings)
    twin = memory_of(backbone, **settings)
    repeat_bank(twin, times)
    plain = memory_of(backbone, **settings)
    runs = [list(begin_rollout(model, each)) for each in (policy, twin, plain)]
    for one, other in zip(*runs[:2], strict=True):
        torch.testing.assert_close(one.latents, other.latents, atol=1e-5, rtol=1e-5)
        assert torch.equal(one.memory.admitted.source, other.memory.admitted.source)
        if Role.BANK in other.shares:
            torch.testing.assert_close(one.shares[Role.BANK], other.shares[Role.BANK], atol=1e-5, rtol=1e-4)
    assert not torch.allclose(runs[0][-1].latents, runs[2][-1].latents, atol=1e-4), "it does something"


def test_pinning_does_not_change_a_tokens_weight(backbone):
    """The next block sees the same tokens with the same bias, whether some of them are pinned or not."""
    latents = []
    for pins in (False, True):
        policy = memory_of(backbone, bank_reinforcement=3.0)
        made = begin_rollout(backbone, policy)
        next(made), next(made)
        if pins:
            policy.pin([0, 3, 4], "fox")
        latents.append(next(made).latents)
    torch.testing.assert_close(*latents, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("factor", [0.0, -2.0, math.inf, math.nan])
def test_a_reinforcement_that_is_no_factor_is_refused(backbone, factor):
    with pytest.raises(ValueError, match="bank_reinforcement"):
        memory_of(backbone, bank_reinforcement=factor)
