"""The fast path generates what the readable one generates."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from recap.admission.flow import FlowNoveltyConfig
from recap.admission.flow_keys import FlowKeysConfig
from recap.admission.keys import KeyNoveltyConfig
from recap.backbones.wan.backbone import WanBackbone, build_untrained
from recap.backbones.wan.spec import UNTRAINED
from recap.contracts import MemoryPolicy
from recap.fast.backbone import FastWanBackbone
from recap.fast.biases import BiasTable
from recap.flow.classical import ClassicalFlow
from recap.memory.recap import RecapConfig
from recap.memory.sink import NoMemoryConfig, SinkConfig
from recap.memory.window import Window
from recap.plan import Shot, make_plan
from recap.rollout import at_once, rollout
from recap.types import Block, GeneratedBlock, MemoryTrace, Role, Segment, Tokens, frame_positions

MEMORIES = {
    "none": NoMemoryConfig(),
    "sink": SinkConfig(),
    "reinforced": SinkConfig(reinforcement=5.0),
    "recap": RecapConfig(),
    "recap, lambda 1": RecapConfig(reinforcement=1.0),
    "recap, no zero scores": RecapConfig(zero_scores_fill=False),
    "by layer": SinkConfig(reinforcement="5@layers:last-half"),
    "by step": RecapConfig(reinforcement="5@steps:0-1"),
    "by head and gate": RecapConfig(reinforcement="5@heads:top-0.5@gate"),
    "by share, no zero scores": RecapConfig(reinforcement="share:0.3", zero_scores_fill=False),
    "recap, bank reinforced": RecapConfig(bank_reinforcement=2.0),
}
SCHEDULED = [name for name in MEMORIES if name.startswith("by ")]
RULES = {"flow": FlowNoveltyConfig(), "keys": KeyNoveltyConfig(), "flow+keys": FlowKeysConfig()}


BY_FRAME = {
    "2 steps": replace(UNTRAINED, frames_per_block=1, steps=(1000, 500)),
    "1 step": replace(UNTRAINED, frames_per_block=1, steps=(1000,)),
}


@pytest.fixture(scope="module")
def plain() -> WanBackbone:
    return build_untrained()


def generate(
    backbone: WanBackbone | FastWanBackbone, name: str, rows: int = 1, rule: str = "flow"
) -> list[GeneratedBlock]:
    spec = backbone.spec

    def admission():  # type: ignore[no-untyped-def]
        return RULES[rule].build(spec, ClassicalFlow())

    policy: MemoryPolicy = MEMORIES[name].build(spec, admission)
    shots = [[Shot("a red boat", 1.5), Shot("a blue house", 3.0)]] * rows
    return list(rollout(backbone, policy, make_plan(shots, spec), seeds=range(rows)))


@pytest.mark.parametrize("name", MEMORIES)
@pytest.mark.parametrize("rows", [1, 2])
def test_fast_and_readable_generate_the_same(plain: WanBackbone, name: str, rows: int) -> None:
    readable, fast = generate(plain, name, rows), generate(FastWanBackbone(plain), name, rows)
    for slow, quick in zip(readable, fast, strict=True):
        torch.testing.assert_close(quick.latents, slow.latents, atol=2e-5, rtol=1e-4)
        assert quick.memory.tokens == slow.memory.tokens
        for role, share in quick.shares.items():
            torch.testing.assert_close(share, slow.shares[role], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("rule", ["keys", "flow+keys"])
def test_a_rule_by_keys_keeps_the_same_tokens_on_the_fast_path(plain: WanBackbone, rule: str) -> None:
    readable, fast = (
        generate(each, "recap, bank reinforced", rows=2, rule=rule)
        for each in (plain, FastWanBackbone(plain))
    )
    for slow, quick in zip(readable, fast, strict=True):
        assert slow.memory.admitted is not None and quick.memory.admitted is not None
        assert torch.equal(slow.memory.admitted.source, quick.memory.admitted.source)
        torch.testing.assert_close(quick.latents, slow.latents, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", BY_FRAME)
@pytest.mark.parametrize("name", ["none", "reinforced", "recap"])
def test_fast_and_readable_generate_the_same_frame_by_frame(kind: str, name: str) -> None:
    readable = build_untrained(spec=BY_FRAME[kind])
    fast = generate(FastWanBackbone(readable), name)
    assert len(fast) == 18
    for slow, quick in zip(generate(readable, name), fast, strict=True):
        torch.testing.assert_close(quick.latents, slow.latents, atol=2e-5, rtol=1e-4)
        assert quick.memory.tokens == slow.memory.tokens


def test_all_shares_are_measured_where_kernels_cost_little(plain: WanBackbone) -> None:
    """On a CPU. On a GPU one kernel reads all keys without a bias, so only a reinforced sink has a known share."""
    blocks = generate(FastWanBackbone(plain), "recap")
    assert set(blocks[-1].shares) == {Role.SINK, Role.BANK, Role.PRIOR, Role.CURRENT}
    torch.testing.assert_close(sum(blocks[-1].shares.values()), torch.ones(1))


@pytest.mark.parametrize("name", ["sink", "reinforced", "recap, no zero scores"])
def test_only_the_largest_group_is_read_aside_and_is_waited_for(plain: WanBackbone, name: str) -> None:
    """The work is done only when it is waited for, as late as a second stream may do it."""
    early, late = FastWanBackbone(plain), FastWanBackbone(plain)
    asked = 0

    def last_minute(work: Callable[[], None]) -> Callable[[], None]:
        nonlocal asked
        asked += 1
        return work

    late._fast.aside = last_minute
    blocks = generate(early, name)
    for one, other in zip(blocks, generate(late, name), strict=True):
        assert torch.equal(one.latents, other.latents)
    # On a CPU the first block is the only one that reads a single group.
    passes = plain.spec.num_steps + 1
    # The last layer of the clean pass reads for nobody.
    assert asked == (plain.spec.layers * passes - 1) * (len(blocks) - 1)


@pytest.mark.cuda
@pytest.mark.parametrize("rule", ["flow", "keys"])
def test_two_streams_compute_the_same_bits_as_one(rule: str) -> None:
    """The first block of a layout is computed, the second recorded and the others replayed: all of them agree."""
    slow = build_untrained(device="cuda")
    one, two = FastWanBackbone(slow), FastWanBackbone(slow)
    one._fast.aside = at_once
    for alone, both in zip(generate(one, "recap", rule=rule), generate(two, "recap", rule=rule), strict=True):
        assert torch.equal(alone.latents, both.latents)
        assert alone.shares.keys() == both.shares.keys()


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["reinforced", *SCHEDULED])
def test_recordings_on_a_gpu_read_the_biases_of_every_block(name: str) -> None:
    """Blocks of one layout replay one recording, so what a schedule changes from block to block must be in tables."""
    slow = build_untrained(device="cuda")
    fast = FastWanBackbone(slow)
    readable, quick = generate(slow, name, rows=2), generate(fast, name, rows=2)
    for one, other in zip(readable, quick, strict=True):
        torch.testing.assert_close(other.latents, one.latents, atol=1e-3, rtol=1e-3)
    for one, other in zip(readable[1:], quick[1:], strict=True):
        torch.testing.assert_close(other.shares[Role.SINK], one.shares[Role.SINK], atol=1e-4, rtol=1e-3)
    again = generate(fast, name, rows=2)
    for one, other in zip(quick[2:], again[2:], strict=True):
        torch.testing.assert_close(other.latents, one.latents, atol=1e-5, rtol=1e-4)


@pytest.mark.cuda
@pytest.mark.parametrize("name", SCHEDULED)
def test_on_a_gpu_no_schedule_waits_for_a_value(name: str) -> None:
    """From measuring in one block to the biases of the next."""
    spec = build_untrained().spec
    window = Window(spec, sink_frames=1, reinforcement=MEMORIES[name].reinforcement)  # type: ignore[attr-defined]
    shape = (spec.num_steps + 1, spec.layers, 2, spec.heads)
    table = BiasTable(shape, torch.float32, torch.device("cuda"))
    shares = torch.rand(spec.layers, 2, spec.heads, device="cuda")
    keys = torch.zeros(2, 1, spec.heads, spec.head_dim, device="cuda")
    positions = torch.zeros(1, 1, 3, dtype=torch.float64)

    def run_block() -> None:
        biases = window.bias.layers(2, torch.device("cuda"))
        table.fill([Segment(Role.SINK, keys, keys, positions, **bias._asdict()) for bias in biases])
        for layer in range(spec.layers):
            window.bias.measure(layer, shares[layer])
        window.bias.take_share(shares[0, :, 0])
        window.bias.commit({Role.SINK: 1, Role.CURRENT: 5})

    # The first blocks copy the numbers of the schedule.
    run_block()
    run_block()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run_block()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_one_backbone_serves_one_rollout_after_another(plain: WanBackbone) -> None:
    fast = FastWanBackbone(plain)
    first = generate(fast, "recap")
    generate(fast, "none", rows=2)
    generate(fast, "recap, no zero scores")
    again = generate(fast, "recap")
    for one, other in zip(first, again, strict=True):
        assert torch.equal(one.latents, other.latents)


def test_windows_keep_their_storage(plain: WanBackbone) -> None:
    """What a recording reads must stay at its address, once the room is as large as the largest window."""
    fast = FastWanBackbone(plain)
    generate(fast, "recap")
    generate(fast, "recap")
    addresses = {key: [k.data_ptr() for k in d.window.keys] for key, d in fast._runners.items()}
    assert len(addresses) > 1
    generate(fast, "recap")
    assert addresses == {key: [k.data_ptr() for k in d.window.keys] for key, d in fast._runners.items()}


def test_all_windows_are_stored_in_one_room_of_the_largest_ones_size(plain: WanBackbone) -> None:
    fast = FastWanBackbone(plain)
    for name, rows in (("recap", 1), ("none", 2), ("recap", 2)):
        generate(fast, name, rows)
    spec, room = plain.model.spec, fast._room
    tokens = (spec.window_frames + 1) * spec.grid[0] * spec.grid[1]
    assert len(room) == 2 * spec.layers * 2 * tokens * spec.dim
    storage = room.untyped_storage().data_ptr()
    for runner in fast._runners.values():
        for part in (*runner.window.keys, *runner.window.values):
            assert part.untyped_storage().data_ptr() == storage


def test_a_window_that_was_dropped_is_gone_at_once(plain: WanBackbone) -> None:
    """Without waiting for the garbage collector: on a card it would be gigabytes."""
    fast = FastWanBackbone(plain)
    gc.disable()
    try:
        generate(fast, "recap")
        windows = [weakref.ref(runner.window) for runner in fast._runners.values()]
        generate(fast, "recap", rows=2)
        assert windows and not any(window() for window in windows)
    finally:
        gc.enable()


def test_joined_projections_are_stored_once_and_read_as_before() -> None:
    plain, other = build_untrained(), build_untrained()
    fast = FastWanBackbone(plain)
    for block, layer in zip(plain.model.layers(), fast._fast.layers, strict=True):
        own, joined = block.self_attn, layer.qkv.keywords["weight"].untyped_storage()
        assert {p.weight.untyped_storage().data_ptr() for p in (own.q, own.k, own.v)} == {joined.data_ptr()}
        assert joined.nbytes() == 3 * own.q.weight.nbytes
    before, after = other.model.state_dict(), plain.model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    for one, two in zip(generate(other, "recap"), generate(plain, "recap"), strict=True):
        torch.testing.assert_close(one.latents, two.latents)


def test_a_memory_may_keep_the_tokens_it_receives(plain: WanBackbone) -> None:
    """The README's memory keeps the tensors themselves; a fast path that reuses them would change its past."""

    class KeepsTokens(MemoryPolicy):
        """The previous block's own tensors, and nothing else."""

        def __init__(self) -> None:
            self.kept: dict[int, Tokens] = {}
            self.fresh: dict[int, Tokens] = {}
            self.segments: dict[int, Segment] = {}

        def begin(self, block: Block) -> torch.Tensor:
            before = frame_positions(torch.arange(block.num_frames), plain.spec.grid)
            self.segments = {n: Segment(Role.PRIOR, t.keys, t.values, before) for n, t in self.kept.items()}
            return torch.arange(block.num_frames) + min(block.first_frame, block.num_frames)

        def arrange(self, layer: int, own: list[Segment]) -> list[Segment]:
            return [self.segments[layer], *own] if layer in self.segments else own

        def write(self, layer: int, tokens: Tokens) -> None:
            self.fresh[layer] = tokens

        def commit(self, block: Block, pixels: torch.Tensor) -> MemoryTrace:
            self.kept, self.fresh = self.fresh, {}
            return MemoryTrace({Role.CURRENT: plain.spec.block_tokens})

        def clear_prior(self) -> None:
            self.kept = {}

        def state(self) -> dict[str, torch.Tensor]:
            return {}

        def load_state(self, state: dict[str, torch.Tensor]) -> None:
            pass

    plan = make_plan([[Shot("a red boat", 3.75)]], plain.spec)
    slow = [made.latents for made in rollout(plain, KeepsTokens(), plan, seeds=[0])]
    quick = [made.latents for made in rollout(FastWanBackbone(plain), KeepsTokens(), plan, seeds=[0])]
    for one, other in zip(slow, quick, strict=True):
        torch.testing.assert_close(other, one, atol=2e-5, rtol=1e-4)
