"""THE loop: plan, draw, settle, decode, commit; a generator of finished blocks.

It knows no concrete backbone and no concrete memory. Noise of block n depends on (seed, n) alone, so a
longer plan, a resumed run and another batch draw the same block from the same noise. It can also come from outside.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import torch
from torch import Tensor

from recap.attention.context import BlockContext
from recap.contracts import (
    Aside,
    Backbone,
    Decoder,
    MemoryPolicy,
    Noise,
    NoiseSource,
    Recorder,
)
from recap.errors import refuse
from recap.plan import Plan
from recap.types import BackboneSpec, Block, GeneratedBlock, Past, seeded


def silent(_: GeneratedBlock) -> None:
    """The recorder that records nothing."""


def at_once(work: Callable[[], None]) -> Callable[[], None]:
    """Nothing runs beside anything else."""
    work()
    return lambda: None


def rollout(
    backbone: Backbone,
    policy: MemoryPolicy,
    plan: Plan,
    *,
    seeds: Sequence[int],
    decoder: Decoder | None = None,
    start: int = 0,
    recorder: Recorder = silent,
    aside: Aside = at_once,
    told: Tensor | None = None,
    recent: Sequence[Tensor] = (),
    opening: Tensor | None = None,
    noise: NoiseSource | None = None,
) -> Generator[GeneratedBlock, str | None, None]:
    """Yield the plan's blocks from `start` on, one seed per row.

    `told` are latents B F C rows columns of the first frames: blocks within them are not drawn but taken from
    there, and remembered like any other. To continue a stopped rollout, hand in policy and decoder with their
    states loaded, the next index, as `recent` the latents of the last blocks (see `reach`), and as `opening` those
    of the video's first frame.
    `send(prompt)` draws the next block under another prompt, which then stays until the plan's next shot.
    `aside` may run a memory's look at the pixels beside the clean pass; results are the same.
    `noise` takes the place of the seeds' own, to draw from what another program drew (see `NoiseSource`).
    """
    if len(seeds) != plan.num_rows:
        raise refuse("seeds", list(seeds), f"the plan has {plan.num_rows} rows", "give one seed per row")
    decoder = decoder if decoder is not None else backbone.decoder()
    past = list(zip(plan.blocks[start - len(recent) : start], recent, strict=True))
    prompts: tuple[str, ...] | None = None
    given: Any = None
    planned = sent = None
    for block in plan.blocks[start:]:
        if block.prompts != planned:
            planned, sent = block.prompts, None
        if sent is not None:
            block = replace(block, prompts=(sent,) * plan.num_rows)
        if block.prompts != prompts:
            prompts, given = block.prompts, backbone.condition(block.prompts)
        if block.rereads_prior:
            _reread(backbone, policy, past, block, given)
        first = policy.noise_block(block)
        if noise is None:
            draws = block_noise(backbone.spec, seeds, block, first)
        else:
            start_of = block if first == block.index else plan.blocks[first]
            draws = _from_outside(noise, backbone.spec, block, start_of)
        known = None
        if told is not None and block.end_frame <= told.shape[1]:
            known = told[:, block.first_frame : block.end_frame]
        behind = Past(opening, _recent(past, block, backbone.spec))
        made = _draw(backbone, policy, decoder, block, given, draws, known, aside, behind)
        past = [*past, (block, made.latents)][-reach(backbone.spec) :]
        opening = made.latents[:, :1] if opening is None else opening
        recorder(made)
        sent = (yield made) or sent


def reach(spec: BackboneSpec) -> int:
    """How many blocks before the current one a window can hold frames of."""
    return -(-(spec.window_frames - spec.frames_per_block) // spec.frames_per_block)


def _recent(past: Sequence[tuple[Block, Tensor]], block: Block, spec: BackboneSpec) -> Tensor | None:
    """The newest latents since the last cut, for a backbone that reads them; others have them in their memory."""
    if not spec.carries_history or block.clears_prior or not past:
        return None
    since = max((i for i, (earlier, _) in enumerate(past) if earlier.clears_prior), default=0)
    return torch.cat([latents for _, latents in past[since:]], dim=1)


@torch.no_grad()
def _reread(
    backbone: Backbone, policy: MemoryPolicy, past: Sequence[tuple[Block, Tensor]], block: Block, given: Any
) -> None:
    """Make the prior anew under another prompt, block by block; sink and bank stay.

    Only a sink whose own block is still that near is made anew too, since it is part of that block.
    """
    if backbone.spec.carries_history:  # read anew at every step, under the prompt of that step
        return
    if len(past) < min(block.index, reach(backbone.spec)):
        limit = f"block {block.index} rereads the prior and needs the latents before it"
        raise refuse("recent", len(past), limit, "pass the latents of the last blocks")
    policy.clear_prior()
    for earlier, latents in past:
        context = BlockContext(policy, policy.begin(earlier))
        backbone.settle(latents, given, context.settling())
        policy.reread(earlier)


@torch.no_grad()
def _draw(
    backbone: Backbone,
    policy: MemoryPolicy,
    decoder: Decoder,
    block: Block,
    given: Any,
    noise: Noise,
    told: Tensor | None,
    aside: Aside,
    past: Past,
) -> GeneratedBlock:
    if block.clears_prior:
        policy.clear_prior()
    context = BlockContext(policy, policy.begin(block), past=past)
    latents = backbone.denoise(noise, given, context) if told is None else told
    # Of the denoising steps; the clean pass draws nothing.
    shares, by_stage = context.shares(), context.stage_shares()
    pixels = decoder.decode(latents)
    ready = aside(lambda: policy.look(block, pixels))
    backbone.settle(latents, given, context.settling())
    ready()
    memory = policy.commit(block, pixels)
    starts = backbone.spec.first_pictures(block.first_frame, block.num_frames)
    return GeneratedBlock(block, latents, pixels, memory, shares, by_stage, starts)


def block_noise(spec: BackboneSpec, seeds: Sequence[int], block: Block, first: int | None = None) -> Noise:
    """The noise of one block, row by row from (seed, block); drawn on the CPU so that every device agrees.

    With `first` the first draw is that of the block of this index, as some memories want it.
    """
    shape = (block.num_frames, spec.latent_channels, *spec.latent_size)
    own = [seeded(seed, block.index) for seed in seeds]
    other = None if first is None or first == block.index else replace(block, index=first)
    start = [] if other is None else [block_noise(spec, seeds, other)()]

    def draw() -> Tensor:
        fresh = torch.stack([torch.randn(shape, generator=g) for g in own])
        # The block's own first draw is made in any case: later steps then draw what they always do.
        return start.pop() if start else fresh

    return draw


def _from_outside(source: NoiseSource, spec: BackboneSpec, block: Block, first: Block) -> Noise:
    """The noise of one block as somebody else drew it; its first draw is that of the block `first`."""
    shape = (len(block.prompts), block.num_frames, spec.latent_channels, *spec.latent_size)
    draws = count()

    def draw() -> Tensor:
        index = next(draws)
        asked = block if index else first
        found = source(asked, index)
        if not isinstance(found, Tensor) or tuple(found.shape) != shape or not found.is_floating_point():
            about = (
                f"{found.dtype} {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
            )
            limit = f"draw {index} of block {asked.index} must be floats of shape {shape}"
            raise refuse("noise", about, limit, "return rows, frames, channels, rows and columns of latents")
        return found.detach().cpu()  # where the seeds' own noise is drawn too

    return draw
