"""Judges videos of the embedded backbone: is an actor there when it is asked for, and is it still the same one?"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from recap.backbones.tiny.reading import read_prompt
from recap.backbones.tiny.vocabulary import ACTORS
from recap.contracts import Curve, Sample
from recap.eval.judges.colours import colour_distance, mean_colour
from recap.eval.judges.probe import NOBODY, Judged, Probe, load_shipped_probe

OPENING_S = 1.0
FARTHEST = 50.0
"""Delta E at which likeness is 0; two instances of one kind lie about 40 apart."""

_AT_ONCE = 32  # pictures: faster than one by one, and their activations stay below 100 MB


class ProbeJudge:
    """One curve per actor that the script names, in the order of first mention."""

    name = "Is it still the same one?"
    about = (
        "A small network, trained apart from the model that draws, looks for every actor the prompt names and reads "
        "its mean colour. 1: the colours of its own first appearance in this video (mean of the first second that "
        "shows it). 0: it is asked for and not found, or its colours are wholly different; in between, "
        f"1 - ΔE/{FARTHEST:.0f} (CIE 1976). Gap: the prompt does not name it, or it is found with no cell to read "
        "colours from. It compares colours, not shapes."
    )

    def __init__(self, probe: Probe) -> None:
        self._probe = probe

    def curves(self, samples: Iterable[Sample]) -> list[Curve]:
        seconds: list[float] = []
        casts: list[tuple[str, ...]] = []
        parts: list[Judged] = []
        for batch in _batches(samples):
            seconds += [sample.second for sample in batch]
            casts += [read_prompt(sample.prompt).prompt.actors for sample in batch]
            pictures = torch.stack([sample.picture for sample in batch]).permute(0, 3, 1, 2)
            parts.append(self._probe.judge(pictures[None].float() / 255))
        judged = Judged(
            presence=torch.cat([part.presence for part in parts], dim=1),
            cells=torch.cat([part.cells for part in parts], dim=1),
            shares=torch.cat([part.shares for part in parts], dim=1),
            colours=torch.cat([part.colours for part in parts], dim=1),
        )
        actors = dict.fromkeys(actor for cast in casts for actor in cast)
        times = torch.tensor(seconds, dtype=torch.float64)
        return [
            Curve(f"the {actor}", _likeness(judged, actor, times, [actor in cast for cast in casts]))
            for actor in actors
        ]

    def subjects(self, picture: Tensor) -> Tensor:
        judged = self._probe.judge(picture.permute(2, 0, 1)[None, None].float() / 255)
        return judged.cells[0, 0] != NOBODY


def build_probe_judge() -> ProbeJudge:
    """The judge with the probe of the package."""
    return ProbeJudge(load_shipped_probe())


def _likeness(judged: Judged, actor: str, seconds: Tensor, named: Sequence[bool]) -> list[float | None]:
    """The actor's likeness to its first appearance, a value per picture of one clip."""
    colour, cells = judged.actor_colour(actor)
    found = judged.presence[0, :, ACTORS.index(actor)] > 0.5
    # What the probe takes for the actor before it is asked for is not its first appearance.
    readable = found & (cells[0] > 0) & torch.tensor(named)
    first = min(seconds[readable].tolist(), default=math.inf)
    opening = readable & (seconds < first + OPENING_S)
    reference = mean_colour(opening[None].float(), colour, cells)
    likeness = (1 - colour_distance(colour[0], reference) / FARTHEST).clamp(min=0)
    return [
        None if not asked or (there and not read) else value if there else 0.0
        for asked, there, read, value in zip(
            named, found.tolist(), readable.tolist(), likeness.tolist(), strict=True
        )
    ]


def _batches(samples: Iterable[Sample]) -> Iterator[list[Sample]]:
    batch: list[Sample] = []
    for sample in samples:
        batch.append(sample)
        if len(batch) == _AT_ONCE:
            yield batch
            batch = []
    if batch:
        yield batch
