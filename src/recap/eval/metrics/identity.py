"""Long-horizon identity: is the subject of the last ten seconds the same as in seconds 2 to 8?

The score is the mean likeness of all pairs of an early and a late picture, at 2 pictures per second, by any witness:
the whole frame or the subject alone. The windows of clips shorter than a minute are scaled, and the score reports
them.
"""

from __future__ import annotations

import numpy as np

from recap.eval.judged import JudgedRun, Measure
from recap.eval.sampling import Sampled, Span
from recap.eval.scores import Score
from recap.eval.witnesses import Witness

EARLY, LATE = Span(2, 8), Span(50, 60)
NOMINAL_S = 60.0
FEWEST = 3
"""The sightings that each window needs."""


def identity(sampled: Sampled, witness: Witness, subject: str, name: str = "identity") -> Score:
    """Compare the sightings of the early window with those of the late one."""
    # A rollout of 60 s lasts 59.8 s, because its first frame is one picture; its windows are not scaled.
    factor = 1.0 if abs(sampled.duration_s - NOMINAL_S) < 1 else sampled.duration_s / NOMINAL_S
    early, late = EARLY.scaled(factor), Span(LATE.start * factor, np.inf)
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
    value = None
    if min(counts) >= FEWEST:
        value = float(witness.likeness(*sightings).mean())
    return Score(name, value, witness.backend, counts[0] * counts[1], details)


def _measure(run: JudgedRun) -> list[Score]:
    return [
        identity(run.sampled, witness, run.subject, f"identity_{name}") for name, witness in run.witnesses
    ]


MEASURES = (
    Measure(
        "identity",
        _measure,
        headlines=("identity_subject", "identity_frame"),
        paper={"identity_frame": ("frame_sim", 1.0), "identity_subject": ("crop_sim", 1.0)},
        of_subject=True,
    ),
)
