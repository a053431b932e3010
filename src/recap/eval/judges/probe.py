"""The probe is a small convolutional net that finds the actors in a picture and their colours.

It is trained on rendered pictures (`training/probe.py`). Per token cell (16 x 16 pixels) it predicts which actor
covers it and that instance's mean colour; per picture, which actors are there at all.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from recap.backbones.tiny.backbone import WEIGHTS, load_strictly
from recap.backbones.tiny.vocabulary import ACTORS
from recap.errors import refuse, unknown_name
from recap.io.weights import read_metadata

CELL = 16
NOBODY = len(ACTORS)
BATCH = 32
"""Pictures that judges show to the probe at once: activations stay below 100 MB."""
SHIPPED = WEIGHTS / "probe.safetensors"


class NormedResidual(nn.Module):
    """Adds two normalised convolutions to what comes in."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.GroupNorm(8, channels), nn.SiLU(), nn.Conv2d(channels, channels, 3, padding=1),
            nn.GroupNorm(8, channels), nn.SiLU(), nn.Conv2d(channels, channels, 3, padding=1),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        changed: Tensor = x + self.body(x)
        return changed


class Verdict(NamedTuple):
    """Holds what the net predicts of N pictures, as numbers.

    `cells` are logits N ACTORS+1 rows columns (the last is nobody), `colours` N 3 rows columns, and `presence` are
    logits N ACTORS.
    """

    cells: Tensor
    colours: Tensor
    presence: Tensor


class Judged(NamedTuple):
    """Says what B clips of T pictures show, in cells of 16 x 16 pixels.

    `presence` B T ACTORS is the probability that the picture shows the actor; `cells` B T rows columns is the
    likeliest actor of a cell, or NOBODY; `shares` B T ACTORS+1 rows columns are the probabilities behind it; and
    `colours` B T rows columns 3 is the mean colour of the instance that covers the cell.
    """

    presence: Tensor
    cells: Tensor
    shares: Tensor
    colours: Tensor

    def actor_colour(self, actor: str) -> tuple[Tensor, Tensor]:
        """Return an actor's colour B T 3 over the cells that show it (nan if none does) and their number B T."""
        number = actor_number(actor)
        weight = self.shares[:, :, number] * (self.cells == number)
        total = weight.sum((-2, -1))
        colour = (self.colours * weight[..., None]).sum((-3, -2)) / total[..., None].clamp(min=1e-6)
        colour = torch.where(total[..., None] > 0, colour, float("nan"))
        return colour, (self.cells == number).sum((-2, -1))


def actor_number(actor: str) -> int:
    """Return the place of an actor in the vocabulary; refuse an unknown one."""
    if actor not in ACTORS:
        raise unknown_name("actor", actor, ACTORS)
    return ACTORS.index(actor)


class Probe(nn.Module):
    """This net has about 0.6 million parameters and takes any picture size that is a multiple of 16."""

    def __init__(self, widths: tuple[int, int, int, int] = (32, 48, 72, 80)) -> None:
        super().__init__()
        first, second, third, last = widths
        self.body = nn.Sequential(
            nn.PixelUnshuffle(2),
            nn.Conv2d(12, first, 3, padding=1),
            nn.SiLU(),
            nn.Conv2d(first, second, 3, stride=2, padding=1),
            NormedResidual(second),
            nn.Conv2d(second, third, 3, stride=2, padding=1),
            NormedResidual(third),
            NormedResidual(third),
            nn.Conv2d(third, last, 3, stride=2, padding=1),
            NormedResidual(last),
            NormedResidual(last),
            nn.GroupNorm(8, last),
            nn.SiLU(),
        )
        self.cells = nn.Conv2d(last, NOBODY + 1, 1)
        self.colours = nn.Conv2d(last, 3, 1)
        self.presence = nn.Conv2d(last, len(ACTORS), 1)
        # The soft maximum adds ln(number of cells); this bias starts with most actors absent.
        assert self.presence.bias is not None
        nn.init.constant_(self.presence.bias, -8.0)

    def forward(self, pictures: Tensor) -> Verdict:
        """Look at pictures N 3 Y X in 0..1."""
        if pictures.ndim != 4 or pictures.shape[-2] % CELL or pictures.shape[-1] % CELL:
            limit = f"it must be N 3 Y X with multiples of {CELL}"
            raise refuse("pictures", tuple(pictures.shape), limit, "cut or pad the pictures")
        features = self.body(pictures * 2 - 1)
        # An actor is present if any cell shows it: a soft maximum over cells.
        presence = self.presence(features).float().flatten(2).logsumexp(-1)
        return Verdict(self.cells(features).float(), self.colours(features).float() + 0.5, presence)

    @torch.no_grad()
    def judge(self, pictures: Tensor, at_once: int = 256) -> Judged:
        """Judge pictures B T 3 Y X in 0..1, on the probe's device."""
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


def save_probe(probe: Probe, file: Path) -> None:
    """Write the weights in half precision, with the names of the actors they know."""
    file.parent.mkdir(parents=True, exist_ok=True)
    weights = {name: value.half().contiguous().cpu() for name, value in probe.state_dict().items()}
    save_file(weights, file, metadata={"actors": ",".join(ACTORS)})


def load_probe(file: Path | None = None, device: torch.device | str = "cpu") -> Probe:
    """Read what `save_probe` wrote; without a file, the probe that comes with the package."""
    file = file or SHIPPED
    probe, remedy = Probe(), "install the released package, or train it with python -m training.probe"
    load_strictly(probe, file, "probe", remedy)
    if read_metadata(file, "probe").get("actors") != ",".join(ACTORS):
        raise refuse("probe", str(file), "it knows other actors than the vocabulary", remedy)
    return probe.to(device).eval().requires_grad_(False)
