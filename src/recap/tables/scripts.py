"""This module reads our prompt sets: 20 prompts for identity, 20 scripts each for reappearance, entering, recurrence.

They were written by us, since the paper's are not published; the scripts of `entering`, in which a second subject
enters, leaves and returns without a cut, and of `recurrence`, in which several come and go for minutes
(`recap.tables.schedules`), have no counterpart in the paper. Public models get sentences, the embedded
world its own words. A set's first n are as good a choice as any n: subjects and scenes alternate.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from recap.backbones.tiny.vocabulary import ACTORS, Prompt, prompt_text
from recap.errors import refuse, unknown_name
from recap.eval.judged import EMBEDDED
from recap.eval.metrics.reappearance import SEGMENTS
from recap.plan import Shot
from recap.tables.schedules import parse_schedules, read_schedules

ENTERING_S = 60.0
"""The length for which the times in the scripts of `entering` are written."""
RECURRENCE_S = 300.0
"""The longest of our schedules; the others are of two minutes."""
SCHEDULED = "recurrence"
"""The set whose scripts are schedules."""
ONE_SCENE = "identity"
"""The set whose scripts are a prompt each."""
MOST_PROMPTS = 10_000


class Script(NamedTuple):
    """Says what to generate: shots, and whom to look for in them."""

    name: str
    # The phrase that a detector is asked for; in the embedded world, the actor's word.
    subject: str
    shots: tuple[Shot, ...]
    # Who enters later, leaves and returns; "" where nobody does.
    late_subject: str = ""
    # Of a schedule: who is on stage in every shot.
    stage: tuple[tuple[str, ...], ...] = ()


def identity_scripts(backbone: str, seconds: float, file: str = "") -> list[Script]:
    """Return scripts of one shot, its subject in sight throughout: ours, or those of a file of prompts."""
    entries = _read_prompts(Path(file), backbone) if file else _read(ONE_SCENE, backbone)
    return [Script(e["subject"], e["subject"], (Shot(e["prompt"], seconds),)) for e in entries]


def reappearance_scripts(backbone: str, seconds: float) -> list[Script]:
    """Return scripts of empty, subject, empty, subject, with cuts between; other lengths than 24 s scale all four."""
    scale = seconds / sum(SEGMENTS.values())
    made = []
    for entry in _read("reappearance", backbone):
        prompts = {segment: entry["prompt" if segment in "BD" else "empty"] for segment in SEGMENTS}
        shots = tuple(Shot(prompts[segment], length * scale) for segment, length in SEGMENTS.items())
        made.append(Script(entry["subject"], entry["subject"], shots))
    return made


def entering_scripts(backbone: str, seconds: float) -> list[Script]:
    """Return scripts of one subject throughout and a second that enters, leaves, and returns to stay, without cuts.

    A length other than 60 s scales all times. There are five timings, each of four scripts: only runs of one timing
    can be rows of a batch.
    """
    made = []
    for entry in _read("entering", backbone):
        lengths = [entry["enters_s"], entry["stays_s"], entry["gone_s"]]
        lengths.append(ENTERING_S - sum(lengths))
        prompts = (entry["prompt"], entry["both"]) * 2
        shots = tuple(
            Shot(prompt, length * seconds / ENTERING_S, cut=False)
            for prompt, length in zip(prompts, lengths, strict=True)
        )
        name = f"{entry['subject']}, then {entry['late']}"
        made.append(Script(name, entry["subject"], shots, entry["late"]))
    return made


def recurrence_scripts(backbone: str, seconds: float, file: str = "") -> list[Script]:
    """Return the scripts of schedules, ours or those of a file; `seconds` other than 300 scale all times."""
    scale, made = seconds / RECURRENCE_S, []
    name = "embedded_recurrence" if backbone == EMBEDDED else "recurrence"
    for schedule in read_schedules(Path(file)) if file else parse_schedules(_load(name)):
        cast = list(dict.fromkeys(phrase for on_stage in schedule.stage for phrase in on_stage))
        for phrase in cast if backbone == EMBEDDED else ():
            if phrase not in ACTORS:
                raise unknown_name("phrase of a subject", phrase, ACTORS)
        shots = tuple(Shot(shot.prompt, shot.seconds * scale, shot.cut) for shot in schedule.shots)
        made.append(Script(schedule.name, cast[0] if cast else "", shots, stage=schedule.stage))
    return made


SETS: dict[str, Callable[[str, float], list[Script]]] = {
    ONE_SCENE: identity_scripts,
    "reappearance": reappearance_scripts,
    "entering": entering_scripts,
    SCHEDULED: recurrence_scripts,
}


@cache
def scripts(
    which: str, backbone: str, seconds: float, num: int, schedules: str = "", prompt_file: str = ""
) -> list[Script]:
    """Return the first `num` scripts of a set; a file takes the place of our schedules, or of our prompts."""
    if which not in SETS:
        raise unknown_name("prompt set", which, SETS)
    if schedules and which != SCHEDULED:
        limit = f"this table has the prompts of {which!r}"
        raise refuse("--schedules", schedules, limit, "leave it out, or ask for a table of schedules")
    if prompt_file and which != ONE_SCENE:
        limit = f"this table has the prompts of {which!r}, which are more than a line"
        raise refuse("--prompt-file", prompt_file, limit, "leave it out, or ask for a table of one scene")
    if file := schedules or prompt_file:
        known = (recurrence_scripts if schedules else identity_scripts)(backbone, seconds, file)
    else:
        known = SETS[which](backbone, seconds)
    if not 1 <= num <= len(known):
        remedy = f"take 1 to {len(known)}, and more --seeds"
        raise refuse("--prompts", num, f"the set has {len(known)}", remedy)
    return known[:num]


def read_lines(file: Path) -> list[str]:
    """Return the prompts of a text file, one a line; empty lines are left out."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        limit = f"cannot be read ({error.strerror})"
        raise refuse("--prompt-file", str(file), limit, "check the path") from error
    except UnicodeDecodeError as error:
        raise refuse("--prompt-file", str(file), "is not text", "write a prompt a line") from error
    found = [line for line in lines if line.strip()]
    if not 1 <= len(found) <= MOST_PROMPTS:
        limit = f"it has {len(found)} prompts; 1 to {MOST_PROMPTS} are read"
        raise refuse("--prompt-file", str(file), limit, "write a prompt a line")
    return found


def _read_prompts(file: Path, backbone: str) -> list[dict[str, str]]:
    """Return the entries of a file of prompts; whom a detector is asked for may follow a prompt, after a tab."""
    entries = []
    for number, line in enumerate(read_lines(file), 1):
        prompt, _, subject = (part.strip() for part in line.partition("\t"))
        if backbone == EMBEDDED:
            subject = next((word for word in (subject, *prompt.lower().split()) if word in ACTORS), "")
        if not prompt or (backbone == EMBEDDED and not subject):
            missing = "it names nobody whom the embedded world has"
            limit = missing if prompt else "there is no prompt before the tab"
            remedy = f"e.g. a {ACTORS[0]} on a beach by day"
            raise refuse(f"--prompt-file, line {number}", line, limit, remedy)
        entries.append({"prompt": prompt, "subject": subject or prompt})
    return entries


@cache
def _read(name: str, backbone: str) -> list[dict[str, Any]]:
    """Return the entries of a set: the subject, a prompt that names it, one without it, one of both subjects."""
    entries: list[dict[str, Any]] = _load(f"embedded_{name}" if backbone == EMBEDDED else name)
    return [_in_own_words(entry) for entry in entries] if backbone == EMBEDDED else entries


def _load(name: str) -> Any:
    file = resources.files("recap.tables").joinpath("prompts", f"{name}.json")
    return json.loads(file.read_text(encoding="utf-8"))


def _in_own_words(entry: dict[str, Any]) -> dict[str, Any]:
    """Add the prompts of an entry in the words of the embedded world."""
    casts: dict[str, tuple[str, ...]] = {"empty": (), "prompt": (entry["actor"],)}
    if "late" in entry:
        casts["both"] = entry["actor"], entry["late"]
    prompts = {n: prompt_text(Prompt(cast, entry["scene"], entry["time"])) for n, cast in casts.items()}
    return {**entry, "subject": entry["actor"], **prompts}
