"""The openings of the embedded model: does the first block show who the prompt names, of every kind, and not hidden?

An actor is shown if the probe finds it in half of the block's pictures. One that is alone is hidden if the probe sees
it in fewer than half as many cells as its kind usually has: the median of rendered openings of the middle size, with
nothing in front.
"""

from __future__ import annotations

import math
import random
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from recap.backbones.tiny.vocabulary import ACTORS, SCENES, TIMES, Prompt, prompt_text
from recap.backbones.wan.backbone import WanBackbone
from recap.eval.metrics.drift import sharpness
from recap.plan import Shot, make_plan
from recap.rollout import rollout
from training.bench import Answer, Bench, make_prompts
from training.measures import (
    RowsDecoder,
    actor_by_row,
    cluster_interval,
    interval,
    mean_of,
    percent,
)
from training.sampling import open_from_each
from training.script import ActorScript, Script
from training.staging import SCALES
from training.world import block_pictures

EACH, CONTROLS = 30, 6
"""Openings of every kind, generated and rendered."""

SHOWN = 0.5
"""The share of a block's pictures that must show an actor."""

VISIBLE = 0.5
"""The part of its kind's usual cells that an actor which is not hidden has at least.

The world draws actors 0.8 to 1.2 times as wide as the middle size, so the smallest has some 0.63 of its cells.
"""

FEW, MOST = 0.4, 0.7
"""The true visible shares below which the check on rendered openings calls an actor hidden, and above which not."""

MIDDLE_SIZE = 63.0
"""The side in pixels of a lone actor's sprite, before its kind's scale, is 50 to 76."""

RENDERED, FRONT = "rendered", "rendered, something in front"


@dataclass(frozen=True, slots=True)
class Looked:
    """What the probe sees in N openings that name K actors."""

    found: Tensor  # N K, share of the pictures
    cells: Tensor  # N K, mean number
    sharpness: Tensor  # N
    visible: Tensor  # N, true visible share of the first actor; nan if generated


def kind_prompts(num: int, seed: int) -> list[Prompt]:
    """Return prompts of one actor that cycle through the kinds, and for each through all settings."""
    settings = [(scene, hour) for scene in SCENES for hour in TIMES]
    random.Random(seed).shuffle(settings)
    rounds = [(number % len(ACTORS), number // len(ACTORS)) for number in range(num)]
    return [Prompt((ACTORS[kind],), *settings[(turn + kind) % len(settings)]) for kind, turn in rounds]


def opening(bench: Bench) -> Answer:
    """Measure whether the first block shows the actors: generated with few steps, by the teacher, and rendered.

    With a teacher so are openings that it begins and the model ends: they tell which steps bring the actors.
    """
    num = bench.count(EACH * len(ACTORS))
    casts = {
        "one actor": kind_prompts(num, bench.options.seed),
        "two actors": make_prompts(min(num, 200), bench.options.seed, 2),
    }
    result: dict[str, Any] = {}
    table = [["opening block", "asked for", "found", "every one found", "not hidden", "sharpness", "n"]]
    for asked, prompts in casts.items():
        looked = _look(bench, prompts)
        prompts = prompts[: len(looked["4 steps"].found)]
        # A prompt that comes twice, with two seeds, is one cluster.
        numbers = {prompt: number for number, prompt in enumerate(dict.fromkeys(prompts))}
        clusters = [numbers[prompt] for prompt in prompts]
        result[asked] = {"n": len(prompts), "prompts": [prompt_text(p) for p in prompts]}
        if asked == "one actor":
            result["n"] = len(prompts)
            usual = usual_cells(prompts, looked[RENDERED].cells[:, 0])
        for name, each in looked.items():
            shown = (each.found >= SHOWN).float()
            clear = not_hidden(each.cells[:, 0], usual) if asked == "one actor" else torch.tensor([math.nan])
            every, open_share = (
                cluster_interval(part, clusters[: len(part)]) for part in (shown.amin(1), clear)
            )
            result[asked][name] = {
                "every": every, "found": mean_of(shown), "not_hidden": open_share,
                "sharpness": mean_of(each.sharpness),
                "rollouts": {"found_shares": each.found, "cells": each.cells, "sharpness": each.sharpness},
            }  # fmt: skip
            table.append([
                name, asked, percent(mean_of(shown)), interval(every, percent), interval(open_share, percent),
                f"{mean_of(each.sharpness):.0f}", str(len(shown)),
            ])  # fmt: skip
        if asked == "one actor":
            result["kinds"], by_kind = _by_kind(prompts, looked["4 steps"], usual)
            result["check"], check = _check(looked[FRONT], usual)
    return result, [*table, [], *check, [], *by_kind]


def usual_cells(prompts: list[Prompt], cells: Tensor) -> Tensor:
    """Return for each prompt the usual number of cells of its actor: the median of its kind among the first ones."""
    kinds = [ACTORS.index(prompt.actors[0]) for prompt in prompts]
    first = torch.tensor(kinds[: len(cells)])
    medians = {kind: cells[first == kind].median() for kind in set(kinds)}
    return torch.stack([medians[kind] for kind in kinds])


def not_hidden(cells: Tensor, usual: Tensor) -> Tensor:
    """Return 1 for actors with enough of their usual cells, else 0, N."""
    return (cells >= VISIBLE * usual[: len(cells)]).float()


def _check(front: Looked, usual: Tensor) -> tuple[dict[str, Any], list[list[str]]]:
    """Compare the measure with the truth, on rendered openings that have a large object in front."""
    clear = not_hidden(front.cells[:, 0], usual)
    found, table = {}, [["rendered with something in front, truly visible", "called not hidden", "n"]]
    for name, chosen in (
        (f"less than {percent(FEW)}", front.visible < FEW),
        (f"{percent(FEW)} to {percent(MOST)}", (front.visible >= FEW) & (front.visible <= MOST)),
        (f"more than {percent(MOST)}", front.visible > MOST),
    ):
        found[name] = {"not_hidden": mean_of(clear[chosen]), "n": int(chosen.sum())}
        table.append([name, percent(found[name]["not_hidden"]), str(found[name]["n"])])
    return found, table


def _by_kind(prompts: list[Prompt], looked: Looked, usual: Tensor) -> tuple[dict[str, Any], list[list[str]]]:
    """Return the shares of each kind, the lowest first."""
    shown = (looked.found[:, 0] >= SHOWN).float()
    clear = not_hidden(looked.cells[:, 0], usual)
    kinds: dict[str, Any] = {}
    for kind in ACTORS:
        own = torch.tensor([prompt.actors[0] == kind for prompt in prompts])
        if bool(own.any()):
            kinds[kind] = {
                "shown": mean_of(shown[own]),
                "not_hidden": mean_of(clear[own]),
                "n": int(own.sum()),
            }
    table = [["kind", "shown", "not hidden", "n"]]
    for kind, each in sorted(kinds.items(), key=lambda item: item[1]["shown"]):
        table.append([kind, percent(each["shown"]), percent(each["not_hidden"]), str(each["n"])])
    return kinds, table


def _look(bench: Bench, prompts: list[Prompt]) -> dict[str, Looked]:
    """Return what the probe sees per sampler; of one actor alone the first prompts are rendered, too."""
    parts: dict[str, list[Looked]] = {}
    seconds = bench.spec.frames_per_block * bench.spec.pictures_per_frame / bench.spec.pictures_per_second
    samplers: dict[str, WanBackbone] = {"4 steps": bench.models.four}
    if bench.models.many is not None:
        samplers[f"{len(bench.models.many._sigmas)} steps"] = bench.models.many
        samplers |= open_from_each(bench.models.many, bench.models.four)
    longest = 0.0
    for rows in bench.batches(len(prompts)):
        begin = time.monotonic()
        if parts and not bench.time_left(longest):
            bench.say(f"out of time: {rows.start} of {len(prompts)} openings")
            break
        some = prompts[rows]
        plan = make_plan([[Shot(prompt_text(p), seconds)] for p in some], bench.spec)
        seeds = [bench.options.seed + row for row in range(rows.start, rows.stop)]
        for name, backbone in samplers.items():
            decoder = RowsDecoder(backbone.decoder)
            (made,) = rollout(backbone, bench.policy("sink"), plan, seeds=seeds, decoder=decoder)
            parts.setdefault(name, []).append(_judge(bench, some, made.pixels))
        rendered = some[: max(0, CONTROLS * len(ACTORS) - rows.start)] if len(some[0].actors) == 1 else []
        for name in (RENDERED, FRONT) if rendered else ():
            scripts = [_script(prompt, front=name == FRONT) for prompt in rendered]
            clips = bench.world.film(
                scripts, bench.options.seed, block_pictures(0)[1], first_index=rows.start
            )
            visible = clips.visibility[:, 0].mean(dim=1).cpu()
            parts.setdefault(name, []).append(_judge(bench, rendered, clips.pictures, visible))
        longest = max(longest, time.monotonic() - begin)
        bench.say(f"opening: {rows.stop} of {len(prompts)} prompts of {len(some[0].actors)}")
    return {
        name: Looked(*(torch.cat([getattr(part, field) for part in own]) for field in Looked.__slots__))
        for name, own in parts.items()
    }


def _script(prompt: Prompt, *, front: bool) -> Script:
    """Stage one actor in its kind's middle size: behind something, the world would shrink it to fit."""
    (actor,) = prompt.actors
    size = MIDDLE_SIZE * SCALES.get(actor, 1.0)
    return Script(prompt.scene, prompt.time, (ActorScript(actor, size=size),), front=front)


def _judge(bench: Bench, prompts: list[Prompt], pixels: Tensor, visible: Tensor | None = None) -> Looked:
    judged = bench.probe.judge(pixels)
    seen = [
        actor_by_row(judged, [prompt.actors[slot] for prompt in prompts])
        for slot in range(len(prompts[0].actors))
    ]
    found, cells = (torch.stack([each[at].mean(dim=1).cpu() for each in seen], dim=1) for at in (0, 2))
    unknown = torch.full((len(prompts),), math.nan)
    return Looked(found, cells, sharpness(pixels).mean(dim=1).cpu(), unknown if visible is None else visible)
