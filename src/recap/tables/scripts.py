"""Prompt sets, written by us since the paper's are not published: 20 for identity, 20 scripts for reappearance.

Twenty more scripts, of which the paper has no like, let a second subject enter, leave and return without a cut.

Public models get sentences, the embedded world its own words. A set's first n are as good a choice as any n: subjects
and scenes alternate.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

from recap.backbones.tiny.vocabulary import Prompt, prompt_text
from recap.errors import refuse, unknown_name
from recap.eval.judged import EMBEDDED
from recap.eval.metrics.reappearance import SEGMENTS
from recap.plan import Shot

ENTERING_S = 60.0
"""For which the times in the scripts of `entering` are written."""


class Script(NamedTuple):
    """Something to generate: shots, and whom to look for in them."""

    name: str
    subject: str  # the phrase a detector is asked for; of the embedded world, the actor's word
    shots: tuple[Shot, ...]
    late_subject: str = ""  # who enters later, leaves and returns; "" where nobody does


def identity_scripts(backbone: str, seconds: float) -> list[Script]:
    """One shot each, its subject in sight throughout."""
    if backbone == EMBEDDED:
        return [
            Script(p.actors[0], p.actors[0], (Shot(prompt_text(p), seconds),)) for p in _worlds("identity")
        ]
    return [
        Script(entry["subject"], entry["subject"], (Shot(entry["prompt"], seconds),))
        for entry in _read("identity")
    ]


def reappearance_scripts(backbone: str, seconds: float) -> list[Script]:
    """Empty, subject, empty, subject, with cuts between; another length than 24 s scales all four."""
    scale = seconds / sum(SEGMENTS.values())
    if backbone == EMBEDDED:
        entries = [
            (p.actors[0], prompt_text(Prompt((), p.scene, p.time)), prompt_text(p))
            for p in _worlds("reappearance")
        ]
    else:
        entries = [(entry["subject"], entry["empty"], entry["present"]) for entry in _read("reappearance")]
    return [
        Script(
            subject,
            subject,
            tuple(
                Shot(present if segment in "BD" else empty, length * scale)
                for segment, length in SEGMENTS.items()
            ),
        )
        for subject, empty, present in entries
    ]


def entering_scripts(backbone: str, seconds: float) -> list[Script]:
    """One subject throughout; a second enters, leaves, and returns to stay. No cuts; another length scales all.

    Five timings, each of four scripts: only runs of one timing can be rows of a batch.
    """
    if backbone == EMBEDDED:
        return [_entering(entry, *_world_of_two(entry), seconds) for entry in _read("embedded_entering")]
    return [
        _entering(entry, entry["subject"], entry["alone"], entry["both"], seconds)
        for entry in _read("entering")
    ]


def _entering(entry: Mapping[str, Any], subject: str, alone: str, both: str, seconds: float) -> Script:
    lengths = [entry["enters_s"], entry["stays_s"], entry["gone_s"]]
    lengths.append(ENTERING_S - sum(lengths))
    shots = tuple(
        Shot(prompt, length * seconds / ENTERING_S, cut=False)
        for prompt, length in zip((alone, both, alone, both), lengths, strict=True)
    )
    return Script(f"{subject}, then {entry['late']}", subject, shots, entry["late"])


def _world_of_two(entry: Mapping[str, str]) -> tuple[str, str, str]:
    """The subject, the prompt that names it alone, and the one that names both."""
    subject, scene, time = entry["actor"], entry["scene"], entry["time"]
    casts = ((subject,), (subject, entry["late"]))
    alone, both = (prompt_text(Prompt(cast, scene, time)) for cast in casts)
    return subject, alone, both


SETS: dict[str, Callable[[str, float], list[Script]]] = {
    "identity": identity_scripts,
    "reappearance": reappearance_scripts,
    "entering": entering_scripts,
}


def scripts(which: str, backbone: str, seconds: float, num: int) -> list[Script]:
    """The first `num` scripts of a set."""
    if which not in SETS:
        raise unknown_name("prompt set", which, SETS)
    known = SETS[which](backbone, seconds)
    if not 1 <= num <= len(known):
        raise refuse(
            "--prompts", num, f"the set has {len(known)}", f"take 1 to {len(known)}, and more --seeds"
        )
    return known[:num]


@cache
def _read(name: str) -> list[dict[str, Any]]:
    file = resources.files("recap.tables").joinpath("prompts", f"{name}.json")
    entries: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
    return entries


def _worlds(name: str) -> list[Prompt]:
    return [Prompt((entry["actor"],), entry["scene"], entry["time"]) for entry in _read(f"embedded_{name}")]
