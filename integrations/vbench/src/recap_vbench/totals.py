"""VBench's sixteen dimensions combined to Quality, Semantic and Total, as its own script does with one difference.

norm(x) = (x - min) / (max - min); Quality is the weighted mean of 7 norms (dynamic degree counts half), Semantic the
mean of 9, Total = (4 Quality + Semantic) / 5. The official script counts a missing dimension as 0 and still prints a
Total; here a score that depends on a missing dimension is refused.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import NamedTuple

from recap.errors import refuse, unknown_name


class Dimension(NamedTuple):
    """How a dimension is normalised and weighted; its group is `quality` or `semantic`."""

    name: str
    low: float
    high: float
    weight: float
    group: str

    def norm(self, value: float) -> float:
        return (value - self.low) / (self.high - self.low)


@cache
def dimensions() -> dict[str, Dimension]:
    text = resources.files("recap_vbench").joinpath("dimensions.csv").read_text(encoding="utf-8")
    lines = csv.reader(text.splitlines()[1:])
    return {
        n: Dimension(n, float(low), float(high), float(weight), group)
        for n, low, high, weight, group in lines
    }


QUALITY_WEIGHT, SEMANTIC_WEIGHT = 4, 1


class Missing(NamedTuple):
    """The dimensions of each group that were not measured."""

    quality: tuple[str, ...]
    semantic: tuple[str, ...]


def missing(values: Mapping[str, float]) -> Missing:
    """Return the dimensions without a value; refuse unknown names."""
    for name, value in values.items():
        if name not in dimensions():
            raise unknown_name("dimension", name, dimensions())
        if not -1e-9 <= value <= 1 + 1e-9:
            raise refuse(f"dimension {name}", value, "must be 0 to 1", "divide percentages by 100")
    lacking = [d for d in dimensions().values() if d.name not in values]
    return Missing(
        tuple(d.name for d in lacking if d.group == "quality"),
        tuple(d.name for d in lacking if d.group == "semantic"),
    )


def group_score(values: Mapping[str, float], group: str) -> float:
    """Return Quality or Semantic, 0..1; refuse if a dimension of the group is missing."""
    lacking = getattr(missing(values), group)
    if lacking:
        limit = f"{len(lacking)} of its dimensions are missing"
        raise refuse(group, ", ".join(lacking), limit, "measure them, or report the dimensions alone")
    own = [d for d in dimensions().values() if d.group == group]
    return math.fsum(d.weight * d.norm(values[d.name]) for d in own) / sum(d.weight for d in own)


def total_score(values: Mapping[str, float]) -> float:
    """Return Total, 0..1; refuse if any of the sixteen is missing."""
    lacking = [name for names in missing(values) for name in names]
    if lacking:
        limit = f"Total needs all {len(dimensions())} dimensions"
        remedy = "report the dimensions and Quality alone"
        raise refuse("Total", f"without {', '.join(lacking)}", limit, remedy)
    quality, semantic = group_score(values, "quality"), group_score(values, "semantic")
    weights = QUALITY_WEIGHT + SEMANTIC_WEIGHT
    return (QUALITY_WEIGHT * quality + SEMANTIC_WEIGHT * semantic) / weights
