"""This module judges comparisons in which a subject comes back, and puts them on one page with their verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import numpy as np

from recap.config import read_record
from recap.eval.judged import MotionJudge, build_motion_judge
from recap.eval.judges.subject import KEPT, ProbeWitness
from recap.eval.metrics.presence import Stretch
from recap.eval.returns import ANOTHER, SAME, Return, headline, judge_return
from recap.eval.sampling import InMemoryClip
from recap.io.trace import BlockTrace, bank_before, has_bank, pictures_of_frames, read_trace
from recap.io.video import open_clip
from recap.plan import Shot
from recap.run import read_spec
from recap.show.clips import embed
from recap.show.run_page import PAGE, read_summary
from recap.show.sheet import Patches, cut_out, gather_patches
from recap.show.story_page import Screen, Story
from recap.types import BackboneSpec, Role

BEFORE_RETURN_S = 1.0
"""The videos of a story begin to play this long before the return."""

MEASURED = (
    "How it was counted: a small network, trained apart from the generating model, finds the subject in two pictures "
    "a second and reads its colours, which are its identity in this world. It is the same if it is found in at least "
    "half of the pictures of each visit and in at most a tenth of those without it, and its colours on return differ "
    f"by less than {KEPT:g} ΔE (CIE 1976) from those of the first visit; two foxes of different seeds are about 40 "
    "apart. This compares colours, not shapes, and mixes those of two where the model shows two. Movement is the way "
    "of its middle after the return, without that of the camera: a subject that stands still is easy to keep."
)


@dataclass(frozen=True, slots=True)
class StoryScript:
    """Describes a script of four shots (without the subject, with it, without it, with it) and its seeds."""

    # Of its folder.
    name: str
    title: str
    subject: str
    shots: tuple[Shot, ...]
    # What happens in every shot, in a word or two.
    labels: tuple[str, str, str, str]
    seeds: tuple[int, ...]
    about: str


class JudgedStory(NamedTuple):
    """Holds a finished script as its page shows it, with the seconds in which the shots begin."""

    story: Story
    returns: dict[str, list[Return]]
    starts_s: list[float]
    flow: str


def judge_story(script: StoryScript, runs: Mapping[str, Path], folder: Path) -> JudgedStory:
    """Judge the finished runs of a script, by memory; links on its page are relative to `folder`."""
    witness, motion = ProbeWitness(), build_motion_judge()
    # The last may have a bank, and then says which flow it used.
    *_, record = [read_record(run) for run in runs.values()]
    spec = read_spec(record)
    rows: list[tuple[str, str, list[Screen]]] = []
    returns: dict[str, list[Return]] = {name: [] for name in runs}
    for row, seed in enumerate(script.seeds):
        screens = []
        for name, run in runs.items():
            screen, found, parts = _screen(script, name, run, row, spec, witness, motion)
            screens.append(screen)
            returns[name].append(found)
        page = next(iter(runs.values())).parent / (f"row-{row}.html" if row else PAGE)
        rows.append((f"Seed {seed}", page.relative_to(folder).as_posix(), screens))
    starts = [part.span.start for part in parts]
    story = Story(
        title=script.title,
        verdict=headline(script.subject, returns),
        about=script.about,
        duration_s=parts[-1].span.end,
        start_s=max(0.0, starts[-1] - BEFORE_RETURN_S),
        scenes=list(zip(starts, script.labels, strict=True)),
        grid=spec.grid,
        rows=rows,
    )
    return JudgedStory(story, returns, starts, record["config"]["flow"])


def _screen(
    script: StoryScript,
    name: str,
    run: Path,
    row: int,
    spec: BackboneSpec,
    witness: ProbeWitness,
    motion: MotionJudge,
) -> tuple[Screen, Return, list[Stretch]]:
    """Judge the video of one memory and seed."""
    path = run / read_summary(run)["videos"][row]
    opened = open_clip(path)
    clip = InMemoryClip(np.stack(list(opened.pictures())), opened.fps)
    trace = [line.row(row) for line in read_trace(run / "trace.jsonl")]
    found, parts = judge_return(clip, trace, script.subject, witness, motion)
    _, first, _, back = parts
    # The middle of a visit, whatever it shows.
    stills = [
        (clip.shown[int(sum(part.span) / 2 * clip.fps)], label)
        for part, label in ((first, "first visit"), (back, "second visit"))
    ]
    bank, about = _kept(clip, trace, parts, spec.token_pixels) if has_bank(trace) else (None, "")
    screen = Screen(
        memory=name,
        video=embed(path)[0],
        badge=f"{found.verdict} {script.subject}" if found.verdict in (SAME, ANOTHER) else found.verdict,
        good=found.verdict == SAME,
        about=describe_return(found),
        stills=stills,
        bank=bank,
        bank_about=about,
    )
    return screen, found, parts


def describe_return(found: Return) -> str:
    """Say what was measured of a return."""
    if found.colour_error is None or found.likeness is None:
        first, again = f"{found.found_first:.0%}", f"{found.found_again:.0%}"
        return f"Found in {first} of the first visit and {again} of the second."
    moved = "" if found.path is None else f"; it moves {found.path:.0%} of the width a second"
    # Likeness ends at 0, so this is the least that it can be.
    most = " or more" if found.likeness < 0.005 else ""
    return f"Likeness {found.likeness:.2f}, colours {found.colour_error:.0f} ΔE{most} apart{moved}."


def _kept(
    clip: InMemoryClip, trace: Sequence[BlockTrace], parts: Sequence[Stretch], side: int
) -> tuple[Patches, str]:
    """Return what the bank had of the first visit when the second began, and its share of the attention."""
    _, first, gone, back = parts
    bank = bank_before(trace, back.first_block)
    start, end = (trace[part.first_block].first_frame for part in (first, gone))
    kept = {place: score for place, score in bank.items() if start <= place[0] < end and score > 0}
    last = {frame: pictures[-1] for frame, pictures in pictures_of_frames(trace).items()}
    cut = {place: cut_out(clip.shown[last[place[0]]], place, side) for place in kept}
    patches = gather_patches(cut, kept, {frame: index / clip.fps for frame, index in last.items()}, side)
    new = f"{len(kept)} patches that were new in the first visit"
    words = f"In the bank at the return: {new}, of {len(bank)}."
    shares = [share[0] for line in trace[back.first_block :] if (share := line.shares.get(Role.BANK))]
    return patches, words + (f" {fmean(shares):.0%} of attention goes to the bank." if shares else "")
