"""THE loop: plan, draw, settle, decode, commit; a generator of finished blocks.

It knows no concrete backbone and no concrete memory. Noise of block n depends on (seed, n) alone, so a
longer plan, a resumed run and another batch draw the same block from the same noise.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from recap.attention.context import BlockContext
from recap.contracts import Backbone, Decoder, MemoryPolicy, Noise, Recorder
from recap.errors import refuse
from recap.plan import Plan
from recap.types import BackboneSpec, Block, GeneratedBlock


def silent(_: GeneratedBlock) -> None:
    """The recorder that records nothing."""


def rollout(
    backbone: Backbone,
    policy: MemoryPolicy,
    plan: Plan,
    *,
    seeds: Sequence[int],
    decoder: Decoder | None = None,
    start: int = 0,
    recorder: Recorder = silent,
) -> Iterator[GeneratedBlock]:
    """Yield the plan's blocks from `start` on, one seed per row.

    To continue a stopped rollout, hand in policy and decoder with their states loaded and the next index.
    """
    if len(seeds) != plan.num_rows:
        raise refuse("seeds", list(seeds), f"the plan has {plan.num_rows} rows", "give one seed per row")
    decoder = decoder if decoder is not None else backbone.decoder()
    prompts: tuple[str, ...] | None = None
    given: Any = None
    for block in plan.blocks[start:]:
        if block.prompts != prompts:
            prompts, given = block.prompts, backbone.condition(block.prompts)
        made = _draw(backbone, policy, decoder, block, given, block_noise(backbone.spec, seeds, block.index))
        recorder(made)
        yield made


@torch.no_grad()
def _draw(
    backbone: Backbone, policy: MemoryPolicy, decoder: Decoder, block: Block, given: Any, noise: Noise
) -> GeneratedBlock:
    if block.clears_prior:
        policy.clear_prior()
    context = BlockContext(policy, policy.begin(block))
    latents = backbone.denoise(noise, given, context)
    shares = context.shares()  # of the denoising steps; the clean pass draws nothing
    backbone.settle(latents, given, context.settling())
    pixels = decoder.decode(latents)
    memory = policy.commit(block, pixels)
    return GeneratedBlock(block, latents, pixels, memory, shares)


def block_noise(spec: BackboneSpec, seeds: Sequence[int], block: int) -> Noise:
    """The noise of one block, row by row from (seed, block); drawn on the CPU so that every device agrees."""
    generators = [torch.Generator().manual_seed(_mix(seed, block)) for seed in seeds]
    shape = (spec.frames_per_block, spec.latent_channels, *spec.latent_size)

    def draw() -> Tensor:
        return torch.stack([torch.randn(shape, generator=g) for g in generators])

    return draw


def _mix(seed: int, block: int) -> int:
    """63 bits from (seed, block); neighbouring seeds and blocks give unrelated streams."""
    digest = hashlib.sha256(f"{seed}:{block}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
