"""Surroundings: what the camera has shown beyond the border of the picture, so that a sway reveals it only once.

Content that leaves through the border leaves its flow correspondence there: by eq. (novelty) alone the same strip
would be new at every sway of the camera. So the last picture is extended on all sides by what left it, moved along
with the camera, and a pixel that enters is compared with what the extension shows at its backtrace.

The camera's step from picture to picture is the median of the backward flow. Where that is a poor description (zoom,
parallax, an actor that enters in front of known ground) the colours disagree, and the pixel is new as before. A cut
forgets everything.

How much of a pixel has been seen is a number, read bilinearly along the flow: what enters by less than half a pixel a
picture, which lies within the picture's edges at every single step, adds up until most of it is unseen.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from recap.contracts import State
from recap.flow.warp import inside, reading_grid

MARGIN = 2
"""The extension reaches a picture's height or width over this on every side."""

CUT_SHARE = 0.5
"""Where the flow of more than this share of the pixels is inconsistent, the camera has not moved: it is elsewhere."""


class Surroundings:
    def __init__(self) -> None:
        self._canvas: Tensor | None = (
            None  # B 4 y' x': RGB, and how much of it has been seen, 0..1; RGB times that
        )
        self._offset: Tensor | None = None  # B 2: what whole-pixel steps of the canvas leave over, x and y

    @torch.no_grad()
    def unseen(self, stream: Tensor, at: Tensor, step: Tensor, cut: Tensor, tolerance: float) -> Tensor:
        """Which pixels enter the picture for the first time: B P y x, bool.

        stream B P+1 3 y x; at B P 2 y x, each pixel's place in the picture before; step B P 2, the camera's; cut B P.
        """
        size = (stream.shape[-2], stream.shape[-1])
        across, down = _margins(size)
        x, y = at.unbind(2)
        whole = (size[0] + 2 * down, size[1] + 2 * across)
        grid = reading_grid(torch.stack((x + across, y + down), dim=2), whole)
        outside = ~inside(at, size)
        if self._canvas is None:
            self._begin(stream[:, 0], whole)
        found = []
        for pair in range(at.shape[1]):
            assert self._canvas is not None
            self._canvas *= ~cut[:, pair, None, None, None]
            # Beyond the canvas nothing has been seen: zeros there.
            shown = functional.grid_sample(
                self._canvas, grid[:, pair], mode="bilinear", padding_mode="zeros", align_corners=True
            )
            now, seen = stream[:, pair + 1], shown[:, 3]
            differs = (now - shown[:, :3] / seen[:, None].clamp(min=0.5)).abs().mean(dim=1)
            new = (seen < 0.5) | (outside[:, pair] & (differs > tolerance))
            found.append(new)
            # What has entered is seen from now on; a pixel that is mostly seen keeps its share.
            self._extend(now, torch.where(new | outside[:, pair], 1.0, seen), step[:, pair])
        return torch.stack(found, dim=1)

    def _begin(self, picture: Tensor, size: tuple[int, int]) -> None:
        """All of the first picture is seen, and nothing around it."""
        self._canvas = picture.new_zeros(len(picture), 4, *size)
        self._offset = picture.new_zeros(len(picture), 2)
        self._lay(picture, torch.ones_like(picture[:, 0]))

    def _extend(self, picture: Tensor, seen: Tensor, step: Tensor) -> None:
        """Move the canvas with the camera, by whole pixels so that nothing blurs, and lay the next picture on it."""
        assert self._canvas is not None and self._offset is not None
        due = step - self._offset
        whole = due.round()
        self._offset = whole - due
        self._canvas = _shifted(self._canvas, whole.long())
        self._lay(picture, seen)

    def _lay(self, picture: Tensor, seen: Tensor) -> None:
        assert self._canvas is not None
        height, width = seen.shape[-2:]
        across, down = _margins((height, width))
        centre = self._canvas[:, :, down : down + height, across : across + width]
        torch.mul(picture, seen[:, None], out=centre[:, :3])
        centre[:, 3] = seen

    def state(self) -> State:
        if self._canvas is None or self._offset is None:
            return {}
        return {"surroundings": self._canvas.clone(), "surroundings_offset": self._offset.clone()}

    def load_state(self, state: State) -> None:
        self._canvas, self._offset = state.get("surroundings"), state.get("surroundings_offset")


def _margins(size: tuple[int, int]) -> tuple[int, int]:
    """Columns and rows that the canvas adds on each side of a picture of (rows, columns) `size`."""
    return size[1] // MARGIN, size[0] // MARGIN


def _shifted(canvas: Tensor, step: Tensor) -> Tensor:
    """The canvas B C y x read `step` (B 2, whole columns and rows) further on; zeros come in from outside."""
    for axis, size in ((3, canvas.shape[3]), (2, canvas.shape[2])):
        index = torch.arange(size, device=canvas.device) + step[:, 3 - axis, None]
        there = (index >= 0) & (index < size)
        shape = [len(canvas), 1, 1, 1]
        shape[axis] = size
        index, there = (each.view(shape) for each in (index.clamp(0, size - 1), there))
        canvas = canvas.gather(axis, index.expand_as(canvas)) * there
    return canvas
