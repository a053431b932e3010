"""The rollouts of distillation: the model with the memories of inference, and the windows of its judges."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from recap.admission.base import retain_top
from recap.attention.context import BlockContext
from recap.backbones.wan.model import CausalWan, TextConditioning
from recap.backbones.wan.schedule import clean_estimate, model_time, renoise, warp
from recap.backbones.wan.spec import EMBEDDED, WanSpec
from recap.contracts import Admission, Context, MemoryPolicy
from recap.errors import refuse
from recap.memory.recap import RecapConfig
from recap.memory.sink import NoMemoryConfig, SinkConfig
from recap.types import Block, Candidates
from training.clips import World
from training.teacher_forcing import DENSE_FRAMES, Layout

LEAST_BATCH = 4
"""There are four windows of rollouts."""


class Rollout(NamedTuple):
    """The blocks of a generator and their inputs."""

    clean: Tensor  # B blocks F C rows columns
    inputs: Tensor  # B blocks steps F C rows columns: the noisy latents of every step
    text: Tensor  # B blocks L text_dim
    score: Tensor  # B blocks N/blocks
    counts: Tensor  # B blocks: 0 for a block whose past is not among these blocks, else 1

    def rows(self, chosen: Tensor) -> Rollout:
        return Rollout(*(part[chosen] for part in self))


class FixedScores(Admission):
    """An admission with precomputed scores, so that the banks of training and of a rollout are equal."""

    def __init__(self, spec: WanSpec, score: Tensor) -> None:
        self._grid = spec.grid
        self._score = score

    def propose(self, block: Block, pixels: Tensor) -> Candidates:
        frames = range(block.first_frame, block.first_frame + block.num_frames)
        axes = (torch.tensor(list(frames)), *(torch.arange(side) for side in self._grid))
        source = torch.cartesian_prod(*axes).to(self._score.device)
        size = self._grid[0] * self._grid[1]
        own = slice(block.first_frame * size, (block.first_frame + block.num_frames) * size)
        return Candidates(source.expand(len(self._score), -1, -1), self._score[:, own])

    def retain(self, pool: Candidates, capacity: int) -> Tensor:
        return retain_top(pool, capacity)


def rollout_layouts(batch: int, frame_tokens: int, *, bank_rows: bool = False) -> tuple[Layout, ...]:
    """Return the memory of each row of a rollout: most have a sink, others have none, a cut, or all of their past.

    With `bank_rows` half of them have a bank, to measure what training with one adds.
    """
    if bank_rows:
        cut, bare = max(1, batch // 6), max(1, batch // 6)
        banked = (batch - cut - bare + 1) // 2
        return (
            Layout(banked, bank=frame_tokens),
            Layout(batch - cut - bare - banked),
            Layout(bare, sink=False),
            Layout(cut, cut=True, bank=frame_tokens),
        )
    part = max(1, batch // 5)
    return (
        Layout(batch - 3 * part),
        Layout(part, sink=False),
        Layout(part, cut=True),
        Layout(part, dense=True),
    )


def build_policy(spec: WanSpec, layout: Layout, score: Tensor) -> MemoryPolicy:
    """Build the memory of inference that has the windows of `layout`."""

    def admission() -> Admission:
        return FixedScores(spec, score)

    if layout.dense:
        spec = replace(spec, window_frames=DENSE_FRAMES)
    sizes = spec.backbone_spec()
    if not layout.sink:
        return NoMemoryConfig().build(sizes, admission)
    if not layout.bank:
        return SinkConfig().build(sizes, admission)
    frames = layout.bank / sizes.frame_tokens
    return RecapConfig(reinforcement=1.0, capacity_frames=frames).build(sizes, admission)


def judged_layouts(layouts: tuple[Layout, ...], alone: float) -> tuple[Layout, ...]:
    """Return the windows of teacher and fake score: of layouts with sink and prior, a share lose the prior.

    A judge that sees a degraded past continues from it, so slow drift is never corrected. A judge that sees only the
    first frame must find the block likely by itself.
    """
    judged: list[Layout] = []
    for layout in layouts:
        without = int(alone * layout.rows) if layout.sink and not layout.cut else 0
        judged += [replace(layout, rows=layout.rows - without), Layout(without, cut=True)]
    return tuple(layout for layout in judged if layout.rows)


class LongRollout:
    """Videos of prompts, generated block by block as at inference, a few blocks at a time.

    `text` B blocks L text_dim and `score` B blocks N/blocks, by which the bank selects tokens, cover as many blocks
    as the rollout may have.
    """

    def __init__(self, model: CausalWan, text: Tensor, score: Tensor, layout: Layout) -> None:
        self._model, self._layout = model, layout
        self._text, self._score = text, score
        self._policy = build_policy(model.spec, layout, score.flatten(1))
        self._length = 0
        self._opening: tuple[Tensor, Tensor] | None = None

    @property
    def length(self) -> int:
        return self._length

    @torch.no_grad()
    def advance(self, blocks: int) -> Rollout:
        """Generate more blocks; return the first block of the video and the last `blocks` - 1."""
        begins = self._opening is None
        made = [self._generate() for _ in range(blocks - (not begins))]
        if self._opening is None:
            self._opening = made[0]
        parts = made if begins else [self._opening, *made]
        clean, inputs = (torch.stack(tensors, dim=1) for tensors in zip(*parts, strict=True))
        chosen = torch.tensor([0, *range(self._length - blocks + 1, self._length)], device=clean.device)
        counts = torch.ones(clean.shape[:2], device=clean.device)
        counts[:, 1] = float(begins)
        return Rollout(clean, inputs, self._text[:, chosen], self._score[:, chosen], counts)

    def _generate(self) -> tuple[Tensor, Tensor]:
        """Generate the next block; return it and the noisy latents of its steps."""
        model, index, device = self._model, self._length, self._text.device
        spec, rows = model.spec, len(self._text)
        shape = (rows, spec.frames_per_block, spec.in_channels, *spec.latent_size)
        sigmas = warp(spec.steps, spec.shift)
        block = Block(index, index * spec.frames_per_block, spec.frames_per_block, ("",) * rows)
        if self._layout.cut:
            self._policy.clear_prior()
        prompt = model.condition(self._text[:, index])
        context = BlockContext(self._policy, self._policy.begin(block))
        noisy = torch.randn(shape, device=device)
        inputs = [noisy]
        for sigma, following in zip(sigmas, (*sigmas[1:], None), strict=True):
            estimate = clean_estimate(noisy, model(noisy, model_time(sigma), prompt, context), sigma)
            if following is not None:
                noisy = renoise(estimate, torch.randn(shape, device=device), following)
                inputs.append(noisy)
        model(estimate, 0.0, prompt, context.clean_pass())
        self._policy.commit(block, estimate)
        self._length += 1
        return estimate, torch.stack(inputs, dim=1)


class Drawing(Protocol):
    """The options of a run that shape its rollouts."""

    @property
    def minutes(self) -> float: ...
    @property
    def batch(self) -> int: ...
    @property
    def num_captions(self) -> int: ...
    @property
    def blocks(self) -> int: ...  # that one pass sees: the opening and the last ones
    @property
    def longest(self) -> int: ...  # blocks; a rollout that is begun continues from draw to draw
    @property
    def ending(self) -> float: ...  # the chance that it ends after a draw instead
    @property
    def steady(self) -> float: ...  # how many keep the caption of their opening for good
    @property
    def uses(self) -> int: ...  # iterations that one draw feeds, each with rows of its own


class Draws:
    """Rollouts of all layouts, generated for several iterations at once: a wide draw takes no longer."""

    def __init__(
        self,
        model: CausalWan,
        text: Callable[[Tensor], Tensor],
        captions: Tensor,
        layouts: tuple[Layout, ...],
        options: Drawing,
    ) -> None:
        self._model, self._text, self._captions = model, text, captions
        self._layouts, self._options = layouts, options
        self._live: list[LongRollout | None] = [None for _ in layouts]

    def next(self) -> list[Rollout]:
        """Generate rollouts for several iterations; each layout's continues its last one, or begins."""
        o = self._options
        shares = []
        for index, layout in enumerate(self._layouts):
            live = self._live[index] or self._begin(layout)
            drawn = live.advance(o.blocks)
            # One pass must see all of a dense window, so such a rollout is as long as the compared blocks.
            longest = o.blocks if layout.dense else o.longest
            ends = bool(torch.rand(()) < o.ending) or live.length + o.blocks - 1 > longest
            self._live[index] = None if ends else live
            order = torch.arange(layout.rows * o.uses, device=drawn.clean.device).unflatten(0, (o.uses, -1))
            shares.append([drawn.rows(rows) for rows in order])
        # Every iteration gets rows of every layout, in the order of the layouts.
        return [
            Rollout(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))
            for parts in zip(*shares, strict=True)
        ]

    def _begin(self, layout: Layout) -> LongRollout:
        num, length, spec = layout.rows * self._options.uses, self._options.longest, self._model.spec
        rows = torch.randint(len(self._captions), (num,))
        words = self._captions[rows.to(self._captions.device)]
        # The captions of a clip are read forwards and backwards over the length of the rollout.
        last = words.shape[1] - 1
        words = words[:, [last - abs(last - block % (2 * last)) for block in range(length)]]
        kept = torch.rand(num, 1, 1, device=words.device) < self._options.steady
        text = self._text(torch.where(kept, words[:, :1], words))
        block_tokens = spec.grid[0] * spec.grid[1] * spec.frames_per_block
        score = torch.rand(num, length, block_tokens, device=self._model.device)
        return LongRollout(self._model, text.detach(), score, layout)


def check_drawing(options: Drawing) -> None:
    """Refuse options from which no rollouts can be drawn, before any model is loaded."""
    most = DENSE_FRAMES // EMBEDDED.frames_per_block
    if not 2 <= options.blocks <= most:
        limit = f"must be 2 to {most}, whose past one pass sees"
        raise refuse("--blocks", options.blocks, limit, f"{most} is usual")
    if options.batch < LEAST_BATCH:
        limit = f"must be at least {LEAST_BATCH}, a row for every window"
        raise refuse("--batch", options.batch, limit, "16 is usual")
    # These comparisons refuse nan, too.
    if not 0 < options.minutes < math.inf:
        raise refuse("--minutes", options.minutes, "must be above 0", "9 is usual")
    for field, usual in (("uses", 8), ("num_captions", 1920)):
        if (count := getattr(options, field)) < 1:
            raise refuse(f"--{field.replace('_', '-')}", count, "must be at least 1", f"{usual} is usual")
    for field, usual in (("ending", 0.15), ("steady", 0.5)):
        if not 0 <= (share := getattr(options, field)) <= 1:
            raise refuse(f"--{field}", share, "must be 0 to 1", f"{usual} is usual")


def draw_captions(world: World, count: int) -> Tensor:
    """Return captions N blocks L of clips; their pictures are not used."""
    chunk = min(24, count)
    made: list[Tensor] = [world(chunk, seed).words for seed in range(count // chunk)]
    return torch.cat(made)


class HalvedWan(CausalWan):
    """A copy of a model in bf16 that takes and returns what the model does: on a CPU it takes half the time."""

    def forward(
        self, latents: Tensor, timestep: float | Tensor, conditioning: TextConditioning, context: Context
    ) -> Tensor:
        return super().forward(latents.to(self.dtype), timestep, conditioning, context).float()

    @torch.no_grad()
    def follow(self, model: CausalWan) -> None:
        """Take over the weights of a model."""
        torch._foreach_copy_(list(self.parameters()), list(model.parameters()))


def halve(model: CausalWan) -> HalvedWan:
    """Make a copy in bf16."""
    made = HalvedWan(model.spec).to(model.device, torch.bfloat16).requires_grad_(False)
    made.follow(model)
    return made


def share_weights(model: CausalWan) -> CausalWan:
    """Make a model of the same storage, to run block by block what is compiled for whole clips."""
    runner = CausalWan(model.spec).to(model.device)
    runner.load_state_dict(model.state_dict(), assign=True)
    return runner.requires_grad_(False)
