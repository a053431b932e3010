"""What the bank is made of, by its tokens that were new: how many lie at the border, and how many on an actor."""

from __future__ import annotations

from collections.abc import Set

import numpy as np

from recap.eval.judged import JudgedRun, Measure
from recap.eval.judges.witness import ProbeWitness
from recap.eval.metrics.bank import Place, held_before
from recap.eval.scores import Score
from recap.trace import picture_of_frame


def content_before(run: JudgedRun, end: int) -> list[Score]:
    """The bank's content as the block of that number begins."""
    new = {place for place, score in held_before(run.trace, end).items() if score > 0}
    edge = run.trace[end - 1]["bank_edge_share"][0] if new else None
    scores = [Score("bank_edge_share", edge, "native", len(new))]
    if isinstance(run.subject_witness, ProbeWitness):
        actors = _on_actors(run, run.subject_witness, new)
        share = len(actors) / len(new) if new else None
        scores.append(Score("bank_actor_share", share, run.subject_witness.backend, len(new)))
    return scores


def _on_actors(run: JudgedRun, probe: ProbeWitness, places: Set[Place]) -> Set[Place]:
    """The tokens on which an actor is seen, in the first or the last picture of their frame."""
    if not places:
        return set()
    first = picture_of_frame(run.trace)
    pictures = {
        f: {first[f], first.get(f + 1, run.num_pictures) - 1} for f in {frame for frame, _, _ in places}
    }
    wanted = sorted(set().union(*pictures.values()))
    found = {index: picture for index, picture in enumerate(run.clip.pictures()) if index in set(wanted)}
    covered = dict(zip(wanted, probe.covered(np.stack([found[index] for index in wanted])), strict=True))
    return {
        (frame, row, column)
        for frame, row, column in places
        if any(covered[index][row, column] for index in pictures[frame])
    }


def _measure(run: JudgedRun) -> list[Score]:
    """Looks at the bank at the last cut, or at the end where there are none."""
    if not run.has_bank:
        return []
    cuts = [index for index, line in enumerate(run.trace) if line["clears_prior"]]
    return content_before(run, cuts[-1] if cuts else len(run.trace))


MEASURES = (Measure("content", _measure),)
