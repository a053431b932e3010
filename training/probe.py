"""The judge: names the actors in a picture and reads the colours of their instances.

    python -m training.probe --minutes 3 --device cuda --out training/cache/probe.safetensors

A small convolutional net trained on rendered pictures, some of them degraded as a codec or an autoencoder would.
Per token cell (16 x 16 pixels) it says which actor covers it and that instance's mean colour, in the sense of
`Clips.colours`; per picture, which actors are there at all.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from recap.backbones.tiny.autoencoder import Autoencoder
from recap.backbones.tiny.vocabulary import ACTORS, MAX_ACTORS
from recap.errors import refuse
from training.atlas import CACHE, load_atlas
from training.records import load_weights
from training.world import PICTURES, Clips, World

CELL = 16
NOBODY = len(ACTORS)
UNSURE = -100  # label of cells and actors too little seen to be right or wrong
RoundTrip = Callable[[Tensor], Tensor]  # pictures N 3 Y X through a codec and back


class _Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.GroupNorm(8, channels), nn.SiLU(), nn.Conv2d(channels, channels, 3, padding=1),
            nn.GroupNorm(8, channels), nn.SiLU(), nn.Conv2d(channels, channels, 3, padding=1),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


class Verdict(NamedTuple):
    """What the net says of N pictures, before it is put into words."""

    cells: Tensor  # N ACTORS+1 rows columns, logits; the last is nobody
    colours: Tensor  # N 3 rows columns
    presence: Tensor  # N ACTORS, logits


@dataclass(frozen=True, slots=True)
class Judged:
    """What is in B clips of T pictures, in cells of 16 x 16 pixels."""

    presence: Tensor  # B T ACTORS, probability that the actor is in the picture
    cells: Tensor  # B T rows columns, int64: the likeliest actor, NOBODY for none
    shares: Tensor  # B T ACTORS+1 rows columns, probabilities
    colours: Tensor  # B T rows columns 3, mean colour of the instance that covers the cell

    def actor_colour(self, actor: str) -> tuple[Tensor, Tensor]:
        """Colour B T 3 of an actor over the cells that show it (nan: none does), and how many do, B T."""
        if actor not in ACTORS:
            raise refuse("actor", actor, "no such name", f"take one of {', '.join(ACTORS)}")
        number = ACTORS.index(actor)
        weight = self.shares[:, :, number] * (self.cells == number)
        total = weight.sum((-2, -1))
        colour = (self.colours * weight[..., None]).sum((-3, -2)) / total[..., None].clamp(min=1e-6)
        colour = torch.where(total[..., None] > 0, colour, float("nan"))
        return colour, (self.cells == number).sum((-2, -1))


class Probe(nn.Module):
    """About 0.6 million parameters; any picture size that is a multiple of 16."""

    def __init__(self, widths: tuple[int, int, int, int] = (32, 48, 72, 80)) -> None:
        super().__init__()
        first, second, third, last = widths
        self.body = nn.Sequential(
            nn.PixelUnshuffle(2),
            nn.Conv2d(12, first, 3, padding=1),
            nn.SiLU(),
            nn.Conv2d(first, second, 3, stride=2, padding=1),
            _Residual(second),
            nn.Conv2d(second, third, 3, stride=2, padding=1),
            _Residual(third),
            _Residual(third),
            nn.Conv2d(third, last, 3, stride=2, padding=1),
            _Residual(last),
            _Residual(last),
            nn.GroupNorm(8, last),
            nn.SiLU(),
        )
        self.cells = nn.Conv2d(last, NOBODY + 1, 1)
        self.colours = nn.Conv2d(last, 3, 1)
        self.presence = nn.Conv2d(last, len(ACTORS), 1)
        # The soft maximum adds ln(number of cells) to what starts near zero; begin where most actors are absent.
        nn.init.constant_(self.presence.bias, -8.0)

    def forward(self, pictures: Tensor) -> Verdict:
        """Pictures N 3 Y X in 0..1."""
        if pictures.ndim != 4 or pictures.shape[-2] % CELL or pictures.shape[-1] % CELL:
            limit = f"it must be N 3 Y X with multiples of {CELL}"
            raise refuse("pictures", tuple(pictures.shape), limit, "cut or pad the pictures")
        features = self.body(pictures * 2 - 1)
        # An actor is present if some cell says so: a soft maximum over cells.
        presence = self.presence(features).float().flatten(2).logsumexp(-1)
        return Verdict(self.cells(features).float(), self.colours(features).float() + 0.5, presence)

    @torch.no_grad()
    def judge(self, pictures: Tensor, at_once: int = 256) -> Judged:
        """Pictures B T 3 Y X in 0..1, on the probe's device."""
        flat = pictures.flatten(0, 1)
        verdicts = [self(part) for part in flat.split(at_once)]
        cells, colours, presence = (torch.cat(part) for part in zip(*verdicts, strict=True))
        shape = pictures.shape[:2]
        shares = cells.softmax(1)
        return Judged(
            presence=presence.sigmoid().unflatten(0, shape),
            cells=shares.argmax(1).unflatten(0, shape),
            shares=shares.unflatten(0, shape),
            colours=colours.clamp(0, 1).permute(0, 2, 3, 1).unflatten(0, shape),
        )

    def actor_colour(self, pictures: Tensor, actor: str) -> tuple[Tensor, Tensor]:
        """As `Judged.actor_colour`, of pictures B T 3 Y X."""
        return self.judge(pictures).actor_colour(actor)


@dataclass(frozen=True, slots=True)
class Labels:
    """The truth about N pictures."""

    cells: Tensor  # N rows columns: actor, NOBODY or UNSURE
    colours: Tensor  # N rows columns 3
    presence: Tensor  # N ACTORS: 1, 0 or UNSURE


def labels_of(clips: Clips) -> Labels:
    """Labels of all pictures of a batch, clip by clip."""
    rows, num = clips.instances.shape[:2]
    owner = clips.instances.flatten(0, 1)
    cover = torch.stack(
        [F.avg_pool2d((owner == slot + 1).float()[:, None], CELL)[:, 0] for slot in range(MAX_ACTORS)], 1
    )
    most, slot = cover.max(dim=1)  # N rows columns
    kinds = clips.kinds.repeat_interleave(num, dim=0)
    kind = kinds[:, :, None, None].expand(-1, -1, *slot.shape[1:]).gather(1, slot[:, None])[:, 0]
    cells = torch.where(most >= 0.3, kind, torch.where(most > 0.06, UNSURE, NOBODY))
    colours = clips.colours.repeat_interleave(num, dim=0)  # N K 3
    index = slot.flatten(1)[..., None].expand(-1, -1, 3)
    colours = colours.gather(1, index).unflatten(1, slot.shape[1:])
    seen = clips.visibility.transpose(1, 2).flatten(0, 1)  # N K
    told = torch.where(seen >= 0.3, 1, torch.where(seen > 0.03, UNSURE, 0))
    presence = told.new_zeros(rows * num, len(ACTORS) + 1)
    # Kind -1 (nobody cast) writes to the spare last column.
    presence.scatter_(1, torch.where(kinds < 0, len(ACTORS), kinds), told)
    return Labels(cells, colours, presence[:, :-1])


def probe_loss(verdict: Verdict, labels: Labels) -> Tensor:
    """Cells, colours of covered cells, presence."""
    cells = F.cross_entropy(verdict.cells, labels.cells, ignore_index=UNSURE, reduction="none")
    someone = (labels.cells != NOBODY) & (labels.cells != UNSURE)
    count = someone.sum().clamp(min=1)
    # Most cells show nobody: weigh both halves alike.
    named = (cells * someone).sum() / count + (cells * ~someone).mean()
    miss = F.smooth_l1_loss(verdict.colours.permute(0, 2, 3, 1), labels.colours, beta=0.05, reduction="none")
    colour = (miss.mean(-1) * someone).sum() / count
    told = labels.presence != UNSURE
    truth = labels.presence.clamp(min=0).float()
    present = F.binary_cross_entropy_with_logits(verdict.presence, truth, reduction="none")
    return named + 4 * colour + 10 * (present * told).mean()


def degrade(pictures: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Soften, shrink, block and speckle N 3 Y X, each picture by its own chance; colours stay on average."""

    def chance(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(len(pictures), 1, 1, 1, generator=generator).to(
            pictures.device
        )

    size = pictures.shape[-2:]
    soft = F.avg_pool2d(F.pad(pictures, (1, 1, 1, 1), mode="replicate"), 3, stride=1)
    half = F.interpolate(F.avg_pool2d(pictures, 2), size=size, mode="bilinear", align_corners=False)
    quarter = F.interpolate(F.avg_pool2d(pictures, 4), size=size, mode="bicubic", align_corners=False)
    blocks = F.interpolate(F.avg_pool2d(pictures, 8), size=size, mode="nearest")
    mixed = pictures
    for other, often, most in ((soft, 0.5, 1.0), (half, 0.4, 1.0), (quarter, 0.25, 0.6), (blocks, 0.3, 0.3)):
        share = chance(0, most) * (chance(0, 1) < often)
        mixed = mixed + share * (other - mixed)
    noise = (
        torch.randn(pictures.shape, generator=generator).to(pictures.device)
        if generator
        else torch.randn_like(pictures)
    )
    return (mixed + chance(0, 0.04) * (chance(0, 1) < 0.5) * noise).clamp(0, 1)


@torch.no_grad()
def measure(probe: Probe, world: World, seed: int = 10_000_019, num_clips: int = 64) -> dict[str, float]:
    """How good the judge is on one clean picture each of unseen clips."""
    clips = world.sample(seed, range(num_clips), span=(40, 41))
    labels = labels_of(clips)
    verdict = probe(clips.pictures.flatten(0, 1))
    someone = (labels.cells != NOBODY) & (labels.cells != UNSURE)
    guess = verdict.cells.argmax(1)
    present, told = labels.presence == 1, labels.presence != UNSURE
    says = verdict.presence > 0
    error = (verdict.colours.permute(0, 2, 3, 1) - labels.colours).abs().mean(-1)
    return {
        "actor_cells_right": float((guess == labels.cells)[someone].float().mean()),
        "empty_cells_right": float((guess == labels.cells)[labels.cells == NOBODY].float().mean()),
        "presence_recall": float(says[present].float().mean()),
        "presence_precision": float(present[says & told].float().mean()),
        "colour_error": float(error[someone].mean()),
    }


def train_probe(
    minutes: float, device: torch.device | str, out: Path, *, atlas: Tensor | None = None, batch: int = 96,
    rate: float = 2e-3, seed: int = 77, round_trip: RoundTrip | None = None, max_steps: int | None = None,
) -> Probe:  # fmt: skip
    """Train for a time and save; `round_trip`, where given, is a trained autoencoder that half the pictures pass."""
    world = World(load_atlas() if atlas is None else atlas, device)
    torch.manual_seed(seed)
    probe = Probe().to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(probe.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.02)
    chance = torch.Generator().manual_seed(seed)
    begin, step, spent = time.monotonic(), 0, 0.0
    while spent < 1 and (max_steps is None or step < max_steps):
        spent = (time.monotonic() - begin) / (60 * minutes)
        pace = min(1.0, (step + 1) / 100) * 0.5 * (1 + math.cos(math.pi * min(spent, 1.0)))
        for group in optimizer.param_groups:
            group["lr"] = rate * max(pace, 0.005)
        at = int(torch.randint(PICTURES, (), generator=chance))
        clips = world.sample(seed, range(step * batch, (step + 1) * batch), span=(at, at + 1))
        pictures = clips.pictures.flatten(0, 1)
        if round_trip is not None and step % 2:
            with torch.no_grad():
                pictures = round_trip(pictures)
        with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=world.device.type == "cuda"):
            verdict = probe(degrade(pictures).contiguous(memory_format=torch.channels_last))
        loss = probe_loss(verdict, labels_of(clips))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(probe.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step % 200 == 0:
            print(
                f"step {step}, {60 * minutes * spent:.0f} s, loss {loss.item():.3f}, {measure(probe, world)}",
                flush=True,
            )
    probe.eval()
    print(f"step {step}, {measure(probe, world, num_clips=256)}", flush=True)
    save_probe(probe, out)
    return probe


def save_probe(probe: Probe, file: Path) -> None:
    """Write the weights in half precision, with the names of the actors they know."""
    file.parent.mkdir(parents=True, exist_ok=True)
    weights = {name: value.half().contiguous().cpu() for name, value in probe.state_dict().items()}
    save_file(weights, file, metadata={"actors": ",".join(ACTORS)})


def load_probe(file: Path, device: torch.device | str = "cpu") -> Probe:
    """Read what `save_probe` wrote."""
    if not file.is_file():
        raise refuse("probe", str(file), "no such file", "make it with python -m training.probe")
    with safe_open(file, framework="pt") as stored:
        if stored.metadata().get("actors") != ",".join(ACTORS):
            raise refuse("probe", str(file), "it knows other actors than the vocabulary", "train it anew")
        weights = {name: stored.get_tensor(name).float() for name in stored.keys()}  # noqa: SIM118
    probe = Probe()
    probe.load_state_dict(weights)
    return probe.to(device).eval()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--autoencoder", type=Path, help="pass half the pictures through this one")
    parser.add_argument("--out", type=Path, default=CACHE.parent / "probe.safetensors")
    given = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    passed = None if given.autoencoder is None else load_round_trip(given.autoencoder, given.device)
    train_probe(given.minutes, given.device, given.out, round_trip=passed)


def load_round_trip(file: Path, device: torch.device | str) -> RoundTrip:
    """Single pictures through a trained autoencoder, each with the latent noise that a drawn one may have."""
    model = Autoencoder()
    model.load_state_dict(load_weights(file))
    model.to(device, memory_format=torch.channels_last).eval().requires_grad_(False)

    def there_and_back(pictures: Tensor) -> Tensor:
        latents = model.encode(pictures[:, None])
        level = 0.4 * torch.rand(len(latents), 1, 1, 1, 1, device=latents.device)
        return model.decode(latents + level * torch.randn_like(latents))[:, -1].float().clamp(0, 1)

    return there_and_back


if __name__ == "__main__":
    main()
