"""Instances of actors: an actor's sprite in colours of its own, which the prompt does not mention.

Every instance is hue-rotated, tinted and perhaps patterned. The outline and the pattern of light and dark stay, by
which its kind is recognised.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from training.dice import Dice

LUMA = (0.299, 0.587, 0.114)
MEAN_LUMA = 0.62
PATTERNS = ("plain", "stripes", "patches", "halves")
# Patterns are rare, because they hide the kind like camouflage.
PATTERN_SHARES = (0.82, 0.06, 0.06, 0.06)
# The contrast of light and dark, by which eyes, wheels and windows are recognised.
CONTRAST = 1.3
_TO_YIQ = torch.tensor(((0.299, 0.587, 0.114), (0.596, -0.274, -0.322), (0.211, -0.523, 0.312)))
_TO_RGB = torch.linalg.inv(_TO_YIQ)


@dataclass(frozen=True, slots=True)
class Looks:
    """How the instances of a batch differ from their kinds; every field B K or B K 3."""

    hue_turn: Tensor  # radians, by which the sprite's own hues are rotated
    tint: Tensor  # B K 3, the main colour of the instance
    tint_share: Tensor  # 0..1
    second: Tensor  # B K 3, the colour of its pattern
    pattern: Tensor  # int64, index in PATTERNS
    pattern_pitch: Tensor  # half waves across the sprite
    pattern_angle: Tensor  # radians
    pattern_phase: Tensor  # radians


def roll_looks(dice: Dice, num_actors: int, hue: Tensor | None = None) -> Looks:
    """Draw the looks of B x `num_actors` instances; `hue` (B K, 0..1, nan = any) fixes some main colours."""
    rolled = dice.uniform(0, 1, num_actors)
    hue = rolled if hue is None else torch.where(hue.isnan(), rolled, hue)
    tint = hsv_to_rgb(hue, dice.uniform(0.55, 0.95, num_actors), dice.uniform(0.82, 1.0, num_actors))
    second_hue = (hue + dice.uniform(0.22, 0.78, num_actors)) % 1
    second = hsv_to_rgb(second_hue, dice.uniform(0.45, 1.0, num_actors), dice.uniform(0.6, 1.0, num_actors))
    return Looks(
        hue_turn=dice.uniform(0, 2 * math.pi, num_actors),
        tint=tint,
        tint_share=dice.uniform(0.7, 0.9, num_actors),
        second=second,
        pattern=dice.choice(PATTERN_SHARES, num_actors),
        pattern_pitch=dice.uniform(1.4, 2.4, num_actors),
        pattern_angle=dice.uniform(0, math.pi, num_actors),
        pattern_phase=dice.uniform(0, 2 * math.pi, num_actors),
    )


def recolour(sprites: Tensor, looks: Looks, light: Tensor) -> tuple[Tensor, Tensor]:
    """Recolour premultiplied sprites B K 4 S S in light B 3; return them and their mean colours B K 3."""
    alpha = sprites[:, :, 3:]
    colour = sprites[:, :, :3] / alpha.clamp(min=1e-3)
    turn = _hue_turn(looks.hue_turn, sprites)
    colour = (turn[..., None, None] * colour[:, :, None]).sum(3).clamp(0, 1)
    luma = (colour * colour.new_tensor(LUMA)[:, None, None]).sum(2, keepdim=True)
    # A tint would not show on dark kinds, so all instances are made equally bright.
    mean_luma = (luma * alpha).sum((-2, -1), keepdim=True) / alpha.sum((-2, -1), keepdim=True).clamp(min=1e-3)
    luma = luma.clamp(min=1e-3) ** (math.log(MEAN_LUMA) / mean_luma.clamp(0.1, 0.9).log())
    luma = (MEAN_LUMA + CONTRAST * (luma - MEAN_LUMA)).clamp(0, 1)
    share = looks.tint_share[..., None, None, None]
    colour = colour + share * (_shade(looks.tint, luma) - colour)
    mask = 0.7 * _pattern_mask(looks, sprites)
    colour = colour + mask * (_shade(looks.second, luma) - colour)
    drawn = (colour.clamp(0, 1) * light[:, None, :, None, None]) * alpha
    mean = drawn.sum((-2, -1)) / alpha.sum((-2, -1)).clamp(min=1e-3)
    return torch.cat((drawn, alpha), dim=2), mean


def prefilter(textures: Tensor, drawn_size: Tensor) -> Tensor:
    """Blur N C S S so that drawing it `drawn_size` (N) pixels wide with bilinear reads does not alias."""
    shrink = textures.shape[-1] / drawn_size
    sigma = (0.42 * (shrink**2 - 1).clamp(min=0).sqrt()).clamp(0.05, 3.0)
    taps = torch.arange(-6, 7, device=textures.device, dtype=textures.dtype)
    kernel = torch.exp(-0.5 * (taps / sigma[:, None]) ** 2)
    kernel = kernel / kernel.sum(1, keepdim=True)
    channels, side = textures.shape[1], textures.shape[-1]
    # One group per texture, with its own kernel; its channels are the batch.
    blurred = textures.transpose(0, 1)
    blurred = F.conv2d(blurred, kernel[:, None, :, None], padding=(6, 0), groups=len(textures))
    blurred = F.conv2d(blurred, kernel[:, None, None, :], padding=(0, 6), groups=len(textures))
    return blurred.transpose(0, 1).reshape(-1, channels, side, side)


def hsv_to_rgb(hue: Tensor, saturation: Tensor, value: Tensor) -> Tensor:
    """Convert hue, saturation and value in 0..1 to colours `... 3`."""
    k = (hue.new_tensor((5.0, 3.0, 1.0)) + hue[..., None] * 6) % 6
    dip = torch.minimum(k, 4 - k).clamp(0, 1)
    return value[..., None] * (1 - saturation[..., None] * dip)


def _shade(tint: Tensor, luma: Tensor) -> Tensor:
    """Apply a tint to light and dark: dark parts keep some of it, the brightest turn half white."""
    tint = tint[..., None, None]
    body = tint * (0.16 + 1.1 * luma).clamp(max=1.0)
    return body + (0.6 * ((luma - 0.72) / 0.28).clamp(0, 1)) * (1 - body)


def _hue_turn(angle: Tensor, like: Tensor) -> Tensor:
    """Return matrices `... 3 3` that rotate RGB colours around the grey axis."""
    to_yiq, back = _TO_YIQ.to(like), _TO_RGB.to(like)
    cos, sin = angle.cos(), angle.sin()
    zero, one = torch.zeros_like(cos), torch.ones_like(cos)
    rows = (one, zero, zero, zero, cos, -sin, zero, sin, cos)
    middle = torch.stack(rows, dim=-1).unflatten(-1, (3, 3))
    # Written out, because a matmul would round to TF32 when training allows it.
    left = (back[:, :, None] * middle[..., None, :, :]).sum(-2)
    return (left[..., :, :, None] * to_yiq).sum(-2)


def _pattern_mask(looks: Looks, like: Tensor) -> Tensor:
    """Return the mask of the second colour, B K 1 S S in 0..1, with soft edges."""
    side = like.shape[-1]
    axis = torch.linspace(-1, 1, side, device=like.device, dtype=like.dtype)
    cos, sin = looks.pattern_angle.cos()[..., None, None], looks.pattern_angle.sin()[..., None, None]
    along = cos * axis + sin * axis[:, None]
    across = cos * axis[:, None] - sin * axis
    pitch, phase = math.pi * looks.pattern_pitch[..., None, None], looks.pattern_phase[..., None, None]
    stripes = torch.sigmoid(6 * torch.sin(pitch * along + phase))
    waves = torch.sin(pitch * along + phase) * torch.sin(pitch * across + 2 * phase)
    patches = torch.sigmoid(9 * (waves - 0.15))
    halves = torch.sigmoid(12 * along)
    choices = torch.stack((torch.zeros_like(stripes), stripes, patches, halves), dim=2)
    index = looks.pattern[..., None, None, None].expand(-1, -1, 1, side, side)
    return choices.gather(2, index)
