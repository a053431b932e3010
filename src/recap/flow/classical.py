"""Flow without weights: dense inverse search (Kroeger et al., ECCV 2016), OpenCV's, on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from recap.contracts import Flow
from recap.errors import refuse

SMALLEST = 32  # pixels; OpenCV refuses pictures with both sides below about 12


def load_opencv() -> Any:
    """OpenCV, which is an extra of this package."""
    try:
        import cv2
    except ImportError as missing:
        raise refuse(
            "flow", "classical", "it needs OpenCV, which is not installed", "pip install recap-forcing[flow]"
        ) from missing
    return cv2


class ClassicalFlow:
    """The flow estimator: each pair of gray pictures searched both ways."""

    def __init__(self) -> None:
        cv2 = load_opencv()
        self._search = cv2.DISOpticalFlow_create(cv2.DISOPTICAL_FLOW_PRESET_MEDIUM)

    def __call__(self, pictures: Tensor) -> Flow:
        """Pictures B T 3 Y X, 0..1, on any device; the flow is on theirs, float32."""
        rows, num = pictures.shape[:2]
        if num < 2:
            raise refuse(
                "pictures", tuple(pictures.shape), "flow needs at least 2", "pass B T 3 Y X with T >= 2"
            )
        clips = gray_bytes(pictures)
        pairs = [(clip[i], clip[i + 1]) for clip in clips for i in range(num - 1)]
        found = [[self._search.calc(*pair, None) for pair in pairs]]
        found += [[self._search.calc(later, earlier, None) for earlier, later in pairs]]
        flow = torch.from_numpy(np.array(found)).movedim(-1, -3).to(pictures.device)
        height, width = pictures.shape[-2:]
        forward, backward = flow[..., :height, :width].reshape(2, rows, num - 1, 2, height, width)
        return Flow(forward, backward)


def gray_bytes(pictures: Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """B T Y X luma (Rec. 601) of pictures B T 3 Y X, with border pixels repeated up to the smallest side."""
    red, green, blue = pictures.detach().float().unbind(2)
    luma = (0.299 * red + 0.587 * green + 0.114 * blue).clamp(0, 1)
    gray = (luma * 255).round().to(torch.uint8).cpu().numpy()
    more = [max(0, SMALLEST - side) for side in gray.shape[-2:]]
    return np.pad(gray, [(0, 0), (0, 0), *((0, side) for side in more)], mode="edge")
