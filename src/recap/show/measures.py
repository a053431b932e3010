"""What can be said of a picture by arithmetic alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from recap.contracts import Curve, Sample
from recap.io.video import Picture

_LEVELS = 8  # per colour channel


def histogram_cosine(opening: Picture, picture: Picture) -> float:
    """Cosine of the two pictures' colour histograms, 8 x 8 x 8; blind to where a colour lies."""
    one, other = _histogram(opening), _histogram(picture)
    return float(one @ other / np.sqrt((one @ one) * (other @ other)))


def _histogram(picture: Picture) -> NDArray[np.float64]:
    level: NDArray[Any] = picture.astype(np.int64) * _LEVELS // 256
    cell = (level[..., 0] * _LEVELS + level[..., 1]) * _LEVELS + level[..., 2]
    return np.bincount(cell.ravel(), minlength=_LEVELS**3).astype(np.float64)


def contrast(picture: Picture) -> float:
    """Standard deviation of luma (BT.601), luma running from 0 to 1."""
    return float((picture.astype(np.float64) @ np.array([0.299, 0.587, 0.114]) / 255).std())


class ColourJudge:
    """One curve: how much every picture is like the first in its colours."""

    name = "Colours like the opening picture"
    about = (
        "Cosine of the colour histograms (8x8x8, whole picture) with picture 0. It sees drifting colours, "
        "not who is in the picture."
    )

    def curves(self, samples: Iterable[Sample]) -> list[Curve]:
        values: list[float | None] = []
        opening: Picture | None = None
        for sample in samples:
            picture: Picture = sample.picture.numpy()
            opening = picture if opening is None else opening
            values.append(histogram_cosine(opening, picture))
        return [Curve("the whole picture", values)]

    def subjects(self, picture: Tensor) -> None:
        """Colours do not tell what is a subject."""
