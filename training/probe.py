"""Train the probe (`recap.eval.judges.probe`), which judges pictures of the embedded backbone.

    python -m training.probe --minutes 3 --device cuda --out training/cache/probe.safetensors

It learns from rendered pictures, some of them degraded as by a codec or an autoencoder, which actor covers a cell,
the mean colour of that instance (`Clips.colours`), and which actors the picture shows.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recap.backbones.tiny.vocabulary import ACTORS, MAX_ACTORS
from recap.eval.judges.probe import CELL, NOBODY, Probe, Verdict, save_probe
from training.atlas import CACHE, load_atlas
from training.records import load_autoencoder
from training.world import PICTURES, Clips, World

UNSURE = -100
"""The label of cells and actors that are hardly visible, so that no answer counts as right or wrong."""

RoundTrip = Callable[[Tensor], Tensor]
"""A function that sends pictures N 3 Y X through a codec and back."""


@dataclass(frozen=True, slots=True)
class Labels:
    """The ground truth of N pictures."""

    cells: Tensor  # N rows columns: actor, NOBODY or UNSURE
    colours: Tensor  # N rows columns 3
    presence: Tensor  # N ACTORS: 1, 0 or UNSURE


def labels_of(clips: Clips) -> Labels:
    """Label all pictures of a batch, clip by clip."""
    rows, num = clips.instances.shape[:2]
    owner = clips.instances.flatten(0, 1)
    cover = torch.stack(
        [F.avg_pool2d((owner == slot + 1).float()[:, None], CELL)[:, 0] for slot in range(MAX_ACTORS)], 1
    )
    most, slot = cover.max(dim=1)
    kinds = clips.kinds.repeat_interleave(num, dim=0)
    kind = kinds[:, :, None, None].expand(-1, -1, *slot.shape[1:]).gather(1, slot[:, None])[:, 0]
    cells = torch.where(most >= 0.3, kind, torch.where(most > 0.06, UNSURE, NOBODY))
    colours = clips.colours.repeat_interleave(num, dim=0)
    index = slot.flatten(1)[..., None].expand(-1, -1, 3)
    colours = colours.gather(1, index).unflatten(1, slot.shape[1:])
    visible = clips.visibility.transpose(1, 2).flatten(0, 1)
    label = torch.where(visible >= 0.3, 1, torch.where(visible > 0.03, UNSURE, 0))
    presence = label.new_zeros(rows * num, len(ACTORS) + 1)
    # Kind -1 (nobody) writes to the spare last column.
    presence.scatter_(1, torch.where(kinds < 0, len(ACTORS), kinds), label)
    return Labels(cells, colours, presence[:, :-1])


def probe_loss(verdict: Verdict, labels: Labels) -> Tensor:
    """Return the loss of cells, of colours of covered cells, and of presence."""
    cells = F.cross_entropy(verdict.cells, labels.cells, ignore_index=UNSURE, reduction="none")
    someone = (labels.cells != NOBODY) & (labels.cells != UNSURE)
    count = someone.sum().clamp(min=1)
    # Most cells show nobody, so both groups get equal weight.
    named = (cells * someone).sum() / count + (cells * ~someone).mean()
    miss = F.smooth_l1_loss(verdict.colours.permute(0, 2, 3, 1), labels.colours, beta=0.05, reduction="none")
    colour = (miss.mean(-1) * someone).sum() / count
    sure = labels.presence != UNSURE
    truth = labels.presence.clamp(min=0).float()
    present = F.binary_cross_entropy_with_logits(verdict.presence, truth, reduction="none")
    return named + 4 * colour + 10 * (present * sure).mean()


def degrade(pictures: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Blur, shrink, block and add noise to N 3 Y X, each picture at random; mean colours stay."""

    def chance(low: float, high: float) -> Tensor:
        random = torch.rand(len(pictures), 1, 1, 1, generator=generator).to(pictures.device)
        return low + (high - low) * random

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
    """Measure the probe on one clean picture of each of some unseen clips."""
    clips = world.sample(seed, range(num_clips), span=(40, 41))
    labels = labels_of(clips)
    verdict = probe(clips.pictures.flatten(0, 1))
    someone = (labels.cells != NOBODY) & (labels.cells != UNSURE)
    guess = verdict.cells.argmax(1)
    present, sure = labels.presence == 1, labels.presence != UNSURE
    claimed = verdict.presence > 0
    error = (verdict.colours.permute(0, 2, 3, 1) - labels.colours).abs().mean(-1)
    return {
        "actor_cells_right": float((guess == labels.cells)[someone].float().mean()),
        "empty_cells_right": float((guess == labels.cells)[labels.cells == NOBODY].float().mean()),
        "presence_recall": float(claimed[present].float().mean()),
        "presence_precision": float(present[claimed & sure].float().mean()),
        "colour_error": float(error[someone].mean()),
    }


def train_probe(
    minutes: float, device: torch.device | str, out: Path, *, atlas: Tensor | None = None, batch: int = 96,
    rate: float = 2e-3, seed: int = 77, round_trip: RoundTrip | None = None, max_steps: int | None = None,
) -> Probe:  # fmt: skip
    """Train for some minutes and save; half the pictures pass through `round_trip`, a trained autoencoder."""
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
            seconds = 60 * minutes * spent
            print(
                f"step {step}, {seconds:.0f} s, loss {loss.item():.3f}, {measure(probe, world)}", flush=True
            )
    probe.eval()
    print(f"step {step}, {measure(probe, world, num_clips=256)}", flush=True)
    save_probe(probe, out)
    return probe


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--autoencoder", type=Path, help="send half the pictures through this one")
    parser.add_argument("--out", type=Path, default=CACHE.parent / "probe.safetensors")
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    round_trip = None if options.autoencoder is None else load_round_trip(options.autoencoder, options.device)
    train_probe(options.minutes, options.device, options.out, round_trip=round_trip)


def load_round_trip(file: Path, device: torch.device | str) -> RoundTrip:
    """Load a function that sends single pictures through a trained autoencoder, with noise on their latents."""
    model = load_autoencoder(file, device)

    def round_trip(pictures: Tensor) -> Tensor:
        latents = model.encode(pictures[:, None])
        level = 0.4 * torch.rand(len(latents), 1, 1, 1, 1, device=latents.device)
        return model.decode(latents + level * torch.randn_like(latents))[:, -1].float().clamp(0, 1)

    return round_trip


if __name__ == "__main__":
    main()
