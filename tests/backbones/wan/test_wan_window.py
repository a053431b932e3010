"""Ten blocks through the real window against a slow, transparent writing of it that keeps every raw token."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from wan_fakes import noise_of, random_model, turn

from recap.attention.context import BlockContext
from recap.backbones.wan.backbone import WanBackbone
from recap.backbones.wan.spec import UNTRAINED
from recap.memory.base import WindowMemory
from recap.memory.window import Window
from recap.types import Block, Role, Segment, frame_positions

BLOCKS = 10


class SlowPast:
    """Every layer's raw keys and values of every frame ever finished, and a softmax written out."""

    def __init__(self, spec, sink_frames: int) -> None:
        self.spec, self.sink_frames = spec, sink_frames
        self.frames: list[dict[int, tuple[Tensor, Tensor]]] = [{} for _ in range(spec.layers)]

    def seen(self, block: int) -> list[int]:
        """Frames before a block that its queries may see: the sink, and what else the window has room for."""
        spec = self.spec
        past = list(range(block * spec.frames_per_block))
        sink, rest = past[: self.sink_frames], past[self.sink_frames :]
        room = spec.window_frames - spec.frames_per_block - len(sink)
        return sink + rest[max(0, len(rest) - room) :]

    def phase(self, block: int, frame: int) -> int:
        """Absolute, or counted in the window: sink from 0, the block behind a full window, the rest before it."""
        spec, first = self.spec, block * self.spec.frames_per_block
        if spec.phases == "absolute" or frame < self.sink_frames:
            return frame
        return min(first, spec.window_frames - spec.frames_per_block) - (first - frame)


class SlowContext:
    def __init__(self, past: SlowPast, block: int, *, settling: bool = False) -> None:
        self.past, self.block, self.is_settling = past, block, settling

    @property
    def own_frames(self) -> range:
        per = self.past.spec.frames_per_block
        return range(self.block * per, (self.block + 1) * per)

    @property
    def phases(self) -> Tensor:
        first = self.own_frames[0]
        spec = self.past.spec
        start = first if spec.phases == "absolute" else min(first, spec.window_frames - spec.frames_per_block)
        return torch.arange(start, start + spec.frames_per_block, dtype=torch.float64)

    def positions(self, grid: tuple[int, int], device: torch.device) -> Tensor:
        return frame_positions(self.phases, grid)

    def attend(self, layer: int, query: Tensor, own: list[Segment]) -> Tensor:
        (current,) = own
        assert current.role is Role.CURRENT
        size = self.past.spec.frame_tokens
        store = self.past.frames[layer]
        keys, values = [turn(current.keys, current.positions)], [current.values]
        for frame in self.past.seen(self.block):
            at = frame_positions(torch.tensor([self.past.phase(self.block, frame)]), self.past.spec.grid)
            keys.append(turn(store[frame][0], at))
            values.append(store[frame][1])
        if self.is_settling:
            for number, frame in enumerate(self.own_frames):
                mine = slice(number * size, (number + 1) * size)
                store[frame] = (current.keys[:, mine].clone(), current.values[:, mine].clone())
        q, k, v = turn(query, current.positions), torch.cat(keys, 1), torch.cat(values, 1)
        logits = torch.einsum("bnhd,bmhd->bhnm", q, k) / q.shape[-1] ** 0.5
        return torch.einsum("bhnm,bmhd->bnhd", logits.softmax(-1), v)


@pytest.mark.parametrize("phases", ["window", "absolute"])
@pytest.mark.parametrize(
    ("window", "sink", "length", "steps"),
    [
        *((window, sink, 3, UNTRAINED.steps) for window, sink in ((6, 0), (6, 1), (12, 3), (7, 0), (7, 1))),
        (6, 1, 1, (1000, 500)),
        (5, 2, 1, (1000,)),
        (6, 0, 2, (1000, 900, 3)),
    ],
)
def test_ten_blocks_equal_the_slow_reference(
    window: int, sink: int, length: int, steps: tuple[int, ...], phases: str
) -> None:
    wan = replace(
        UNTRAINED, layers=2, window_frames=window, phases=phases, frames_per_block=length, steps=steps
    )
    model = random_model(wan)
    words = torch.randn(1, wan.text_len, wan.text_dim, dtype=torch.float64)
    backbone = WanBackbone(model, lambda _: words, lambda: None)  # type: ignore[arg-type, return-value]
    conditioning = backbone.condition(("",))
    past = SlowPast(backbone.spec, sink)
    policy = WindowMemory(Window(backbone.spec, sink_frames=sink))
    for index in range(BLOCKS):
        block = Block(index, length * index, length, ("",))
        context = BlockContext(policy, policy.begin(block))
        fast, slow = (
            backbone.denoise(noise_of(index, dtype=torch.float64, frames=length), conditioning, each)
            for each in (context, SlowContext(past, index))
        )
        torch.testing.assert_close(fast, slow, atol=1e-9, rtol=1e-9)
        backbone.settle(fast, conditioning, context.clean_pass())
        backbone.settle(slow, conditioning, SlowContext(past, index, settling=True))
        policy.commit(block, torch.zeros(0))


def test_the_memory_holds_the_clean_pass_and_not_the_noisy_steps() -> None:
    wan = replace(UNTRAINED, layers=2)
    model = random_model(wan)
    backbone = WanBackbone(model, lambda _: torch.zeros(1, 16, 32), lambda: None)  # type: ignore[arg-type, return-value]
    conditioning = backbone.condition(("",))
    policy, past = WindowMemory(Window(backbone.spec)), SlowPast(backbone.spec, 0)
    block = Block(0, 0, 3, ("",))
    context = BlockContext(policy, policy.begin(block))
    latents = backbone.denoise(noise_of(0, dtype=torch.float64), conditioning, context)
    model(latents, 625.0, conditioning, SlowContext(past, 0, settling=True))
    noisy = torch.cat([past.frames[1][frame][0] for frame in range(3)], dim=1)
    model(latents, 0.0, conditioning, SlowContext(past, 0, settling=True))
    clean = torch.cat([past.frames[1][frame][0] for frame in range(3)], dim=1)
    backbone.settle(latents, conditioning, context.clean_pass())
    policy.commit(block, torch.zeros(0))
    stored = policy.state()["prior.keys"][1]
    torch.testing.assert_close(stored, clean, atol=1e-12, rtol=0)
    assert (stored - noisy).abs().max() > 1e-3
