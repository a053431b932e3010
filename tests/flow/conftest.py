"""Real pictures with known flow, and the real weights."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from recap.contracts import Flow
from recap.flow import RAFT_SMALL


class KnownPair(NamedTuple):
    pictures: Tensor  # 1 2 3 Y X
    truth: Tensor  # 2 Y X
    known: Tensor  # Y X, bool

    def error(self, flow: Flow) -> float:
        """Mean distance in pixels between forward flow and truth, where that is known."""
        distance = (flow.forward[0, 0].cpu() - self.truth).norm(dim=0)
        return float(distance[self.known].mean())


def read_pair(first: Path, second: Path, truth: Path) -> KnownPair:
    cv2 = pytest.importorskip("cv2")
    pictures = np.stack([cv2.imread(str(path))[..., ::-1] for path in (first, second)])
    content = np.fromfile(truth, np.float32)
    width, height = content[1:3].view(np.int32)
    flow = torch.from_numpy(content[3:].reshape(height, width, 2)).movedim(-1, 0)
    return KnownPair(torch.from_numpy(pictures).movedim(-1, -3)[None] / 255, flow, (flow.abs() < 1e6).all(0))


@pytest.fixture(scope="session")
def rubber_whale(shared_data: Path) -> KnownPair:
    folder = shared_data / "flow_gt"
    return read_pair(folder / "RubberWhale1.png", folder / "RubberWhale2.png", folder / "RubberWhale.flo")


@pytest.fixture(scope="session")
def chairs(shared_data: Path) -> KnownPair:
    names = ("chairs_00001_img1.ppm", "chairs_00001_img2.ppm", "chairs_00001_flow.flo")
    return read_pair(*(shared_data / "flow_gt" / name for name in names))


@pytest.fixture(scope="session")
def raft_weights(installed_home: Path) -> Path:
    """Installed weights, as `make` leaves them, else those next to the checkout."""
    neighbour = Path(__file__).resolve().parents[3] / "shared" / "data" / "weights"
    for path in (installed_home / RAFT_SMALL.file_name, neighbour / RAFT_SMALL.file_name):
        if path.is_file():
            return path
    pytest.skip("no weights of RAFT-small: `recap weights raft-small` installs them")
