"""Embedders turn a whole picture into a vector; witnesses look for one subject in pictures and compare sightings.

The full frame, a detector's crop and the probe of the embedded world are three witnesses, so identity, retention and
reappearance are written once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from recap.eval.sampling import Pictures
from recap.io.video import Picture

Vectors = NDArray[np.float32]
"""Unit vectors, N D."""

MARGIN = 0.15
"""The margin of a crop on each side, as a share of the box's width and height."""


class Embedder(Protocol):
    """Turns pictures of any sizes into unit vectors."""

    @property
    def backend(self) -> str: ...

    def embed(self, pictures: Sequence[Picture]) -> Vectors: ...


class Box(NamedTuple):
    """A box is in pixels; `right` and `bottom` are exclusive."""

    left: float
    top: float
    right: float
    bottom: float


class Detector(Protocol):
    """Finds a subject by its description."""

    @property
    def backend(self) -> str: ...

    def find(self, pictures: Pictures, subject: str) -> list[Box | None]:
        """Return the subject's box in each picture, or None where it is not visible."""


class Witness(Protocol):
    """Finds a subject in pictures and compares its sightings."""

    @property
    def backend(self) -> str: ...

    @property
    def same_from(self) -> float | None:
        """The likeness from which on two sightings show the same instance; None where no such mark is known."""

    def look(self, pictures: Pictures, subject: str) -> tuple[NDArray[np.bool_], NDArray[np.float32]]:
        """Return whether the subject was found, N, and its features N D, which mean nothing where it was not."""

    def likeness(self, one: NDArray[np.float32], other: NDArray[np.float32]) -> NDArray[np.float64]:
        """Return how alike the sightings N D and M D are, as N M; equal ones have 1."""


class FrameWitness:
    """This witness treats the whole picture as the subject."""

    def __init__(self, embedder: Embedder, same_from: float | None = None):
        self._embedder, self.same_from = embedder, same_from
        self.backend = embedder.backend

    def look(self, pictures: Pictures, subject: str) -> tuple[NDArray[np.bool_], Vectors]:
        return np.ones(len(pictures), bool), self._embedder.embed(list(pictures))

    def likeness(self, one: Vectors, other: Vectors) -> NDArray[np.float64]:
        """Return the cosines of unit vectors."""
        product: NDArray[np.float64] = one.astype(np.float64) @ other.astype(np.float64).T
        return product


class CropWitness(FrameWitness):
    """This witness embeds the subject's box, with a margin, padded to a square."""

    def __init__(self, detector: Detector, embedder: Embedder, same_from: float | None = None):
        super().__init__(embedder, same_from)
        self._detector = detector
        self.backend = f"{embedder.backend} in {detector.backend}"

    def look(self, pictures: Pictures, subject: str) -> tuple[NDArray[np.bool_], Vectors]:
        boxes = self._detector.find(pictures, subject)
        found = np.array([box is not None for box in boxes], bool)
        crops = [crop(p, box) for p, box in zip(pictures, boxes, strict=True) if box is not None]
        seen = self._embedder.embed(crops) if crops else np.zeros((0, 1), np.float32)
        vectors = np.zeros((len(pictures), seen.shape[1]), np.float32)
        vectors[found] = seen
        return found, vectors


def crop(picture: Picture, box: Box) -> Picture:
    """Return the box grown by its margin, cut at the picture's edge, on a grey square."""
    rows, columns = picture.shape[:2]
    wide, high = MARGIN * (box.right - box.left), MARGIN * (box.bottom - box.top)
    left, right = (int(np.clip(v, 0, columns)) for v in (box.left - wide, np.ceil(box.right + wide)))
    top, bottom = (int(np.clip(v, 0, rows)) for v in (box.top - high, np.ceil(box.bottom + high)))
    right, bottom = max(right, left + 1), max(bottom, top + 1)
    part = picture[top:bottom, left:right]
    side = max(part.shape[:2])
    # Embedders subtract about this grey, so the padding hardly matters.
    square = np.full((side, side, 3), 118, np.uint8)
    y, x = (side - part.shape[0]) // 2, (side - part.shape[1]) // 2
    square[y : y + part.shape[0], x : x + part.shape[1]] = part
    return square
