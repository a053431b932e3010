"""The probe as a witness: finds an actor of the embedded world in pictures and compares its sightings by colour.

Instances of one kind differ in their colours alone, so colour is identity in this world.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from recap.backbones.tiny.vocabulary import ACTORS
from recap.errors import refuse, unknown_name
from recap.eval.judges.colours import to_lab
from recap.eval.judges.probe import CELL, NOBODY, Judged, Probe, load_shipped_probe
from recap.eval.judges.subject import FARTHEST

_AT_ONCE = 32


class ProbeWitness:
    """Likeness is 1 - Delta E / 50 of the actor's mean colours, 0 at the least."""

    backend = "probe"

    def __init__(self, probe: Probe) -> None:
        self._probe = probe

    def look(
        self, pictures: NDArray[np.uint8], subject: str
    ) -> tuple[NDArray[np.bool_], NDArray[np.float32]]:
        """Found N, and the actor's colour N 3, sRGB in 0..1, of pictures N Y X 3."""
        found, colours = [], []
        for judged in self._judged(pictures, subject):
            colour, cells = judged.actor_colour(subject)
            there = (judged.presence[0, :, ACTORS.index(subject)] > 0.5) & (cells[0] > 0)
            found.append(there.numpy())
            colours.append(colour[0].nan_to_num().numpy().astype(np.float32))
        return np.concatenate(found), np.concatenate(colours)

    def where(self, pictures: NDArray[np.uint8], subject: str) -> NDArray[np.float32]:
        """How surely each cell shows the actor, N rows columns: 0 where it is not found or another is likelier."""
        parts = []
        for judged in self._judged(pictures, subject):
            number = ACTORS.index(subject)
            found = judged.presence[0, :, number] > 0.5
            shown = (judged.cells[0] == number) & found[:, None, None]
            parts.append((judged.shares[0, :, number] * shown).numpy().astype(np.float32))
        return np.concatenate(parts)

    def _judged(self, pictures: NDArray[np.uint8], subject: str) -> Iterator[Judged]:
        """What the probe says of some pictures at a time, as one clip."""
        if subject not in ACTORS:
            raise unknown_name("subject", subject, ACTORS)
        if pictures.shape[1] % CELL or pictures.shape[2] % CELL:
            limit = f"the probe reads multiples of {CELL}"
            raise refuse(
                "clip size", pictures.shape[1:3], limit, "judge clips of the embedded backbone with it"
            )
        for start in range(0, len(pictures), _AT_ONCE):
            part = torch.from_numpy(np.ascontiguousarray(pictures[start : start + _AT_ONCE]))
            yield self._probe.judge(part.permute(0, 3, 1, 2)[None].float() / 255)

    def covered(self, pictures: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Where any actor is seen: N rows columns of cells, of pictures N Y X 3."""
        parts = torch.from_numpy(np.ascontiguousarray(pictures)).permute(0, 3, 1, 2).split(_AT_ONCE)
        cells = [self._probe.judge(part[None].float() / 255).cells[0] != NOBODY for part in parts]
        return torch.cat(cells).numpy()

    def likeness(self, one: NDArray[np.float32], other: NDArray[np.float32]) -> NDArray[np.float64]:
        """N M of colours N 3 and M 3."""
        lab = [to_lab(torch.from_numpy(part)) for part in (one, other)]
        apart = torch.cdist(lab[0], lab[1])
        alike: NDArray[np.float64] = (1 - apart / FARTHEST).clamp(min=0).numpy()
        return alike


def build_probe_witness() -> ProbeWitness:
    """The witness with the probe of the package."""
    return ProbeWitness(load_shipped_probe())
