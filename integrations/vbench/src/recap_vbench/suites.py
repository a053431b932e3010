"""Knows the prompt suites: their prompts, the dimensions they are scored in, file names and clip lengths.

The prompts belong to others and are not shipped: VBench's list comes with its wheel, MovieGen's from a file of the
user. Scores of two suites do not compare, so suite and counts are reported with each score.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from recap.errors import refuse, unknown_name
from recap_vbench.scores import DIMENSIONS, QUALITY, SEMANTIC

SHORT_S, LONG_S = 2, 10
LONG = {"human_action", "temporal_style", "overall_consistency"}
"""VBench-Long scores these dimensions on clips of 10 s, the others on clips of 2 s."""

MOST_BYTES = 255
"""The longest file name that all common file systems allow."""

LABELLED = ("object_class", "multiple_objects", "color", "spatial_relationship", "scene", "appearance_style")
"""These dimensions need a label of VBench's metadata, and so its own prompts."""

GROUPS_OF_128 = {
    "subject_consistency": 10, "scene": 12, "overall_consistency": 13, "object_class": 11, "multiple_objects": 11,
    "color": 11, "spatial_relationship": 11, "temporal_style": 14, "human_action": 13, "temporal_flickering": 10,
    "appearance_style": 12,
}  # fmt: skip
"""The number of prompts taken from each of VBench's eleven groups, in proportion to their sizes.

A group is named by its first dimension.
"""


@dataclass(frozen=True, slots=True)
class Suite:
    """Describes a prompt set and the dimensions it can be scored in.

    An `official` suite has prompts of VBench's wheel. The clip rule is `prompt` (VBench's standard mode),
    `dimension` (its table) or `short` (its custom mode).
    """

    name: str
    num_entries: int
    dimensions: tuple[str, ...]
    official: bool
    clip_rule: str
    seeds: int = 5


SUITES = {
    suite.name: suite
    for suite in (
        Suite("vbench946", 946, (*QUALITY, *SEMANTIC), True, "prompt"),
        Suite("vbench128", 128, (*QUALITY, *SEMANTIC), True, "dimension"),
        Suite("moviegen128", 128, (*QUALITY, "overall_consistency"), False, "short"),
    )
}
"""VBench's whole list; 128 of its prompts, with quality scored on all and a semantic dimension on its own group; and
the 128 MovieGen prompts, for which VBench has no labels."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Describes one prompt and the dimensions it is scored in; its files are `<stem>-<seed>.mp4`.

    `listed` has the dimensions for which VBench's own list names the prompt.
    """

    text: str
    stem: str
    dimensions: tuple[str, ...]
    labels: dict[str, Any] = field(default_factory=dict)
    listed: tuple[str, ...] = ()


def video_name(stem: str, seed: int) -> str:
    """Return the file name of a prompt's seed, as generation writes it and scoring reads it."""
    return f"{stem}-{seed}.mp4"


def find_suite(name: str) -> Suite:
    """Return the suite of that name."""
    if name not in SUITES:
        raise unknown_name("suite", name, SUITES)
    return SUITES[name]


def check_dimensions(suite: Suite, names: Sequence[str], static_filter: bool) -> tuple[str, ...]:
    """Return the dimensions to measure in VBench's order: those named, or all of the suite."""
    for name in names:
        if name not in DIMENSIONS:
            raise unknown_name("--dimension", name, DIMENSIONS)
        if name not in suite.dimensions:
            needs = "labels that" if name in LABELLED else "a group of prompts that"
            limit = f"{suite.name} cannot be scored in it: it needs {needs} only VBench's own prompts have"
            raise refuse("--dimension", name, limit, f"it has {', '.join(suite.dimensions)}")
    if static_filter and not suite.official:
        limit = f"the filter works on VBench's own prompts only, and {suite.name} has none"
        raise refuse("--static-filter", suite.name, limit, "leave it out, or use vbench946 or vbench128")
    return tuple(name for name in suite.dimensions if not names or name in names)


def load_entries(suite: Suite, prompts: Path | None, info: str) -> list[Entry]:
    """Load the suite's prompts from VBench's own metadata, the file `info`, or from the user's file."""
    if suite.official:
        texts, official = own_choice(suite, prompts), _official(info)
        if prompts is not None:
            return _counted(suite, [_chosen(official, text, prompts) for text in texts], str(prompts))
        return _counted(suite, official if suite.name == "vbench946" else _sample(official), info)
    if prompts is None:
        limit = f"{suite.name} needs the file of its {suite.num_entries} prompts"
        remedy = "name a text file with one prompt per line, or JSON {name: prompt}"
        raise refuse("--prompts", "none", limit, remedy)
    return _counted(suite, _from_file(suite, prompts), str(prompts))


def own_choice(suite: Suite, prompts: Path | None) -> list[str]:
    """Return which of VBench's prompts the user wants, none if no file names them."""
    if prompts is None or not suite.official:
        return []
    if suite.name != "vbench128":
        raise refuse("--prompts", str(prompts), f"{suite.name} has VBench's own list", "leave it out")
    return _lines(prompts)


def clip_seconds(suite: Suite, entries: Iterable[Entry]) -> dict[tuple[str, str], int]:
    """Return the length of clips by prompt and dimension.

    VBench's standard mode uses the longest of all dimensions that list a prompt, so aesthetic and imaging quality
    of its own list are in fact scored on 10 s.
    """
    names: dict[str, set[str]] = {}
    for entry in entries:
        names.setdefault(entry.text, set()).update(entry.dimensions)
    seconds = {}
    for text, name in ((text, name) for text, own in names.items() for name in own):
        counted = {"prompt": names[text], "dimension": {name}, "short": set()}[suite.clip_rule]
        seconds[text, name] = LONG_S if counted & LONG else SHORT_S
    return seconds


def for_static_filter(entries: Iterable[Entry]) -> list[Entry]:
    """Restrict flickering to the prompts that VBench lists for it, the only ones that its filter reads."""
    name = "temporal_flickering"
    return [
        replace(e, dimensions=tuple(d for d in e.dimensions if d != name or name in e.listed))
        for e in entries
    ]


def digest(entries: Iterable[Entry]) -> str:
    """Return the SHA-256 of the prompts and their dimensions, which distinguishes two results of one suite."""
    listed = [[entry.text, entry.stem, list(entry.dimensions), entry.labels] for entry in entries]
    return hashlib.sha256(json.dumps(listed, sort_keys=True).encode()).hexdigest()


def find_videos(folder: Path, suite: Suite, stems: Collection[str]) -> dict[tuple[str, int], Path]:
    """Return the files of a folder by stem and seed; refuse one that belongs to no prompt.

    Without stems it may belong to any: before VBench's list is installed, that is all that can be checked.
    """
    if not folder.is_dir():
        raise refuse("videos", str(folder), "no such folder", "name the folder of <prompt>-<seed>.mp4 files")
    example = video_name(min(stems, default="<prompt>"), 0)
    found = {}
    for path in sorted(folder.glob("*.mp4")):
        parts = re.fullmatch(r"(.+)-(\d+)", path.stem, flags=re.DOTALL)
        if not parts or (stems and parts[1] not in stems):
            limit = f"its name is no <prompt>-<seed>.mp4 of {suite.name}"
            raise refuse("video", path.name, limit, f"name it like {example!r}, or move it away")
        if int(parts[2]) >= suite.seeds or parts[2] != str(int(parts[2])):
            limit = f"seeds of {suite.name} are 0 to {suite.seeds - 1}"
            raise refuse("video", path.name, limit, "rename it, or move it away")
        found[parts[1], int(parts[2])] = path
    if not found:
        raise refuse("videos", str(folder), "no .mp4 file in it", f"put the videos there, as {example!r}")
    return found


def missing_videos(
    suite: Suite, entries: Iterable[Entry], dimension: str, found: Collection[tuple[str, int]]
) -> list[str]:
    """List the names of files that a dimension needs and the folder lacks."""
    stems = dict.fromkeys(entry.stem for entry in entries if dimension in entry.dimensions)
    wanted = [(stem, seed) for stem in stems for seed in range(suite.seeds)]
    return [video_name(*each) for each in wanted if each not in found]


def _official(info: str) -> list[Entry]:
    """Read VBench's own list."""
    try:
        entries = []
        for line in json.loads(Path(info).read_text(encoding="utf-8")):
            text, names = line["prompt_en"], tuple(line["dimension"])
            entries.append(Entry(text, text, names, line.get("auxiliary_info", {}), names))
        return entries
    except (OSError, ValueError, KeyError, TypeError) as error:
        limit = f"not readable as VBench's list of prompts ({type(error).__name__})"
        raise refuse("prompts", info, limit, "run `recap vbench setup` again") from error


def _sample(official: Sequence[Entry]) -> list[Entry]:
    """Choose the 128: evenly through each group, so the list is the same everywhere; a text of two groups once."""
    chosen: list[Entry] = []
    for group, wanted in GROUPS_OF_128.items():
        taken = {entry.text for entry in chosen}
        own = [entry for entry in official if group in entry.dimensions and entry.text not in taken]
        if len(own) < wanted:
            limit = f"only {len(own)} prompts of {group}, {wanted} are needed"
            raise refuse("prompts", "VBench's metadata", limit, "run `recap vbench setup` again")
        chosen += [_for_all_quality(own[index * len(own) // wanted]) for index in range(wanted)]
    return chosen


def _chosen(official: Sequence[Entry], text: str, path: Path) -> Entry:
    """Return one prompt with everything that VBench's list has about it."""
    own = [entry for entry in official if entry.text == text]
    if not own:
        limit = "it is not one of VBench's own, and only those have labels"
        raise refuse("prompt", text, limit, f"change that line of {path}, or use moviegen128")
    names = tuple(name for entry in own for name in entry.dimensions)
    labels = {name: label for entry in own for name, label in entry.labels.items()}
    return _for_all_quality(Entry(text, text, names, labels, names))


def _for_all_quality(entry: Entry) -> Entry:
    semantic = tuple(name for name in entry.dimensions if name in SEMANTIC)
    return replace(entry, dimensions=(*QUALITY, *semantic))


def _from_file(suite: Suite, path: Path) -> list[Entry]:
    """Read the user's prompts: a line each, or JSON that also names their files."""
    if path.suffix != ".json":
        return [
            Entry(text, text if _fits(text, suite) else f"line-{number:03d}", suite.dimensions)
            for number, text in enumerate(_lines(path), start=1)
        ]
    try:
        named = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise refuse("--prompts", str(path), "not readable as JSON", "give {name: prompt}") from error
    if not isinstance(named, dict) or not all(isinstance(text, str) for text in named.values()):
        raise refuse("--prompts", str(path), "not an object of names and prompts", "give {name: prompt}")
    return [Entry(text, name, suite.dimensions) for name, text in named.items()]


def _fits(text: str, suite: Suite) -> bool:
    return "/" not in text and len(video_name(text, suite.seeds - 1).encode()) <= MOST_BYTES


def _lines(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise refuse("--prompts", str(path), "not readable as text", "give one prompt per line") from error
    return [line.strip() for line in lines if line.strip()]


def _counted(suite: Suite, entries: list[Entry], source: str) -> list[Entry]:
    """Refuse a list of another length, with a prompt twice, or with a prompt that no file can be named after."""
    if len(entries) != suite.num_entries:
        limit = f"{suite.name} has {suite.num_entries} prompts, and this list has {len(entries)}"
        raise refuse("prompts", source, limit, "give the suite's own list")
    stems = [entry.stem for entry in entries]
    # VBench itself has two prompts in two groups each.
    if suite.name != "vbench946" and (double := [stem for stem in stems if stems.count(stem) > 1]):
        raise refuse("prompts", double[0], "it is in the list twice", "give every prompt once")
    for stem in stems:
        if not stem or not _fits(stem, suite):
            slash = "its files cannot have a / in their name"
            limit = slash if "/" in stem else f"file names have 1 to {MOST_BYTES} bytes with seed and suffix"
            raise refuse("prompt", stem, limit, "give it another name in a JSON of {name: prompt}")
    return entries
