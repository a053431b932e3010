"""A judge for videos of the embedded backbone: is a requested actor visible, and is it still the same one?"""

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
"""The Delta E at which likeness is 0; two instances of one kind are about 40 apart."""

# Pictures per batch: faster than one by one, and the activations stay below 100 MB.
_BATCH = 32


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
    """Build the judge with the probe of the package."""
    return ProbeJudge(load_shipped_probe())


def _likeness(judged: Judged, actor: str, seconds: Tensor, named: Sequence[bool]) -> list[float | None]:
    """Return the actor's likeness to its first appearance, one value per picture of one clip."""
    colour, cells = judged.actor_colour(actor)
    found = judged.presence[0, :, ACTORS.index(actor)] > 0.5
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


def _batches(samples: Iterable[Sample]) -> Iterator[list[Sample]]:
    batch: list[Sample] = []
    for sample in samples:
        batch.append(sample)
        if len(batch) == _BATCH:
            yield batch
            batch = []
    if batch:
        yield batch
