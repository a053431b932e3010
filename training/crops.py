"""Train the crop embedding (`recap.eval.judges.crops`), which tells instances of the embedded world apart.

    python -m training.crops --minutes 10 --device cpu --out training/cache/crops.safetensors

A pool of crops is rendered once: four views of every instance, in other scenes, sizes and pictures, some behind
something, one sent through the autoencoder. Training is contrastive: the views of an instance are close, and all
others of the batch are far, among them five of the same kind. The check on unseen instances asks whether two crops
show the same one, and finds the likeness at which both errors are equal.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recap.backbones.tiny.backbone import WEIGHTS
from recap.backbones.tiny.vocabulary import ACTORS, MAX_ACTORS, SCENES, TIMES
from recap.eval.judges.colours import colour_distance, to_lab
from recap.eval.judges.crops import SIDE, CropNet, as_crops, boxes_of, save_crop_net
from recap.eval.judges.probe import Judged, Probe, load_probe
from recap.eval.judges.subject import KEPT
from recap.eval.witnesses import crop
from training.atlas import CACHE, load_atlas
from training.probe import RoundTrip, degrade, load_round_trip
from training.script import CAMERAS, ActorScript, Script
from training.staging import SCALES
from training.world import World

VIEWS, PICTURES = 4, 40
"""Views of an instance, each one of this many pictures of a clip."""

HUES, HUE_SPREAD = 4, 0.03
"""Instances of a kind have one of so many hues, give or take, so that many are hard to tell apart by colour."""

FRONT_SHARE = 0.15
KINDS, EACH = 8, 6
"""Kinds of a batch, and instances of each."""

TEMPERATURE = 0.1
SEED, UNSEEN = 91, 10_000_091


@dataclass(frozen=True, slots=True)
class Pool:
    """N crops and whom they show."""

    crops: Tensor  # N 3 SIDE SIDE uint8
    instance: Tensor  # N
    kind: Tensor  # N
    colour: Tensor  # N 3, as the probe reads it


def script_of(seed: int, index: int, view: int) -> Script:
    """Return the script of one view: cast, hues and time of day are the clip's, all else is the view's."""
    clip, own = random.Random(f"{seed} {index}"), random.Random(f"{seed} {index} {view}")
    kinds, hour = clip.sample(ACTORS, MAX_ACTORS), clip.choice(TIMES)
    # Python's own hash of a text differs from run to run.
    hues = [(ACTORS.index(kind) * 0.618 + clip.randrange(HUES) / HUES) % 1 for kind in kinds]
    hues = [(hue + clip.uniform(-HUE_SPREAD, HUE_SPREAD)) % 1 for hue in hues]
    actors = [
        ActorScript(kind, hue=hue, size=own.uniform(46, 66) * min(1.15, SCALES.get(kind, 1.0)))
        for kind, hue in zip(kinds, hues, strict=True)
    ]
    return Script(
        own.choice(SCENES), hour, tuple(actors), own.choice(CAMERAS), front=own.random() < FRONT_SHARE
    )


@torch.no_grad()
def render_pool(
    world: World, probe: Probe, round_trip: RoundTrip, seed: int, num_clips: int, at_once: int = 32
) -> Pool:
    """Render every view of the instances of these clips; the probe finds them, and those it misses are left out."""
    chance = torch.Generator().manual_seed(seed)
    parts: list[Pool] = []
    for first in range(0, num_clips, at_once):
        indices = range(first, min(first + at_once, num_clips))
        for view in range(VIEWS):
            at = int(torch.randint(PICTURES, (), generator=chance))
            scripts = [script_of(seed, index, view) for index in indices]
            clips = world.film(scripts, seed, PICTURES, first_index=first, span=(at, at + 1))
            pictures = clips.pictures[:, 0]
            pictures = round_trip(pictures) if view == VIEWS - 1 else degrade(pictures, chance)
            parts += _cut(pictures, probe.judge(pictures[:, None]), scripts, first)
    return Pool(*(torch.cat([getattr(part, name) for part in parts]) for name in Pool.__slots__))


def _cut(pictures: Tensor, judged: Judged, scripts: Sequence[Script], first: int) -> list[Pool]:
    """Cut out every actor that the probe finds in pictures B 3 Y X."""
    parts = []
    shown = (pictures.clamp(0, 1) * 255).round().byte().permute(0, 2, 3, 1).cpu().numpy()
    for row, script in enumerate(scripts):
        own = Judged(*(part[row : row + 1] for part in judged))
        for slot, actor in enumerate(script.actors):
            (box,) = boxes_of(own, actor.kind)
            if box is not None:
                made = (as_crops([crop(shown[row], box)]) * 255).round().byte()
                instance = torch.tensor([(first + row) * MAX_ACTORS + slot])
                kind = torch.tensor([ACTORS.index(actor.kind)])
                parts.append(Pool(made, instance, kind, own.actor_colour(actor.kind)[0][0].cpu()))
    return parts


def vary(crops: Tensor) -> Tensor:
    """Flip, move, resize and partly cover crops N 3 SIDE SIDE, each at random; colours stay."""
    num, device = len(crops), crops.device
    flip = torch.where(torch.rand(num, device=device) < 0.5, -1.0, 1.0)
    size = 1 + 0.15 * (2 * torch.rand(num, device=device) - 1)
    zero, shift = torch.zeros(num, device=device), 0.12 * (2 * torch.rand(2, num, device=device) - 1)
    rows = (flip * size, zero, shift[0], zero, size, shift[1])
    grid = F.affine_grid(torch.stack(rows, 1).view(num, 2, 3), list(crops.shape), align_corners=False)
    moved = F.grid_sample(crops, grid, padding_mode="border", align_corners=False)
    axis = torch.arange(SIDE, device=device)
    low = SIDE * torch.rand(2, num, 1, device=device)
    span = SIDE * (0.15 + 0.35 * torch.rand(2, num, 1, device=device))
    down, across = ((axis >= low[i]) & (axis < low[i] + span[i]) for i in (0, 1))
    covered = (down[:, :, None] & across[:, None]) & (torch.rand(num, 1, 1, device=device) < 0.35)
    # What covers a crop is a part of another one.
    return torch.where(covered[:, None], moved.roll(1, 0), moved)


def contrast_loss(one: Tensor, other: Tensor) -> Tensor:
    """Return the loss of two views, P FEATURES each: each view must find its partner among all other vectors."""
    vectors = torch.cat((one, other))
    likeness = vectors @ vectors.T / TEMPERATURE
    likeness.fill_diagonal_(-math.inf)
    num = len(one)
    partner = torch.cat((torch.arange(num) + num, torch.arange(num))).to(one.device)
    return F.cross_entropy(likeness, partner)


class Drawer:
    """Draws batches of pairs of views, of a few kinds and several instances of each."""

    def __init__(self, pool: Pool, seed: int) -> None:
        self._chance = random.Random(seed)
        self._rows: dict[int, list[list[int]]] = {}
        for instance in pool.instance.unique().tolist():
            rows = (pool.instance == instance).nonzero()[:, 0].tolist()
            if len(rows) > 1:
                self._rows.setdefault(int(pool.kind[rows[0]]), []).append(rows)

    def draw(self) -> tuple[list[int], list[int]]:
        """Return the rows of the pool of one view of each, and of the other."""
        kinds = self._chance.sample(sorted(self._rows), min(KINDS, len(self._rows)))
        chosen = [
            rows
            for kind in kinds
            for rows in self._chance.sample(self._rows[kind], min(EACH, len(self._rows[kind])))
        ]
        pairs = [self._chance.sample(rows, 2) for rows in chosen]
        return [one for one, _ in pairs], [other for _, other in pairs]


@torch.no_grad()
def check(net: CropNet, pool: Pool) -> dict[str, float]:
    """Ask of all pairs of unseen crops whether they show the same instance, by crops and by the probe's colours."""
    crops = pool.crops.to(next(net.parameters()).device).float() / 255
    vectors = _embed(net, crops)
    lab = to_lab(pool.colour)
    first, second = torch.triu_indices(len(crops), len(crops), 1)
    likeness, distance = (vectors @ vectors.T)[first, second], torch.cdist(lab, lab)[first, second]
    same = pool.instance[first] == pool.instance[second]
    same_kind = (pool.kind[first] == pool.kind[second]) & ~same
    # Those that a judge of colours alone takes for the same.
    similar = same_kind & (distance < KEPT)
    found: dict[str, float] = {"pairs_same": int(same.sum()), "pairs_similar": int(similar.sum())}
    for name, others in (("other_kind", ~same & ~same_kind), ("same_kind", same_kind), ("similar", similar)):
        found[f"auc_{name}"] = auc(likeness[same], likeness[others])
        found[f"colour_auc_{name}"] = auc(-distance[same], -distance[others])
    found["same_from"], found["equal_error"] = equal_error(likeness[same], likeness[same_kind])
    found["similar_called_same"] = float((likeness[similar] >= found["same_from"]).float().mean())
    found["just_noticeable"] = 1 - float((vectors * _embed(net, reddened(crops))).sum(1).mean())
    found["likeness_same"] = float(likeness[same].mean())
    found["likeness_same_kind"] = float(likeness[same_kind].mean())
    found["likeness_same_sd"] = float(likeness[same].std())
    return found


def _embed(net: CropNet, crops: Tensor) -> Tensor:
    return torch.cat([net(part) for part in crops.split(256)]).cpu()


def reddened(crops: Tensor) -> Tensor:
    """Shift the colours of crops N 3 Y X towards red by what is just noticeable on average, a Delta E of 2.3."""
    shift = torch.tensor([0.01, 0.0, -0.01], device=crops.device)[:, None, None]
    moved = colour_distance(crops.movedim(1, -1), (crops + shift).movedim(1, -1)).mean()
    return (crops + shift * float(2.3 / moved)).clamp(0, 1)


def auc(same: Tensor, others: Tensor) -> float:
    """Return the chance that a pair of the same is more alike than one of others; a tie counts half."""
    if not len(same) or not len(others):
        return math.nan
    ordered = others.double().sort().values
    below, upto = (torch.searchsorted(ordered, same.double(), right=right) for right in (False, True))
    return float((below + upto).double().mean() / (2 * len(ordered)))


def equal_error(same: Tensor, others: Tensor) -> tuple[float, float]:
    """Return the likeness at which as many of the same are missed as others are taken for it, and this share."""
    marks = torch.linspace(-1, 1, 2001, dtype=torch.float64)
    one, other = same.double().sort().values, others.double().sort().values
    missed = torch.searchsorted(one, marks) / max(1, len(one))
    taken = 1 - torch.searchsorted(other, marks) / max(1, len(other))
    best = int((missed - taken).abs().argmin())
    return float(marks[best]), float((missed[best] + taken[best]) / 2)


def train(
    pool: Pool, net: CropNet, minutes: float, device: str, *, rate: float = 2e-3, max_steps: int = 10**9
) -> int:
    """Train for some minutes, or steps; return the number of steps."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.05)
    drawer, crops = Drawer(pool, SEED), pool.crops.to(device)
    begin, step, spent = time.monotonic(), 0, 0.0
    while spent < 1 and step < max_steps:
        spent = (time.monotonic() - begin) / (60 * minutes)
        pace = min(1.0, (step + 1) / 50) * 0.5 * (1 + math.cos(math.pi * min(spent, 1.0)))
        for group in optimizer.param_groups:
            group["lr"] = rate * max(pace, 0.01)
        one, other = (net(vary(crops[rows].float() / 255)) for rows in drawer.draw())
        loss = contrast_loss(one, other)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step % 100 == 0:
            print(f"step {step}, {60 * minutes * spent:.0f} s, loss {loss.item():.3f}", flush=True)
    return step


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="of training, after rendering")
    parser.add_argument("--clips", type=int, default=480, help="clips of three instances each")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--autoencoder", type=Path, default=WEIGHTS / "autoencoder.safetensors")
    parser.add_argument("--out", type=Path, default=CACHE.parent / "crops.safetensors")
    options = parser.parse_args()
    torch.manual_seed(SEED)
    world, probe = World(load_atlas(), options.device), load_probe(device=options.device)
    round_trip = load_round_trip(options.autoencoder, options.device)
    pools = []
    for seed, num in ((UNSEEN, max(8, options.clips // 5)), (SEED, options.clips)):
        pools.append(render_pool(world, probe, round_trip, seed, num))
        print(f"{len(pools[-1].crops)} crops of {num} clips, {time.process_time():.0f} CPU s", flush=True)
    net = CropNet().to(options.device)
    steps = train(pools[1], net, options.minutes, options.device)
    found = check(net.eval(), pools[0])
    print(f"step {steps}, {time.process_time():.0f} CPU s, {found}", flush=True)
    save_crop_net(net, options.out, found["same_from"])


if __name__ == "__main__":
    main()
