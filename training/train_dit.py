"""Train the embedded causal Wan by flow matching with teacher forcing, for a fixed time.

    python -m training.train_dit --minutes 9 --autoencoder FILE --out DIR [--resume DIR]

It writes to DIR, every two minutes and at the end: dit-1.safetensors, dit-2.safetensors ... and
text.safetensors (running mean, fp16), record.json, and samples of unseen prompts with 16 and with 4 steps.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from recap.backbones.tiny.backbone import WordTable
from recap.backbones.tiny.vocabulary import null_token_ids
from recap.backbones.wan.model import CausalWan
from recap.backbones.wan.spec import EMBEDDED, WanSpec
from training.clips import LatentClips, LatentPool, World, open_world
from training.optimisers import Clock, Muon, RunningMean, split_parameters
from training.options import choose_device, read_options
from training.records import Record, load_autoencoder, load_weights, save_weights
from training.sampling import write_samples
from training.teacher_forcing import ClipBatch, Layout, Turns, make_turns, predict_flow, spread_rows
from training.train_autoencoder import UNSEEN_SEED, plain_settings

Encode = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Options:
    """One run."""

    minutes: float
    autoencoder: Path
    out: Path
    resume: Path | None = None
    seed: int = 0
    batch: int = 24
    extra: int = 4  # further noisy openings next to each clip, of other clips
    muon_rate: float = 2.5e-3
    adam_rate: float = 1e-3
    mean_decay: float = 0.9985
    context_noise: float = 0.12  # most noise in what is remembered: a rollout's own past is never clean
    text_dropout: float = 0.1
    pool: int = 6000
    start_pool: int = 2400
    fresh_every: int = 8
    actor_weight: float = (
        4.0  # how much more the error counts where actors are: they are a tenth of the picture
    )
    floor: float = 0.01  # of the rates, at the end of the run; a run that is to be continued ends higher
    eval_clips: int = 48
    eval_every_s: float = 120.0
    warmup_s: float = 8.0
    reserve_s: float = 12.0
    sample_blocks: int = 14
    bank_rows: bool = False  # banks in half of the rows, for comparison: it teaches what a memory is to show
    compile: bool = True


class TextAndFlow(nn.Module):
    """The transformer and its word table, trained together."""

    def __init__(self, spec: WanSpec) -> None:
        super().__init__()
        self.dit = CausalWan(spec)
        self.text = WordTable(spec)
        self.apply(_draw_weights)
        for block in self.dit.blocks:
            # Prompts enter gradually: at first a block reads only its neighbours.
            nn.init.zeros_(block.cross_attn.o.weight)
        for part in (self.dit.time_embedding, self.dit.text_embedding):
            for layer in part:
                if isinstance(layer, nn.Linear):
                    nn.init.normal_(layer.weight, std=0.02)
        nn.init.zeros_(self.dit.head.head.weight)


def _draw_weights(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight)
        nn.init.zeros_(module.bias)


def draw_sigma(*shape: int, shift: float, device: str) -> Tensor:
    """Draw noise levels: logit-normal, shifted towards noise like the sampler's schedule."""
    plain = torch.sigmoid(torch.randn(*shape, device=device))
    return (shift * plain / (1 + (shift - 1) * plain)).clamp(1e-3, 0.9995)


def add_noise(clean: Tensor, noise: Tensor, sigma: Tensor) -> Tensor:
    """Return (1 - sigma) clean + sigma noise; sigma is B blocks, the others are B blocks F C rows columns."""
    level = sigma[..., None, None, None, None]
    return (1 - level) * clean + level * noise


def bank_scores(novelty: Tensor) -> Tensor:
    """Draw frozen scores B N of a clip's tokens for its banks.

    Half the rows prefer what is just entering, as flow novelty does, and half are random: a bank at inference has
    both relevant content and random background. Chance also breaks ties.
    """
    weight = (torch.rand(len(novelty), 1, device=novelty.device) < 0.6).float()
    chance = torch.rand_like(novelty.flatten(1))
    return weight * novelty.flatten(1) + 0.35 * chance


class Practice(NamedTuple):
    """A batch with the target of its noisy entries and the weight of their errors."""

    batch: ClipBatch
    wanted: Tensor  # B blocks+X F C rows columns, flow
    weight: Tensor  # B blocks+X F 1 rows columns, mean 1


def make_batch(
    clips: LatentClips, openings: LatentClips, model: TextAndFlow, options: Options, null_words: Tensor
) -> Practice:
    """Add noise to a batch of clips, and to the first blocks of some other clips for each."""
    spec = model.dit.spec
    per = spec.frames_per_block
    clean = clips.latents.unflatten(1, (-1, per))
    rows, blocks = clean.shape[:2]
    device = clean.device.type
    first = openings.latents[:, :per].unflatten(0, (rows, options.extra))
    sigma = draw_sigma(rows, blocks + options.extra, shift=spec.shift, device=device)
    shown = torch.cat([clean, first], dim=1)
    noise = torch.randn_like(shown)
    noisy = add_noise(shown, noise, sigma)
    past_sigma = options.context_noise * torch.rand(rows, blocks, device=device)
    words = torch.cat([clips.words, openings.words[:, 0].unflatten(0, (rows, options.extra))], dim=1)
    dropped = torch.rand(rows, 1, 1, device=device) < options.text_dropout
    text = model.text(torch.where(dropped, null_words, words))
    actors = torch.cat(
        [clips.actors.unflatten(1, (-1, per)), openings.actors[:, :per].unflatten(0, (rows, -1))], dim=1
    )
    batch = ClipBatch(
        clean=add_noise(clean, torch.randn_like(clean), past_sigma),
        noisy=noisy[:, :blocks],
        sigma=sigma[:, :blocks],
        extra=noisy[:, blocks:],
        extra_sigma=sigma[:, blocks:],
        text=text[:, :blocks],
        extra_text=text[:, blocks:],
        score=bank_scores(clips.novelty),
    )
    return Practice(batch, noise - shown, actor_weights(actors, sigma, options.actor_weight))


def actor_weights(actors: Tensor, sigma: Tensor, most: float) -> Tensor:
    """Return weights of mean 1 per latent, from the share of each token that shows actors.

    They fade with the noise: while the input does not yet show where actors will be, weighting by the answer would
    teach the model to expect actors everywhere.
    """
    weight = 1 + most * actors * (1 - sigma)[..., None, None, None]
    weight = weight.repeat_interleave(2, dim=-2).repeat_interleave(2, dim=-1).unsqueeze(3)
    return weight / weight.mean()


class Trainer:
    def __init__(
        self, options: Options, world: World, encode: Encode, device: str, spec: WanSpec = EMBEDDED
    ) -> None:
        self.options = options
        self.clock = Clock(
            options.minutes, reserve_s=options.reserve_s, warmup_s=options.warmup_s, floor=options.floor
        )
        self.record = Record(options.out, {**plain_settings(asdict(options)), "spec": asdict(spec)})
        torch.manual_seed(options.seed)
        self.device = device
        self.world, self.encode = world, encode
        self.model = TextAndFlow(spec).to(device)
        if options.resume is not None:
            load_model(self.model, options.resume)
        self.mean = RunningMean(self.model, options.mean_decay)
        matrices, rest = split_parameters(self.model, "dit.blocks.")
        self.optimisers: list[torch.optim.Optimizer] = [
            Muon(matrices, options.muon_rate),
            torch.optim.AdamW(rest, options.adam_rate, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        self.null_words = torch.tensor(null_token_ids(), device=device)
        self.turns: Turns = make_turns(spec, device)
        self.layouts: tuple[Layout, ...] = spread_rows(
            options.batch, spec.grid[0] * spec.grid[1], bank_rows=options.bank_rows
        )
        first = int(torch.randint(UNSEEN_SEED // 2, ()).item()) if options.resume else 0
        self.pool = LatentPool(
            world, encode, capacity=options.pool, fresh=options.batch, every=options.fresh_every, seed=first
        )
        self.pool.fill(options.start_pool)
        if options.compile:
            compile_blocks(self.model.dit)
        self.record.add("ready", parameters=sum(p.numel() for p in self.model.parameters()))

    def autocast(self) -> AbstractContextManager[None]:
        return torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda")

    def run(self) -> float:
        """Train until the time is used up; return the last loss on unseen clips."""
        steps, shown, saved = 0, self.clock.elapsed_s, self.clock.elapsed_s
        losses: list[Tensor] = []
        while not self.clock.finished:
            rate = self.clock.apply(self.optimisers)
            losses.append(self.step())
            steps += 1
            if self.clock.elapsed_s - shown >= min(30.0, self.options.eval_every_s):
                shown = self.clock.elapsed_s
                self._note(steps, rate, losses)
                losses = []
            if self.clock.elapsed_s - saved >= self.options.eval_every_s:
                saved = self.clock.elapsed_s
                self.evaluate(samples=False)
        if losses:
            self._note(steps, 0.0, losses)
        return self.evaluate(samples=self.options.sample_blocks > 0)

    def step(self) -> Tensor:
        """Make one update; return the loss per entry, on the device: blocks in order, then openings."""
        clips = self.pool.draw(self.options.batch)
        openings = self.pool.openings(self.options.batch * self.options.extra)
        per_entry = self.loss(clips, openings, weighted=True)
        for optimiser in self.optimisers:
            optimiser.zero_grad(set_to_none=True)
        per_entry.mean().backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimiser in self.optimisers:
            optimiser.step()
        self.mean.update()
        return per_entry.detach()

    def loss(self, clips: LatentClips, openings: LatentClips, *, weighted: bool) -> Tensor:
        """Return the mean square error of the flow per entry: blocks in order, then openings."""
        with self.autocast():
            batch, wanted, weight = make_batch(clips, openings, self.model, self.options, self.null_words)
            flow = predict_flow(self.model.dit, batch, self.layouts, self.turns)
        square = (flow.float() - wanted).square()
        return (square * (weight if weighted else 1)).mean(dim=(0, 2, 3, 4, 5))

    @torch.no_grad()
    def evaluate(self, samples: bool) -> float:
        """Return the loss of the running mean on unseen clips; write weights, record and, if wanted, samples."""
        self.mean.swap()
        # The same clips and noise at every call, without changing the random numbers of training.
        with torch.random.fork_rng(devices=[0] if self.device == "cuda" else []):
            torch.manual_seed(1)
            rounds = max(1, self.options.eval_clips // self.options.batch)
            # With gradients, although they are not used: otherwise every layer would be compiled a second time.
            with torch.enable_grad():
                losses = [self._unseen_loss(UNSEEN_SEED + i) for i in range(rounds)]
        mean = torch.stack(losses).mean(dim=0)
        blocks = len(mean) - self.options.extra
        self.record.add(
            "eval", loss=mean.mean().item(), opening=mean[0].item(), later=mean[1:blocks].mean().item()
        )
        save_model(self.model, self.options.out)
        self.record.write()
        if samples:
            write_samples(
                self.model.dit, self.model.text, self.options.autoencoder, self.options.out,
                self.options.sample_blocks, self.record,
            )  # fmt: skip
            self.record.write()
        self.mean.swap()
        return mean.mean().item()

    def _unseen_loss(self, seed: int) -> Tensor:
        made = self.world(self.options.batch, seed)
        clips = LatentClips(self.encode(made.pixels), made.words, made.novelty, made.actors)
        rows = torch.arange(self.options.batch * self.options.extra, device=clips.words.device) % len(
            clips.words
        )
        openings = LatentClips(
            clips.latents[rows], clips.words[rows], clips.novelty[rows], clips.actors[rows]
        )
        return self.loss(clips, openings, weighted=False).detach()

    def _note(self, steps: int, rate: float, losses: list[Tensor]) -> None:
        mean = torch.stack(losses).mean(dim=0)
        blocks = len(mean) - self.options.extra
        self.record.add(
            "train", steps=steps, loss=mean.mean().item(), opening=mean[0].item(),
            later=mean[1:blocks].mean().item(), rate=rate,
        )  # fmt: skip


def compile_blocks(model: CausalWan) -> None:
    """Compile the forward of every layer; this suits training, where all calls share their shapes."""
    # A layer that cannot be compiled still runs, only slower.
    torch._dynamo.config.suppress_errors = True
    for block in model.blocks:
        block.compile(dynamic=False)


def save_model(model: TextAndFlow, folder: Path) -> None:
    save_weights(folder / "dit.safetensors", model.dit.state_dict())
    save_weights(folder / "text.safetensors", model.text.state_dict())


def load_model(model: TextAndFlow, folder: Path) -> None:
    model.dit.load_state_dict(load_weights(folder / "dit.safetensors"))
    model.text.load_state_dict(load_weights(folder / "text.safetensors"))


def load_encoder(file: Path, device: str) -> Encode:
    """Load the trained encoder as a function from pixels to normalised latents."""
    autoencoder = load_autoencoder(file, device)

    @torch.no_grad()
    def encode(pixels: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            return autoencoder.encode(pixels).float()

    return encode


def main() -> None:
    options, device = read_options(Options, __doc__), choose_device()
    Trainer(options, open_world(device), load_encoder(options.autoencoder, device), device).run()


if __name__ == "__main__":
    main()
