"""What a page shows of one run next to its numbers: pictures of a few moments, and what its bank kept."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from recap.eval.metrics.bank import sources_by_block
from recap.eval.sampling import InMemoryClip, Pictures
from recap.io.video import Clip
from recap.show.chart import BankHistory
from recap.trace import BlockTrace, has_bank, pictures_of_frames

MOMENTS = 5


class Look(NamedTuple):
    pictures: Pictures  # one per moment
    moments: Sequence[float]
    bank: BankHistory | None  # None for a memory without one


def look_at(
    clip: Clip | InMemoryClip,
    num_pictures: int,
    trace: Sequence[BlockTrace],
    shots_s: Sequence[float],
) -> Look:
    """Pictures and bank of a run whose shots have these lengths."""
    moments = moments_of(shots_s, num_pictures / clip.fps)
    wanted = [round(second * clip.fps) for second in moments]
    found = {index: picture for index, picture in enumerate(clip.pictures()) if index in wanted}
    pictures: Pictures = np.stack([found[index] for index in wanted])
    return Look(pictures, moments, history_of(trace, num_pictures, clip.fps))


def moments_of(shots_s: Sequence[float], duration_s: float) -> list[float]:
    """Late in every shot, or evenly spread moments of a single shot."""
    if len(shots_s) == 1:
        return [duration_s * (i + 0.5) / MOMENTS for i in range(MOMENTS)]
    ends = np.cumsum(shots_s) * duration_s / sum(shots_s)
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


def pack_look(look: Look) -> dict[str, Any]:
    """A look as JSON takes it; pictures as their differences from row to row, a sixth of the bytes."""
    steps = np.diff(look.pictures, axis=1, prepend=np.uint8(0))
    bank = look.bank
    return {
        "moments": list(look.moments),
        "shape": list(look.pictures.shape),
        "pictures": base64.b64encode(zlib.compress(steps.tobytes(), 9)).decode(),
        "bank": bank and [list(bank.ends), [list(held.items()) for held in bank.held], list(bank.cuts)],
    }


def unpack_look(packed: Mapping[str, Any]) -> Look:
    steps = np.frombuffer(zlib.decompress(base64.b64decode(packed["pictures"])), np.uint8)
    pictures = np.cumsum(steps.reshape(packed["shape"]), axis=1, dtype=np.uint8)
    bank = None
    if packed["bank"] is not None:
        ends, held, cuts = packed["bank"]
        bank = BankHistory(ends, [dict(map(tuple, each)) for each in held], cuts)
    return Look(pictures, packed["moments"], bank)
