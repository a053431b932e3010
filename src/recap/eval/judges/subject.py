"""Judges videos of the embedded backbone: is a requested actor visible, and is it still the same one?

Instances of one kind differ only in their colours, so colour is identity in this world.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recap.backbones.tiny.reading import read_prompt
from recap.contracts import Curve, Sample
from recap.eval.embedders import picture_key
from recap.eval.judges.colours import colour_distance, mean_colour, to_lab
from recap.eval.judges.probe import BATCH, NOBODY, Judged, Probe, actor_number, load_probe
from recap.eval.sampling import Pictures, as_tensor

OPENING_S = 1.0
FARTHEST = 50.0
"""The Delta E at which likeness is 0; two instances of one kind are about 40 apart."""
KEPT = 15.0
"""Below this Delta E an instance counts as the same."""
AT_ONCE = 8
"""A witness always shows the probe so many pictures at once: batches of another size are rounded otherwise, and the
answer to a picture should depend on that picture alone."""


class ProbeJudge:
    """This judge makes one curve per actor that the script names, in the order of first mention."""

    name = "Is it still the same one?"
    about = (
        "A small network, trained apart from the generating model, looks for each actor the prompt names and reads "
        "its mean colour. 1: the colours of its own first appearance in this video (mean of the first second that "
        "shows it). 0: the prompt names it and it is not found, or its colours are entirely different; in between, "
        f"1 - ΔE/{FARTHEST:.0f} (CIE 1976). Gap: the prompt does not name it, or it is found with no cell to read "
        "colours from. It compares colours, not shapes."
    )

    def __init__(self, probe: Probe | None = None) -> None:
        self._probe = probe or load_probe()

    def curves(self, samples: Iterable[Sample]) -> list[Curve]:
        seconds: list[float] = []
        casts: list[tuple[str, ...]] = []
        parts: list[Judged] = []
        left = iter(samples)
        while batch := list(itertools.islice(left, BATCH)):
            seconds += [sample.second for sample in batch]
            casts += [read_prompt(sample.prompt).prompt.actors for sample in batch]
            pictures = torch.stack([sample.picture for sample in batch]).permute(0, 3, 1, 2)
            parts.append(self._probe.judge(pictures[None].float() / 255))
        judged = Judged(*(torch.cat(part, dim=1) for part in zip(*parts, strict=True)))
        actors = dict.fromkeys(actor for cast in casts for actor in cast)
        times = torch.tensor(seconds, dtype=torch.float64)
        return [
            Curve(f"the {actor}", _likeness(judged, actor, times, [actor in cast for cast in casts]))
            for actor in actors
        ]

    def subjects(self, picture: Tensor) -> Tensor:
        judged = self._probe.judge(picture.permute(2, 0, 1)[None, None].float() / 255)
        return judged.cells[0, 0] != NOBODY


class ProbeWitness:
    """This witness has as likeness 1 - Delta E / 50 of the actor's mean colours, at least 0."""

    backend = "probe"
    same_from: float | None = 1 - KEPT / FARTHEST

    def __init__(self, probe: Probe | None = None) -> None:
        self._probe = probe or load_probe()
        # A picture is asked about by many measures; every one but the first finds the answer here.
        self._known: dict[bytes, Judged] = {}

    def remember(self, pictures: Pictures, judged: Judged) -> None:
        """Take over the answers to these pictures, one clip, where they were judged elsewhere."""
        parts = (part.split(1, dim=1) for part in judged)
        each = map(Judged._make, zip(*parts, strict=True))
        self._known |= zip(map(picture_key, pictures), each, strict=True)

    def look(self, pictures: Pictures, subject: str) -> tuple[NDArray[np.bool_], NDArray[np.float32]]:
        """Return whether the actor was found, N, and its colour N 3, sRGB in 0..1."""
        judged = self.judge(pictures)
        colour, cells = judged.actor_colour(subject)
        found = (judged.presence[0, :, actor_number(subject)] > 0.5) & (cells[0] > 0)
        return found.numpy(), colour[0].nan_to_num().numpy().astype(np.float32)

    def where(self, pictures: Pictures, subject: str) -> NDArray[np.float32]:
        """Return the probability that a cell shows the actor, N rows columns; 0 if another actor is likelier."""
        judged, number = self.judge(pictures), actor_number(subject)
        found = judged.presence[0, :, number] > 0.5
        shown = (judged.cells[0] == number) & found[:, None, None]
        shares: NDArray[np.float32] = (judged.shares[0, :, number] * shown).numpy().astype(np.float32)
        return shares

    def covered(self, pictures: Pictures) -> NDArray[np.bool_]:
        """Return which cells show any actor, N rows columns."""
        cells: NDArray[np.bool_] = (self.judge(pictures).cells[0] != NOBODY).numpy()
        return cells

    def judge(self, pictures: Pictures) -> Judged:
        """Judge the pictures as one clip; those judged before are remembered."""
        keys = [picture_key(picture) for picture in pictures]
        new = {key: picture for key, picture in zip(keys, pictures, strict=True) if key not in self._known}
        if new:
            shown = list(new.values())
            padded = np.stack(shown + shown[-1:] * (-len(shown) % AT_ONCE))
            judged = self._probe.judge(as_tensor(padded), AT_ONCE)
            self.remember(np.stack(shown), Judged(*(part[:, : len(shown)] for part in judged)))
        found = (self._known[key] for key in keys)
        return Judged(*(torch.cat(part, dim=1) for part in zip(*found, strict=True)))

    def likeness(self, one: NDArray[np.float32], other: NDArray[np.float32]) -> NDArray[np.float64]:
        """Return the likeness N M of colours N 3 and M 3."""
        lab = [to_lab(torch.from_numpy(part)) for part in (one, other)]
        distance = torch.cdist(lab[0], lab[1])
        likeness: NDArray[np.float64] = (1 - distance / FARTHEST).clamp(min=0).numpy()
        return likeness


def _likeness(judged: Judged, actor: str, seconds: Tensor, named: Sequence[bool]) -> list[float | None]:
    """Return the actor's likeness to its first appearance, one value per picture of one clip."""
    colour, cells = judged.actor_colour(actor)
    found = judged.presence[0, :, actor_number(actor)] > 0.5
    # A detection before a prompt names the actor is not its first appearance.
    readable = found & (cells[0] > 0) & torch.tensor(named)
    first = min(seconds[readable].tolist(), default=math.inf)
    opening = readable & (seconds < first + OPENING_S)
    reference = mean_colour(opening[None].float(), colour, cells)
    likeness = (1 - colour_distance(colour[0], reference) / FARTHEST).clamp(min=0)
    values = zip(named, found.tolist(), readable.tolist(), likeness.tolist(), strict=True)
    return [
        None if not wanted or (visible and not read) else value if visible else 0.0
        for wanted, visible, read, value in values
    ]
