"""Is somebody there? Of the stretches of a video under one prompt each, the share of moments that show the subject.

Where a prompt does not ask for the subject, finding it is haunting: a memory that brings back what nobody asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from recap.eval.sampling import Sampled, Span
from recap.eval.scores import Score
from recap.trace import BlockTrace

LEAVING_S = 3.0
"""Without a cut a subject that is no longer asked for may walk off, which is no haunting."""
MOST_LEFT_OUT = 1 / 3  # of a stretch, so that short videos are judged too


class Stretch(NamedTuple):
    """Blocks that follow each other under one prompt, with no cut among them."""

    prompt: str
    first_block: int
    span: Span

    def without_first(self, seconds: float) -> Span:
        start, end = self.span
        return Span(start + min(seconds, (end - start) * MOST_LEFT_OUT), end)


def stretches(trace: Sequence[BlockTrace], fps: float, duration_s: float) -> list[Stretch]:
    """The whole of a rollout, by its prompts and cuts; a trace of one row."""
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
    """The share of the moments within these spans in which the subject was found; None without a moment."""
    spans = list(spans)
    inside = np.zeros(len(found), bool)
    for span in spans:
        inside |= sampled.within(span)
    value = float(found[inside].mean()) if inside.any() else None
    shares = [float(found[part].mean()) if (part := sampled.within(span)).any() else None for span in spans]
    details = {"spans_s": [list(span) for span in spans], "found_share": shares}
    return Score(name, value, backend, int(inside.sum()), details)
