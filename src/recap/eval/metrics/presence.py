"""Measures presence: the share of sampled moments that show a subject, per stretch of a video under one prompt.

If a prompt does not name the subject, finding it is haunting: the memory brings back what the prompt left out.
`entering` is about a second subject that enters, leaves and returns without a cut: is it the same, and what of it is
in the bank?
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from recap.backbones.tiny.vocabulary import parse_prompt
from recap.eval.judged import JudgedRun, Measure
from recap.eval.judges.subject import ProbeWitness
from recap.eval.metrics.bank import content_before
from recap.eval.metrics.reappearance import SETTLING_S, reappearance, same_again, slots_from
from recap.eval.sampling import Sampled, Span
from recap.eval.scores import Score
from recap.eval.visible import LIKENESS, MOMENTS, VIDEOS
from recap.io.trace import BlockTrace, bank_before

LEAVING_S = 3.0
"""Without a cut, a subject that the prompt no longer names may take this long to leave, which is not haunting."""

MOST_LEFT_OUT = 1 / 3
"""The largest share of a stretch that is left out for it, so that short videos are measured too."""


class Stretch(NamedTuple):
    """A stretch has consecutive blocks under one prompt, without a cut between them."""

    prompt: str
    first_block: int
    span: Span

    def without_first(self, seconds: float) -> Span:
        start, end = self.span
        return Span(start + min(seconds, (end - start) * MOST_LEFT_OUT), end)

    def without_leaving(self, trace: Sequence[BlockTrace]) -> Span:
        """Return the span without its beginning: a cut removes a subject at once, else it may take a while."""
        return self.without_first(SETTLING_S if trace[self.first_block].clears_prior else LEAVING_S)


def stretches(trace: Sequence[BlockTrace], fps: float, duration_s: float) -> list[Stretch]:
    """Split a rollout of one batch row at its prompt changes and cuts."""
    firsts = [
        block
        for block, line in enumerate(trace)
        if block == 0 or line.clears_prior or line.prompts != trace[block - 1].prompts
    ]
    starts = [trace[block].first_pictures[0] / fps for block in firsts]
    spans = [Span(start, end) for start, end in zip(starts, [*starts[1:], duration_s], strict=True)]
    return [Stretch(trace[block].prompts[0], block, span) for block, span in zip(firsts, spans, strict=True)]


def presence(
    sampled: Sampled, found: NDArray[np.bool_], spans: Iterable[Span], name: str, backend: str
) -> Score:
    """Return the share of sampled moments in these spans that show the subject; None if there are none."""
    spans = list(spans)
    inside = sampled.within_any(spans)
    value = float(found[inside].mean()) if inside.any() else None
    shares = [float(found[part].mean()) if (part := sampled.within(span)).any() else None for span in spans]
    details = {"spans_s": [list(span) for span in spans], "found_share": shares}
    return Score(name, value, backend, int(inside.sum()), details)


def _measure_haunting(run: JudgedRun) -> list[Score]:
    """Give nothing where every prompt names somebody, or where the prompts are not in words that we can read."""
    witness = run.subject_witness
    if not isinstance(witness, ProbeWitness):
        return []
    whole = stretches(run.trace, run.clip.fps, run.sampled.duration_s)
    empty = [each for each in whole if not parse_prompt(each.prompt).actors]
    if not empty:
        return []
    found, _ = witness.look(run.sampled.pictures, run.subject)
    spans = [each.without_first(SETTLING_S) for each in empty]
    return [presence(run.sampled, found, spans, "haunting", witness.backend)]


def _measure_entering(run: JudgedRun) -> list[Score]:
    """Measure the stretches of a script: opening, visit, gone, back."""
    sampled, late = run.sampled, run.late_subject
    if not late:
        return []
    whole = stretches(run.trace, run.clip.fps, sampled.duration_s)
    starts = [each.span.start for each in whole]
    scores = [
        reappearance(sampled, witness, late, starts, f"return_{name}", presence=run.subject_witness)
        for name, witness in run.witnesses
    ]
    scores += [same_again(each, "return_same") for each in scores if each.name == "return_crop"]
    _, visit, gone, back = whole
    if (witness := run.subject_witness) is not None:
        found, _ = witness.look(sampled.pictures, late)
        opening, _ = witness.look(sampled.pictures, run.subject)
        for name, who, span in (
            ("late_found_on_visit", found, visit.without_first(SETTLING_S)),
            ("late_haunting", found, gone.without_first(LEAVING_S)),
            ("late_found_on_return", found, back.without_first(SETTLING_S)),
            ("opening_found", opening, Span(0.0, sampled.duration_s)),
        ):
            scores.append(presence(sampled, who, [span], name, witness.backend))
    if run.has_bank:
        first, end = (run.trace[each.first_block].first_frame for each in (visit, gone))
        bank = bank_before(run.trace, back.first_block)
        slots = float(slots_from(bank, first, end))
        scores.append(Score("bank_slots_from_visit", slots, "native", len(bank)))
        content = content_before(run, back.first_block)
        scores += [replace(each, name=f"{each.name}_at_return") for each in content]
    return scores


MEASURES = (
    Measure("haunting", _measure_haunting, visible={"haunting": MOMENTS}),
    Measure(
        "entering",
        _measure_entering,
        headlines=(
            "return_kept",
            "return_same",
            "return_subject",
            "return_crop",
            "late_found_on_return",
            "late_haunting",
            "return_frame",
        ),
        visible={
            **dict.fromkeys(("return_subject", "return_crop", "return_frame"), LIKENESS),
            **dict.fromkeys(("return_kept", "return_same"), VIDEOS),
            **dict.fromkeys(
                ("late_found_on_visit", "late_haunting", "late_found_on_return", "opening_found"), MOMENTS
            ),
        },
        # Who is never let in cannot be told from another later; without this a memory would gain by it.
        counted={"return_same": "return_kept"},
        of_subject=True,
    ),
)
