"""Show where a memory fails: `python docs/scripts/show_failures.py RUNS --memory recap-plus`

Generates scripts of `reappearance` and `entering` with the embedded model on the CPU, first seed of each (runs that
are in the folder RUNS already are taken as they are), ranks the videos by four failures and writes a strip of the
worst of each to docs/images/NAME-failures.jpg. The pictures of a strip are those in which the failure shows, where
there are such. It prints all scores. Eight scripts of 24 s and six of 30 s take about ten minutes on 2 cores.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np
from numpy.typing import NDArray

from recap import Run, generate
from recap.backbones.tiny.vocabulary import parse_prompt
from recap.eval.judged import build_motion_judge
from recap.eval.judges.subject import ProbeWitness
from recap.eval.metrics.presence import LEAVING_S, Stretch, stretches
from recap.eval.metrics.reappearance import SETTLING_S
from recap.eval.metrics.subject_motion import camera_steps, subject_motion
from recap.eval.sampling import PER_SECOND, Sampled, Span, sample_clip
from recap.io.report import SILENT
from recap.io.video import Picture, open_clip
from recap.show.sheet import pictures_sheet
from recap.studio.segments import jpeg_of
from recap.tables.scripts import scripts

IMAGES = Path(__file__).parents[1] / "images"
SETS = {"reappearance": 24.0, "entering": 30.0}
FAILURES = ("haunting", "doubled", "lost", "frozen")
LABELS = ("before", "first visit", "first visit", "away", "second visit", "second visit")
# The stretch of each picture of a strip, and its share of the stretch where nothing is to be seen.
PLACES = ((0, 0.7), (1, 0.4), (1, 0.8), (2, 0.7), (3, 0.4), (3, 0.8))
# Cells of 16 pixels that a second body must have; one alone is mostly a shadow.
LEAST_CELLS = 2


class Failure(NamedTuple):
    """Says how bad a video is, 0 to 1, and in which of its sampled pictures that shows."""

    score: float
    shows: NDArray[np.bool_]


class Seen(NamedTuple):
    """Holds what was seen in one video."""

    name: str
    sampled: Sampled
    parts: list[Stretch]
    failures: dict[str, Failure]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("runs", type=Path)
    parser.add_argument("--memory", default="recap-plus")
    parser.add_argument("--reappearance", type=int, default=8, help="how many of these scripts")
    parser.add_argument("--entering", type=int, default=6, help="how many of these")
    options = parser.parse_args()
    witness, seen = ProbeWitness(), []
    for which, seconds in SETS.items():
        for number, script in enumerate(scripts(which, "embedded", seconds, getattr(options, which))):
            folder = options.runs / f"{options.memory}-{which}-{number}"
            if not (folder / "summary.json").is_file():
                chosen = {"memory": options.memory, "seed": 1000 * number, "device": "cpu"}
                generate(script.shots, folder=folder, reporter=SILENT, **chosen)
            who = script.late_subject or script.subject
            seen.append(look_at(Run(folder), f"{which}: {script.name}", who, witness))
            found = (f"{name} {failure.score:.2f}" for name, failure in seen[-1].failures.items())
            print(seen[-1].name, *found, sep=", ", flush=True)
    shown = {}
    for name in FAILURES:
        worst = max(seen, key=lambda each: each.failures[name].score)
        shown[f"{name} {worst.failures[name].score:.0%}, {worst.name}"] = strip(worst, name)
    (IMAGES / f"{options.memory}-failures.jpg").write_bytes(jpeg_of(pictures_sheet(shown, LABELS)))


def look_at(run: Run, name: str, who: str, witness: ProbeWitness) -> Seen:
    """Measure the failures of a video in which somebody comes, leaves and returns."""
    sampled = sample_clip(open_clip(run.video), PER_SECOND)
    parts = stretches(run.trace, open_clip(run.video).fps, sampled.duration_s)
    found, _ = witness.look(sampled.pictures, who)
    cells = witness.where(sampled.pictures, who)
    named = [who in parse_prompt(part.prompt).actors for part in parts]
    there, away, back = (np.zeros(len(found), bool) for _ in range(3))
    for index, (part, is_named) in enumerate(zip(parts, named, strict=True)):
        leaving = SETTLING_S if run.trace[part.first_block].clears_prior else LEAVING_S
        inside = sampled.within(part.without_first(SETTLING_S if is_named else leaving))
        (there if is_named else away)[:] |= inside
        back |= inside & (index == len(parts) - 1)
    doubled = np.array([bodies(each) > 1 for each in cells]) & there
    flow, judge = build_motion_judge()
    kept = Sampled(sampled.seconds[back], sampled.pictures[back], sampled.duration_s)
    camera = camera_steps(kept, flow, cells[back])
    _, change = subject_motion(kept, cells[back], camera, (witness.backend, judge))
    return Seen(
        name,
        sampled,
        parts,
        {
            "haunting": Failure(share(found, away), found & away),
            "doubled": Failure(share(doubled, there), doubled),
            "lost": Failure(share(~found, back), ~found & there),
            # Of somebody who is not there nothing can be frozen.
            "frozen": Failure(0.0 if change.value is None else 1 - change.value, np.zeros_like(found)),
        },
    )


def share(flags: NDArray[np.bool_], inside: NDArray[np.bool_]) -> float:
    return float(flags[inside].mean()) if inside.any() else 0.0


def bodies(cells: NDArray[np.float32]) -> int:
    """Count the groups of connected cells that show somebody."""
    _, _, stats, _ = cv2.connectedComponentsWithStats((cells > 0).astype(np.uint8), connectivity=8)
    return int((stats[1:, cv2.CC_STAT_AREA] >= LEAST_CELLS).sum())


def strip(seen: Seen, name: str) -> list[Picture]:
    """Return pictures of a video, in the stretches of `PLACES`: where the failure shows, else at fixed moments."""
    shows, used, chosen = seen.failures[name].shows, set(), []
    for number, at in PLACES:
        start, end = seen.parts[number].span
        inside = np.flatnonzero(seen.sampled.within(Span(start, end)))
        usual = inside[int(at * len(inside))]
        flagged = [index for index in inside if shows[index] and index not in used]
        # The one nearest to the usual moment.
        best = min(flagged, key=lambda index: abs(index - usual)) if flagged else usual
        used.add(best)
        chosen.append(seen.sampled.pictures[best])
    return chosen


if __name__ == "__main__":
    main()
