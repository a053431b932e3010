"""The crop embedding is a small net that tells instances of the embedded world apart by colour, kind and pattern.

It is trained on rendered crops (`training/crops.py`): two views of one instance are close, other instances are far,
those of the same kind too. The probe finds the subject; its box, with a margin, is what the net sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from recap.backbones.tiny.backbone import WEIGHTS, load_strictly
from recap.errors import refuse
from recap.eval.judges.probe import CELL, Judged, NormedResidual, actor_number
from recap.eval.judges.subject import ProbeWitness
from recap.eval.sampling import Pictures, as_tensor
from recap.eval.witnesses import Box, CropWitness, Vectors
from recap.io.video import Picture
from recap.io.weights import read_metadata

SIDE = 48
"""Crops are resized to this many pixels."""
FEATURES = 64
SHIPPED = WEIGHTS / "crops.safetensors"
FIELD, REMEDY = "crop embedding", "install the released package, or train it with python -m training.crops"


class CropNet(nn.Module):
    """This net has about 0.39 million parameters."""

    def __init__(self, widths: tuple[int, int, int] = (32, 64, 96)) -> None:
        super().__init__()
        first, second, third = widths
        self.body = nn.Sequential(
            nn.PixelUnshuffle(2),
            nn.Conv2d(12, first, 3, padding=1),
            NormedResidual(first),
            nn.Conv2d(first, second, 3, stride=2, padding=1),
            NormedResidual(second),
            nn.Conv2d(second, third, 3, stride=2, padding=1),
            NormedResidual(third),
            nn.GroupNorm(8, third),
            nn.SiLU(),
            # Where in the crop something is, roughly, is part of a look.
            nn.AdaptiveAvgPool2d(3),
            nn.Flatten(),
            nn.Linear(9 * third, FEATURES),
        )

    def forward(self, crops: Tensor) -> Tensor:
        """Map crops N 3 SIDE SIDE in 0..1 to unit vectors N FEATURES."""
        if crops.shape[1:] != (3, SIDE, SIDE):
            limit = f"they must be N 3 {SIDE} {SIDE}"
            raise refuse("crops", tuple(crops.shape), limit, "resize them")
        return functional.normalize(self.body(crops * 2 - 1).float(), dim=1)


class ProbeDetector:
    """Finds an actor of the embedded world by the cells in which the probe sees it."""

    backend = "probe"

    def __init__(self, witness: ProbeWitness) -> None:
        self._witness = witness

    def find(self, pictures: Pictures, subject: str) -> list[Box | None]:
        return boxes_of(self._witness.judge(pictures), subject)


def boxes_of(judged: Judged, actor: str) -> list[Box | None]:
    """Return the box around the cells that show an actor, per picture of one clip; None where it is not found."""
    number = actor_number(actor)
    boxes: list[Box | None] = []
    for cells, share in zip(judged.cells[0] == number, judged.presence[0, :, number], strict=True):
        rows, columns = (cells.any(dim=axis).nonzero()[:, 0].tolist() for axis in (1, 0))
        if not rows or share <= 0.5:
            boxes.append(None)
            continue
        edges = (columns[0], rows[0], columns[-1] + 1, rows[-1] + 1)
        boxes.append(Box(*(float(CELL * edge) for edge in edges)))
    return boxes


def as_crops(pictures: Sequence[Picture]) -> Tensor:
    """Resize square pictures of any sizes to N 3 SIDE SIDE in 0..1."""
    parts = [as_tensor(picture[None])[0] for picture in pictures]
    return torch.cat([
        functional.interpolate(part, size=(SIDE, SIDE), mode="bilinear", antialias=True, align_corners=False)
        for part in parts
    ])  # fmt: skip


class CropEmbedder:
    """Embeds crops by the net."""

    backend = "crops"

    def __init__(self, net: CropNet | None = None) -> None:
        self._net = net or load_crop_net()

    @torch.no_grad()
    def embed(self, pictures: Sequence[Picture]) -> Vectors:
        crops = as_crops(pictures)
        vectors = torch.cat([self._net(part) for part in crops.split(256)])
        return vectors.numpy().astype(np.float32)


def save_crop_net(net: CropNet, file: Path, threshold: float) -> None:
    """Write the weights in half precision, with the likeness from which on two crops show the same instance."""
    file.parent.mkdir(parents=True, exist_ok=True)
    weights = {name: value.half().contiguous().cpu() for name, value in net.state_dict().items()}
    save_file(weights, file, metadata={"same_from": f"{threshold:.4f}"})


def load_crop_net(file: Path | None = None) -> CropNet:
    """Read what `save_crop_net` wrote; without a file, the net that comes with the package."""
    net = CropNet()
    load_strictly(net, file or SHIPPED, FIELD, REMEDY)
    return net.eval().requires_grad_(False)


def same_from(file: Path | None = None) -> float:
    """Return the likeness from which on two crops show the same instance."""
    file = file or SHIPPED
    try:
        found = float(read_metadata(file, FIELD)["same_from"])
    except (KeyError, ValueError):
        found = float("nan")
    if not -1 < found < 1:
        raise refuse(FIELD, str(file), "it does not say from which likeness on two are the same", REMEDY)
    return found


# The net and its mark are read once per process.
_embedder, _mark = cache(CropEmbedder), cache(same_from)


def build_crop_witness(witness: ProbeWitness) -> CropWitness:
    """Return the witness that finds by the probe and compares by the crop embedding."""
    return CropWitness(ProbeDetector(witness), _embedder(), _mark())
