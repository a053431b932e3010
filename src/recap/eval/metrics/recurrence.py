"""Measures recurrence over minutes: subjects that come and go by a schedule. Is each the same again, after which gap?

A return is a stretch with a subject, and the one before that had it; the gap is the time between them, 0 where only a
cut is between. The gate comes first: the subject must be found in at least half of the pictures of both stretches,
and in at most a tenth of those between them. Likeness is of returns that pass, and `recurrence_kept` of all whose
earlier stretch shows the subject: who is not found on return is not kept. Scores by gap take the nearest of `GAPS_S`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from recap.eval.judged import WITNESSES, JudgedRun, Measure
from recap.eval.metrics.identity import compare_windows
from recap.eval.metrics.presence import Stretch, stretches
from recap.eval.metrics.reappearance import ABSENT, PRESENT, SETTLING_S, slots_from
from recap.eval.sampling import Sampled, Span
from recap.eval.scores import Score
from recap.eval.visible import LIKENESS, MOMENTS, VIDEOS
from recap.eval.witnesses import Witness
from recap.io.trace import BlockTrace, bank_before, pictures_of_frames

GAPS_S = (0, 1, 2, 5, 10, 15, 20, 30, 45, 60, 75, 90, 120, 180, 300)
AGES_S = tuple(range(0, 301, 15))
"""The edges of the histogram of ages; what is older counts with the last."""
BY_GAP = "_by_gap_"
AGES_AT_RETURN = "bank_age_at_return"


class PlannedReturn(NamedTuple):
    """Names a subject and the numbers of two stretches with it, between which it is away or there is a cut."""

    subject: str
    before: int
    after: int


class JudgedReturn(NamedTuple):
    """Holds what was found of a return: shares of pictures (None of no picture), and likeness by witness."""

    subject: str
    gap_s: float
    found: tuple[float | None, float | None, float | None]
    likeness: dict[str, float | None]
    # By the threshold of the witness that tells instances apart best; False if it was seen too rarely.
    same: bool

    @property
    def shown_before(self) -> bool:
        return self.found[0] is not None and self.found[0] >= PRESENT

    @property
    def passes(self) -> bool:
        """Tell whether it passes the gate."""
        _, away, after = self.found
        back = after is not None and after >= PRESENT
        return self.shown_before and back and (away is None or away <= ABSENT)

    @property
    def gap_bin(self) -> int:
        return gap_bin(self.gap_s)


def gap_bin(gap_s: float) -> int:
    """Return the nearest of `GAPS_S`; only no gap at all is 0."""
    if gap_s <= 0:
        return 0
    return min(GAPS_S[1:], key=lambda each: abs(each - gap_s))


def planned_returns(
    stage: Sequence[Sequence[str]], parts: Sequence[Stretch], trace: Sequence[BlockTrace]
) -> list[PlannedReturn]:
    """List all returns of a schedule; somebody who just stays, without a cut, does not return."""
    found = []
    for subject in dict.fromkeys(name for cast in stage for name in cast):
        there = [number for number, cast in enumerate(stage) if subject in cast]
        for before, after in pairwise(there):
            if after - before > 1 or trace[parts[after].first_block].clears_prior:
                found.append(PlannedReturn(subject, before, after))
    return found


def judge_returns(run: JudgedRun, parts: Sequence[Stretch]) -> list[JudgedReturn]:
    """Judge every return of a run by all its witnesses."""
    sampled, finder, teller = run.sampled, run.finder, find_teller(run)
    judged = []
    for planned in planned_returns(run.stage, parts, run.trace):
        early, late = (parts[number].without_first(SETTLING_S) for number in (planned.before, planned.after))
        away = [part.without_leaving(run.trace) for part in parts[planned.before + 1 : planned.after]]
        shares = [_found_share(sampled, finder, planned.subject, each) for each in ([early], away, [late])]
        likeness = {
            name: compare_windows(sampled, witness, planned.subject, early, late, name).value
            for name, witness in run.witnesses
        }
        gap_s = parts[planned.after].span.start - parts[planned.before].span.end
        same = teller is not None and (likeness[teller[0]] or 0.0) >= (teller[1].same_from or 0.0)
        judged.append(JudgedReturn(planned.subject, gap_s, (shares[0], shares[1], shares[2]), likeness, same))
    return judged


def _found_share(
    sampled: Sampled, finder: Witness | None, subject: str, spans: Iterable[Span]
) -> float | None:
    """Return the share of sampled pictures that show the subject; None without pictures or a finder."""
    inside = sampled.within_any(spans)
    if finder is None or not inside.any():
        return None
    return float(finder.look(sampled.pictures[inside], subject)[0].mean())


def find_teller(run: JudgedRun) -> tuple[str, Witness] | None:
    """Return the witness with a mark that tells instances apart best: crops, then a language model, then colours."""
    marked = {name: witness for name, witness in run.witnesses if witness.same_from is not None}
    return next(((name, marked[name]) for name in ("crop", "vlm", "subject") if name in marked), None)


def _score(name: str, values: Iterable[float | bool | None], backend: str) -> Score:
    """Average the values that are known."""
    known = [float(value) for value in values if value is not None]
    return Score(name, float(np.mean(known)) if known else None, backend, len(known))


def _by_gap(name: str, backend: str, pairs: Sequence[tuple[int, float | bool | None]]) -> list[Score]:
    """Average over all returns, and over those of every gap."""
    scores = [_score(f"recurrence_{name}", (value for _, value in pairs), backend)]
    for gap in sorted({gap for gap, _ in pairs}):
        own = (value for at, value in pairs if at == gap)
        scores.append(_score(f"{name}{BY_GAP}{gap}", own, backend))
    return scores


def _measure(run: JudgedRun) -> list[Score]:
    """Give nothing for a run without a schedule, or whose schedule has no return."""
    parts = stretches(run.trace, run.clip.fps, run.sampled.duration_s)
    if not run.stage:
        return []
    assert len(parts) == len(run.stage), "a job has an entry of its stage per stretch"
    judged = judge_returns(run, parts)
    if not judged:
        return []
    scores, gated = [], judged
    if run.finder is not None:
        gated = [each for each in judged if each.passes]
        scores += _by_gap("gate", run.finder.backend, [(each.gap_bin, each.passes) for each in judged])
        scores.append(_score("recurrence_haunting", (each.found[1] for each in judged), run.finder.backend))
    for name, witness in run.witnesses:
        own = _by_gap(name, witness.backend, [(each.gap_bin, each.likeness[name]) for each in gated])
        # Whole frames hardly tell who is in them: a curve only where nobody else compares.
        scores += own[:1] if name == "frame" and len(run.witnesses) > 1 else own
    if run.finder is not None and (teller := find_teller(run)) is not None:
        shown = [each for each in judged if each.shown_before]
        backend = teller[1].backend
        scores += _by_gap("kept", backend, [(each.gap_bin, each.passes and each.same) for each in shown])
        for name, first in (("opening", True), ("late", False)):
            kept = [each.passes and each.same for each in shown if (each.subject in run.stage[0]) is first]
            scores.append(_score(f"recurrence_kept_{name}", kept, backend))
    scores[0] = replace(scores[0], details={"returns": [each._asdict() for each in judged]})
    return scores + (_measure_bank(run, parts) if run.has_bank else [])


def _measure_bank(run: JudgedRun, parts: Sequence[Stretch]) -> list[Score]:
    """Say how old the bank's slots are as a subject returns, and how many are of its last visit, as shares."""
    second = {frame: own[0] / run.clip.fps for frame, own in pictures_of_frames(run.trace).items()}
    ages: list[float] = []
    kept: list[tuple[int, float | bool | None]] = []
    for planned in planned_returns(run.stage, parts, run.trace):
        before, after = parts[planned.before], parts[planned.after]
        bank = bank_before(run.trace, after.first_block)
        if not bank:
            continue
        ages += [after.span.start - second[frame] for frame, _, _ in bank]
        end = parts[planned.before + 1].first_block
        first_frame, end_frame = (run.trace[block].first_frame for block in (before.first_block, end))
        gap = gap_bin(after.span.start - before.span.end)
        kept.append((gap, slots_from(bank, first_frame, end_frame) / len(bank)))
    counts = np.histogram(np.minimum(ages, AGES_S[-1]), AGES_S)[0] / max(1, len(ages))
    details = {"ages": counts.tolist(), "edges_s": list(AGES_S)}
    mean = replace(_score(AGES_AT_RETURN, ages, "native"), details=details)
    return [mean, *_by_gap("bank_from_visit", "native", kept)]


def _names(name: str) -> tuple[str, ...]:
    return f"recurrence_{name}", *(f"{name}{BY_GAP}{gap}" for gap in GAPS_S)


MEASURES = (
    Measure(
        "recurrence",
        _measure,
        headlines=(*_names("gate"), *_names("crop"), *_names("kept"), *_names("subject"), *_names("vlm")),
        visible={
            **dict.fromkeys(("recurrence_haunting", *_names("gate")), MOMENTS),
            **{name: LIKENESS for who in WITNESSES for name in _names(who)},
            **dict.fromkeys((*_names("kept"), "recurrence_kept_opening", "recurrence_kept_late"), VIDEOS),
        },
        of_subject=True,
        shows_bank=True,
    ),
)
