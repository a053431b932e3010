"""The fast path draws what the readable one draws."""

from __future__ import annotations

import pytest
import torch

from recap.backbones.wan.backbone import WanBackbone, build_untrained
from recap.contracts import MemoryPolicy
from recap.fast.backbone import FastWanBackbone
from recap.flow.classical import ClassicalFlow
from recap.memory.recap import RecapConfig
from recap.memory.sink import NoMemoryConfig, SinkConfig
from recap.novelty.flow_novelty import FlowNoveltyConfig
from recap.plan import Shot, make_plan
from recap.rollout import rollout
from recap.types import GeneratedBlock, Role

MEMORIES = {
    "none": NoMemoryConfig(),
    "sink": SinkConfig(),
    "reinforced": SinkConfig(reinforcement=5.0),
    "recap": RecapConfig(),
    "recap, lambda 1": RecapConfig(reinforcement=1.0),
}


@pytest.fixture(scope="module")
def plain() -> WanBackbone:
    return build_untrained()


def draw(backbone: WanBackbone | FastWanBackbone, name: str, rows: int = 1) -> list[GeneratedBlock]:
    spec = backbone.spec

    def admission():  # type: ignore[no-untyped-def]
        return FlowNoveltyConfig().build(spec, ClassicalFlow())

    policy: MemoryPolicy = MEMORIES[name].build(spec, admission)
    shots = [[Shot("a red boat", 1.5), Shot("a blue house", 2.25)]] * rows
    return list(rollout(backbone, policy, make_plan(shots, spec), seeds=range(rows)))


@pytest.mark.parametrize("name", MEMORIES)
@pytest.mark.parametrize("rows", [1, 2])
def test_fast_and_readable_draw_the_same(plain: WanBackbone, name: str, rows: int) -> None:
    readable, fast = draw(plain, name, rows), draw(FastWanBackbone(plain), name, rows)
    for slow, quick in zip(readable, fast, strict=True):
        torch.testing.assert_close(quick.latents, slow.latents, atol=2e-5, rtol=1e-4)
        assert quick.memory.tokens == slow.memory.tokens
        for role, share in quick.shares.items():
            torch.testing.assert_close(share, slow.shares[role], atol=1e-5, rtol=1e-4)


def test_all_shares_are_measured_where_kernels_cost_little(plain: WanBackbone) -> None:
    """On a CPU; on a GPU the keys without a bias are read at once, and only a reinforced sink's share is known."""
    blocks = draw(FastWanBackbone(plain), "recap")
    assert set(blocks[-1].shares) == {Role.SINK, Role.BANK, Role.PRIOR, Role.CURRENT}
    torch.testing.assert_close(sum(blocks[-1].shares.values()), torch.ones(1))


def test_one_backbone_serves_one_rollout_after_another(plain: WanBackbone) -> None:
    fast = FastWanBackbone(plain)
    first = draw(fast, "recap")
    draw(fast, "none", rows=2)
    again = draw(fast, "recap")
    for one, other in zip(first, again, strict=True):
        assert torch.equal(one.latents, other.latents)


def test_windows_keep_their_storage(plain: WanBackbone) -> None:
    """What a recording reads must lie where it lay."""
    fast = FastWanBackbone(plain)
    draw(fast, "recap")
    places = {key: [k.data_ptr() for k in d.window.keys] for key, d in fast._drawers.items()}
    draw(fast, "recap")
    assert places == {key: [k.data_ptr() for k in d.window.keys] for key, d in fast._drawers.items()}
