"""Runs work in parallel on one GPU: a separate stream for kernels that the next ones do not wait for."""

from __future__ import annotations

from collections.abc import Callable

import torch


class SideStream:
    """A stream on which small kernels, such as those of optical flow, fill what a clean pass leaves idle.

    Tensors cross over safely. The work starts after everything queued before it, and whoever waits for it
    continues after it, so no storage is reused while the other stream still reads it.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._stream = torch.cuda.Stream(device)

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            work()
        return lambda: torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
