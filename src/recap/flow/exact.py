"""True flow in an estimator's place, for made scenes whose motion is known."""

from __future__ import annotations

from torch import Tensor

from recap.contracts import Flow
from recap.errors import refuse


class ExactFlow:
    """The flow estimator that was told: a call with T pictures gets the next T - 1 pairs of the clip."""

    def __init__(self, forward: Tensor, backward: Tensor) -> None:
        """Flow of the P pairs of a whole clip, B P 2 Y X each, at the size the pictures will have."""
        if forward.ndim != 5 or forward.shape[2] != 2:
            raise refuse("forward", tuple(forward.shape), "not B P 2 Y X", "pass the flow of a whole clip")
        if backward.shape != forward.shape:
            limit = f"its shape differs from forward's {tuple(forward.shape)}"
            raise refuse("backward", tuple(backward.shape), limit, "pass both directions of the same pairs")
        self._flow = Flow(forward, backward)
        self._next = 0

    def __call__(self, pictures: Tensor) -> Flow:
        """Pictures B T 3 Y X, of which only the shape and the device are looked at."""
        rows, num, _, height, width = pictures.shape
        known_rows, known, _, known_height, known_width = self._flow.forward.shape
        if (rows, height, width) != (known_rows, known_height, known_width):
            limit = f"the flow is known for B {known_rows}, Y {known_height}, X {known_width}"
            raise refuse("pictures", tuple(pictures.shape), limit, "pass pictures of that size")
        end = self._next + num - 1
        if end > known or num < 2:
            limit = f"T must be 2 to {known - self._next + 1} with {known - self._next} of {known} pairs left"
            raise refuse("pictures", tuple(pictures.shape), limit, "make a longer clip or ask for less")
        part = slice(self._next, end)
        self._next = end
        return Flow(*(direction[:, part].to(pictures.device) for direction in self._flow))
