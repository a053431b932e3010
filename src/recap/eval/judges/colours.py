"""Measures the perceived distance of two colours, and an actor's mean colour over several pictures."""

from __future__ import annotations

import torch
from torch import Tensor

_TO_XYZ = (
    (0.4124564, 0.3575761, 0.1804375),
    (0.2126729, 0.7151522, 0.0721750),
    (0.0193339, 0.1191920, 0.9503041),
)
# The white point D65.
_WHITE = (0.95047, 1.0, 1.08883)


def to_lab(rgb: Tensor) -> Tensor:
    """Convert sRGB colours `... 3` in 0..1 to CIE L*a*b* (D65)."""
    rgb = rgb.double()
    linear = torch.where(rgb <= 0.04045, rgb / 12.92, ((rgb.clamp(min=0) + 0.055) / 1.055) ** 2.4)
    xyz = linear @ torch.tensor(_TO_XYZ, dtype=torch.float64, device=rgb.device).T
    share = xyz / torch.tensor(_WHITE, dtype=torch.float64, device=rgb.device)
    edge = 6 / 29
    f = torch.where(share > edge**3, share.clamp(min=1e-12) ** (1 / 3), share / (3 * edge**2) + 4 / 29)
    x, y, z = f.unbind(-1)
    return torch.stack((116 * y - 16, 500 * (x - y), 200 * (y - z)), dim=-1)


def colour_distance(one: Tensor, other: Tensor) -> Tensor:
    """Return Delta E (CIE 1976) of sRGB colours `... 3`: 2.3 is just noticeable; an unknown colour gives nan."""
    distance: Tensor = torch.linalg.vector_norm(to_lab(one) - to_lab(other), dim=-1)
    return distance


def mean_colour(found: Tensor, colour: Tensor, cells: Tensor) -> Tensor:
    """Average colours B T 3 over the pictures that show the actor, weighted by cells; B 3, nan if none does."""
    weight = (cells * found)[..., None]
    total = weight.sum(dim=1)
    mean = (colour.nan_to_num() * weight).sum(dim=1) / total.clamp(min=1e-6)
    return torch.where(total > 0, mean, float("nan"))
