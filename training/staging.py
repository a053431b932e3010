"""Who is where and when: the camera, the actors' comings and goings, and scripts that fix them.

Positions are pixels of the picture, channel order x, y, with the centre of the first pixel at (0, 0). The stage is
a panorama wider than the picture; the camera is the panorama position of the picture's first pixel. Actors move in
the picture, so a camera that pans follows them; *anchored* ones stand in the panorama and are left behind.
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

STAY, ENTER, LEAVE, RETURN, ANCHORED, HIDE = range(6)
BEHAVIOUR_SHARES = (0.50, 0.13, 0.03, 0.27, 0.07)  # HIDE is dealt out where there is something to hide behind
ACTOR_COUNT_SHARES = (0.06, 0.40, 0.34, 0.20)
CAMERA_SHARES = (0.65, 0.10, 0.25)
FRONT_SHARE = 0.28  # clips with something large in front
TURN_PICTURES = 3  # odd, so that a turning sprite is never without width


@dataclass(frozen=True, slots=True)
class Paths:
    """Where actors are drawn in every picture: B K T each."""

    x: Tensor  # centre
    y: Tensor  # centre
    size: Tensor  # side of the square sprite
    tilt: Tensor  # radians
    facing: Tensor  # 1 as drawn (left), -1 mirrored, between while turning, never 0


@dataclass(frozen=True, slots=True)
class Staging:
    """Everything about a batch of clips but their colours."""

    scene: Tensor  # B
    time: Tensor  # B
    kinds: Tensor  # B K, -1 where nobody is cast
    horizon: Tensor  # B, row of the panorama
    camera: Tensor  # B T 2
    paths: Paths
    front: Tensor  # B, whether something stands in front
    front_place: Tensor  # B 2, its centre in the panorama
    front_size: Tensor  # B

    @property
    def num_pictures(self) -> int:
        return self.camera.shape[1]


def roll_staging(dice: Dice, num_pictures: int, scripts: list[Script] | None = None) -> Staging:
    """Stage a batch by chance, or by scripts (one per row), which leave to chance what they do not say."""
    time_axis = torch.arange(num_pictures, device=dice.device, dtype=torch.float32)
    plan = timetable(scripts, dice.device) if scripts is not None else None
    scene, time = dice.choice((1,) * len(SCENES)), dice.choice((1,) * len(TIMES))
    count = dice.choice(ACTOR_COUNT_SHARES)
    cast = dice.distinct(MAX_ACTORS, len(ACTORS))
    kinds = torch.where(torch.arange(MAX_ACTORS, device=dice.device) < count[:, None], cast, -1)
    front = dice.flag(FRONT_SHARE)
    camera_kind = dice.choice(CAMERA_SHARES)
    if plan is not None:
        scene, time, kinds, front, camera_kind = plan.scene, plan.time, plan.kinds, plan.front, plan.camera
    horizon = dice.uniform(58, 76)
    camera = _camera(dice, time_axis, camera_kind, front)
    front_x = dice.uniform(70, WIDTH - 70)
    front_size = dice.uniform(82, 92)
    front_place = camera[:, 0] + torch.stack((front_x, 124 - front_size / 2), dim=-1)
    paths = _paths(dice, time_axis, kinds, camera, camera_kind, horizon, front, front_x, plan)
    return Staging(scene, time, kinds, horizon, camera, paths, front, front_place, front_size)


def _camera(dice: Dice, time_axis: Tensor, kind: Tensor, front: Tensor) -> Tensor:
    """B T 2: at rest, panning to and fro across the panorama, or swaying about a place."""
    room_x, room_y = STAGE_WIDTH - WIDTH, STAGE_HEIGHT - HEIGHT
    begin, speed = dice.uniform(0, room_x, 1), dice.uniform(0.5, 1.8, 1)
    speed = torch.where(dice.flag(0.5, 1), speed, -speed)
    # A triangle wave: the pan turns back at the panorama's ends.
    pan = room_x - ((begin + speed * time_axis) % (2 * room_x) - room_x).abs()
    sway = dice.uniform(30, 120, 1)
    sway = torch.where(front[:, None], sway / 6, sway)  # what stands in front stays in the picture
    period, phase = dice.uniform(72, 150, 1), dice.uniform(0, 1, 1)
    middle = sway + begin / room_x * (room_x - 2 * sway)
    # A triangle wave again: a camera that rests at its turning points, as a sine does, looks like one at rest, and
    # who sees but a second of a video at rest would learn that it may start to move.
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
    camera: Tensor,
    camera_kind: Tensor,
    horizon: Tensor,
    front: Tensor,
    front_x: Tensor,
    plan: Timetable | None,
) -> Paths:
    """Draw everybody's way through the clip."""
    behaviour = dice.choice(BEHAVIOUR_SHARES, MAX_ACTORS)
    # To be left behind takes a camera that comes back.
    behaviour = torch.where((behaviour == ANCHORED) & (camera_kind != 2)[:, None], STAY, behaviour)
    # Two hide at most, one on either side of what is in front; a third would come out on top of another.
    hides = front[:, None] & dice.flag(0.6, MAX_ACTORS) & (torch.arange(MAX_ACTORS, device=dice.device) < 2)
    behaviour = torch.where(hides, HIDE, behaviour)
    size = _sizes(dice, kinds, behaviour, plan)
    if plan is not None:
        behaviour = torch.full_like(behaviour, STAY)
    x = _visit(dice, time_axis, kinds, behaviour, size, plan)
    drift = camera[:, :1, 0] - camera[:, :, 0]  # B T, how the panorama has moved in the picture
    x = torch.where((behaviour == ANCHORED)[..., None], x + drift[:, None], x)
    y, size_now, tilt = _animate(dice, time_axis, kinds, size, camera, horizon)
    x, y = _hide(
        dice, time_axis, behaviour, x, y, (front_x[:, None] + drift)[:, None], 108 - size[..., None] / 2
    )
    x = torch.where((kinds >= 0)[..., None], x, -FAR)
    facing = _facing(dice, x, camera[:, :, 0])
    return Paths(x, y, size_now, tilt, facing)


def _sizes(dice: Dice, kinds: Tensor, behaviour: Tensor, plan: Timetable | None) -> Tensor:
    """B K: a crowd is drawn smaller than one alone, and who hides must fit behind what is in front."""
    crowd = (kinds >= 0).sum(1, keepdim=True).clamp(1, MAX_ACTORS)
    largest = torch.tensor((80.0, 80.0, 72.0, 64.0), device=kinds.device)[crowd]
    size = 50 + (largest - 50) * dice.uniform(0, 1, MAX_ACTORS)
    size = torch.where(behaviour == HIDE, size.clamp(max=54), size)
    return size if plan is None else torch.where(plan.size.isnan(), size, plan.size)


def _visit(
    dice: Dice, time_axis: Tensor, kinds: Tensor, behaviour: Tensor, size: Tensor, plan: Timetable | None
) -> Tensor:
    """B K T: columns of actors that walk in, pace about a home, and walk out, some of them more than once."""
    visits = (MAX_ACTORS, MAX_VISITS)
    # The picture is shared out evenly among the cast, so that actors meet but seldom cover each other.
    cast = kinds >= 0
    share = torch.where(cast, dice.uniform(0, 1, MAX_ACTORS), 2.0).argsort(1).argsort(1)[..., None]
    crowd = cast.sum(1).clamp(min=1)[:, None, None]
    home = 34 + (WIDTH - 68) * (share + dice.uniform(0.15, 0.85, *visits)) / crowd
    edge = 0.62 * size[..., None]
    near_left = home < WIDTH / 2
    left_in = torch.where(dice.flag(0.75, *visits), near_left, ~near_left)
    left_out = torch.where(dice.flag(0.75, *visits), near_left, ~near_left)
    outside_in = torch.where(left_in, -edge, WIDTH - 1 + edge)
    outside_out = torch.where(left_out, -edge, WIDTH - 1 + edge)
    walk_in = (home - outside_in).abs() / dice.uniform(4.0, 6.5, *visits)
    walk_out = (home - outside_out).abs() / dice.uniform(4.0, 6.5, *visits)
    start, leave = _hours(dice, behaviour, walk_in, walk_out)
    if plan is not None:
        # A script says when an actor is gone, not when it turns to go; a short visit is walked faster.
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
    pace = 44 * dice.uniform(0, 1, MAX_ACTORS, 1) ** 2
    pacing = pace * torch.sin(
        2 * math.pi * time_axis / dice.uniform(56, 120, MAX_ACTORS, 1) + dice.uniform(0, 6.3, MAX_ACTORS, 1)
    )
    x = home + pacing * up * (1 - down)
    return x + (outside_in - home) * (1 - up) + (outside_out - home) * down


def _hours(dice: Dice, behaviour: Tensor, walk_in: Tensor, walk_out: Tensor) -> tuple[Tensor, Tensor]:
    """B K visits each: when an actor starts to walk in, and when to walk out; FAR for never."""
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
    """0 to 1 that starts at a walk and comes to rest."""
    return share * (1.5 - 0.5 * share**2)


def _animate(
    dice: Dice, time_axis: Tensor, kinds: Tensor, size: Tensor, camera: Tensor, horizon: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, sizes and tilts, B K T: feet on the ground with a bob, or afloat with a slow rise and fall."""
    each = (MAX_ACTORS, 1)
    floats = torch.tensor([actor in FLOATERS for actor in (*ACTORS, "")], device=kinds.device)[kinds][
        ..., None
    ]
    phase = dice.uniform(0, 2 * math.pi, *each)
    beat = torch.sin(math.pi * time_axis / dice.uniform(7, 12, *each) + phase)
    swell = torch.sin(2 * math.pi * time_axis / dice.uniform(36, 80, *each) + phase)
    # Slots are drawn from first to last, so feet are sorted: who is nearer stands lower and covers the rest.
    ground = (
        horizon[:, None] + 26 + (STAGE_HEIGHT - 12 - horizon[:, None] - 26) * dice.uniform(0, 1, MAX_ACTORS)
    )
    feet = (
        ground.sort(dim=1).values[..., None]
        - dice.uniform(0.5, 3.5, *each) * beat.abs()
        - size[..., None] * 0.5
    )
    afloat = horizon[:, None, None] - 16 + dice.uniform(-14, 30, *each) + dice.uniform(2, 7, *each) * swell
    y = torch.where(floats, afloat, feet) - camera[:, None, :, 1]
    size_now = size[..., None] * (1 + dice.uniform(0, 0.06, *each) * swell)
    tilt = dice.uniform(0.01, 0.09, *each) * torch.where(floats, swell, beat)
    return y, size_now, tilt


def _hide(
    dice: Dice, time_axis: Tensor, behaviour: Tensor, x: Tensor, y: Tensor, front_x: Tensor, front_y: Tensor
) -> tuple[Tensor, Tensor]:
    """Send those who hide behind what is in front, again and again, to come out on either side of it."""
    each = (MAX_ACTORS, 1)
    begin, walk, hidden = dice.uniform(3, 13, *each), dice.uniform(10, 14, *each), dice.uniform(16, 30, *each)
    period = dice.uniform(96, 150, *each)
    lap = time_axis % period
    inward = _ease(((lap - begin) / walk).clamp(0, 1))
    outward = _ease(((lap - begin - walk - hidden) / walk).clamp(0, 1))
    share = inward - outward
    swap = ((time_axis / period).floor() + (lap > begin + walk + hidden / 2)) % 2 == 1
    swap &= dice.flag(0.5, 1, 1)
    # Neighbouring slots hide from either side, so that they seldom come out on top of each other.
    odd = torch.arange(MAX_ACTORS, device=x.device)[:, None] % 2 == 1
    side = torch.where(dice.flag(0.5, 1, 1) ^ odd ^ swap, -1.0, 1.0)
    beside = (front_x + side * dice.uniform(66, 84, *each)).clamp(26, WIDTH - 26)
    hides = (behaviour == HIDE)[..., None]
    hiding_x = beside + (front_x - beside) * share
    return torch.where(hides, hiding_x, x), torch.where(hides, y + (front_y - y) * share, y)


def _facing(dice: Dice, x: Tensor, camera_x: Tensor) -> Tensor:
    """B K T: everybody looks where they go, measured on the ground, and turns within a few pictures."""
    steps = (
        F.pad((x + camera_x[:, None]).diff(dim=-1), (0, 1), mode="replicate") if x.shape[-1] > 1 else 0 * x
    )
    walking = steps.abs() > 0.3
    index = torch.arange(x.shape[-1], device=x.device)
    # Who stands still keeps the side of the last step; before any step, chance decides.
    last = torch.where(walking, index, -1).cummax(dim=-1).values
    looks_right = (steps > 0).gather(2, last.clamp(min=0))
    looks_right = torch.where(last < 0, dice.flag(0.5, MAX_ACTORS, 1), looks_right)
    side = torch.where(looks_right, -1.0, 1.0)
    half = TURN_PICTURES // 2
    padded = F.pad(side, (half, half), mode="replicate")
    return F.avg_pool1d(padded, TURN_PICTURES, stride=1)
