"""Measures controlled reappearance: empty, subject, empty, subject again. Is it the same subject?

Segments A to D follow each other with cuts that clear the prior, so only a bank can carry the subject from B to D.
The first second after every cut is left out. A video is verified if the subject is found in at least half of the
pictures of B and of D and in at most a tenth of those of C.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from recap.errors import refuse
from recap.eval.judged import JudgedRun, Measure
from recap.eval.judges.crops import same_from
from recap.eval.metrics.identity import FEWEST, compare_windows
from recap.eval.sampling import Sampled, Span
from recap.eval.scores import Score
from recap.eval.visible import LIKENESS, MOMENTS, VIDEOS
from recap.eval.witnesses import Witness
from recap.io.trace import Bank, BlockTrace, bank_before

SEGMENTS = {"A": 3.0, "B": 6.0, "C": 7.5, "D": 7.5}
"""Seconds of each segment; the subject is there in B and D."""
SETTLING_S = 1.0
PRESENT, ABSENT = 0.5, 0.1


def segment_spans(starts_s: Sequence[float], duration_s: float) -> dict[str, Span]:
    """Return the four segments without their first second (scaled down for short videos), from where they begin."""
    if len(starts_s) != len(SEGMENTS) or list(starts_s) != sorted(starts_s):
        limit = f"a reappearance has {len(SEGMENTS)} segments in order"
        raise refuse("segments", list(starts_s), limit, "give the second in which each begins")
    settling = min(SETTLING_S, SETTLING_S * duration_s / sum(SEGMENTS.values()))
    ends = [*starts_s[1:], duration_s + 1.0]
    return {
        name: Span(start + settling, end) for name, start, end in zip(SEGMENTS, starts_s, ends, strict=True)
    }


def starts_from_trace(trace: Sequence[BlockTrace], fps: float) -> list[float]:
    """Return the seconds in which the segments of a rollout begin: its start, and every cut."""
    return [0.0, *(line.first_pictures[0] / fps for line in trace if line.clears_prior)]


def reappearance(
    sampled: Sampled,
    witness: Witness,
    subject: str,
    starts_s: Sequence[float],
    name: str = "reappearance",
    presence: Witness | None = None,
) -> Score:
    """Measure the likeness of B's sightings to D's; details say where it was found and whether it is verified.

    `presence` finds the subject where `witness` cannot, as one that looks at whole frames.
    """
    spans = segment_spans(starts_s, sampled.duration_s)
    found, _ = (presence or witness).look(sampled.pictures, subject)
    shares = {
        segment: float(found[sampled.within(span)].mean()) if sampled.within(span).any() else float("nan")
        for segment, span in spans.items()
    }
    score = compare_windows(sampled, witness, subject, spans["B"], spans["D"], name)
    verified = shares["B"] >= PRESENT and shares["D"] >= PRESENT and shares["C"] <= ABSENT
    return replace(score, details={**score.details, "found_share": shares, "verified": bool(verified)})


def same_again(by_crops: Score, name: str) -> Score:
    """Say 1 if the likeness by crops is that of one instance, else 0, also where the subject does not come back.

    None means that it was not there in the first place.
    """
    before, _ = by_crops.details["found"]
    same = by_crops.value is not None and by_crops.value >= same_from()
    return Score(name, float(same) if before >= FEWEST else None, by_crops.backend, by_crops.n)


def slots_from(bank: Bank, first_frame: int, end_frame: int) -> int:
    """Count the slots of a bank that come from these frames."""
    return sum(first_frame <= frame < end_frame for frame, _, _ in bank)


def _measure(run: JudgedRun) -> list[Score]:
    trace, witness = run.trace, run.subject_witness
    starts = starts_from_trace(trace, run.clip.fps)
    scores = [
        reappearance(run.sampled, each, run.subject, starts, f"reappearance_{name}", presence=witness)
        for name, each in run.witnesses
    ]
    scores += [same_again(each, "same_again") for each in scores if each.name == "reappearance_crop"]
    if witness is not None:
        first = scores[0]
        details, backend = first.details, first.backend
        for segment in "BCD":
            scores.append(Score(f"found_in_{segment}", details["found_share"][segment], backend))
        scores.append(Score("verified", float(details["verified"]), backend))
        value = first.value if details["verified"] else None
        scores.append(Score("reappearance_subject_verified", value, backend, first.n))
    if run.has_bank:
        cuts = [index for index, line in enumerate(trace) if line.clears_prior]
        bank = bank_before(trace, cuts[2])
        count = slots_from(bank, trace[cuts[0]].first_frame, trace[cuts[1]].first_frame)
        scores.append(Score("bank_slots_from_B", float(count), "native", len(bank)))
    return scores


MEASURES = (
    Measure(
        "reappearance",
        _measure,
        headlines=(
            "same_again",
            "reappearance_subject",
            "reappearance_crop",
            "reappearance_subject_verified",
            "reappearance_frame",
        ),
        paper={"reappearance_frame": ("frame_sim", 1.0), "reappearance_subject": ("crop_sim", 1.0)},
        visible={
            **{f"reappearance_{who}": LIKENESS for who in ("subject", "subject_verified", "crop", "frame")},
            "same_again": VIDEOS,
            **{f"found_in_{segment}": MOMENTS for segment in "BCD"},
            "verified": VIDEOS,
        },
        of_subject=True,
        shows_bank=True,
    ),
)
