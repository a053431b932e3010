"""Estimates flow without weights, by OpenCV's dense inverse search (Kroeger et al., ECCV 2016) on the CPU."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recap.contracts import Flow
from recap.errors import refuse
from recap.flow.network import check_clip

# Pixels of a side; OpenCV refuses pictures with both sides below about 12.
SMALLEST = 32


def load_opencv() -> Any:
    """Import OpenCV when it is first needed; a machine that only uses RAFT-small works without it."""
    try:
        import cv2
    except ImportError as missing:
        limit = "it needs OpenCV, which cannot be imported"
        raise refuse("flow", "classical", limit, "pip install opencv-python-headless") from missing
    return cv2


def has_opencv() -> bool:
    """Tell whether OpenCV can be imported."""
    try:
        load_opencv()
    except ValueError:
        return False
    return True


class ClassicalFlow:
    """Estimates flow by a search of each pair of gray pictures both ways, on as many threads as torch has.

    OpenCV releases the interpreter lock while it searches. Searching pairs in parallel pays at any size; OpenCV's
    own threads within a pair do not. The flow is the same for any number of threads.
    """

    def __init__(self) -> None:
        cv2 = load_opencv()
        cv2.setNumThreads(1)
        kind, num = cv2.DISOPTICAL_FLOW_PRESET_MEDIUM, torch.get_num_threads()
        # One per thread, because each has its own buffers.
        self._searches = [cv2.DISOpticalFlow_create(kind) for _ in range(num)]
        self._pool = ThreadPoolExecutor(num)

    def __call__(self, pictures: Tensor) -> Flow:
        """Estimate the flow of pictures B T 3 Y X in 0..1, on any device; the result is on theirs, float32."""
        pairs = _pairs(pictures)
        found = self._find([*pairs, *((later, earlier) for earlier, later in pairs)], pictures)
        return Flow(*found.unflatten(0, (2, len(pictures), -1)))

    def forward(self, pictures: Tensor) -> Tensor:
        """Return only the flow from every picture to the next, B T-1 2 Y X: half the work."""
        flow: Tensor = self._find(_pairs(pictures), pictures).unflatten(0, (len(pictures), -1))
        return flow

    def _find(self, pairs: list[tuple[Any, Any]], pictures: Tensor) -> Tensor:
        """Return flow N 2 Y X of pairs of gray pictures, on the device of `pictures`."""
        size = -(-len(pairs) // len(self._searches))
        parts = [pairs[start : start + size] for start in range(0, len(pairs), size)]
        found = self._pool.map(lambda s, part: [s.calc(*pair, None) for pair in part], self._searches, parts)
        flow = torch.from_numpy(np.array([each for part in found for each in part])).movedim(-1, -3)
        return flow[..., : pictures.shape[-2], : pictures.shape[-1]].to(pictures.device)


def _pairs(pictures: Tensor) -> list[tuple[Any, Any]]:
    check_clip(pictures)
    return [pair for clip in gray_bytes(pictures) for pair in itertools.pairwise(clip)]


def gray_bytes(pictures: Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the luma (Rec. 601) B T Y X of pictures B T 3 Y X; borders are repeated up to the smallest side."""
    red, green, blue = pictures.detach().float().unbind(2)
    luma = (0.299 * red + 0.587 * green + 0.114 * blue).clamp(0, 1)
    gray = (luma * 255).round().to(torch.uint8).cpu().numpy()
    more = [max(0, SMALLEST - side) for side in gray.shape[-2:]]
    return np.pad(gray, [(0, 0), (0, 0), *((0, side) for side in more)], mode="edge")
