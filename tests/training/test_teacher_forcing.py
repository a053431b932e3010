"""One parallel pass must equal stepping through the real backbone with the real policies."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from recap.attention.context import BlockContext
from recap.backbones.wan.backbone import draw_weights
from recap.backbones.wan.model import CausalWan
from recap.backbones.wan.spec import EMBEDDED
from recap.contracts import MemoryPolicy
from recap.memory.recap import RecapConfig
from recap.memory.sink import NoMemoryConfig, SinkConfig
from recap.types import Block
from training.rollouts import FixedScores
from training.teacher_forcing import (
    DENSE_FRAMES,
    ClipBatch,
    Layout,
    bank_tokens,
    make_turns,
    predict_flow,
    spread_rows,
)

SPEC = replace(EMBEDDED, dim=48, heads=2, layers=2, ffn_dim=64, freq_dim=16, text_dim=8, latent_size=(4, 6))
FRAME = SPEC.grid[0] * SPEC.grid[1]
BLOCKS = 4


@pytest.fixture(scope="module")
def model() -> CausalWan:
    made = CausalWan(SPEC)
    draw_weights(made, 3)
    return made.eval().requires_grad_(False)


def clip_batch(rows: int, extra: int = 1, blocks: int = BLOCKS) -> ClipBatch:
    generator = torch.Generator().manual_seed(1)
    frame = (SPEC.frames_per_block, SPEC.in_channels, *SPEC.latent_size)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    return ClipBatch(
        clean=draw(rows, blocks, *frame),
        noisy=draw(rows, blocks, *frame),
        sigma=torch.rand(rows, blocks, generator=generator),
        extra=draw(rows, extra, *frame),
        extra_sigma=torch.rand(rows, extra, generator=generator),
        text=draw(rows, blocks, SPEC.text_len, SPEC.text_dim),
        extra_text=draw(rows, extra, SPEC.text_len, SPEC.text_dim),
        score=torch.rand(rows, blocks * SPEC.frames_per_block * FRAME, generator=generator),
    )


def step_through(model: CausalWan, batch: ClipBatch, policy: MemoryPolicy, cut: bool) -> Tensor:
    """Return the flow of every noisy block of row 0, block by block as in a rollout."""
    flows = []
    for index in range(batch.noisy.shape[1]):
        block = Block(index, index * SPEC.frames_per_block, SPEC.frames_per_block, ("",))
        if cut:
            policy.clear_prior()
        prompt = model.condition(batch.text[:1, index])
        context = BlockContext(policy, policy.begin(block))
        flows.append(model(batch.noisy[:1, index], 1000 * batch.sigma[0, index].item(), prompt, context))
        model(batch.clean[:1, index], 0.0, prompt, context.clean_pass())
        policy.commit(block, torch.zeros(1))
    return torch.stack(flows, dim=1)


BANK = FRAME // 2
LAYOUTS = [
    (Layout(1, sink=False), NoMemoryConfig()),
    (Layout(1), SinkConfig()),
    (Layout(1, cut=True), SinkConfig()),
    (Layout(1, bank=FRAME), RecapConfig(reinforcement=1.0)),
    (Layout(1, bank=BANK), RecapConfig(reinforcement=1.0, capacity_frames=0.5)),
    (Layout(1, cut=True, bank=FRAME), RecapConfig(reinforcement=1.0)),
]


@pytest.mark.parametrize(("layout", "config"), LAYOUTS)
def test_one_pass_equals_stepping(model: CausalWan, layout: Layout, config) -> None:
    batch = clip_batch(1)
    policy = config.build(SPEC.backbone_spec(), lambda: FixedScores(SPEC, batch.score))
    stepped = step_through(model, batch, policy, layout.cut)
    made = predict_flow(model, batch, (layout,), make_turns(SPEC, "cpu"))
    assert stepped.std() > 0.1
    torch.testing.assert_close(made[:, :BLOCKS], stepped, atol=1e-4, rtol=1e-4)


def test_long_windows_equal_stepping_in_a_longer_window(model: CausalWan) -> None:
    """While it fills, a window of 12 frames has sink 0, prior 1.., then the current block."""
    batch = clip_batch(1)
    wide = replace(SPEC, window_frames=12).backbone_spec()
    policy = SinkConfig().build(wide, lambda: FixedScores(SPEC, batch.score))
    stepped = step_through(model, batch, policy, cut=False)
    made = predict_flow(model, batch, (Layout(1, long=True),), make_turns(SPEC, "cpu"))
    torch.testing.assert_close(made[:, :BLOCKS], stepped, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("config", [NoMemoryConfig(), SinkConfig()])
def test_dense_windows_equal_stepping_in_a_window_of_the_whole_clip(model: CausalWan, config) -> None:
    """None of 21 frames leaves such a window, and its first frame is where a sink would be."""
    blocks = DENSE_FRAMES // SPEC.frames_per_block
    batch = clip_batch(1, blocks=blocks)
    whole = replace(SPEC, window_frames=DENSE_FRAMES).backbone_spec()
    policy = config.build(whole, lambda: FixedScores(SPEC, batch.score))
    stepped = step_through(model, batch, policy, cut=False)
    made = predict_flow(model, batch, (Layout(1, dense=True),), make_turns(SPEC, "cpu"))
    assert made.shape[1] == blocks + 1
    torch.testing.assert_close(made[:, :blocks], stepped, atol=1e-4, rtol=1e-4)
    short = predict_flow(model, batch, (Layout(1, long=True),), make_turns(SPEC, "cpu"))
    assert not torch.allclose(short[:, blocks - 1], stepped[:, -1], atol=1e-4), "the far past is read"


def test_rows_of_a_mixed_batch_do_not_mix(model: CausalWan) -> None:
    layouts = (*(layout for layout, _ in LAYOUTS), Layout(1, long=True), Layout(1, dense=True))
    batch = clip_batch(len(layouts), extra=2)
    turns = make_turns(SPEC, "cpu")
    together = predict_flow(model, batch, layouts, turns)
    for row, layout in enumerate(layouts):
        alone = predict_flow(model, ClipBatch(*(x[row : row + 1] for x in batch)), (layout,), turns)
        torch.testing.assert_close(together[row : row + 1], alone, atol=1e-4, rtol=1e-4)


def test_extra_entries_are_openings_with_prompts_of_their_own(model: CausalWan) -> None:
    batch = clip_batch(2)
    turns = make_turns(SPEC, "cpu")
    again = batch._replace(
        extra=batch.noisy[:, :1], extra_sigma=batch.sigma[:, :1], extra_text=batch.text[:, :1]
    )
    made = predict_flow(model, again, (Layout(2),), turns)
    torch.testing.assert_close(made[:, BLOCKS], made[:, 0])
    other = predict_flow(model, again._replace(extra_text=batch.extra_text), (Layout(2),), turns)
    assert torch.equal(other[:, :BLOCKS], made[:, :BLOCKS])
    assert not torch.equal(other[:, BLOCKS], made[:, BLOCKS])


def test_banks_have_the_best_of_the_past_and_never_the_sink() -> None:
    score = torch.rand(3, 4 * 12)
    banks = bank_tokens(score, num_blocks=4, block_tokens=12, sink_tokens=4, capacity=5)
    assert banks.shape == (3, 3, 5)
    for block in range(1, 4):
        now = banks[:, block - 1]
        assert now.min() >= 4 and now.max() < 12 * block
        best = score[:, 4 : 12 * block].topk(5).values
        torch.testing.assert_close(score.gather(1, now), best)


@pytest.mark.parametrize("batch", [12, 16, 24, 32])
def test_every_row_is_dense_or_a_plain_window_and_none_has_a_bank(batch: int) -> None:
    layouts = spread_rows(batch, FRAME)
    assert sum(layout.rows for layout in layouts) == batch
    assert not any(layout.bank for layout in layouts)
    dense = sum(layout.rows for layout in layouts if layout.dense)
    assert 0.35 <= dense / batch <= 0.45
    windows = {replace(layout, rows=1) for layout in layouts if not layout.dense}
    assert windows == {Layout(1), Layout(1, sink=False), Layout(1, cut=True), Layout(1, long=True)}


def test_rows_have_a_bank_only_on_request() -> None:
    layouts = spread_rows(24, FRAME, bank_rows=True)
    assert sum(layout.rows for layout in layouts) == 24
    assert sum(layout.rows for layout in layouts if layout.bank) == 12
