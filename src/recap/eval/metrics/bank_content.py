"""What the bank is made of, by its tokens that were new: how many lie at the border, and how many on an actor."""

from __future__ import annotations

from collections.abc import Set

import numpy as np

from recap.eval.judged import JudgedRun, Measure
from recap.eval.judges.witness import ProbeWitness
from recap.eval.scores import Score
from recap.trace import Position, bank_before, pictures_of_frames


def content_before(run: JudgedRun, end: int) -> list[Score]:
    """The bank's content as the block of that number begins."""
    new = {position for position, score in bank_before(run.trace, end).items() if score > 0}
    edges = run.trace[end - 1].edge_share
    edge = edges[0] if new and edges else None
    scores = [Score("bank_edge_share", edge, "native", len(new))]
    if isinstance(run.subject_witness, ProbeWitness):
        actors = _on_actors(run, run.subject_witness, new)
        share = len(actors) / len(new) if new else None
        scores.append(Score("bank_actor_share", share, run.subject_witness.backend, len(new)))
    return scores


def _on_actors(run: JudgedRun, probe: ProbeWitness, positions: Set[Position]) -> Set[Position]:
    """The tokens on which an actor is seen, in the first or the last picture of their frame."""
    if not positions:
        return set()
    spans = pictures_of_frames(run.trace)
    pictures = {frame: {spans[frame][0], spans[frame][-1]} for frame, _, _ in positions}
    wanted = sorted(set().union(*pictures.values()))
    found = {index: picture for index, picture in enumerate(run.clip.pictures()) if index in set(wanted)}
    covered = dict(zip(wanted, probe.covered(np.stack([found[index] for index in wanted])), strict=True))
    return {
        (frame, row, column)
        for frame, row, column in positions
        if any(covered[index][row, column] for index in pictures[frame])
    }


def _measure(run: JudgedRun) -> list[Score]:
    """Looks at the bank at the last cut, or at the end where there are none."""
    if not run.has_bank:
        return []
    cuts = [index for index, line in enumerate(run.trace) if line.clears_prior]
    return content_before(run, cuts[-1] if cuts else len(run.trace))


MEASURES = (Measure("content", _measure),)
