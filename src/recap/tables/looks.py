"""What a page shows of one run beside its numbers: pictures of a few moments, and what its bank remembered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from recap.eval.metrics.bank import sources_by_block
from recap.eval.sampling import Drawn, Pictures
from recap.io.video import Clip
from recap.show.bank_chart import BankHistory
from recap.tables.scripts import Script
from recap.trace import BlockTrace, has_bank, pictures_of_frames

MOMENTS = 5


class Look(NamedTuple):
    pictures: Pictures  # one per moment
    moments: Sequence[float]
    bank: BankHistory | None  # None of a memory without one


def look_at(clip: Clip | Drawn, num_pictures: int, trace: Sequence[BlockTrace], script: Script) -> Look:
    """The moments of a script in a run of it."""
    moments = moments_of(script, num_pictures / clip.fps)
    wanted = [round(second * clip.fps) for second in moments]
    found = {index: picture for index, picture in enumerate(clip.pictures()) if index in wanted}
    pictures: Pictures = np.stack([found[index] for index in wanted])
    return Look(pictures, moments, history_of(trace, num_pictures, clip.fps))


def moments_of(script: Script, duration_s: float) -> list[float]:
    """Late in every shot of a script, or evenly spread moments of a single shot."""
    shots = script.shots
    if len(shots) == 1:
        return [duration_s * (i + 0.5) / MOMENTS for i in range(MOMENTS)]
    ends = np.cumsum([shot.seconds for shot in shots]) * duration_s / sum(shot.seconds for shot in shots)
    starts = [0.0, *ends[:-1]]
    return [float(start + 0.7 * (end - start)) for start, end in zip(starts, ends, strict=True)]


def history_of(trace: Sequence[BlockTrace], num_pictures: int, fps: float) -> BankHistory | None:
    """The bank of a trace in seconds; None where there is none."""
    if not has_bank(trace):
        return None
    second_of = {frame: pictures[0] / fps for frame, pictures in pictures_of_frames(trace).items()}
    starts = [second_of[line.first_frame] for line in trace]
    held = [
        {second_of[frame]: count for frame, count in sources.items()} for sources in sources_by_block(trace)
    ]
    cuts = [start for start, line in zip(starts, trace, strict=True) if line.clears_prior]
    return BankHistory([*starts[1:], num_pictures / fps], held, cuts)
