"""Distil the flow model to few steps: distribution matching on its own rollouts, for a fixed time.

    python -m training.distill --minutes 9 --teacher DIR --autoencoder FILE --out DIR [--resume DIR]

A generator rolls out videos with the windows of inference, and with all of a short past. Its blocks are noised again
and denoised by the teacher and by a second model that is trained on the generator's own videos (the fake score); the
difference of the two clean estimates is the direction in which the generator should change. The generator sees its
rollout as its past; teacher and fake score see it in some rows and only the first frame in others, so that slow drift
is corrected too. A rollout is continued from draw to draw up to a minute of video.

The first steps of openings learn by regression instead, since what is likeliest is an opening whose camera stands
still: see `training.leading`.

It writes the files of train_dit, and fake-1.safetensors ... so that a run can resume. `--resume` also takes the
package's own weights, `--bank-rows --head-start 100` then measures what training with banks would add.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from recap.backbones.tiny.vocabulary import null_token_ids
from recap.backbones.wan.schedule import warp
from recap.backbones.wan.spec import EMBEDDED, WanSpec
from recap.errors import refuse
from training.clips import World, open_world
from training.leading import Leader
from training.optimisers import Clock, RunningMean
from training.options import choose_device, read_options
from training.records import Record, load_weights, save_weights
from training.rollouts import (
    Draws,
    HalvedWan,
    Rollout,
    check_drawing,
    draw_captions,
    halve,
    judged_layouts,
    rollout_layouts,
    share_weights,
)
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
    blocks: int = 7  # that one pass compares: the opening and the last ones of a rollout
    longest: int = 85  # blocks of a rollout; one that is begun continues from draw to draw
    ending: float = 0.15  # the chance that it ends after a draw instead
    generator_rate: float = 5e-5
    fake_rate: float = 1.5e-4
    fake_steps: int = 2  # updates of the fake score for each of the generator
    uses: int = 8  # iterations that one draw feeds, each with rows of its own: a wide draw takes no longer
    head_start: int = 20  # iterations in which only the fake score learns
    guidance: float = 2.5  # of the teacher in the opening: how far beyond its estimate without a prompt
    later_guidance: float = 1.75  # after it, where the past tells most: more than needed doubles actors
    guided_below: float = 0.85  # noise level from which on there is no guidance, which would slow motion
    opening_weight: float = 2.0  # of the opening's error: what it doubles or leaves out, later blocks keep
    led: int = 2  # of an opening's steps, how many follow the teacher
    openings: int = 8  # new ones in every update for each row of a rollout, to learn these steps
    euler_steps: int = 8  # of the teacher from noise to the end; a multiple of the generator's own number
    led_weight: float = 1.0  # of their error
    steady: float = 0.5  # of the rollouts, how many keep the caption of their opening for good
    alone: float = 0.5  # of the rows with sink and prior, how many are judged by the opening alone
    mean_decay: float = 0.99
    num_captions: int = 1920
    note_every_s: float = 20.0
    save_every_s: float = 120.0
    warmup_s: float = 8.0
    reserve_s: float = 12.0
    sample_blocks: int = 27
    bank_rows: bool = False  # banks in half of the rollouts, for comparison: as in train_dit
    half: bool = False  # rollouts and openings in bf16; on a CPU all other passes, too
    compile: bool = True

    def __post_init__(self) -> None:
        check_drawing(self)
        # These comparisons refuse nan, too.
        if not 0 <= self.alone <= 1:
            raise refuse("--alone", self.alone, "must be 0 to 1", "0.5 is usual")
        if not 0 <= self.guided_below <= 1:
            raise refuse("--guided-below", self.guided_below, "must be 0 to 1", "1 guides all noise levels")
        steps = len(EMBEDDED.steps)
        if not 1 <= self.led < steps:
            raise refuse(
                "--led", self.led, f"must be 1 to {steps - 1}, so that a step is judged", "2 is usual"
            )
        if self.openings < 1:
            raise refuse("--openings", self.openings, "must be at least 1", "8 is usual")
        if self.euler_steps < steps or self.euler_steps % steps:
            limit = f"must be a multiple of {steps}, so that its noise levels include the generator's"
            raise refuse("--euler-steps", self.euler_steps, limit, "8 is usual")
        for field, usual in (("opening_weight", 2), ("led_weight", 1)):
            if not 0 < (value := getattr(self, field)) < math.inf:
                raise refuse(f"--{field.replace('_', '-')}", value, "must be above 0", f"{usual} is usual")


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
            # All three use the word table of the teacher; that of the last run may be of an older teacher.
            self.generator.dit.load_state_dict(load_weights(options.resume / "dit.safetensors"))
            # The weights of the package have no fake score: it then learns from the teacher's, in the head start.
            if any(options.resume.glob("fake*.safetensors")):
                self.fake.dit.load_state_dict(load_weights(options.resume / "fake.safetensors"))
        copy_of = halve if options.half else share_weights
        self.runner = copy_of(self.generator.dit)
        self.leader = Leader(copy_of(self.teacher.dit), options.led, options.euler_steps)
        self.mean = RunningMean(self.generator, options.mean_decay)
        self.optimisers = [
            torch.optim.AdamW(model.dit.parameters(), rate, betas=(0.0, 0.99), weight_decay=0.0)
            for model, rate in ((self.generator, options.generator_rate), (self.fake, options.fake_rate))
        ]
        self.turns = make_turns(spec, device)
        frame_tokens = spec.grid[0] * spec.grid[1]
        self.layouts = rollout_layouts(options.batch, frame_tokens, bank_rows=options.bank_rows)
        self.judged = judged_layouts(self.layouts, options.alone)
        later = [options.later_guidance] * (options.blocks - 1)
        self.strength = torch.tensor([options.guidance, *later], device=device)
        self.weights = torch.tensor([options.opening_weight, *[1.0] * (options.blocks - 1)], device=device)
        self.no_text = self.teacher.text(torch.tensor(null_token_ids(), device=device)).detach()
        captions = draw_captions(world, options.num_captions)
        self.draws = Draws(self.runner, self.teacher.text, captions, self.layouts, options)
        self.sigmas = torch.tensor(warp(spec.steps, spec.shift), device=device)
        if options.compile:
            for model in (self.teacher, self.fake, self.generator):
                compile_blocks(model.dit)

    def autocast(self) -> AbstractContextManager[None]:
        enabled = self.device == "cuda" or self.options.half
        return torch.autocast(self.device, torch.bfloat16, enabled=enabled)

    def run(self) -> None:
        """Distil until the time is used up."""
        index, noted, saved = 0, self.clock.elapsed_s, self.clock.elapsed_s
        losses: list[Tensor] = []
        drawing_s = 0.0
        while not self.clock.finished:
            began = self.clock.elapsed_s
            draws = self.draws.next()
            drawing_s += self.clock.elapsed_s - began
            for drawn in draws:
                rate = self.clock.apply(self.optimisers)
                losses.append(self.step(index, drawn))
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

    def step(self, index: int, drawn: Rollout) -> Tensor:
        """Update the generator once and the fake score some times; return their losses and a gradient norm."""
        estimate, led_error = self._generate(drawn)
        with torch.no_grad():
            sigma = self._level(0.02 + 0.96 * torch.rand(estimate.shape[:2], device=self.device))
            noisy = add_noise(estimate, torch.randn_like(estimate), sigma)
        fake, real = (self._clean(model, noisy, sigma, drawn) for model in (self.fake, self.teacher))
        unprompted = drawn._replace(text=self.no_text.expand_as(drawn.text))
        strength = torch.where(sigma < self.options.guided_below, self.strength, 1.0)
        real = torch.lerp(self._clean(self.teacher, noisy, sigma, unprompted), real, _wide(strength))
        # Scaled by how far the teacher disagrees, so that all noise levels count equally.
        off = (estimate.detach() - real).abs().mean(dim=(2, 3, 4, 5), keepdim=True).clamp_min(1e-2)
        target = (estimate - (fake - real) / off).detach()
        weights = drawn.counts * self.weights
        loss = 0.5 * _mean((estimate - target).square(), weights)
        whole = loss + self.options.led_weight * led_error.mean()
        norm = self._descend(0, self.generator, whole, apply=index >= self.options.head_start)
        if index >= self.options.head_start:
            self.mean.update()
            if isinstance(self.runner, HalvedWan):
                self.runner.follow(self.generator.dit)
        clean = estimate.detach()
        for _ in range(self.options.fake_steps):
            sigma = draw_sigma(*clean.shape[:2], shift=self.spec.shift, device=self.device)
            noise = torch.randn_like(clean)
            flow = self._flow(self.fake, add_noise(clean, noise, sigma), sigma, drawn, self.judged)
            fake_loss = _mean((flow - (noise - clean)).square(), weights)
            self._descend(1, self.fake, fake_loss, apply=True)
        return torch.stack([loss.detach(), fake_loss.detach(), norm, *led_error.detach()])

    def _generate(self, drawn: Rollout) -> tuple[Tensor, Tensor]:
        """Return the generator's clean estimate from the input of a random step per block, with gradients.

        Next to it the errors of the first steps of new openings, which no block is estimated from: `led` of them.
        """
        led, each, (rows, blocks, steps) = self.options.led, self.options.openings, drawn.inputs.shape[:3]
        choice = torch.randint(steps, (rows, blocks), device=self.device)
        choice[:, 0] = torch.randint(led, steps, (rows,), device=self.device)
        index = choice[:, :, None, None, None, None, None].expand(-1, -1, 1, *drawn.inputs.shape[3:])
        noisy = drawn.inputs.gather(2, index)[:, :, 0]
        sigma = self.sigmas[choice]
        # Rollouts are continued for long, so their openings are few; here every update has new ones.
        text = drawn.text[torch.arange(rows).unsqueeze(1), torch.randint(blocks, (rows, each))]
        opened = self.leader.begin(self.runner, text.flatten(0, 1))
        # Those of a row, each with its steps.
        extra, ends = (x.unflatten(0, (rows, each)).flatten(1, 2) for x in (opened.inputs, opened.ends))
        levels = opened.sigma.repeat(each).expand(rows, -1)
        batch = self._batch(noisy, sigma, drawn)._replace(
            extra=extra, extra_sigma=levels, extra_text=text.repeat_interleave(led, dim=1)
        )
        flow = self._predict(self.generator, batch, self.layouts)
        estimate = noisy - _wide(sigma) * flow[:, :blocks]
        off = extra - _wide(levels) * flow[:, blocks:] - ends
        return estimate, off.square().mean(dim=(2, 3, 4, 5)).unflatten(1, (each, led)).mean(dim=(0, 1))

    def _clean(self, model: TextAndFlow, noisy: Tensor, sigma: Tensor, drawn: Rollout) -> Tensor:
        # With gradients, although they are not used: otherwise every layer would be compiled a second time.
        with torch.enable_grad():
            flow = self._flow(model, noisy, sigma, drawn, self.judged)
        return noisy - _wide(sigma) * flow.detach()

    def _flow(
        self, model: TextAndFlow, noisy: Tensor, sigma: Tensor, drawn: Rollout, layouts: tuple[Layout, ...]
    ) -> Tensor:
        return self._predict(model, self._batch(noisy, sigma, drawn), layouts)

    def _batch(self, noisy: Tensor, sigma: Tensor, drawn: Rollout) -> ClipBatch:
        return ClipBatch(
            clean=drawn.clean,
            noisy=noisy,
            sigma=sigma,
            extra=noisy[:, :0],
            extra_sigma=sigma[:, :0],
            text=drawn.text,
            extra_text=drawn.text[:, :0],
            score=drawn.score.flatten(1),
        )

    def _predict(self, model: TextAndFlow, batch: ClipBatch, layouts: tuple[Layout, ...]) -> Tensor:
        with self.autocast():
            return predict_flow(model.dit, batch, layouts, self.turns).float()

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
        """Write the generator's running mean, the fake score, the record and, if wanted, samples."""
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
        generator, fake, norm, *led = torch.stack(losses).mean(dim=0).tolist()
        stds = [float(f"{part.std().item():.3g}") for part in drawn.clean.unbind(1)]
        self.record.add(
            "distil",
            steps=steps,
            generator=generator,
            fake=fake,
            led=led,
            norm=norm,
            rate=rate,
            std_by_block=stds,
            drawing_s=round(drawing_s, 1),
        )


def _mean(square: Tensor, weights: Tensor) -> Tensor:
    """Average B blocks F C rows columns with weights B blocks."""
    return (square.mean(dim=(2, 3, 4, 5)) * weights).sum() / weights.sum()


def _wide(sigma: Tensor) -> Tensor:
    return sigma[..., None, None, None, None]


def main() -> None:
    options, device = read_options(Options, __doc__), choose_device()
    Trainer(options, open_world(device), device).run()


if __name__ == "__main__":
    main()
