"""This module remembers what the camera has shown beyond the border, so that a sway reveals it only once.

Content that leaves through the border leaves its flow correspondence there: by eq. (novelty) alone the same strip
would be new at every sway of the camera. So the last picture is extended on all sides by what left it, moved along
with the camera, and a pixel that enters is compared with what the extension shows at its backtrace.

The camera's step from picture to picture is the median of the backward flow. Where that is a poor description (zoom,
parallax, an actor that enters in front of known ground) the colours disagree, and the pixel is new as before. A cut
forgets everything.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from recap.contracts import Entry, State, copies, copy_of, together
from recap.flow.warp import reading_grid

MARGIN = 2
"""The extension reaches a picture's height or width over this on every side."""

CUT_SHARE = 0.5
"""Where the flow of more than this share of the pixels is inconsistent, the camera has not moved: it is elsewhere."""

AT_REST_PX = 0.5
"""A camera that moves by less is at rest: too little enters or leaves to matter, and in rain the median wanders."""

SEEN = 0.999
"""A reading next to unseen ground is mixed with it, so all of what is read must have been seen, but for rounding."""


class Surroundings:
    """Keeps a canvas around the last picture, with what left it, moved along with the camera."""

    def __init__(self) -> None:
        self._canvas: Tensor | None = None  # B 4 y' x': RGB, and 1 where it has been seen
        self._offset: Tensor | None = None  # B 2: what whole-pixel steps of the canvas leave over, x and y

    def begin(self, picture: Tensor) -> tuple[Tensor, Tensor]:
        """Return canvas and offset; at first nothing but all of the first `picture`, B 3 y x, has been seen."""
        if self._canvas is None or self._offset is None:
            height, width = picture.shape[-2:]
            across, down = margins((height, width))
            self._canvas = picture.new_zeros(len(picture), 4, height + 2 * down, width + 2 * across)
            self._offset = picture.new_zeros(len(picture), 2)
            self._lay(picture)
        return self._canvas, self._offset

    def keep(self, canvas: Tensor, offset: Tensor) -> None:
        """Continue from what was computed elsewhere."""
        self._canvas, self._offset = canvas, offset

    @torch.no_grad()
    def known(self, stream: Tensor, at: Tensor, step: Tensor, cut: Tensor, tolerance: float) -> Tensor:
        """Tell, B P y x, which pixels show what was seen at their backtrace, in the picture before or around it.

        stream B P+1 3 y x; at B P 2 y x, the backtraces; step B P 2, the camera's; cut B P, where the scene changes.
        """
        self.begin(stream[:, 0])
        size = (stream.shape[-2], stream.shape[-1])
        known = []
        for pair in range(at.shape[1]):
            assert self._canvas is not None
            self._canvas[:, 3] *= ~cut[:, pair, None, None]
            shown = self._read(at[:, pair], size)
            differs = (stream[:, pair + 1] - shown[:, :3]).abs().mean(dim=1)
            known.append((shown[:, 3] > SEEN) & (differs <= tolerance))
            self._extend(stream[:, pair + 1], step[:, pair])
        return torch.stack(known, dim=1)

    def _read(self, at: Tensor, size: tuple[int, int]) -> Tensor:
        """Read the canvas at positions B 2 y x of the last picture: B 4 y x; beyond it nothing has been seen."""
        assert self._canvas is not None and self._offset is not None
        across, down = margins(size)
        corner = torch.stack((across - self._offset[:, 0], down - self._offset[:, 1]), dim=1)
        grid = reading_grid(at + corner[:, :, None, None], (self._canvas.shape[-2], self._canvas.shape[-1]))
        return functional.grid_sample(
            self._canvas, grid, mode="bilinear", padding_mode="zeros", align_corners=True
        )

    def _extend(self, picture: Tensor, step: Tensor) -> None:
        """Move the canvas with the camera, by whole pixels so that nothing blurs, and lay the next picture on it."""
        assert self._canvas is not None and self._offset is not None
        step = torch.where(step.abs() < AT_REST_PX, 0.0, step)
        due = step - self._offset
        whole = due.round()
        self._offset = whole - due
        self._canvas = _shifted(self._canvas, whole.long())
        self._lay(picture)

    def _lay(self, picture: Tensor) -> None:
        """Put a picture on the middle of the canvas."""
        assert self._canvas is not None
        height, width = picture.shape[-2:]
        across, down = margins((height, width))
        centre = self._canvas[:, :, down : down + height, across : across + width]
        centre[:, :3].copy_(picture)
        centre[:, 3] = 1.0

    def state(self) -> State:
        return copies({"surroundings": self._canvas, "surroundings_offset": self._offset})

    def expected(self, state: State, size: tuple[int, int]) -> dict[str, Entry]:
        """Return what a state must have of the surroundings of pictures of (rows, columns) `size`."""
        across, down = margins(size)
        canvas = Entry(("B", 4, size[0] + 2 * down, size[1] + 2 * across), torch.float32)
        return together(
            state, {"surroundings": canvas, "surroundings_offset": Entry(("B", 2), torch.float32)}
        )

    def load_state(self, state: State) -> None:
        # A copy, since the canvas is written in place and a state may be loaded twice.
        self._canvas, self._offset = copy_of(state.get("surroundings")), state.get("surroundings_offset")


def margins(size: tuple[int, int]) -> tuple[int, int]:
    """Return the columns and rows that the canvas adds on each side of a picture of (rows, columns) `size`."""
    return size[1] // MARGIN, size[0] // MARGIN


def _shifted(canvas: Tensor, step: Tensor) -> Tensor:
    """Return the canvas B C y x read `step` (B 2, whole columns and rows) further on; zeros come in from outside."""
    for axis, size in ((3, canvas.shape[3]), (2, canvas.shape[2])):
        index = torch.arange(size, device=canvas.device) + step[:, 3 - axis, None]
        there = (index >= 0) & (index < size)
        shape = [len(canvas), 1, 1, 1]
        shape[axis] = size
        index, there = (each.view(shape) for each in (index.clamp(0, size - 1), there))
        canvas = canvas.gather(axis, index.expand_as(canvas)) * there
    return canvas
