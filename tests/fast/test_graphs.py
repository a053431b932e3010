from __future__ import annotations

import pytest
import torch
from torch import Tensor

from recap.fast.graphs import Graphed


class Sum:
    """Adds its input to a total that it keeps in place."""

    def __init__(self, device: str) -> None:
        self.total = torch.zeros(3, device=device)
        self.calls = 0

    def __call__(self, given: Tensor) -> Tensor:
        self.calls += 1
        self.total += given
        return self.total * 2


def test_on_the_cpu_it_is_a_plain_call() -> None:
    kept = Sum("cpu")
    graphed = Graphed(kept)
    for count in range(1, 5):
        assert torch.equal(graphed(torch.ones(3)), torch.full((3,), 2.0 * count))
    assert kept.calls == 4


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="records a CUDA graph")
def test_every_call_counts_once_and_python_runs_twice() -> None:
    """Warm-up, recording and replays: a total kept in place shows which of them did the work."""
    kept = Sum("cuda")
    graphed = Graphed(kept)
    for count in range(1, 6):
        given = torch.full((3,), float(count), device="cuda")
        assert graphed(given).tolist() == [count * (count + 1.0)] * 3
    assert kept.calls == 2
    with pytest.raises(RuntimeError):
        graphed(torch.ones(2, device="cuda"))  # another shape is another recording, and this sum has three
