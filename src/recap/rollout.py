"""This module is THE loop: it plans, denoises, decodes, settles and commits, and yields finished blocks.

It knows no concrete backbone and no concrete memory. Noise of block n depends on (seed, n) alone (see
recap.backbones.noise), so a longer plan, a resumed run and another batch generate the same block from the same noise.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from recap.attention.context import OWN_KERNELS, BlockContext, ContextKernels
from recap.backbones.noise import (
    PLAIN,
    NoiseSource,
    Sampling,
    block_noise,
    blur_opening,
    noise_from_outside,
    opposed,
)
from recap.contracts import Aside, Backbone, Decoder, MemoryPolicy, Noise, State
from recap.errors import refuse
from recap.plan import Plan
from recap.types import BackboneSpec, Block, GeneratedBlock, MemoryTrace, Past, Role, Segment, Tokens


def at_once(work: Callable[[], None]) -> Callable[[], None]:
    """Do the work right away; there is nothing left to wait for."""
    work()
    return lambda: None


def unseen_pixels(spec: BackboneSpec, block: Block, latents: Tensor) -> Tensor:
    """Return the shape of a block's pixels, B T 3 Y X, in no storage: for a memory that does not look at them."""
    count = spec.num_pictures(block.end_frame) - spec.num_pictures(block.first_frame)
    return latents.new_full((), math.nan).expand(latents.shape[0], count, 3, *spec.picture_size)


class BlockRun:
    """Conducts one block between a memory and whatever runs the model: the order of calls is written down here only.

    Beginning it freezes the memory. `context` serves the denoising steps and `clean` the clean pass, which may come
    before or after the pixels are known; `commit` ends it, and the prior slides.
    """

    def __init__(
        self,
        policy: MemoryPolicy,
        spec: BackboneSpec,
        block: Block,
        kernels: ContextKernels = OWN_KERNELS,
        past: Past | None = None,
    ) -> None:
        if block.clears_prior:
            policy.clear_prior()
        self._policy = policy
        self._spec = spec
        self.block = block
        self.context = BlockContext(policy, policy.begin(block), kernels, past)
        self.clean = self.context.clean_pass()

    def look(self, pixels: Tensor, aside: Aside = at_once) -> Callable[[], None]:
        """Start what the memory can do with the pixels alone; returns a function that waits for it."""
        return aside(lambda: self._policy.look(self.block, pixels))

    def commit(self, latents: Tensor, pixels: Tensor) -> GeneratedBlock:
        """End the block. Shares are of the denoising steps: the clean pass generates nothing."""
        shares = self.context.shares()
        if Role.SINK in shares:
            self._policy.take_sink_share(shares[Role.SINK])
        return GeneratedBlock(
            self.block,
            latents,
            pixels,
            self._policy.commit(self.block, pixels),
            shares,
            self.context.stage_shares(),
            self._spec.first_pictures(self.block.first_frame, self.block.num_frames),
        )


@dataclass(frozen=True, slots=True)
class Resume:
    """Says what a rollout continues from; by default nothing. Latents are B F C rows columns.

    A stopped rollout also needs its policy and decoder, with their states loaded.
    """

    block: int = 0  # index of the first block to generate
    opening_latents: Tensor | None = None  # first frames of the video: blocks within them are taken from here
    recent_latents: Sequence[Tensor] = ()  # of the last blocks before `block`, oldest first; see `reach`
    first_latent: Tensor | None = None  # of the video's first frame; needed after block 0
    # Where every block was generated before, its latents: memory and decoder are then made again as they were.
    latents_of: Callable[[Block], Tensor] | None = None


def rollout(
    backbone: Backbone,
    policy: MemoryPolicy,
    plan: Plan,
    *,
    seeds: Sequence[int],
    decoder: Decoder | None = None,
    resume: Resume | None = None,
    aside: Aside = at_once,
    noise: NoiseSource | None = None,
    sampling: Sampling = PLAIN,
    kernels: ContextKernels = OWN_KERNELS,
) -> Rollout:
    """Generate the plan's blocks one after the other, one seed per row of the batch.

    `resume` continues a stopped rollout, or begins from given frames, which are remembered like any other.
    `aside` may run a memory's look at the pixels next to the clean pass, or its choice of what to keep next to the
    decoder; results are the same.
    `noise` takes the place of the seeds' own, to start from what another program drew (see `NoiseSource`).
    `sampling` has options that bring motion from elsewhere than the memory.
    `kernels` do the arithmetic of attention.
    """
    if len(seeds) != plan.num_rows:
        raise refuse("seeds", list(seeds), f"the plan has {plan.num_rows} rows", "give one seed per row")
    for seed in seeds:
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise refuse("seeds", seed, "must be whole numbers", "0 is as good as any")
    resume = resume or Resume()
    start, most = resume.block, len(plan.blocks)
    if isinstance(start, bool) or not isinstance(start, int) or not 0 <= start <= most:
        raise refuse("block", start, f"the plan has blocks 0 to {most - 1}", "0 starts with the first")
    before = plan.blocks[resume.block - len(resume.recent_latents) : resume.block]
    conductor = Conductor(
        backbone,
        policy,
        seeds=seeds,
        decoder=decoder if decoder is not None else backbone.decoder(),
        aside=aside,
        noise=noise,
        sampling=sampling,
        first_latent=resume.first_latent,
        past=list(zip(before, resume.recent_latents, strict=True)),
        kernels=kernels,
    )
    known = resume.opening_latents
    latents_of = None if policy.needs_steps else resume.latents_of

    def find_known(block: Block) -> Tensor | None:
        if latents_of is not None:
            return latents_of(block)
        if known is not None and block.end_frame <= known.shape[1]:
            return known[:, block.first_frame : block.end_frame]
        return None

    return Rollout(conductor, plan, start, find_known)


class Conductor:
    """Generates the blocks of one video in order, and keeps what later blocks need of earlier ones."""

    def __init__(
        self,
        backbone: Backbone,
        policy: MemoryPolicy,
        *,
        seeds: Sequence[int],
        decoder: Decoder,
        aside: Aside = at_once,
        noise: NoiseSource | None = None,
        sampling: Sampling = PLAIN,
        first_latent: Tensor | None = None,
        past: Sequence[tuple[Block, Tensor]] = (),
        kernels: ContextKernels = OWN_KERNELS,
    ) -> None:
        self.backbone = backbone
        self.policy = policy
        self._seeds = seeds
        self.decoder = decoder
        self.aside = aside
        self._noise = noise
        self.sampling = sampling
        self._first = first_latent
        # No more blocks than a window can have frames of.
        self._past = deque(past, maxlen=reach(backbone.spec))
        self.kernels = kernels
        # The prompts of the last block, with what the backbone made of them.
        self._conditioned: tuple[tuple[str, ...], Any] = ((), None)

    def condition(self, prompts: tuple[str, ...]) -> Any:
        """Return the conditioning of one prompt per row; a prompt that the backbone refuses changes nothing."""
        if prompts != self._conditioned[0]:
            self._conditioned = prompts, self.backbone.condition(prompts)
        return self._conditioned[1]

    def run(self, block: Block, latents: Tensor | None = None, *, again: bool = False) -> GeneratedBlock:
        """Generate the next block; one whose latents are known is only decoded and remembered.

        With `again` they were generated before: a memory that needs the denoising steps sees them once more.
        """
        conditioning = self.condition(block.prompts)
        if block.rereads_prior:
            self._reread(block, conditioning)
        made = self._run(block, conditioning, latents, again and self.policy.needs_steps)
        self.remember(block, made.latents)
        return made

    def remember(self, block: Block, latents: Tensor) -> None:
        """Keep what later blocks need of a finished one."""
        self._past.append((block, latents))
        self._first = latents[:, :1] if self._first is None else self._first

    @property
    def is_joinable(self) -> bool:
        """Tell whether its blocks can be rows of a batch: one row, and all that it reads is known at their start."""
        return (
            len(self._seeds) == 1 and not self.backbone.spec.carries_history and not self.policy.needs_queries
        )

    def begin(self, block: Block) -> tuple[Noise, Tensor]:
        """Let the memory begin a block that another conductor will run; returns its noise and its phases."""
        if block.rereads_prior:
            self._reread(block, self.condition(block.prompts))
        noise = self._noise_of(block)
        if block.clears_prior:
            self.policy.clear_prior()
        return noise, self.policy.begin(block)

    @torch.no_grad()
    def _run(self, block: Block, conditioning: Any, latents: Tensor | None, steps: bool) -> GeneratedBlock:
        backbone, policy = self.backbone, self.policy
        # A memory with a rule for the noise is asked before the block begins.
        noise = self._noise_of(block)
        past = Past(self._opening(), _since_cut(list(self._past), block, backbone.spec))
        run = BlockRun(policy, backbone.spec, block, self.kernels, past)
        if latents is None or steps:
            found = backbone.denoise(noise, conditioning, run.context)
            latents = found if latents is None else latents
        run.context.forget_rotated()
        if not policy.needs_pixels:
            # What it keeps does not wait for the pixels: it is chosen while they are decoded.
            backbone.settle(self._settled(block, latents), conditioning, run.clean)
            made: list[GeneratedBlock] = []
            unseen = unseen_pixels(backbone.spec, block, latents)
            wait = self.aside(lambda: made.append(run.commit(latents, unseen)))
            pixels = self.decoder.decode(latents)
            wait()
            return replace(made[0], pixels=pixels)
        pixels = self.decoder.decode(latents)
        wait = run.look(pixels, self.aside)
        backbone.settle(self._settled(block, latents), conditioning, run.clean)
        wait()
        return run.commit(latents, pixels)

    def _noise_of(self, block: Block) -> Noise:
        policy, spec = self.policy, self.backbone.spec
        first = policy.noise_block(block)
        if self._noise is None:
            drawn = block_noise(spec, self._seeds, block, first)
        else:
            drawn = noise_from_outside(self._noise, spec, block, first)
        return opposed(drawn, self.sampling.antiphase)

    def _settled(self, block: Block, latents: Tensor) -> Tensor:
        """Return what the clean pass of a block reads; with noise on the sink, its frames are not clean."""
        sink = min(max(self.policy.sink_frames - block.first_frame, 0), block.num_frames)
        return blur_opening(latents, sink, self.sampling.sink_noise, self._seeds, block.index)

    def _opening(self) -> Tensor | None:
        """Return the video's first frame, as a backbone that carries it in its sequence reads it."""
        if self._first is None:
            return None
        sink = min(self.policy.sink_frames, 1)
        return blur_opening(self._first, sink, self.sampling.sink_noise, self._seeds, 0)

    @torch.no_grad()
    def _reread(self, block: Block, conditioning: Any) -> None:
        """Make the prior again under another prompt, block by block; sink and bank stay.

        Only a sink whose own block is still that near is made again too, since it is part of that block.
        """
        policy, past, spec = self.policy, self._past, self.backbone.spec
        if spec.carries_history:
            # Its past is read again at every step, under the prompt of that step.
            return
        if len(past) < min(block.index, reach(spec)):
            limit = f"block {block.index} rereads the prior and needs the latents before it"
            raise refuse("recent_latents", len(past), limit, "pass the latents of the last blocks in Resume")
        policy.clear_prior()
        for earlier, latents in past:
            context = BlockContext(policy, policy.begin(earlier))
            self.backbone.settle(self._settled(earlier, latents), conditioning, context.clean_pass())
            policy.reread(earlier)


class _LoneBlock(MemoryPolicy):
    """Shows a block nothing but itself, and keeps the tokens of its clean pass."""

    def __init__(self) -> None:
        self.tokens: dict[int, Tokens] = {}

    def begin(self, block: Block) -> Tensor:
        return torch.arange(block.num_frames, dtype=torch.float64)

    def arrange(self, layer: int, own: list[Segment]) -> list[Segment]:
        return own

    def write(self, layer: int, tokens: Tokens) -> None:
        # A copy: a fast path hands out the same storage again and again.
        self.tokens[layer] = replace(tokens, keys=tokens.keys.clone(), values=tokens.values.clone())

    def commit(self, block: Block, pixels: Tensor) -> MemoryTrace:
        return MemoryTrace({})

    def clear_prior(self) -> None:
        """Do nothing: there is no prior."""

    def state(self) -> State:
        return {}

    def load_state(self, state: State) -> None:
        """Do nothing: there is no state."""


@torch.no_grad()
def read_alone(backbone: Backbone, latents: Tensor, prompts: tuple[str, ...]) -> tuple[Tensor, Tensor]:
    """Return the clean keys and values, L B N H D, unrotated, of one block B F C rows columns, seen by itself."""
    policy = _LoneBlock()
    run = BlockRun(policy, backbone.spec, Block(0, 0, latents.shape[1], prompts))
    backbone.settle(latents, backbone.condition(prompts), run.clean)
    layers = [policy.tokens[layer] for layer in range(backbone.spec.layers)]
    return torch.stack([each.keys for each in layers]), torch.stack([each.values for each in layers])


class Rollout(Iterator[GeneratedBlock]):
    """Yields the blocks of a plan, each generated when it is asked for; see `rollout`. An error ends it."""

    def __init__(
        self,
        conductor: Conductor,
        plan: Plan,
        start: int,
        find_known: Callable[[Block], Tensor | None],
    ) -> None:
        self._conductor, self._plan = conductor, plan
        self._find_known = find_known
        # The prompts of the plan's last block, and those that were sent, until the plan's next shot.
        self._planned: tuple[str, ...] | None = None
        self._sent: tuple[str, ...] | None = None
        self._left = iter(plan.blocks[start:])

    def __next__(self) -> GeneratedBlock:
        # No generator: with a method's it would be a reference cycle, and a rollout that is dropped would keep its
        # decoder, gigabytes and recordings, until garbage is collected.
        left, self._left = self._left, iter(())
        block = next(left)
        if self._planned is not None and block.prompts != self._planned:
            self._sent = None
        self._planned = block.prompts
        if self._sent is not None:
            block = replace(block, prompts=self._sent)
        made = self._conductor.run(block, self._find_known(block))
        self._left = left
        return made

    def send(self, prompt: str | None) -> GeneratedBlock:
        """Generate the next block under another prompt, which then stays until the plan's next shot.

        A prompt that the backbone refuses raises here and changes nothing: the rollout continues without it.
        """
        if prompt is not None:
            if not isinstance(prompt, str):
                raise refuse("prompt", prompt, "must be text", "None changes nothing")
            prompts = (prompt,) * self._plan.num_rows
            self._conductor.condition(prompts)
            self._sent = prompts
        return next(self)


def reach(spec: BackboneSpec) -> int:
    """Return how many blocks before the current one a window can have frames of."""
    return -(-(spec.window_frames - spec.frames_per_block) // spec.frames_per_block)


def _since_cut(past: Sequence[tuple[Block, Tensor]], block: Block, spec: BackboneSpec) -> Tensor | None:
    """Return the newest latents since the last cut, for a backbone that reads them; others have them in memory."""
    if not spec.carries_history or block.clears_prior or not past:
        return None
    since = max((i for i, (earlier, _) in enumerate(past) if earlier.clears_prior), default=0)
    return torch.cat([latents for _, latents in past[since:]], dim=1)
