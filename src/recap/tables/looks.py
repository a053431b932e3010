"""This module keeps what a page shows of a run next to its numbers: pictures of a few moments, and its bank."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from recap.eval.metrics.bank import sources_by_block
from recap.eval.sampling import InMemoryClip, Pictures
from recap.show.bank_chart import BankHistory
from recap.trace import BlockTrace, has_bank, pictures_of_frames

MOMENTS = 5


class Look(NamedTuple):
    """Holds a picture per moment, and the bank, which is None for a memory without one."""

    pictures: Pictures
    moments: Sequence[float]
    bank: BankHistory | None


def look_at(clip: InMemoryClip, trace: Sequence[BlockTrace], shots_s: Sequence[float]) -> Look:
    """Return pictures late in every shot, or at evenly spread moments of a single shot, and the bank in seconds."""
    num_pictures = len(clip.shown)
    duration_s = num_pictures / clip.fps
    if len(shots_s) == 1:
        moments = [duration_s * (i + 0.5) / MOMENTS for i in range(MOMENTS)]
    else:
        ends = np.cumsum(shots_s) * duration_s / sum(shots_s)
        moments = [float(start + 0.7 * (end - start)) for start, end in zip([0.0, *ends], ends, strict=False)]
    pictures: Pictures = np.stack([clip.shown[round(second * clip.fps)] for second in moments])
    return Look(pictures, moments, _history_of(trace, duration_s, clip.fps) if has_bank(trace) else None)


def _history_of(trace: Sequence[BlockTrace], duration_s: float, fps: float) -> BankHistory:
    second_of = {frame: pictures[0] / fps for frame, pictures in pictures_of_frames(trace).items()}
    starts = [second_of[line.first_frame] for line in trace]
    sources = [{second_of[frame]: n for frame, n in slots.items()} for slots in sources_by_block(trace)]
    cuts = [start for start, line in zip(starts, trace, strict=True) if line.clears_prior]
    return BankHistory([*starts[1:], duration_s], sources, cuts)


def pack_look(look: Look) -> dict[str, Any]:
    """Return a look as JSON takes it; pictures as their differences from line to line, a sixth of the bytes."""
    steps = np.diff(look.pictures, axis=1, prepend=np.uint8(0))
    bank = look.bank
    return {
        "moments": list(look.moments),
        "shape": list(look.pictures.shape),
        "pictures": base64.b64encode(zlib.compress(steps.tobytes(), 9)).decode(),
        "bank": bank and [list(bank.ends), [list(slots.items()) for slots in bank.held], list(bank.cuts)],
    }


def unpack_look(packed: Mapping[str, Any]) -> Look:
    """Return the look that was packed."""
    steps = np.frombuffer(zlib.decompress(base64.b64decode(packed["pictures"])), np.uint8)
    pictures = np.cumsum(steps.reshape(packed["shape"]), axis=1, dtype=np.uint8)
    bank = None
    if packed["bank"] is not None:
        ends, sources, cuts = packed["bank"]
        bank = BankHistory(ends, [dict(map(tuple, each)) for each in sources], cuts)
    return Look(pictures, packed["moments"], bank)
