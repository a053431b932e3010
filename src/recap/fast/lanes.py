"""Work beside other work on one GPU: a stream of its own for what the next kernels do not wait for."""

from __future__ import annotations

from collections.abc import Callable

import torch


class SideStream:
    """Small kernels, as flow has, fill what the large ones of a clean pass leave idle.

    Tensors cross over safely: work starts after all that was asked for before it, and whoever waits for it
    goes on after it, so that no storage is handed out again while the other stream still reads it.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._stream = torch.cuda.Stream(device)

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            work()
        return lambda: torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
