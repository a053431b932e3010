"""Panoramas: sky, two ranges on the horizon, ground and landmarks, for eight scenes at three times of day.

Everything is smooth or has soft edges on purpose: detail that the autoencoder cannot keep at one token per 16 x 16
pixels would only teach it to blur.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from recap.backbones.tiny.vocabulary import SCENES, TIMES
from training.dice import Dice
from training.landmarks import LANDMARK_NAMES, LANDMARKS, draw_landmarks
from training.sprites import hsv_to_rgb, prefilter

Colour = tuple[int, int, int]
NUM_TALL, NUM_SMALL, NUM_CLOUDS = 5, 6, 3
SMOOTH, PEAKS, BLOCKS, CROWNS = range(4)


@dataclass(frozen=True, slots=True)
class SceneStyle:
    """The look of one scene by day, in colours of 0..255, and its landmarks."""

    sky: tuple[Colour, Colour]  # top, horizon
    ranges: tuple[Colour, Colour]  # far, near
    ground: tuple[Colour, Colour]  # horizon, bottom
    band: Colour  # a strip of ground of another kind
    band_rows: tuple[float, float]  # below the horizon, in pixels
    profiles: tuple[int, int]  # far, near
    heights: tuple[float, float]  # of the ranges, in pixels
    tall: tuple[str, ...]
    small: tuple[str, ...]
    front: tuple[str, ...]
    caps: float = 0.0  # snow on the far range
    clouds: float = 0.6


STAGES: dict[str, SceneStyle] = {
    "beach": SceneStyle(((86, 176, 240), (206, 236, 250)), ((104, 176, 206), (70, 150, 190)), ((246, 222, 158),
            (228, 190, 120)),
                   (48, 150, 205), (-7, 13), (SMOOTH, SMOOTH), (9, 3), ("palm", "umbrella", "lighthouse"),
                   ("pebble",), ("boulder", "kiosk")),
    "forest": SceneStyle(((140, 200, 225), (214, 236, 214)), ((98, 158, 120), (58, 122, 74)), ((98, 158, 70),
            (56, 108, 48)),
                    (134, 112, 70), (30, 42), (CROWNS, CROWNS), (26, 15), ("tree", "pine"),
                    ("tuft", "flower"), ("hedge", "boulder")),
    "city": SceneStyle(((132, 176, 222), (222, 228, 236)), ((150, 160, 184), (112, 120, 148)), ((168, 166, 168),
            (140, 138, 142)),
                  (86, 88, 98), (20, 44), (BLOCKS, BLOCKS), (44, 24), ("tower", "house"), ("pebble",),
                  ("kiosk", "hedge")),
    "desert": SceneStyle(((108, 182, 236), (250, 230, 186)), ((226, 170, 110), (214, 148, 84)), ((240, 196, 116),
            (206, 144, 74)),
                    (226, 172, 96), (26, 38), (BLOCKS, SMOOTH), (15, 10), ("cactus", "rock", "tent"),
                    ("pebble", "tuft"), ("boulder",), clouds=0.2),
    "snow": SceneStyle(((150, 198, 240), (226, 240, 252)), ((186, 208, 232), (208, 224, 242)), ((246, 250, 255),
            (206, 224, 244)),
                  (168, 212, 238), (30, 44), (PEAKS, SMOOTH), (26, 12), ("snowy pine", "house"), ("pebble",),
                  ("boulder", "kiosk")),
    "meadow": SceneStyle(((104, 184, 244), (214, 240, 252)), ((138, 192, 132), (112, 184, 88)), ((136, 204, 84),
            (78, 158, 58)),
                    (108, 184, 72), (24, 36), (SMOOTH, SMOOTH), (16, 10), ("tree", "house"),
                    ("flower", "tuft"), ("hedge", "kiosk")),
    "sea": SceneStyle(((70, 190, 226), (30, 130, 196)), ((26, 112, 176), (20, 96, 150)), ((196, 206, 160),
            (132, 160, 140)),
                 (176, 190, 146), (28, 38), (SMOOTH, CROWNS), (18, 9), ("kelp", "coral", "rock"),
                 ("coral", "pebble"), ("boulder",), clouds=0.0),
    "mountains": SceneStyle(((96, 164, 232), (212, 230, 246)), ((126, 136, 168), (98, 122, 118)), ((124, 164, 96),
            (82, 118, 66)),
                       (150, 142, 128), (28, 38), (PEAKS, PEAKS), (58, 20), ("pine", "rock", "tent"),
                       ("tuft", "pebble"), ("boulder", "hedge"), caps=1.0),
}  # fmt: skip
assert tuple(STAGES) == SCENES

# By time of day: the light on objects, and the sky's own colours with their share of the scene's.
LIGHT = ((1.0, 1.0, 1.0), (1.0, 0.82, 0.74), (0.50, 0.58, 0.84))
SKY = (((0, 0, 0), (0, 0, 0)), ((116, 92, 170), (255, 168, 96)), ((20, 26, 78), (64, 80, 150)))
SKY_SHARE = (0.0, 0.78, 0.9)
# Sun, low sun, moon.
GLOBE = ((255, 246, 190), (255, 206, 120), (236, 238, 250))
# Weaker than LIGHT, because the colours of actors must stay recognisable.
ACTOR_LIGHT = ((1.0, 1.0, 1.0), (1.0, 0.93, 0.88), (0.80, 0.84, 0.95))


class Backgrounds:
    """A painter of panoramas in batches; its tables are on the device."""

    def __init__(self, size: tuple[int, int], device: torch.device | str = "cpu") -> None:
        self.size = size
        table = torch.tensor
        stages = tuple(STAGES.values())
        colours = [(*s.sky, *s.ranges, *s.ground, s.band) for s in stages]
        self._palette = table(colours, device=device) / 255  # scene, 7, 3
        self._band_rows = table([s.band_rows for s in stages], device=device)
        self._profiles = table([s.profiles for s in stages], device=device)
        self._heights = table([s.heights for s in stages], device=device)
        self._caps = table([s.caps for s in stages], device=device)
        self._clouds = table([s.clouds for s in stages], device=device)
        choices = [[_numbers(names) for names in (s.tall, s.small, s.front)] for s in stages]
        self._choices = table(choices, device=device)  # scene, tall | small | front, 6
        self._light, self._sky = table(LIGHT, device=device), table(SKY, device=device) / 255
        self._sky_share, self._globe = table(SKY_SHARE, device=device), table(GLOBE, device=device) / 255
        self._actor_light = table(ACTOR_LIGHT, device=device)
        self._masks = draw_landmarks(device)
        self._colours = table([mark.colours for mark in LANDMARKS.values()], device=device)
        self._any_hue = table([mark.any_hue for mark in LANDMARKS.values()], device=device)
        self._shines = table([mark.shines for mark in LANDMARKS.values()], device=device)
        self._rows = torch.arange(size[0], device=device, dtype=torch.float32)[:, None]
        self._columns = torch.arange(size[1], device=device, dtype=torch.float32)

    def actor_light(self, time: Tensor) -> Tensor:
        """Return how much the time of day dims actors, B 3."""
        return self._actor_light[time]

    def draw(self, dice: Dice, scene: Tensor, time: Tensor, horizon: Tensor) -> Tensor:
        """Draw panoramas B 3 rows columns in 0..1."""
        palette = self._colours_of_clip(dice, scene, time)
        line = horizon[:, None, None]
        picture = self._sky_part(dice, palette, scene, time, line)
        picture = self._range_part(dice, picture, palette, scene, time, line)
        picture = self._ground_part(dice, picture, palette, scene, line)
        picture = self._landmark_part(dice, picture, scene, time, horizon)
        return picture.clamp(0, 1)

    def front_sprite(self, dice: Dice, scene: Tensor, time: Tensor, drawn_size: Tensor) -> Tensor:
        """Draw the object in front, B 4 SIDE SIDE premultiplied."""
        kind = self._pick(dice, scene, 2, 1)[:, 0]
        colours = self._landmark_colours(dice, kind[:, None], time)[:, 0]
        masks = prefilter(self._masks[kind], drawn_size)
        rgb = (masks[:, :, None] * colours[..., None, None]).sum(1)
        return torch.cat((rgb, masks.sum(1, keepdim=True)), dim=1)

    def _colours_of_clip(self, dice: Dice, scene: Tensor, time: Tensor) -> Tensor:
        """Return the scene's palette with random changes in the light of the hour, B 7 3 1 1."""
        palette = self._palette[scene] + dice.normal(0.028, 7, 3) + dice.normal(0.03, 7, 1)
        palette = palette * self._light[time][:, None]
        # Water keeps more of its own colour, especially in an orange evening, which would turn it grey.
        water = torch.where(time == TIMES.index("evening"), 0.25, 0.55)
        share = self._sky_share[time] * torch.where(scene == SCENES.index("sea"), water, 1.0)
        share = share[:, None, None]
        sky = palette[:, :2] + share * (self._sky[time] + dice.normal(0.03, 2, 3) - palette[:, :2])
        return torch.cat((sky, palette[:, 2:]), dim=1).clamp(0, 1)[..., None, None]

    def _sky_part(self, dice: Dice, palette: Tensor, scene: Tensor, time: Tensor, line: Tensor) -> Tensor:
        down = (self._rows / line).clamp(0, 1)[:, None]
        picture = (palette[:, 0] + down * (palette[:, 1] - palette[:, 0])).expand(-1, -1, *self.size)
        x, lift = dice.uniform(20, self.size[1] - 20, 1, 1), dice.uniform(0.12, 0.4, 1, 1)
        y = line * torch.where((time == TIMES.index("evening"))[:, None, None], 0.9 - 0.6 * lift, lift)
        distance = ((self._columns - x) ** 2 + (self._rows - y) ** 2).sqrt() - dice.uniform(9, 15, 1, 1)
        disc = (0.5 - distance / 1.6).clamp(0, 1) + 0.35 * torch.exp(-distance.clamp(min=0) / 14)
        above = (scene != SCENES.index("sea"))[:, None, None]
        disc = (disc.clamp(0, 1) * above)[:, None]
        return picture + disc * (self._globe[time][..., None, None] - picture)

    def _range_part(
        self, dice: Dice, picture: Tensor, palette: Tensor, scene: Tensor, time: Tensor, line: Tensor
    ) -> Tensor:
        snow = (self._light[time] * 0.96)[..., None, None]
        for layer in range(2):
            height = self._heights[scene, layer][:, None] * dice.uniform(0.75, 1.2, 1)
            rise = height * self._profile(dice, self._profiles[scene, layer])  # B columns
            top = line - rise[:, None]
            cover = (0.5 - (top - self._rows) / 1.5).clamp(0, 1)[:, None]
            haze = 0.38 if layer == 0 else 0.12
            colour = palette[:, 2 + layer] + haze * (palette[:, 1] - palette[:, 2 + layer])
            if layer == 0:
                ragged = 3 * torch.sin(self._columns / dice.uniform(5, 9, 1, 1))
                cap = (0.5 + (line - 0.5 * height[..., None] + ragged - self._rows) / 3).clamp(0, 1)
                cap = (cap * self._caps[scene][:, None, None])[:, None]
                colour = colour + cap * (snow - colour)
            picture = picture + cover * (colour - picture)
        return picture

    def _profile(self, dice: Dice, kind: Tensor) -> Tensor:
        """Return a skyline B columns, about 0..1: rolling hills, peaks, roofs or tree crowns."""
        x = self._columns
        wave = dice.uniform(110, 260, 3, 1) / x.new_tensor(((1.0,), (1.7,), (2.9,)))
        angle = 2 * math.pi * x / wave + dice.uniform(0, 2 * math.pi, 3, 1)
        share = x.new_tensor(((0.5,), (0.32,), (0.18,)))
        smooth = 0.55 + 0.45 * (share * torch.sin(angle)).sum(1)
        peaks = 1 - 1.15 * (share * (2 / math.pi) * torch.asin(0.999 * torch.sin(angle)).abs()).sum(1)
        width = dice.uniform(22, 34, 1)
        cell = x / width
        stairs = dice.uniform(0.25, 1.0, 26)
        here = cell.floor().long().clamp(0, 24)
        # The last two pixels lead to the next roof.
        into = ((cell - cell.floor() - 1) * width / 2 + 1).clamp(0, 1)
        blocks = stairs.gather(1, here) * (1 - into) + stairs.gather(1, here + 1) * into
        bump = dice.uniform(20, 34, 1)
        crowns = 0.5 + 0.3 * torch.sin(math.pi * x / bump).abs() + 0.25 * (smooth - 0.5)
        every = torch.stack((smooth, peaks, blocks, crowns), dim=1)
        return every.gather(1, kind[:, None, None].expand(-1, 1, x.shape[0]))[:, 0]

    def _ground_part(
        self, dice: Dice, picture: Tensor, palette: Tensor, scene: Tensor, line: Tensor
    ) -> Tensor:
        down = ((self._rows - line) / (self.size[0] - line)).clamp(0, 1)[:, None]
        ground = palette[:, 4] + down * (palette[:, 5] - palette[:, 4])
        # Low waves of light and shade: texture that flow can track, coarse enough to encode.
        texture = dice.normal(1.0, 1, 6, 22) * dice.uniform(0.012, 0.032, 1, 1, 1)
        ground = ground * (1 + F.interpolate(texture, size=self.size, mode="bicubic", align_corners=False))
        rows = self._band_rows[scene] + dice.uniform(-3, 3, 2)
        edge = dice.uniform(1, 3, 1, 1) * torch.sin(self._columns / dice.uniform(18, 34, 1, 1))
        edge = torch.where((scene == SCENES.index("city"))[:, None, None], 0.0, edge)
        below = (0.5 + (self._rows - line - rows[:, 0, None, None] - edge * 0.5) / 1.6).clamp(0, 1)
        above = (0.5 - (self._rows - line - rows[:, 1, None, None] - edge) / 1.6).clamp(0, 1)
        sea = (scene == SCENES.index("beach"))[:, None, None]
        band = (torch.where(sea, 1.0, below) * above * dice.flag(0.8, 1, 1).logical_or(sea))[:, None]
        ground = ground + band * (palette[:, 6] - ground)
        cover = (0.5 + (self._rows - line) / 1.5).clamp(0, 1)[:, None]
        return picture + cover * (ground - picture)

    def _landmark_part(
        self, dice: Dice, picture: Tensor, scene: Tensor, time: Tensor, horizon: Tensor
    ) -> Tensor:
        rows, columns = self.size
        spread = torch.arange(NUM_TALL, device=picture.device)
        tall_x = (spread + dice.uniform(0.15, 0.85, NUM_TALL)) * columns / NUM_TALL
        small_x = dice.uniform(0, columns, NUM_SMALL)
        cloud_x = dice.uniform(0, columns, NUM_CLOUDS)
        tall_size = dice.uniform(40, 66, NUM_TALL)
        small_size, cloud_size = dice.uniform(10, 17, NUM_SMALL), dice.uniform(40, 70, NUM_CLOUDS)
        tall_feet = (horizon[:, None] + dice.uniform(3, 20, NUM_TALL)).sort(1).values
        depth = rows - 24 - horizon[:, None]
        small_feet = (horizon[:, None] + 16 + depth * dice.uniform(0, 1, NUM_SMALL)).sort(1).values
        cloud_feet = horizon[:, None] * dice.uniform(0.35, 0.75, NUM_CLOUDS) + cloud_size / 3
        kind_cloud = torch.full_like(cloud_x, LANDMARK_NAMES.index("cloud"), dtype=torch.long)
        kind_tall, kind_small = self._pick(dice, scene, 0, NUM_TALL), self._pick(dice, scene, 1, NUM_SMALL)
        kinds = torch.cat((kind_cloud, kind_tall, kind_small), 1)
        shares = ((self._clouds[scene][:, None], NUM_CLOUDS), (0.8, NUM_TALL), (0.8, NUM_SMALL))
        shown = torch.cat([dice.flag(share, num) for share, num in shares], 1)
        x = torch.cat((cloud_x, tall_x, small_x), 1)
        feet = torch.cat((cloud_feet, tall_feet, small_feet), 1)
        size = torch.cat((cloud_size, tall_size, small_size), 1)
        colours = self._landmark_colours(dice, kinds, time) * shown[..., None, None]
        masks = prefilter(self._masks[kinds.flatten()], size.flatten()).unflatten(0, kinds.shape)
        for slot in range(kinds.shape[1]):
            half = (size[:, slot] / 2)[:, None]
            across = (self._columns - x[:, slot, None]) / half
            down = (self._rows[:, 0] - feet[:, slot, None]) / half + 1
            grid = torch.stack(torch.broadcast_tensors(across[:, None, :], down[:, :, None]), dim=-1)
            drawn = F.grid_sample(masks[:, slot], grid, align_corners=False)
            cover = (drawn.sum(1, keepdim=True) * shown[:, slot, None, None, None]).clamp(0, 1)
            rgb = sum(drawn[:, i : i + 1] * colours[:, slot, i, :, None, None] for i in range(3))
            picture = picture * (1 - cover) + rgb
        return picture

    def _landmark_colours(self, dice: Dice, kinds: Tensor, time: Tensor) -> Tensor:
        """Return the colours of the three masks of every landmark in the light of the hour, B slots 3 3."""
        slots = kinds.shape[1]
        colours = self._colours[kinds] + dice.normal(0.03, slots, 3, 3)
        paint = hsv_to_rgb(*(dice.uniform(*bounds, slots) for bounds in ((0, 1), (0.15, 0.6), (0.7, 0.98))))
        painted = self._any_hue[kinds] & dice.flag(0.7, slots)
        primary = torch.where(painted[..., None], paint, colours[:, :, 0])
        colours = torch.cat((primary[:, :, None], colours[:, :, 1:]), dim=2)
        colours = colours * self._light[time][:, None, None]
        lamp = colours.new_tensor((1.0, 0.86, 0.5))
        lit = (self._shines[kinds] & (time != TIMES.index("day"))[:, None])[..., None]
        accent = torch.where(lit, lamp, colours[:, :, 2])
        return torch.cat((colours[:, :, :2], accent[:, :, None]), dim=2).clamp(0, 1)

    def _pick(self, dice: Dice, scene: Tensor, group: int, num: int) -> Tensor:
        """Draw landmarks of the scene's tall (0), small (1) or front (2) group, B num, int64."""
        choice = dice.choice((1,) * self._choices.shape[-1], num)
        return self._choices[scene, group].gather(1, choice)


def _numbers(names: tuple[str, ...]) -> list[int]:
    """Return six landmark numbers with every name equally often; groups have one, two or three names."""
    assert 6 % len(names) == 0
    return [LANDMARK_NAMES.index(name) for name in names] * (6 // len(names))
