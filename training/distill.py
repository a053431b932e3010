"""Distil the flow model to its few steps: distribution matching on its own rollouts, on a clock.

    python -m training.distill --minutes 9 --teacher DIR --autoencoder FILE --out DIR [--resume DIR]

A generator rolls out videos with the memories it will have at inference. Where its blocks, noised again,
look different to the teacher and to a second model that is kept trained on the generator's own videos (the
fake score), the difference of their clean estimates says which way the generator should move. Teacher, fake
and generator see the rollout as past, so mistakes that only a rollout makes are corrected too.

Writes what train_dit writes, and fake-1.safetensors ... so that a run can resume.
"""

from __future__ import annotations

import argparse
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from recap.attention.context import BlockContext
from recap.backbones.tiny.vocabulary import null_token_ids
from recap.backbones.wan.model import CausalWan
from recap.backbones.wan.schedule import clean_estimate, model_time, renoise, warp
from recap.backbones.wan.spec import EMBEDDED, WanSpec
from recap.contracts import Admission, MemoryPolicy, State
from recap.memory.recap import RecapConfig
from recap.memory.sink import NoMemoryConfig, SinkConfig
from recap.types import Block, Candidates
from training.clips import World, open_world
from training.optimisers import Clock, RunningMean
from training.records import Record, load_weights, save_weights
from training.sampling import write_samples
from training.teacher_forcing import ClipBatch, Layout, make_turns, predict_flow
from training.train_autoencoder import plain_settings
from training.train_dit import TextAndFlow, add_noise, compile_blocks, draw_sigma, load_model, save_model


@dataclass(frozen=True, slots=True)
class Options:
    """One run."""

    minutes: float
    teacher: Path
    autoencoder: Path
    out: Path
    resume: Path | None = None
    seed: int = 0
    batch: int = 16
    blocks: int = 7  # that one pass compares
    longest: int = (
        20  # blocks of a rollout: half are `blocks` long, the others up to this, compared at their end
    )
    generator_rate: float = 5e-5
    fake_rate: float = 1.5e-4
    fake_steps: int = 2  # updates of the fake score for each of the generator
    uses: int = 8  # iterations that one draw feeds, each with rows of its own: a wide draw takes no longer
    head_start: int = 20  # iterations in which only the fake score learns
    guidance: float = (
        2.5  # of the teacher: how far beyond its estimate without a prompt; 1 is the plain teacher
    )
    mean_decay: float = 0.99
    num_captions: int = 1920
    note_every_s: float = 20.0
    save_every_s: float = 120.0
    warmup_s: float = 8.0
    reserve_s: float = 35.0
    sample_blocks: int = 27
    compile: bool = True


class Rollout(NamedTuple):
    """What a generator drew, and what it drew it from."""

    clean: Tensor  # B blocks F C rows columns
    inputs: Tensor  # B blocks steps F C rows columns: the noisy latents of every step
    text: Tensor  # B blocks L text_dim
    score: Tensor  # B blocks N/blocks

    def ending(self, blocks: int) -> Rollout:
        """The opening, from which the sink is, and the last blocks, so many in all."""
        total = self.clean.shape[1]
        chosen = torch.tensor([0, *range(total - blocks + 1, total)], device=self.clean.device)
        return Rollout(*(part.index_select(1, chosen) for part in self))

    def rows(self, chosen: Tensor) -> Rollout:
        return Rollout(*(part[chosen] for part in self))


class GivenScores:
    """An admission with scores drawn beforehand: training's banks and a rollout's must hold the same."""

    def __init__(self, spec: WanSpec, score: Tensor) -> None:
        self._grid = spec.grid
        self._score = score

    def propose(self, block: Block, pixels: Tensor) -> Candidates:
        frames = range(block.first_frame, block.first_frame + block.num_frames)
        axes = (torch.tensor(list(frames)), *(torch.arange(side) for side in self._grid))
        source = torch.cartesian_prod(*axes).to(self._score.device)
        size = self._grid[0] * self._grid[1]
        mine = slice(block.first_frame * size, (block.first_frame + block.num_frames) * size)
        return Candidates(source.expand(len(self._score), -1, -1), self._score[:, mine])

    def retain(self, pool: Candidates, capacity: int) -> Tensor:
        return pool.score.topk(min(capacity, pool.count), dim=1).indices

    def state(self) -> State:
        return {}

    def load_state(self, state: State) -> None:
        """Nothing to load."""


def rollout_layouts(batch: int, frame_tokens: int) -> tuple[Layout, ...]:
    """How rows of a rollout remember: a third each with a bank and with a sink, the rest cut or sinkless."""
    cut, bare = max(1, batch // 6), max(1, batch // 6)
    banked = (batch - cut - bare + 1) // 2
    return (
        Layout(banked, bank=frame_tokens),
        Layout(batch - cut - bare - banked),
        Layout(bare, sink=False),
        Layout(cut, cut=True, bank=frame_tokens),
    )


def build_policy(spec: WanSpec, layout: Layout, score: Tensor) -> MemoryPolicy:
    """The memory of inference that lays windows out as `layout` does."""

    def admission() -> Admission:
        return GivenScores(spec, score)

    sizes = spec.backbone_spec()
    if not layout.sink:
        return NoMemoryConfig().build(sizes, admission)
    if not layout.bank:
        return SinkConfig().build(sizes, admission)
    frames = layout.bank / sizes.frame_tokens
    return RecapConfig(reinforcement=1.0, capacity_frames=frames).build(sizes, admission)


@torch.no_grad()
def roll_out(model: CausalWan, text: Tensor, score: Tensor, layout: Layout) -> Rollout:
    """Draw videos of prompts B blocks L text_dim block by block, as the backbone does at inference.

    `score` B blocks N/blocks decides whom the bank keeps.
    """
    spec = model.spec
    rows, blocks = text.shape[:2]
    shape = (rows, spec.frames_per_block, spec.in_channels, *spec.latent_size)
    sigmas = warp(spec.steps, spec.shift)
    policy = build_policy(spec, layout, score.flatten(1))
    clean, inputs = [], []
    for index in range(blocks):
        block = Block(index, index * spec.frames_per_block, spec.frames_per_block, ("",) * rows)
        if layout.cut:
            policy.clear_prior()
        given = model.condition(text[:, index])
        context = BlockContext(policy, policy.begin(block))
        noisy = torch.randn(shape, device=text.device)
        seen = [noisy]
        for sigma, following in zip(sigmas, (*sigmas[1:], None), strict=True):
            estimate = clean_estimate(noisy, model(noisy, model_time(sigma), given, context), sigma)
            if following is not None:
                noisy = renoise(estimate, torch.randn(shape, device=text.device), following)
                seen.append(noisy)
        model(estimate, 0.0, given, context.settling())
        policy.commit(block, estimate)
        clean.append(estimate)
        inputs.append(torch.stack(seen, dim=1))
    return Rollout(torch.stack(clean, dim=1), torch.stack(inputs, dim=1), text, score)


class Trainer:
    def __init__(self, options: Options, world: World, device: str, spec: WanSpec = EMBEDDED) -> None:
        self.options = options
        self.clock = Clock(options.minutes, reserve_s=options.reserve_s, warmup_s=options.warmup_s, floor=0.1)
        self.record = Record(options.out, {**plain_settings(asdict(options)), "spec": asdict(spec)})
        torch.manual_seed(options.seed)
        self.device, self.spec = device, spec
        self.teacher, self.fake, self.generator = (TextAndFlow(spec).to(device) for _ in range(3))
        for model in (self.teacher, self.fake, self.generator):
            load_model(model, options.teacher)
            model.text.requires_grad_(False)
        if options.resume is not None:
            load_model(self.generator, options.resume)
            self.fake.dit.load_state_dict(load_weights(options.resume / "fake.safetensors"))
        # Shares the generator's storage: its layers are compiled for whole clips, these roll out block by block.
        self.runner = CausalWan(spec).to(device)
        self.runner.load_state_dict(self.generator.dit.state_dict(), assign=True)
        self.runner.requires_grad_(False)
        self.mean = RunningMean(self.generator, options.mean_decay)
        self.optimisers = [
            torch.optim.AdamW(model.dit.parameters(), rate, betas=(0.0, 0.99), weight_decay=0.0)
            for model, rate in ((self.generator, options.generator_rate), (self.fake, options.fake_rate))
        ]
        self.turns = make_turns(spec, device)
        frame_tokens = spec.grid[0] * spec.grid[1]
        self.layouts = rollout_layouts(options.batch, frame_tokens)
        self.block_tokens = frame_tokens * spec.frames_per_block
        self.no_text = self.teacher.text(torch.tensor(null_token_ids(), device=device)).detach()
        self.captions = _captions(world, options.num_captions)
        self.sigmas = torch.tensor(warp(spec.steps, spec.shift), device=device)
        if options.compile:
            for model in (self.teacher, self.fake, self.generator):
                compile_blocks(model.dit)

    def autocast(self) -> AbstractContextManager[None]:
        return torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda")

    def run(self) -> None:
        """Distil until the clock says stop."""
        index, noted, saved = 0, self.clock.elapsed_s, self.clock.elapsed_s
        losses: list[Tensor] = []
        drawing_s = 0.0
        while not self.clock.finished:
            began = self.clock.elapsed_s
            draws, whole = self.draw()
            drawing_s += self.clock.elapsed_s - began
            for drawn in draws:
                rate = self.clock.apply(self.optimisers)
                losses.append(self.step(index, drawn, whole))
                index += 1
            if self.clock.elapsed_s - noted >= self.options.note_every_s:
                noted = self.clock.elapsed_s
                self._note(index, rate, losses, drawn, drawing_s)
                losses = []
            if self.clock.elapsed_s - saved >= self.options.save_every_s:
                saved = self.clock.elapsed_s
                self.save(samples=False)
        if losses:
            self._note(index, rate, losses, drawn, drawing_s)
        self.save(samples=self.options.sample_blocks > 0)

    def draw(self) -> tuple[list[Rollout], bool]:
        """Rollouts for several iterations, and whether they hold all blocks: else the second lacks its past."""
        o = self.options
        whole = bool(torch.rand(()) < 0.5) or o.longest <= o.blocks
        length = o.blocks if whole else int(torch.randint(o.blocks + 1, o.longest + 1, ()))
        num = o.batch * o.uses
        rows = torch.randint(len(self.captions), (num,))
        words = self.captions[rows.to(self.captions.device)]
        # Captions of a clip, read forwards and backwards for as long as the rollout takes.
        there = words.shape[1] - 1
        text = self.teacher.text(
            words[:, [there - abs(there - block % (2 * there)) for block in range(length)]]
        )
        score = torch.rand(num, length, self.block_tokens, device=self.device)
        parts, owners, start = [], [], 0
        for layout in self.layouts:
            part = slice(start, start + layout.rows * o.uses)
            owners.append(torch.arange(part.start, part.stop, device=self.device).unflatten(0, (o.uses, -1)))
            start = part.stop
            parts.append(roll_out(self.runner, text[part], score[part], layout))
        drawn = Rollout(*(torch.cat(tensors) for tensors in zip(*parts, strict=True))).ending(o.blocks)
        # Every iteration gets its share of every layout, in the order of the layouts.
        return [drawn.rows(torch.cat(share)) for share in zip(*owners, strict=True)], whole

    def step(self, index: int, drawn: Rollout, whole: bool) -> Tensor:
        """One update of the generator and some of the fake score; returns their losses and a gradient norm."""
        estimate = self._estimate(drawn)
        with torch.no_grad():
            sigma = self._level(0.02 + 0.96 * torch.rand(estimate.shape[:2], device=self.device))
            noisy = add_noise(estimate, torch.randn_like(estimate), sigma)
        fake, real = (self._clean(model, noisy, sigma, drawn) for model in (self.fake, self.teacher))
        if self.options.guidance != 1:
            wordless = drawn._replace(text=self.no_text.expand_as(drawn.text))
            real = torch.lerp(self._clean(self.teacher, noisy, sigma, wordless), real, self.options.guidance)
        # Scaled by how far the teacher disagrees, so that all noise levels count alike.
        off = (estimate.detach() - real).abs().mean(dim=(2, 3, 4, 5), keepdim=True).clamp_min(1e-2)
        target = (estimate - (fake - real) / off).detach()
        loss = 0.5 * _mean((estimate - target).square(), whole)
        norm = self._descend(0, self.generator, loss, apply=index >= self.options.head_start)
        if index >= self.options.head_start:
            self.mean.update()
        clean = estimate.detach()
        for _ in range(self.options.fake_steps):
            sigma = draw_sigma(*clean.shape[:2], shift=self.spec.shift, device=self.device)
            noise = torch.randn_like(clean)
            flow = self._flow(self.fake, add_noise(clean, noise, sigma), sigma, drawn)
            fake_loss = _mean((flow - (noise - clean)).square(), whole)
            self._descend(1, self.fake, fake_loss, apply=True)
        return torch.stack([loss.detach(), fake_loss.detach(), norm])

    def _estimate(self, drawn: Rollout) -> Tensor:
        """What the generator makes of one step's input, drawn by chance for each block; with gradients."""
        steps = drawn.inputs.shape[2]
        choice = torch.randint(steps, drawn.inputs.shape[:2], device=self.device)
        index = choice[:, :, None, None, None, None, None].expand(-1, -1, 1, *drawn.inputs.shape[3:])
        noisy = drawn.inputs.gather(2, index)[:, :, 0]
        sigma = self.sigmas[choice]
        return noisy - _wide(sigma) * self._flow(self.generator, noisy, sigma, drawn)

    def _clean(self, model: TextAndFlow, noisy: Tensor, sigma: Tensor, drawn: Rollout) -> Tensor:
        # With gradients on, though none are wanted: without, every layer would be compiled a second time.
        with torch.enable_grad():
            flow = self._flow(model, noisy, sigma, drawn)
        return noisy - _wide(sigma) * flow.detach()

    def _flow(self, model: TextAndFlow, noisy: Tensor, sigma: Tensor, drawn: Rollout) -> Tensor:
        batch = ClipBatch(
            clean=drawn.clean,
            noisy=noisy,
            sigma=sigma,
            extra=noisy[:, :0],
            extra_sigma=sigma[:, :0],
            text=drawn.text,
            extra_text=drawn.text[:, :0],
            score=drawn.score.flatten(1),
        )
        with self.autocast():
            return predict_flow(model.dit, batch, self.layouts, self.turns).float()

    def _level(self, plain: Tensor) -> Tensor:
        return self.spec.shift * plain / (1 + (self.spec.shift - 1) * plain)

    def _descend(self, which: int, model: TextAndFlow, loss: Tensor, *, apply: bool) -> Tensor:
        optimiser = self.optimisers[which]
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.dit.parameters(), 1.0)
        if apply:
            optimiser.step()
        return norm.detach()

    def save(self, samples: bool) -> None:
        """Write the generator's running mean, the fake score and the record; samples if asked."""
        self.mean.swap()
        save_model(self.generator, self.options.out)
        save_weights(self.options.out / "fake.safetensors", self.fake.dit.state_dict())
        if samples:
            write_samples(
                self.generator.dit, self.generator.text, self.options.autoencoder, self.options.out,
                self.options.sample_blocks, self.record, many=False,
            )  # fmt: skip
        self.mean.swap()
        self.record.write()

    def _note(self, steps: int, rate: float, losses: list[Tensor], drawn: Rollout, drawing_s: float) -> None:
        generator, fake, norm = torch.stack(losses).mean(dim=0).tolist()
        stds = [float(f"{part.std().item():.3g}") for part in drawn.clean.unbind(1)]
        self.record.add(
            "distil",
            steps=steps,
            generator=generator,
            fake=fake,
            norm=norm,
            rate=rate,
            std_by_block=stds,
            drawing_s=round(drawing_s, 1),
        )


def _mean(square: Tensor, whole: bool) -> Tensor:
    """Mean of B blocks F C rows columns, without the second block where its past is not in the window."""
    return (
        square.mean()
        if whole
        else (square.sum() - square[:, 1].sum()) / (square.numel() - square[:, 1].numel())
    )


def _wide(sigma: Tensor) -> Tensor:
    return sigma[..., None, None, None, None]


def _captions(world: World, count: int) -> Tensor:
    """Captions N blocks L of clips that nobody needs to see."""
    chunk = min(24, count)
    made: list[Tensor] = [world(chunk, seed).words for seed in range(count // chunk)]
    return torch.cat(made)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--teacher", type=Path, required=True)
    parser.add_argument("--autoencoder", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--guidance", type=float)
    parser.add_argument("--longest", type=int)
    parser.add_argument("--generator-rate", type=float)
    parser.add_argument("--fake-rate", type=float)
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    given = {name: value for name, value in vars(parser.parse_args()).items() if value is not None}
    options = replace(Options(*(given[n] for n in ("minutes", "teacher", "autoencoder", "out"))), **given)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    Trainer(options, open_world(device), device).run()


if __name__ == "__main__":
    main()
