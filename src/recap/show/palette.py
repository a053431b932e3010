"""This module defines a colour for each memory, the same on every page, sheet and video."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle

from recap.registry import MEMORIES

COLOURS = (
    "#7d8796", "#2f7fe0", "#12a150", "#c4610c", "#9a4fd0", "#d03a6a",
    "#0d9aa5", "#a58a0d", "#5a5fc7", "#8a5a3c", "#4d7d2c", "#b0419a",
)  # fmt: skip
MEMORY_COLOURS = dict(zip(MEMORIES, cycle(COLOURS), strict=False))


def colours_of(names: Sequence[str]) -> list[str]:
    """Return the colours of the rows of one page: memories have their own, and other rows take what is left.

    A variant such as 'sink, lambda 5' has the colour of its memory where no other row has it.
    """
    found = {name: MEMORY_COLOURS[name] for name in names if name in MEMORY_COLOURS}
    for name in names:
        own = MEMORY_COLOURS.get(name.partition(",")[0])
        if name not in found and own is not None and own not in found.values():
            found[name] = own
    free = cycle([colour for colour in COLOURS if colour not in found.values()] or COLOURS)
    for name in names:
        if name not in found:
            found[name] = next(free)
    return [found[name] for name in names]
