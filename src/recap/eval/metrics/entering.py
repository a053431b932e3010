"""A second subject enters, leaves and returns without a cut: is it the same, and what of it is in the bank?"""

from __future__ import annotations

from dataclasses import replace

from recap.eval.judged import JudgedRun, Measure
from recap.eval.metrics.bank_content import content_before
from recap.eval.metrics.presence import LEAVING_S, presence, stretches
from recap.eval.metrics.reappearance import SETTLING_S, reappearance, slots_from
from recap.eval.sampling import Span
from recap.eval.scores import Score
from recap.trace import bank_before


def _measure(run: JudgedRun) -> list[Score]:
    sampled, late = run.sampled, run.late_subject
    if not late:
        return []
    whole = stretches(run.trace, run.clip.fps, sampled.duration_s)
    starts = [each.span.start for each in whole]
    scores = [
        reappearance(sampled, witness, late, starts, f"return_{name}", presence=run.subject_witness)
        for name, witness in run.witnesses
    ]
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
    Measure(
        "entering",
        _measure,
        headlines=("return_subject", "late_found_on_return", "late_haunting", "return_frame"),
        of_subject=True,
    ),
)
