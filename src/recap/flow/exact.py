"""This module returns known flow instead of an estimate, for rendered scenes."""

from __future__ import annotations

from torch import Tensor

from recap.contracts import Flow
from recap.errors import refuse


class ExactFlow:
    """Returns precomputed flow: a call with T pictures gets the clip's next T - 1 pairs."""

    def __init__(self, forward: Tensor, backward: Tensor) -> None:
        """Take the flow of the P pairs of a whole clip, B P 2 Y X each, at the size of the pictures."""
        if forward.ndim != 5 or forward.shape[2] != 2:
            raise refuse("forward", tuple(forward.shape), "not B P 2 Y X", "pass the flow of a whole clip")
        if backward.shape != forward.shape:
            limit = f"its shape differs from forward's {tuple(forward.shape)}"
            raise refuse("backward", tuple(backward.shape), limit, "pass both directions of the same pairs")
        self._flow = Flow(forward, backward)
        self._next = 0

    def __call__(self, pictures: Tensor) -> Flow:
        """Return the flow of the next pictures B T 3 Y X; only their shape and device are used."""
        num = pictures.shape[1]
        rows, total, _, height, width = self._flow.forward.shape
        if (pictures.shape[0], *pictures.shape[3:]) != (rows, height, width):
            limit = f"the flow is known for B {rows}, Y {height}, X {width}"
            raise refuse("pictures", tuple(pictures.shape), limit, "pass pictures of that size")
        end, left = self._next + num - 1, total - self._next
        if end > total or num < 2:
            limit = f"T must be 2 to {left + 1} with {left} of {total} pairs left"
            raise refuse("pictures", tuple(pictures.shape), limit, "make a longer clip or ask for less")
        part = slice(self._next, end)
        self._next = end
        return Flow(*(direction[:, part].to(pictures.device) for direction in self._flow))
