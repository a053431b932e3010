"""Train the embedded row of the causal Wan by flow matching under teacher forcing, on a clock.

    python -m training.train_dit --minutes 9 --autoencoder FILE --out DIR [--resume DIR]

Writes into DIR, every two minutes and at the end: dit-1.safetensors, dit-2.safetensors ... and
text.safetensors (running mean, fp16), record.json, and samples of unseen prompts by 16 and by 4 steps.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from recap.backbones.tiny.autoencoder import Autoencoder
from recap.backbones.tiny.backbone import WordTable
from recap.backbones.tiny.vocabulary import null_token_ids
from recap.backbones.wan.model import CausalWan
from recap.backbones.wan.spec import EMBEDDED, WanSpec
from training.clips import LatentClips, LatentPool, World, open_world
from training.optimisers import Clock, Muon, RunningMean, split_parameters
from training.records import Record, load_weights, save_weights
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
    extra: int = 2  # further noisy copies of block 0
    muon_rate: float = 2.5e-3
    adam_rate: float = 1e-3
    mean_decay: float = 0.9985
    context_noise: float = 0.12  # most noise in what is remembered: a rollout's own past is never clean
    text_dropout: float = 0.1
    pool: int = 6000
    start_pool: int = 960
    fresh_every: int = 3
    eval_clips: int = 48
    eval_every_s: float = 120.0
    warmup_s: float = 8.0
    reserve_s: float = 40.0
    sample_blocks: int = 14
    compile: bool = True


class TextAndFlow(nn.Module):
    """The transformer and its words, as one thing to train."""

    def __init__(self, spec: WanSpec) -> None:
        super().__init__()
        self.dit = CausalWan(spec)
        self.text = WordTable(spec)
        self.apply(_draw_weights)
        for block in self.dit.blocks:
            # Prompts are let in gradually: at first a block only reads its neighbours.
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
    """Noise levels: logit-normal, shifted towards noise as the sampler's schedule is."""
    plain = torch.sigmoid(torch.randn(*shape, device=device))
    return (shift * plain / (1 + (shift - 1) * plain)).clamp(1e-3, 0.9995)


def add_noise(clean: Tensor, noise: Tensor, sigma: Tensor) -> Tensor:
    """(1 - sigma) clean + sigma noise, sigma B blocks, the others B blocks F C rows columns."""
    level = sigma[..., None, None, None, None]
    return (1 - level) * clean + level * noise


def bank_scores(novelty: Tensor) -> Tensor:
    """Frozen scores B N of a clip's tokens for its banks.

    Half the rows prefer what is just entering, as flow novelty does, half know nothing: a bank at inference
    holds both what matters and chance background. Chance also breaks ties.
    """
    weight = (torch.rand(len(novelty), 1, device=novelty.device) < 0.6).float()
    chance = torch.rand_like(novelty.flatten(1))
    return weight * novelty.flatten(1) + 0.35 * chance


def make_batch(
    clips: LatentClips, model: TextAndFlow, options: Options, null_words: Tensor
) -> tuple[ClipBatch, Tensor]:
    """Noise a batch of clips; returns it with the flow its noisy entries should be given."""
    spec = model.dit.spec
    clean = clips.latents.unflatten(1, (-1, spec.frames_per_block))
    rows, blocks = clean.shape[:2]
    device = clean.device.type
    sigma = draw_sigma(rows, blocks, shift=spec.shift, device=device)
    extra_sigma = draw_sigma(rows, options.extra, shift=spec.shift, device=device)
    noise = torch.randn_like(clean)
    first = clean[:, :1].expand(-1, options.extra, *clean.shape[2:])
    extra_noise = torch.randn_like(first)
    past_sigma = options.context_noise * torch.rand(rows, blocks, device=device)
    dropped = torch.rand(rows, 1, 1, device=device) < options.text_dropout
    words = torch.where(dropped, null_words, clips.words)
    batch = ClipBatch(
        clean=add_noise(clean, torch.randn_like(clean), past_sigma),
        noisy=add_noise(clean, noise, sigma),
        sigma=sigma,
        extra=add_noise(first, extra_noise, extra_sigma),
        extra_sigma=extra_sigma,
        text=model.text(words),
        score=bank_scores(clips.novelty),
    )
    return batch, torch.cat([noise - clean, extra_noise - first], dim=1)


class Trainer:
    def __init__(
        self, options: Options, world: World, encode: Encode, device: str, spec: WanSpec = EMBEDDED
    ) -> None:
        self.options = options
        self.clock = Clock(options.minutes, reserve_s=options.reserve_s, warmup_s=options.warmup_s)
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
        self.layouts: tuple[Layout, ...] = spread_rows(options.batch, spec.grid[0] * spec.grid[1])
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
        """Train until the clock says stop; returns the last loss on unseen clips."""
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
        """One update; returns the loss per entry, on the device: blocks in order, then extra ones."""
        clips = self.pool.draw(self.options.batch)
        per_entry = self.loss(clips)
        for optimiser in self.optimisers:
            optimiser.zero_grad(set_to_none=True)
        per_entry.mean().backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimiser in self.optimisers:
            optimiser.step()
        self.mean.update()
        return per_entry.detach()

    def loss(self, clips: LatentClips) -> Tensor:
        """Mean square error of the flow, per entry."""
        with self.autocast():
            batch, wanted = make_batch(clips, self.model, self.options, self.null_words)
            flow = predict_flow(self.model.dit, batch, self.layouts, self.turns)
        return (flow.float() - wanted).square().mean(dim=(0, 2, 3, 4, 5))

    @torch.no_grad()
    def evaluate(self, samples: bool) -> float:
        """Loss of the running mean on unseen clips; writes weights and record, and samples if asked."""
        self.mean.swap()
        # The same clips under the same noise at every call, without disturbing the training's own chance.
        with torch.random.fork_rng(devices=[0] if self.device == "cuda" else []):
            torch.manual_seed(1)
            rounds = max(1, self.options.eval_clips // self.options.batch)
            # With gradients on, though none are wanted: without, every layer would be compiled a second time.
            with torch.enable_grad():
                losses = [self.loss(self._unseen(UNSEEN_SEED + i)).detach() for i in range(rounds)]
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

    def _unseen(self, seed: int) -> LatentClips:
        clips = self.world(self.options.batch, seed)
        return LatentClips(self.encode(clips.pixels), clips.words, clips.novelty)

    def _note(self, steps: int, rate: float, losses: list[Tensor]) -> None:
        mean = torch.stack(losses).mean(dim=0)
        blocks = len(mean) - self.options.extra
        self.record.add(
            "train", steps=steps, loss=mean.mean().item(), opening=mean[0].item(),
            later=mean[1:blocks].mean().item(), rate=rate,
        )  # fmt: skip


def compile_blocks(model: CausalWan) -> None:
    """Compile every layer's forward. Only training does: all its calls share their shapes."""
    torch._dynamo.config.suppress_errors = True  # a layer that cannot be compiled still runs, only slower
    for block in model.blocks:
        block.compile(dynamic=False)


def save_model(model: TextAndFlow, folder: Path) -> None:
    save_weights(folder / "dit.safetensors", model.dit.state_dict())
    save_weights(folder / "text.safetensors", model.text.state_dict())


def load_model(model: TextAndFlow, folder: Path) -> None:
    model.dit.load_state_dict(load_weights(folder / "dit.safetensors"))
    model.text.load_state_dict(load_weights(folder / "text.safetensors"))


def load_encoder(file: Path, device: str) -> Encode:
    """The trained encoder as a function of pixels to normalised latents."""
    autoencoder = Autoencoder()
    autoencoder.load_state_dict(load_weights(file))
    autoencoder.to(device, memory_format=torch.channels_last).eval().requires_grad_(False)

    @torch.no_grad()
    def encode(pixels: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            return autoencoder.encode(pixels).float()

    return encode


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--autoencoder", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--muon-rate", type=float)
    parser.add_argument("--adam-rate", type=float)
    parser.add_argument("--sample-blocks", type=int)
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    given = {name: value for name, value in vars(parser.parse_args()).items() if value is not None}
    options = replace(Options(given["minutes"], given["autoencoder"], given["out"]), **given)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    Trainer(options, open_world(device), load_encoder(options.autoencoder, device), device).run()


if __name__ == "__main__":
    main()
