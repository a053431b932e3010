"""Who looks at pictures for a measure: embedders see a whole picture, witnesses look for one subject in it.

A witness answers two questions: where is the subject found, and how alike are two sightings of it. The full frame, a
detector's crop and the embedded world's probe are three such witnesses, so identity, retention and reappearance are
written once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from recap.eval.sampling import Pictures
from recap.io.video import Picture

Vectors = NDArray[np.float32]
"""N D, of length 1 each."""

MARGIN = 0.15  # of the box's width and height, on each side


class Embedder(Protocol):
    """Pictures of any sizes to vectors of length 1."""

    @property
    def backend(self) -> str: ...

    def embed(self, pictures: Sequence[Picture]) -> Vectors: ...


class Box(NamedTuple):
    """Pixels, right and bottom not included."""

    left: float
    top: float
    right: float
    bottom: float


class Detector(Protocol):
    @property
    def backend(self) -> str: ...

    def find(self, pictures: Pictures, subject: str) -> list[Box | None]:
        """The subject's box in every picture, None where it is not seen."""


class Witness(Protocol):
    @property
    def backend(self) -> str: ...

    def look(self, pictures: Pictures, subject: str) -> tuple[NDArray[np.bool_], NDArray[np.float32]]:
        """Found N, and what was seen N D; the rows of pictures without the subject mean nothing."""

    def likeness(self, one: NDArray[np.float32], other: NDArray[np.float32]) -> NDArray[np.float64]:
        """N M: how alike the sightings N D and M D are, 1 for equal ones."""


class FrameWitness:
    """Takes the whole picture for the subject."""

    def __init__(self, embedder: Embedder):
        self._embedder = embedder
        self.backend = embedder.backend

    def look(self, pictures: Pictures, subject: str) -> tuple[NDArray[np.bool_], Vectors]:
        return np.ones(len(pictures), bool), self._embedder.embed(list(pictures))

    def likeness(self, one: Vectors, other: Vectors) -> NDArray[np.float64]:
        return cosines(one, other)


class CropWitness:
    """Looks at the subject's box, with a margin, padded to a square."""

    def __init__(self, detector: Detector, embedder: Embedder):
        self._detector, self._embedder = detector, embedder
        self.backend = f"{embedder.backend} in {detector.backend}"

    def look(self, pictures: Pictures, subject: str) -> tuple[NDArray[np.bool_], Vectors]:
        boxes = self._detector.find(pictures, subject)
        found = np.array([box is not None for box in boxes], bool)
        crops = [crop(p, box) for p, box in zip(pictures, boxes, strict=True) if box is not None]
        if not crops:
            return found, np.zeros((len(pictures), 1), np.float32)
        seen = self._embedder.embed(crops)
        vectors = np.zeros((len(pictures), seen.shape[1]), np.float32)
        vectors[found] = seen
        return found, vectors

    def likeness(self, one: Vectors, other: Vectors) -> NDArray[np.float64]:
        return cosines(one, other)


def cosines(one: Vectors, other: Vectors) -> NDArray[np.float64]:
    """N M, of unit vectors."""
    product: NDArray[np.float64] = one.astype(np.float64) @ other.astype(np.float64).T
    return product


def crop(picture: Picture, box: Box, margin: float = MARGIN) -> Picture:
    """The box grown by its margin, cut at the picture's edge, on a grey square."""
    rows, columns = picture.shape[:2]
    wide, high = margin * (box.right - box.left), margin * (box.bottom - box.top)
    left, right = (int(np.clip(v, 0, columns)) for v in (box.left - wide, np.ceil(box.right + wide)))
    top, bottom = (int(np.clip(v, 0, rows)) for v in (box.top - high, np.ceil(box.bottom + high)))
    right, bottom = max(right, left + 1), max(bottom, top + 1)
    part = picture[top:bottom, left:right]
    side = max(part.shape[:2])
    # Grey, the mean that embedders subtract: the padding then says next to nothing.
    square = np.full((side, side, 3), 118, np.uint8)
    above, beside = (side - part.shape[0]) // 2, (side - part.shape[1]) // 2
    square[above : above + part.shape[0], beside : beside + part.shape[1]] = part
    return square
