"""Train the video autoencoder on rendered clips, for a fixed time.

    python -m training.train_autoencoder --minutes 8 --out DIR [--resume DIR]

It writes to DIR, every minute and at the end: autoencoder.safetensors (running mean, fp16, with the latent
statistics), record.json, autoencoder.png (unseen clips, each above its reconstruction).
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from recap.backbones.tiny.autoencoder import EMBEDDED_AUTOENCODER, Autoencoder, AutoencoderSpec
from training.clips import PixelPool, World, open_world
from training.optimisers import Clock, Muon, RunningMean, split_parameters
from training.options import choose_device, read_options
from training.records import Record, load_weights, save_weights, write_sheet

UNSEEN_SEED = 10_000_000
"""Training never uses seeds from here on."""


@dataclass(frozen=True, slots=True)
class Options:
    """One run; it trains on pieces of `piece_frames` latent frames and sometimes on a few whole clips."""

    minutes: float
    out: Path
    resume: Path | None = None
    seed: int = 0
    batch: int = 32
    piece_frames: int = 7
    whole_every: int = 8
    whole_batch: int = 10
    muon_rate: float = 3e-3
    adam_rate: float = 2e-3
    noise: float = 0.15  # most noise a latent meets, in standard deviations: what the decoder must forgive
    pool: int = 1500
    fresh: int = 8
    eval_clips: int = 32
    eval_every_s: float = 60.0
    warmup_s: float = 5.0
    reserve_s: float = 25.0
    compile: bool = False


def reconstruction_loss(made: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Return the training loss of pixels B T 3 Y X and their plain mean square error.

    The loss has Charbonnier and a little square error for colours, differences along x, y and t for edges and against
    flicker, which optical flow would read as motion, and a blurred copy against patches of wrong shade.
    """
    off = made - wanted
    square = off.square().mean()
    colours = (off.square() + 1e-6).sqrt().mean()
    edges = off.diff(dim=-1).abs().mean() + off.diff(dim=-2).abs().mean()
    flicker = off.diff(dim=1).abs().mean()
    blurred = functional.avg_pool2d(off.flatten(0, 1), 4).abs().mean()
    return colours + 4 * square + 0.5 * edges + 0.25 * flicker + 0.5 * blurred, square


def latent_loss(latents: Tensor) -> Tensor:
    """Measure how far the channels of raw latents B F C rows columns are from zero mean and unit variance."""
    variance, mean = torch.var_mean(latents.float(), dim=(0, 1, 3, 4))
    return (variance - 1).square().mean() + mean.square().mean()


def decibels(square: Tensor) -> Tensor:
    """Return the PSNR of mean square errors of pixels in 0..1."""
    return -10 * torch.log10(square.clamp_min(1e-10))


class Trainer:
    def __init__(
        self, options: Options, world: World, device: str, spec: AutoencoderSpec = EMBEDDED_AUTOENCODER
    ) -> None:
        self.options = options
        self.clock = Clock(options.minutes, reserve_s=options.reserve_s, warmup_s=options.warmup_s)
        self.record = Record(options.out, {**plain_settings(asdict(options)), "spec": asdict(spec)})
        torch.manual_seed(options.seed)
        self.device = device
        self.model = Autoencoder(spec).to(device, memory_format=torch.channels_last)
        if options.resume is not None:
            self.model.load_state_dict(load_weights(options.resume / "autoencoder.safetensors"))
        self.mean = RunningMean(self.model, 0.999)
        matrices, rest = split_parameters(self.model, "")
        self.optimisers: list[torch.optim.Optimizer] = [
            Muon(matrices, options.muon_rate),
            torch.optim.AdamW(rest, options.adam_rate, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        self.world = world
        # A resumed run must not see the clips of the run before it again in the same order.
        first = torch.randint(UNSEEN_SEED // 2, ()).item() if options.resume else 0
        self.pool = PixelPool(world, capacity=options.pool, fresh=options.fresh, seed=int(first))
        self.pool.fill(3 * options.batch)
        self.encode, self.decode = self.model.encode_raw, self.model.decode_raw
        if options.compile:
            self.encode = torch.compile(self.encode, dynamic=False)
            self.decode = torch.compile(self.decode, dynamic=False)

    def autocast(self) -> AbstractContextManager[None]:
        return torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda")

    def run(self) -> float:
        """Train until the time is used up; return the last PSNR on unseen clips."""
        steps, shown = 0, self.clock.elapsed_s
        losses: list[Tensor] = []
        squares: list[Tensor] = []
        while not self.clock.finished:
            rate = self.clock.apply(self.optimisers)
            loss, square = self.step(steps)
            steps += 1
            losses.append(loss)
            squares.append(square)
            if self.clock.elapsed_s - shown >= self.options.eval_every_s:
                shown = self.clock.elapsed_s
                self._note(steps, rate, losses, squares)
                losses, squares = [], []
                self.evaluate()
        if losses:
            self._note(steps, 0.0, losses, squares)
        return self.evaluate()

    def step(self, index: int) -> tuple[Tensor, Tensor]:
        """Make one update; return loss and mean square error, still on the device."""
        o, per = self.options, self.model.spec.pictures_per_frame
        whole = o.whole_every > 0 and index % o.whole_every == o.whole_every - 1
        pictures = self.pool.num_pictures if whole else 1 + per * (o.piece_frames - 1)
        wanted = self.pool.draw(o.whole_batch if whole else o.batch, pictures)
        with self.autocast():
            latents = self.encode(wanted).float()
            # Each clip has its own level, so that clean latents, as at inference, are trained too.
            level = o.noise * torch.rand(len(latents), 1, 1, 1, 1, device=latents.device)
            made = self.decode(latents + level * torch.randn_like(latents)).float()
        loss, square = reconstruction_loss(made, wanted)
        loss = loss + 0.1 * latent_loss(latents)
        for optimiser in self.optimisers:
            optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimiser in self.optimisers:
            optimiser.step()
        self.mean.update()
        return loss.detach(), square.detach()

    @torch.no_grad()
    def evaluate(self) -> float:
        """Return the PSNR of the running mean on unseen clips; write statistics, weights, sheet and record."""
        self.mean.swap()
        chunk = min(8, self.options.eval_clips)
        seeds = range(UNSEEN_SEED, UNSEEN_SEED + self.options.eval_clips // chunk)
        clips = [self.world(chunk, seed).pixels for seed in seeds]
        with self.autocast():
            raw = torch.cat([self.model.encode_raw(pixels).float() for pixels in clips])
        std, mean = torch.std_mean(raw, dim=(0, 1, 3, 4))
        self.model.latent_mean.copy_(mean)
        self.model.latent_std.copy_(std)
        ratios, openings = [], []
        for pixels in clips:
            with self.autocast():
                made = self.model.decode(self.model.encode(pixels)).float()
            off = (made - pixels).square()
            ratios.append(decibels(off.mean(dim=(1, 2, 3, 4))))
            openings.append(decibels(off[:, 0].mean(dim=(1, 2, 3))))
        psnr, opening = torch.cat(ratios).mean().item(), torch.cat(openings).mean().item()
        extremes = [float(f"{value:.3g}") for value in (std.min().item(), std.max().item())]
        self.record.add("eval", psnr=psnr, first_picture_psnr=opening, latent_std=extremes)
        shown = torch.linspace(0, pixels.shape[1] - 1, 9).long()
        rows = [side[row, shown] for row in range(min(3, chunk)) for side in (pixels, made)]
        write_sheet(self.options.out / "autoencoder.png", torch.stack(rows))
        save_weights(self.options.out / "autoencoder.safetensors", self.model.state_dict())
        self.record.write()
        self.mean.swap()
        return psnr

    def _note(self, steps: int, rate: float, losses: list[Tensor], squares: list[Tensor]) -> None:
        loss, square = torch.stack(losses).mean().item(), torch.stack(squares).mean()
        self.record.add("train", steps=steps, loss=loss, psnr=decibels(square).item(), rate=rate)


def plain_settings(settings: dict[str, object]) -> dict[str, object]:
    """Convert settings for JSON; of a path only the name stays, since folders differ between machines."""
    return {name: value.name if isinstance(value, Path) else value for name, value in settings.items()}


def main() -> None:
    options, device = read_options(Options, __doc__), choose_device()
    Trainer(options, open_world(device), device).run()


if __name__ == "__main__":
    main()
