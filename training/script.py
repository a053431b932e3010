"""Scripts fix which actors are on stage when, under which prompts, so that evaluation does not depend on chance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from recap.backbones.tiny.vocabulary import ACTORS, MAX_ACTORS, SCENES, TIMES, parse_prompt
from recap.errors import refuse

MAX_VISITS = 8
FAR = 1e6
"""A time that never comes, in pictures, or a position outside, in pixels."""

CAMERAS = ("static", "pan", "sway")


@dataclass(frozen=True, slots=True)
class ActorScript:
    """One actor: its kind, and the pictures [first, last) in which it is on stage, walks included.

    A last picture of None means the end of the clip. The hue, in 0..1, and the size in pixels are random if None.
    """

    kind: str
    visits: tuple[tuple[int, int | None], ...] = ((0, None),)
    hue: float | None = None
    size: float | None = None


@dataclass(frozen=True, slots=True)
class Script:
    """The script of one clip.

    `front` places something large in front. `prompts` are (first picture, text); None captions the visible actors.
    """

    scene: str
    time: str = "day"
    actors: tuple[ActorScript, ...] = ()
    camera: str = "static"
    front: bool = False
    prompts: tuple[tuple[int, str], ...] | None = None

    def __post_init__(self) -> None:
        for field, value, names in (
            ("scene", self.scene, SCENES),
            ("time", self.time, TIMES),
            ("camera", self.camera, CAMERAS),
            *(("kind", actor.kind, ACTORS) for actor in self.actors),
        ):
            if value not in names:
                raise refuse(field, value, "no such name", f"use one of {', '.join(names)}")
        if len(self.actors) > MAX_ACTORS:
            raise refuse("actors", len(self.actors), f"at most {MAX_ACTORS}", "script fewer actors")
        for actor in self.actors:
            _check_visits(actor)

    @classmethod
    def from_segments(cls, segments: Sequence[tuple[str, int]], camera: str = "static") -> Script:
        """Make a script from (prompt, pictures) segments: an actor is on stage in the segments that name it."""
        prompts = [parse_prompt(text) for text, _ in segments]
        settings = {(prompt.scene, prompt.time) for prompt in prompts}
        if len(settings) != 1:
            limit = "a clip has one scene and time"
            raise refuse("segments", sorted(settings), limit, "script a clip for each")
        firsts = [sum(length for _, length in segments[:index]) for index in range(len(segments) + 1)]
        kinds = dict.fromkeys(actor for prompt in prompts for actor in prompt.actors)
        actors = []
        for kind in kinds:
            visits: list[tuple[int, int | None]] = []
            for index, prompt in enumerate(prompts):
                if kind not in prompt.actors:
                    continue
                last = None if index == len(prompts) - 1 else firsts[index + 1]
                joined = bool(visits) and visits[-1][1] == firsts[index]
                visits[-1:] = [(visits[-1][0], last)] if joined else [*visits[-1:], (firsts[index], last)]
            actors.append(ActorScript(kind, tuple(visits)))
        texts = tuple(zip(firsts[:-1], (text for text, _ in segments), strict=True))
        scene, time = settings.pop()
        return cls(scene, time, tuple(actors), camera, prompts=texts)


def _check_visits(actor: ActorScript) -> None:
    if not 1 <= len(actor.visits) <= MAX_VISITS:
        raise refuse("visits", len(actor.visits), f"1 to {MAX_VISITS} are possible", "join or drop some")
    clock = 0
    for first, last in actor.visits:
        if first < clock or (last is not None and last <= first):
            limit = "visits must be in order and not empty"
            raise refuse("visits", actor.visits, limit, "sort them, without overlaps")
        clock = last if last is not None else int(FAR)


@dataclass(frozen=True, slots=True)
class Timetable:
    """A batch of scripts as tensors."""

    scene: Tensor  # B
    time: Tensor  # B
    camera: Tensor  # B
    front: Tensor  # B
    kinds: Tensor  # B K, -1 for nobody
    size: Tensor  # B K, nan for any
    hue: Tensor  # B K, nan for any
    start: Tensor  # B K visits
    stop: Tensor  # B K visits


def timetable(scripts: Sequence[Script], device: torch.device | str = "cpu") -> Timetable:
    """Convert scripts to tensors, one per row, with FAR for visits that do not exist."""
    nan = float("nan")
    kinds, sizes, hues, starts, stops = [], [], [], [], []
    for script in scripts:
        missing = MAX_ACTORS - len(script.actors)
        kinds.append([ACTORS.index(actor.kind) for actor in script.actors] + [-1] * missing)
        sizes.append([nan if actor.size is None else actor.size for actor in script.actors] + [nan] * missing)
        hues.append([nan if actor.hue is None else actor.hue for actor in script.actors] + [nan] * missing)
        visits = [actor.visits for actor in script.actors] + [()] * missing
        padded = [[*each, *([(FAR, None)] * (MAX_VISITS - len(each)))] for each in visits]
        starts.append([[float(first) for first, _ in each] for each in padded])
        stops.append([[FAR if last is None else float(last) for _, last in each] for each in padded])
    return Timetable(
        scene=torch.tensor([SCENES.index(script.scene) for script in scripts], device=device),
        time=torch.tensor([TIMES.index(script.time) for script in scripts], device=device),
        camera=torch.tensor([CAMERAS.index(script.camera) for script in scripts], device=device),
        front=torch.tensor([script.front for script in scripts], device=device),
        kinds=torch.tensor(kinds, device=device),
        size=torch.tensor(sizes, device=device),
        hue=torch.tensor(hues, device=device),
        start=torch.tensor(starts, device=device),
        stop=torch.tensor(stops, device=device),
    )
