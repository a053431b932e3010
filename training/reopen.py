"""Give a distilled model its teacher's openings back: regression on its own rollouts, for a fixed time.

    python -m training.reopen --minutes 5 --teacher DIR --former DIR --autoencoder FILE --out DIR [--resume DIR]

Distribution matching under a guided teacher keeps what is likeliest, a camera that stands still (docs/log.md). What
an opening shows is chosen in its first steps, and later blocks continue it. So the first steps of openings learn here
where the teacher would go from the same noisy latents in many small steps. All other steps and blocks learn to stay
what they are in the former model.

It writes the files of train_dit, which `training.distill --resume` takes, too.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn

from recap.attention.context import BlockContext
from recap.backbones.tiny.vocabulary import null_token_ids
from recap.backbones.wan.schedule import clean_estimate, model_time, renoise, warp
from recap.backbones.wan.spec import EMBEDDED, WanSpec
from recap.contracts import Decoder
from recap.errors import refuse
from recap.memory.sink import NoMemoryConfig
from recap.types import Block
from training.clips import World, open_world
from training.optimisers import Clock, RunningMean
from training.options import choose_device, read_options
from training.records import Record, load_weights
from training.rollouts import (
    Draws,
    HalvedWan,
    Rollout,
    check_drawing,
    draw_captions,
    halve,
    rollout_layouts,
    share_weights,
)
from training.sampling import EulerBackbone, admit_nothing, euler_sigmas, write_samples
from training.teacher_forcing import ClipBatch, make_turns, predict_flow
from training.train_autoencoder import plain_settings
from training.train_dit import TextAndFlow, compile_blocks, load_model, save_model


@dataclass(frozen=True, slots=True)
class Options:
    """One run."""

    minutes: float
    teacher: Path
    former: Path
    autoencoder: Path
    out: Path
    resume: Path | None = None
    seed: int = 0
    batch: int = 16
    led: int = 2  # of an opening's steps, how many follow the teacher
    euler_steps: int = 8  # of the teacher from noise to the end; a multiple of the model's own number
    guidance: float = 1.0  # of the teacher
    led_weight: float = 2.0  # of a step that follows the teacher, next to a block that stays
    openings: int = 8  # new ones in every update for each row of a rollout
    blocks: int = 5  # that one pass sees: the opening and the last ones of a rollout
    longest: int = 85
    ending: float = 0.15
    steady: float = 0.5
    uses: int = 8
    rate: float = 2e-4
    mean_decay: float = 0.99
    num_captions: int = 1920
    note_every_s: float = 20.0
    save_every_s: float = 120.0
    warmup_s: float = 8.0
    reserve_s: float = 12.0
    sample_blocks: int = 27
    half: bool = False  # rollouts, openings and the teacher in bf16; on a CPU the other passes, too
    compile: bool = True

    def __post_init__(self) -> None:
        steps = len(EMBEDDED.steps)
        if not 1 <= self.led < steps:
            raise refuse("--led", self.led, f"must be 1 to {steps - 1}, so that a step stays", "2 is usual")
        if self.openings < 1:
            raise refuse("--openings", self.openings, "must be at least 1", "8 is usual")
        if self.euler_steps < steps or self.euler_steps % steps:
            limit = f"must be a multiple of {steps}, so that its noise levels include the model's"
            raise refuse("--euler-steps", self.euler_steps, limit, "8 is usual")
        # These comparisons refuse nan, too.
        for field, usual in (("led_weight", "2"), ("guidance", "1"), ("rate", "2e-4")):
            if not 0 < (value := getattr(self, field)) < math.inf:
                raise refuse(f"--{field.replace('_', '-')}", value, "must be above 0", f"{usual} is usual")
        check_drawing(self)


class Trainer:
    def __init__(self, options: Options, world: World, device: str, spec: WanSpec = EMBEDDED) -> None:
        self.options = options
        self.clock = Clock(options.minutes, reserve_s=options.reserve_s, warmup_s=options.warmup_s, floor=0.1)
        self.record = Record(options.out, {**plain_settings(asdict(options)), "spec": asdict(spec)})
        torch.manual_seed(options.seed)
        self.device, self.spec = device, spec
        self.teacher, self.former, self.model = (TextAndFlow(spec).to(device) for _ in range(3))
        load_model(self.teacher, options.teacher)
        for model in (self.former, self.model):
            load_model(model, options.former)
        if options.resume is not None:
            self.model.dit.load_state_dict(load_weights(options.resume / "dit.safetensors"))
        self.words = self.former.text.requires_grad_(False)
        _refuse_other_words(self.teacher, self.former, options.teacher)
        self.mean = RunningMean(self.model, options.mean_decay)
        self.optimiser = torch.optim.AdamW(
            self.model.dit.parameters(), options.rate, betas=(0.9, 0.99), weight_decay=0.0
        )
        self.turns = make_turns(spec, device)
        self.layouts = rollout_layouts(options.batch, spec.grid[0] * spec.grid[1])
        captions = draw_captions(world, options.num_captions)
        self.runner = halve(self.model.dit) if options.half else share_weights(self.model.dit)
        self.draws = Draws(self.runner, self.words, captions, self.layouts, options)
        self.sigmas = torch.tensor(warp(spec.steps, spec.shift), device=device)
        self.grid = euler_sigmas(options.euler_steps, spec.shift)
        teacher = halve(self.teacher.dit) if options.half else self.teacher.dit
        self.euler = EulerBackbone(teacher, self.words.encode, _decode_nothing)
        if options.guidance != 1:
            self.euler.guidance = options.guidance
            self.euler.no_text = self.words(torch.tensor([null_token_ids()], device=device)).detach()
        if options.compile:
            compile_blocks(self.model.dit)

    def autocast(self) -> AbstractContextManager[None]:
        enabled = self.device == "cuda" or self.options.half
        return torch.autocast(self.device, torch.bfloat16, enabled=enabled)

    def run(self) -> None:
        """Train until the time is used up."""
        steps, noted, saved = 0, self.clock.elapsed_s, self.clock.elapsed_s
        losses: list[Tensor] = []
        while not self.clock.finished:
            for drawn in self.draws.next():
                rate = self.clock.apply([self.optimiser])
                losses.append(self.step(drawn))
                steps += 1
            if self.clock.elapsed_s - noted >= self.options.note_every_s:
                noted = self.clock.elapsed_s
                self._note(steps, rate, losses)
                losses = []
            if self.clock.elapsed_s - saved >= self.options.save_every_s:
                saved = self.clock.elapsed_s
                self.save(samples=False)
        if losses:
            self._note(steps, rate, losses)
        self.save(samples=self.options.sample_blocks > 0)

    def step(self, drawn: Rollout) -> Tensor:
        """Make one update; return the errors of the led steps, of other openings, of later blocks, and the norm."""
        led, each, (rows, blocks, steps) = self.options.led, self.options.openings, drawn.inputs.shape[:3]
        # Rollouts are continued for long, so their openings are few; here every update has new ones.
        text = drawn.text[torch.arange(rows).unsqueeze(1), torch.randint(blocks, (rows, each))]
        openings = self.open(text.flatten(0, 1))
        lead = self.lead(openings, text.flatten(0, 1))
        choice = torch.randint(steps, (rows, blocks), device=self.device)
        choice[:, 0] = torch.randint(led, steps, (rows,), device=self.device)
        index = choice[:, :, None, None, None, None, None].expand(-1, -1, 1, *drawn.inputs.shape[3:])
        staying = ClipBatch(
            clean=drawn.clean,
            noisy=drawn.inputs.gather(2, index)[:, :, 0],
            sigma=self.sigmas[choice],
            extra=drawn.clean[:, :0],
            extra_sigma=self.sigmas[choice[:, :0]],
            text=drawn.text,
            extra_text=drawn.text[:, :0],
            score=drawn.score.flatten(1),
        )
        batch = staying._replace(
            extra=openings.unflatten(0, (rows, each)).flatten(1, 2),
            extra_sigma=self.sigmas[:led].repeat(each).expand(rows, -1),
            extra_text=text.repeat_interleave(led, dim=1),
        )
        with torch.no_grad():
            kept = self._ends(self.former, staying)
        wanted = torch.cat([kept, lead.unflatten(0, (rows, each)).flatten(1, 2)], dim=1)
        errors = (self._ends(self.model, batch) - wanted).square().mean(dim=(2, 3, 4, 5))
        weights = errors.new_full((rows, led * each), self.options.led_weight / each)
        weights = torch.cat([drawn.counts, weights], dim=1)
        self.optimiser.zero_grad(set_to_none=True)
        ((errors * weights).sum() / weights.sum()).backward()
        norm = nn.utils.clip_grad_norm_(self.model.dit.parameters(), 1.0)
        self.optimiser.step()
        self.mean.update()
        if isinstance(self.runner, HalvedWan):
            self.runner.follow(self.model.dit)
        led_errors = errors[:, blocks:].unflatten(1, (each, led))
        parts = (*led_errors.unbind(2), errors[:, 0], errors[:, 1:blocks])
        return torch.stack([*(part.detach().mean() for part in parts), norm.detach()])

    @torch.no_grad()
    def open(self, text: Tensor) -> Tensor:
        """Return the inputs of the first steps of new openings of prompts B L text_dim, B led F C rows columns."""
        prompt, context = self.runner.condition(text), self._alone(len(text))
        shape = (len(text), self.spec.frames_per_block, self.spec.in_channels, *self.spec.latent_size)
        inputs = [torch.randn(shape, device=self.device)]
        for sigma, following in pairwise(warp(self.spec.steps, self.spec.shift)[: self.options.led]):
            flow = self.runner(inputs[-1], model_time(sigma), prompt, context)
            estimate = clean_estimate(inputs[-1], flow, sigma)
            inputs.append(renoise(estimate, torch.randn(shape, device=self.device), following))
        return torch.stack(inputs, dim=1)

    def lead(self, openings: Tensor, text: Tensor) -> Tensor:
        """Return where the teacher takes openings from the inputs of their first steps, B led F C rows columns."""
        prompt, context = self.euler.model.condition(text), self._alone(len(text))
        ends = []
        for step, start in enumerate(openings.unbind(1)):
            self.euler._sigmas = self.grid[step * self.options.euler_steps // len(self.spec.steps) :]
            ends.append(self.euler.denoise(lambda start=start: start, prompt, context))
        return torch.stack(ends, dim=1)

    def _alone(self, rows: int) -> BlockContext:
        """Return the context of first blocks, which see nothing but themselves."""
        policy = NoMemoryConfig().build(self.euler.spec, admit_nothing)
        block = Block(0, 0, self.spec.frames_per_block, ("",) * rows)
        return BlockContext(policy, policy.begin(block))

    def save(self, samples: bool) -> None:
        """Write the model's running mean, the record and, if wanted, samples."""
        self.mean.swap()
        save_model(self.model, self.options.out)
        if samples:
            write_samples(
                self.model.dit, self.model.text, self.options.autoencoder, self.options.out,
                self.options.sample_blocks, self.record, many=False,
            )  # fmt: skip
        self.mean.swap()
        self.record.write()

    def _ends(self, model: TextAndFlow, batch: ClipBatch) -> Tensor:
        """Return where a model's flow ends from all noisy blocks and then the extra ones."""
        with self.autocast():
            flow = predict_flow(model.dit, batch, self.layouts, self.turns).float()
        noisy, sigma = (
            torch.cat(pair, dim=1) for pair in ((batch.noisy, batch.extra), (batch.sigma, batch.extra_sigma))
        )
        return noisy - sigma[..., None, None, None, None] * flow

    def _note(self, steps: int, rate: float, losses: list[Tensor]) -> None:
        *led, opening, later, norm = torch.stack(losses).mean(dim=0).tolist()
        self.record.add("reopen", steps=steps, led=led, opening=opening, later=later, norm=norm, rate=rate)


def _decode_nothing() -> Decoder:
    raise AssertionError("the teacher's latents are not decoded")


def _refuse_other_words(one: TextAndFlow, other: TextAndFlow, folder: Path) -> None:
    """Refuse a teacher with another word table; stored ones differ by their rounding."""
    ours, theirs = one.text.state_dict(), other.text.state_dict()
    if not all(torch.allclose(ours[name], theirs[name], atol=1e-2) for name in ours):
        limit = "has another word table than --former"
        raise refuse("--teacher", str(folder), limit, "name the teacher that it was distilled from")


def main() -> None:
    options, device = read_options(Options, __doc__), choose_device()
    Trainer(options, open_world(device), device).run()


if __name__ == "__main__":
    main()
