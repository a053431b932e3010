"""Identity retention over time: likeness to the opening, second by second.

The paper's curve compares with frame 0. A witness that does not find the subject there takes its first sighting
within the first second. Table values are means over a second to each side of start, middle and end. The middle is
half of the video but at most a minute: the paper's points are 0, 30 and 60 s of a minute, 0, 1 and 5 min of five.
"""

from __future__ import annotations

import numpy as np

from recap.eval.judged import JudgedRun, Measure
from recap.eval.sampling import Sampled, Span, sample_clip
from recap.eval.scores import Score
from recap.eval.witnesses import Witness

OPENING_S = 1.0
REACH_S = 1.0
LATEST_MIDDLE_S = 60.0


def retention(sampled: Sampled, witness: Witness, subject: str) -> Score:
    """Value: likeness at the end. Details: the curve (None where the subject is not found), start, mid and end."""
    found, seen = witness.look(sampled.pictures, subject)
    opening = np.flatnonzero(found & (sampled.seconds <= OPENING_S))
    curve: list[float | None] = [None] * len(found)
    if len(opening):
        likeness = witness.likeness(seen[opening[:1]], seen)[0]
        curve = [float(value) if there else None for value, there in zip(likeness, found, strict=True)]
    last = float(sampled.seconds[-1])
    marks = {"start": 0.0, "mid": min(last / 2, LATEST_MIDDLE_S), "end": last}
    means = {name: _around(sampled, curve, mark) for name, mark in marks.items()}
    if curve[0] is not None:
        means["start"] = curve[0]  # the opening is its own measure
    details = {"seconds": sampled.seconds.tolist(), "curve": curve, **means}
    return Score("retention", means["end"], witness.backend, int(found.sum()), details)


def _around(sampled: Sampled, curve: list[float | None], mark: float) -> float | None:
    inside = sampled.within(Span(mark - REACH_S, mark + REACH_S + 1e-6))
    values = [value for value, there in zip(curve, inside, strict=True) if there and value is not None]
    return float(np.mean(values)) if values else None


def _measure(run: JudgedRun) -> list[Score]:
    sampled = sample_clip(run.clip, 1)
    scores = []
    for name, witness in run.witnesses:
        whole = retention(sampled, witness, run.subject)
        for when in ("start", "mid", "end"):
            details = whole.details if when == "end" else {}
            scores.append(
                Score(f"retention_{name}_{when}", whole.details[when], whole.backend, whole.n, details)
            )
    return scores


MEASURES = (
    Measure(
        "retention",
        _measure,
        headlines=("retention_subject_end", "retention_frame_end"),
        paper={f"retention_frame_{when}": (when, 1.0) for when in ("start", "mid", "end")},
        of_subject=True,
    ),
)
