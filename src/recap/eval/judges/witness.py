"""The probe as a witness: it finds an actor of the embedded world and compares its sightings by colour.

Instances of one kind differ only in their colours, so colour is identity in this world.
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
from recap.eval.sampling import Pictures, as_tensor

_BATCH = 32


class ProbeWitness:
    """A witness whose likeness is 1 - Delta E / 50 of the actor's mean colours, at least 0."""

    backend = "probe"

    def __init__(self, probe: Probe) -> None:
        self._probe = probe

    def look(self, pictures: Pictures, subject: str) -> tuple[NDArray[np.bool_], NDArray[np.float32]]:
        """Return whether the actor was found, N, and its colour N 3, sRGB in 0..1."""
        number = _number(subject)
        found, colours = [], []
        for judged in self._judged(pictures):
            colour, cells = judged.actor_colour(subject)
            found.append(((judged.presence[0, :, number] > 0.5) & (cells[0] > 0)).numpy())
            colours.append(colour[0].nan_to_num().numpy().astype(np.float32))
        return np.concatenate(found), np.concatenate(colours)

    def where(self, pictures: Pictures, subject: str) -> NDArray[np.float32]:
        """Return the probability that a cell shows the actor, N rows columns; 0 if another actor is likelier."""
        number = _number(subject)
        parts = []
        for judged in self._judged(pictures):
            found = judged.presence[0, :, number] > 0.5
            shown = (judged.cells[0] == number) & found[:, None, None]
            parts.append((judged.shares[0, :, number] * shown).numpy().astype(np.float32))
        return np.concatenate(parts)

    def covered(self, pictures: Pictures) -> NDArray[np.bool_]:
        """Return which cells show any actor, N rows columns."""
        return np.concatenate([(judged.cells[0] != NOBODY).numpy() for judged in self._judged(pictures)])

    def _judged(self, pictures: Pictures) -> Iterator[Judged]:
        """Judge the pictures in batches, each as one clip."""
        if pictures.shape[1] % CELL or pictures.shape[2] % CELL:
            limit = f"the probe reads multiples of {CELL}"
            remedy = "use it on clips of the embedded backbone"
            raise refuse("clip size", pictures.shape[1:3], limit, remedy)
        for start in range(0, len(pictures), _BATCH):
            yield self._probe.judge(as_tensor(pictures[start : start + _BATCH]))

    def likeness(self, one: NDArray[np.float32], other: NDArray[np.float32]) -> NDArray[np.float64]:
        """Return the likeness N M of colours N 3 and M 3."""
        lab = [to_lab(torch.from_numpy(part)) for part in (one, other)]
        distance = torch.cdist(lab[0], lab[1])
        likeness: NDArray[np.float64] = (1 - distance / FARTHEST).clamp(min=0).numpy()
        return likeness


def _number(subject: str) -> int:
    if subject not in ACTORS:
        raise unknown_name("subject", subject, ACTORS)
    return ACTORS.index(subject)


def build_probe_witness() -> ProbeWitness:
    """Build the witness with the probe of the package."""
    return ProbeWitness(load_shipped_probe())
