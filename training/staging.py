"""Staging: the motion of the camera and of the actors, random or by script.

Positions are in pixels of the picture, in the order x, y, with the centre of the first pixel at (0, 0). The stage is
a panorama wider than the picture; the camera is the panorama position of the picture's first pixel. Actors move in
the picture, so a panning camera follows them; *anchored* ones stand in the panorama and are left behind.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from recap.backbones.tiny.vocabulary import ACTORS, MAX_ACTORS, SCENES, TIMES
from training.dice import Dice
from training.script import FAR, MAX_VISITS, Script, Timetable, timetable

HEIGHT, WIDTH = 128, 208
STAGE_HEIGHT, STAGE_WIDTH = 140, 512
FLOATERS = ("fish", "whale", "bird", "owl", "balloon", "ghost")
# These are too heavy to hop.
ROLLERS = ("car", "bus", "tractor", "boat", "robot", "snail")
# Wide, flat or thin kinds fill little of their square and would be hard to recognise in a few tokens.
SCALES = {
    "whale": 1.3, "boat": 1.3, "dinosaur": 1.3, "bus": 1.22, "elephant": 1.22, "car": 1.22, "fish": 1.15,
    "tractor": 1.15, "cat": 1.15, "rabbit": 1.15, "duck": 1.15, "turtle": 1.15, "bird": 1.15, "balloon": 1.15,
    "dog": 1.1, "snail": 1.1,
}  # fmt: skip

STAY, ENTER, LEAVE, RETURN, ANCHORED, HIDE = range(6)
# A third each stays, comes late, and leaves; most of the latter come back. HIDE depends on the object in front.
BEHAVIOUR_SHARES = (0.27, 0.36, 0.10, 0.25, 0.02)
ACTOR_COUNT_SHARES = (0.12, 0.40, 0.40, 0.08)
CAMERA_SHARES = (0.65, 0.10, 0.25)
# The share of clips with one or two actors that have a large object in front, which all of them hide behind.
FRONT_SHARE = 0.1
TURN_PICTURES = 3
# The least width of a sprite while it turns: from the edge it could not be recognised.
TURN_WIDTH = 0.6


@dataclass(frozen=True, slots=True)
class Paths:
    """The paths of actors through the pictures, B K T each."""

    x: Tensor  # centre
    y: Tensor  # centre
    size: Tensor  # side of the square sprite
    tilt: Tensor  # radians
    facing: Tensor  # 1 as in the atlas (left), -1 mirrored, in between while turning, never 0


@dataclass(frozen=True, slots=True)
class Staging:
    """Everything about a batch of clips except colours."""

    scene: Tensor  # B
    time: Tensor  # B
    kinds: Tensor  # B K, -1 where nobody is cast
    order: Tensor  # B K, the order of the actors' homes from the left, as captions name them
    horizon: Tensor  # B, row of the panorama
    camera: Tensor  # B T 2
    paths: Paths
    front: Tensor  # B, whether there is an object in front
    front_place: Tensor  # B 2, its centre in the panorama
    front_size: Tensor  # B

    @property
    def num_pictures(self) -> int:
        return self.camera.shape[1]


def roll_staging(dice: Dice, num_pictures: int, scripts: list[Script] | None = None) -> Staging:
    """Stage a batch at random, or by scripts (one per row); whatever a script leaves open is random."""
    time_axis = torch.arange(num_pictures, device=dice.device, dtype=torch.float32)
    plan = timetable(scripts, dice.device) if scripts is not None else None
    scene, time = dice.choice((1,) * len(SCENES)), dice.choice((1,) * len(TIMES))
    count = dice.choice(ACTOR_COUNT_SHARES)
    cast = dice.distinct(MAX_ACTORS, len(ACTORS))
    kinds = torch.where(torch.arange(MAX_ACTORS, device=dice.device) < count[:, None], cast, -1)
    front = dice.flag(FRONT_SHARE) & (count > 0) & (count < 3)
    camera_kind = dice.choice(CAMERA_SHARES)
    order = torch.where(kinds >= 0, dice.uniform(0, 1, MAX_ACTORS), 2.0).argsort(1).argsort(1)
    if plan is not None:
        scene, time, kinds, front, camera_kind = plan.scene, plan.time, plan.kinds, plan.front, plan.camera
        # In the order of the list, like the actors of a prompt.
        order = torch.arange(MAX_ACTORS, device=dice.device).expand_as(kinds)
    horizon = dice.uniform(58, 76)
    camera = _camera(dice, time_axis, camera_kind, front)
    # There must be room next to it for the actors that will hide: on one side, or from the middle on both.
    away = dice.uniform(-1, 1) * torch.where((kinds >= 0).sum(1) > 1, 4.0, 36.0)
    front_x = WIDTH / 2 + away
    front_size = dice.uniform(70, 78)
    front_place = camera[:, 0] + torch.stack((front_x, 124 - front_size / 2), dim=-1)
    paths = _paths(dice, time_axis, kinds, order, camera, camera_kind, horizon, front, front_x, plan)
    return Staging(scene, time, kinds, order, horizon, camera, paths, front, front_place, front_size)


def _camera(dice: Dice, time_axis: Tensor, kind: Tensor, front: Tensor) -> Tensor:
    """Return the camera B T 2: static, panning back and forth over the panorama, or swaying around a point."""
    room_x, room_y = STAGE_WIDTH - WIDTH, STAGE_HEIGHT - HEIGHT
    begin, speed = dice.uniform(0, room_x, 1), dice.uniform(0.5, 1.8, 1)
    speed = torch.where(dice.flag(0.5, 1), speed, -speed)
    # A triangle wave: the pan turns back at the ends of the panorama.
    pan = room_x - ((begin + speed * time_axis) % (2 * room_x) - room_x).abs()
    sway = dice.uniform(30, 120, 1)
    # The object in front stays in the picture.
    sway = torch.where(front[:, None], sway / 15, sway)
    period, phase = dice.uniform(72, 150, 1), dice.uniform(0, 1, 1)
    middle = sway + begin / room_x * (room_x - 2 * sway)
    # A triangle wave again: a sine rests at its turning points and looks static there, so a model that sees only a
    # second of video would learn that a static camera may start to move.
    swaying = middle + sway * (1 - 4 * ((time_axis / period + phase) % 1 - 0.5).abs())
    rest = begin.expand(-1, len(time_axis))
    pan = torch.where(front[:, None], swaying, pan)
    x = torch.where(kind[:, None] == 0, rest, torch.where(kind[:, None] == 1, pan, swaying))
    y = dice.uniform(0, room_y - 4, 1) + torch.where(kind[:, None] == 2, 2.0, 0.0) * (
        1 + torch.sin(2 * math.pi * time_axis / dice.uniform(60, 120, 1))
    )
    return torch.stack((x, y), dim=-1)


def _paths(
    dice: Dice,
    time_axis: Tensor,
    kinds: Tensor,
    order: Tensor,
    camera: Tensor,
    camera_kind: Tensor,
    horizon: Tensor,
    front: Tensor,
    front_x: Tensor,
    plan: Timetable | None,
) -> Paths:
    """Draw the paths of all actors through the clip."""
    behaviour = dice.choice(BEHAVIOUR_SHARES, MAX_ACTORS)
    # An anchored actor needs a camera that comes back, and no other actors whose homes it might cross.
    alone = (kinds >= 0).sum(1) == 1
    behaviour = torch.where((behaviour == ANCHORED) & ~((camera_kind == 2) & alone)[:, None], STAY, behaviour)
    # All or none: an actor that does not hide could first appear from behind the object.
    behaviour = torch.where(front[:, None], HIDE, behaviour)
    size = _sizes(dice, kinds, behaviour, plan)
    if plan is not None:
        behaviour = torch.full_like(behaviour, STAY)
    x = _visit(dice, time_axis, kinds, order, behaviour, size, plan)
    # B T: how far the panorama has moved in the picture.
    drift = camera[:, :1, 0] - camera[:, :, 0]
    x = torch.where((behaviour == ANCHORED)[..., None], x + drift[:, None], x)
    y, size_now, tilt = _animate(dice, time_axis, kinds, size, camera, horizon)
    # An actor with its home on the left stays left of it; a single one is where there is more room.
    left = torch.where(alone[:, None], (front_x > WIDTH / 2)[:, None], order == 0)[..., None]
    hidden_x, hidden_y = (front_x[:, None] + drift)[:, None], 112 - size[..., None] / 2
    x, y = _hide(dice, time_axis, behaviour, left, x, y, hidden_x, hidden_y)
    x = torch.where((kinds >= 0)[..., None], x, -FAR)
    facing = _facing(dice, x, camera[:, :, 0])
    return Paths(x, y, size_now, tilt, facing)


def _sizes(dice: Dice, kinds: Tensor, behaviour: Tensor, plan: Timetable | None) -> Tensor:
    """Draw sizes B K: several actors are smaller than one, and hiding ones must fit behind the object in front."""
    crowd = (kinds >= 0).sum(1, keepdim=True).clamp(1, MAX_ACTORS)
    largest = torch.tensor((76.0, 76.0, 66.0, 56.0), device=kinds.device)[crowd]
    scale = torch.tensor([SCALES.get(actor, 1.0) for actor in (*ACTORS, "")], device=kinds.device)[kinds]
    size = (50 + (largest - 50) * dice.uniform(0, 1, MAX_ACTORS)) * scale
    size = torch.where(behaviour == HIDE, size.clamp(max=56), size)
    return size if plan is None else torch.where(plan.size.isnan(), size, plan.size)


def _visit(
    dice: Dice,
    time_axis: Tensor,
    kinds: Tensor,
    order: Tensor,
    behaviour: Tensor,
    size: Tensor,
    plan: Timetable | None,
) -> Tensor:
    """Return x of the actors, B K T, who walk in, pace around a home, and walk out, some more than once."""
    visits = (MAX_ACTORS, MAX_VISITS)
    # The picture is divided evenly among the actors, so that they seldom cover each other.
    crowd = (kinds >= 0).sum(1).clamp(min=1)[:, None, None]
    home = 30 + (WIDTH - 60) * (order[..., None] + dice.uniform(0.3, 0.7, *visits)) / crowd
    edge = 0.62 * size[..., None]
    near_left = home < WIDTH / 2
    # An actor uses the far side only if it is alone, so that it crosses nobody.
    near = torch.where(crowd == 1, 0.75, 1.0)
    left_in = torch.where(dice.flag(near, *visits), near_left, ~near_left)
    left_out = torch.where(dice.flag(near, *visits), near_left, ~near_left)
    outside_in = torch.where(left_in, -edge, WIDTH - 1 + edge)
    outside_out = torch.where(left_out, -edge, WIDTH - 1 + edge)
    walk_in = (home - outside_in).abs() / dice.uniform(4.0, 6.5, *visits)
    walk_out = (home - outside_out).abs() / dice.uniform(4.0, 6.5, *visits)
    start, leave = _visit_times(dice, behaviour, walk_in, walk_out)
    if plan is not None:
        # A script states when an actor is gone, not when it starts to leave; in a short visit it walks faster.
        walk_in, walk_out = (
            torch.minimum(walk, 0.45 * (plan.stop - plan.start).abs() + 1) for walk in (walk_in, walk_out)
        )
        start = torch.where(plan.start > 0, plan.start, -FAR)
        leave = torch.where(plan.stop < FAR, plan.stop - walk_out, FAR)
    visit = (time_axis[:, None] >= (leave + walk_out)[:, :, None]).sum(-1).clamp(max=MAX_VISITS - 1)
    per_visit = (home, outside_in, outside_out, walk_in, walk_out, start, leave)
    home, outside_in, outside_out, walk_in, walk_out, start, leave = (
        each.gather(2, visit) for each in per_visit
    )
    up = _ease(((time_axis - start) / walk_in).clamp(0, 1))
    down = 1 - _ease(1 - ((time_axis - leave) / walk_out).clamp(0, 1))
    x = home + _pacing(dice, time_axis, home, crowd) * up * (1 - down)
    return x + (outside_in - home) * (1 - up) + (outside_out - home) * down


def _pacing(dice: Dice, time_axis: Tensor, home: Tensor, crowd: Tensor) -> Tensor:
    """Return the pacing around a home, B K T, at 2 to 5 pixels per picture if the other actors leave room."""
    each = (MAX_ACTORS, 1)
    period, fastest = dice.uniform(36, 68, *each), dice.uniform(2.0, 5.0, *each)
    room = torch.minimum(home - 24, WIDTH - 24 - home).clamp(max=50)
    room = torch.where(crowd == 1, room, torch.where(crowd == 2, 20.0, 9.0))
    reach = torch.minimum(fastest * period / (2 * math.pi), room)
    return reach * torch.sin(2 * math.pi * time_axis / period + dice.uniform(0, 6.3, *each))


def _visit_times(dice: Dice, behaviour: Tensor, walk_in: Tensor, walk_out: Tensor) -> tuple[Tensor, Tensor]:
    """Draw when actors start to walk in and to walk out, B K visits each; FAR for never."""
    stay = dice.uniform(20, 60, MAX_ACTORS, MAX_VISITS)
    gap = dice.uniform(22, 42, MAX_ACTORS, MAX_VISITS)
    first_leave = dice.uniform(4, 20, MAX_ACTORS)
    late = dice.uniform(4, 54, MAX_ACTORS)
    first_leave = torch.where(behaviour == LEAVE, late, torch.where(behaviour == RETURN, first_leave, FAR))
    first_start = torch.where(behaviour == ENTER, late, -FAR)
    length = gap[..., 1:] + walk_in[..., 1:] + stay[..., 1:] + walk_out[..., 1:]
    gone = first_leave + walk_out[..., 0]
    ends = gone[..., None] + length.cumsum(-1)
    leaves = ends - walk_out[..., 1:]
    starts = leaves - stay[..., 1:] - walk_in[..., 1:]
    again = (behaviour == RETURN)[..., None]
    start = torch.cat((first_start[..., None], torch.where(again, starts, FAR)), dim=-1)
    leave = torch.cat((first_leave[..., None], torch.where(again, leaves, 2 * FAR)), dim=-1)
    return start, leave


def _ease(share: Tensor) -> Tensor:
    """Ease from 0 to 1: start at walking speed and come to rest."""
    return share * (1.5 - 0.5 * share**2)


def _animate(
    dice: Dice, time_axis: Tensor, kinds: Tensor, size: Tensor, camera: Tensor, horizon: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y, sizes and tilts, B K T: actors hop or roll on the ground, or float up and down."""
    each = (MAX_ACTORS, 1)
    floats, rolls = (
        torch.tensor([actor in some for actor in (*ACTORS, "")], device=kinds.device)[kinds][..., None]
        for some in (FLOATERS, ROLLERS)
    )
    phase = dice.uniform(0, 2 * math.pi, *each)
    beat = torch.sin(math.pi * time_axis / dice.uniform(8, 13, *each) + phase)
    swell = torch.sin(2 * math.pi * time_axis / dice.uniform(28, 56, *each) + phase)
    # Slots are drawn from first to last, so feet are sorted: a nearer actor stands lower and covers the others.
    depth = STAGE_HEIGHT - 12 - horizon[:, None] - 26
    ground = horizon[:, None] + 26 + depth * dice.uniform(0, 1, MAX_ACTORS)
    hop = dice.uniform(3.0, 9.0, *each) * torch.where(rolls, 0.3, 1.0)
    rise = dice.uniform(4, 11, *each)
    # No head is cut off at the top of the picture, wherever the camera is.
    highest = 0.5 * size[..., None] + 12
    feet = (ground.sort(dim=1).values - size * 0.5)[..., None]
    feet = torch.maximum(feet, highest + hop) - hop * beat.abs()
    afloat = horizon[:, None, None] - 16 + dice.uniform(-14, 30, *each)
    afloat = torch.maximum(afloat, highest + rise) + rise * swell
    y = torch.where(floats, afloat, feet) - camera[:, None, :, 1]
    size_now = size[..., None] * (1 + dice.uniform(0, 0.06, *each) * swell)
    tilt = dice.uniform(0.03, 0.12, *each) * torch.where(floats, swell, beat)
    return y, size_now, tilt


def _hide(
    dice: Dice, time_axis: Tensor, behaviour: Tensor, left: Tensor, x: Tensor, y: Tensor, front_x: Tensor,
    front_y: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Send hiding actors behind the object in front repeatedly; the first block shows them next to it."""
    each = (MAX_ACTORS, 1)
    begin, walk, hidden = (dice.uniform(*bounds, *each) for bounds in ((10, 24), (10, 14), (12, 24)))
    lap = time_axis % dice.uniform(96, 150, *each)
    inward = _ease(((lap - begin) / walk).clamp(0, 1))
    outward = _ease(((lap - begin - walk - hidden) / walk).clamp(0, 1))
    share = inward - outward
    pacing = 6 * (1 - torch.cos(2 * math.pi * time_axis / dice.uniform(24, 40, *each)))
    away = dice.uniform(64, 70, *each) + pacing
    outside = (front_x + torch.where(left, -away, away)).clamp(24, WIDTH - 24)
    hides = (behaviour == HIDE)[..., None]
    hiding_x = outside + (front_x - outside) * share
    return torch.where(hides, hiding_x, x), torch.where(hides, y + (front_y - y) * share, y)


def _facing(dice: Dice, x: Tensor, camera_x: Tensor) -> Tensor:
    """Return the facing B K T: actors face where they walk on the ground, and turn within a few pictures."""
    steps = 0 * x
    if x.shape[-1] > 1:
        steps = F.pad((x + camera_x[:, None]).diff(dim=-1), (0, 1), mode="replicate")
    walking = steps.abs() > 0.3
    index = torch.arange(x.shape[-1], device=x.device)
    # An actor at rest faces as in its last step; before any step, as in its first; without steps, at random.
    last = torch.where(walking, index, -1).cummax(dim=-1).values
    looks_right = (steps > 0).gather(2, last.clamp(min=0))
    first = (steps > 0).gather(2, walking.int().argmax(dim=-1, keepdim=True))
    first = torch.where(walking.any(-1, keepdim=True), first, dice.flag(0.5, MAX_ACTORS, 1))
    looks_right = torch.where(last < 0, first, looks_right)
    side = torch.where(looks_right, -1.0, 1.0)
    half = TURN_PICTURES // 2
    padded = F.pad(side, (half, half), mode="replicate")
    turned = F.avg_pool1d(padded, TURN_PICTURES, stride=1)
    return turned.sign() * turned.abs().clamp(min=TURN_WIDTH)
