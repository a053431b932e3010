"""Measures long-horizon identity: is the subject of the last ten seconds the same as in seconds 2 to 8?

The score is the mean likeness of all pairs of an early and a late picture, at 2 pictures per second, by any witness:
the whole frame or the subject alone. The windows of clips shorter than a minute are scaled, and the score reports
them.

Retention is likeness to the opening, second by second. The paper's curve compares with frame 0. A witness that does
not find the subject there takes its first sighting within the first second. Table values are means over a second to
each side of start, middle and end. The middle is half of the video but at most a minute: the paper's points are 0, 30
and 60 s of a minute, 0, 1 and 5 min of five.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from recap.eval.judged import JudgedRun, Measure
from recap.eval.sampling import Sampled, Span, sample_clip
from recap.eval.scores import Score
from recap.eval.visible import LIKENESS
from recap.eval.witnesses import Witness

EARLY, LATE = Span(2, 8), Span(50, 60)
NOMINAL_S = 60.0
FEWEST = 3
"""The sightings that each window needs."""
OPENING_S = 1.0
REACH_S = 1.0
LATEST_MIDDLE_S = 60.0
MARKS = ("start", "mid", "end")


def identity(sampled: Sampled, witness: Witness, subject: str, name: str = "identity") -> Score:
    """Compare the sightings of the early window with those of the late one."""
    # A rollout of 60 s lasts 59.8 s, because its first frame is one picture; its windows are not scaled.
    factor = 1.0 if abs(sampled.duration_s - NOMINAL_S) < 1 else sampled.duration_s / NOMINAL_S
    early, late = Span(*(factor * mark for mark in EARLY)), Span(factor * LATE.start, np.inf)
    return compare_windows(sampled, witness, subject, early, late, name)


def compare_windows(
    sampled: Sampled, witness: Witness, subject: str, early: Span, late: Span, name: str
) -> Score:
    """Average the likeness of all early and late sightings; None with fewer than three in either window."""
    inside = [sampled.within(span) for span in (early, late)]
    looked = inside[0] | inside[1]
    found, seen = witness.look(sampled.pictures[looked], subject)
    sightings = [seen[found & window[looked]] for window in inside]
    counts = [len(part) for part in sightings]
    details = {
        "windows_s": [[span.start, min(span.end, sampled.duration_s)] for span in (early, late)],
        "looked": [int(window.sum()) for window in inside],
        "found": counts,
    }
    value = _known_mean(witness.likeness(*sightings)) if min(counts) >= FEWEST else None
    return Score(name, value, witness.backend, counts[0] * counts[1], details)


def _known_mean(likeness: NDArray[np.float64]) -> float | None:
    """Average likeness without nan, which stands for an answer that could not be read."""
    known = np.isfinite(likeness)
    return float((likeness if known.all() else likeness[known]).mean()) if known.any() else None


def retention(sampled: Sampled, witness: Witness, subject: str) -> Score:
    """Measure likeness at the end; details have the curve (None without the subject), start, mid and end."""
    found, seen = witness.look(sampled.pictures, subject)
    opening = np.flatnonzero(found & (sampled.seconds <= OPENING_S))
    curve: list[float | None] = [None] * len(found)
    if len(opening):
        likeness = witness.likeness(seen[opening[:1]], seen)[0]
        readable = found & np.isfinite(likeness)
        curve = [float(value) if there else None for value, there in zip(likeness, readable, strict=True)]
    last = float(sampled.seconds[-1])
    marks = {"start": 0.0, "mid": min(last / 2, LATEST_MIDDLE_S), "end": last}
    means = {name: _around(sampled, curve, mark) for name, mark in marks.items()}
    if curve[0] is not None:
        # The opening is its own measure.
        means["start"] = curve[0]
    details = {"seconds": sampled.seconds.tolist(), "curve": curve, **means}
    return Score("retention", means["end"], witness.backend, int(found.sum()), details)


def _around(sampled: Sampled, curve: list[float | None], mark: float) -> float | None:
    inside = sampled.within(Span(mark - REACH_S, mark + REACH_S + 1e-6))
    values = [value for value, there in zip(curve, inside, strict=True) if there and value is not None]
    return float(np.mean(values)) if values else None


def _measure(run: JudgedRun) -> list[Score]:
    return [
        identity(run.sampled, witness, run.subject, f"identity_{name}") for name, witness in run.witnesses
    ]


def _measure_retention(run: JudgedRun) -> list[Score]:
    sampled = sample_clip(run.clip, 1)
    scores = []
    for name, witness in run.witnesses:
        whole = retention(sampled, witness, run.subject)
        for when in MARKS:
            details = whole.details if when == "end" else {}
            scores.append(
                Score(f"retention_{name}_{when}", whole.details[when], whole.backend, whole.n, details)
            )
    return scores


MEASURES = (
    Measure(
        "identity",
        _measure,
        headlines=("identity_subject", "identity_crop", "identity_frame"),
        paper={"identity_frame": ("frame_sim", 1.0), "identity_subject": ("crop_sim", 1.0)},
        visible=dict.fromkeys(("identity_subject", "identity_crop", "identity_frame"), LIKENESS),
        of_subject=True,
    ),
    Measure(
        "retention",
        _measure_retention,
        headlines=("retention_subject_end", "retention_crop_end", "retention_frame_end"),
        paper={f"retention_frame_{when}": (when, 1.0) for when in MARKS},
        visible={
            f"retention_{who}_{when}": LIKENESS for who in ("subject", "crop", "frame") for when in MARKS
        },
        of_subject=True,
    ),
)
