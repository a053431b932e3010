"""Replays CUDA graphs, without the host's work between kernels, and runs work on a second stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")
Signature = tuple[tuple[torch.Size, torch.dtype], ...]

# Calls before a tuned recording: one compiles, one chooses convolution kernels, one runs as it will be recorded.
TUNING_RUNS = 3


@dataclass(frozen=True, slots=True)
class Recording(Generic[Result]):
    """Keeps a graph, the tensors that it reads, and those that it writes."""

    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor, ...]
    result: Result


class Graphed(Generic[Result]):
    """Records a function of tensors once per shape of its inputs, then replays it; on the CPU it is just called.

    The function may change tensors that it owns in place, but must not allocate new ones for them, read values
    on the host, or do anything in Python that later calls depend on: only its kernels are repeated. The next
    call with inputs of the same shapes overwrites what a call returned.

    With `tune`, cuDNN times its convolution kernels before the recording, which takes a few extra calls: the
    function must then not change anything in place.
    """

    def __init__(self, function: Callable[..., Result], *, tune: bool = False) -> None:
        self._function = function
        self._tune = tune
        self._recordings: dict[Signature, Recording[Result] | None] = {}

    def __call__(self, *inputs: Tensor) -> Result:
        if not inputs[0].is_cuda:
            return self._function(*inputs)
        signature = tuple((tensor.shape, tensor.dtype) for tensor in inputs)
        if signature not in self._recordings:
            # The first call is the warm-up, and it counts: tensors changed in place must change once. It compiles
            # and chooses kernels, neither of which is possible while recording.
            result = self._function(*inputs)
            self._recordings[signature] = None
            return result
        found = self._recordings[signature]
        if found is None:
            found = self._recordings[signature] = self._record(inputs)
        for static, tensor in zip(found.inputs, inputs, strict=True):
            static.copy_(tensor)
        found.graph.replay()
        return found.result

    def _record(self, inputs: tuple[Tensor, ...]) -> Recording[Result]:
        """Record the function on copies of its inputs; with `tune`, kernels are chosen before."""
        static, graph = tuple(tensor.clone() for tensor in inputs), torch.cuda.CUDAGraph()
        with _timed_convolutions() if self._tune else nullcontext():
            if self._tune:
                current, side = torch.cuda.current_stream(), torch.cuda.Stream()
                side.wait_stream(current)
                with torch.cuda.stream(side):
                    for _ in range(TUNING_RUNS):
                        self._function(*static)
                current.wait_stream(side)
            # Other threads, such as a writer of files, may use the device in the meantime.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                result = self._function(*static)
        return Recording(graph, static, result)


@contextmanager
def _timed_convolutions() -> Iterator[None]:
    """Let cuDNN choose its convolution kernels by timing them."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


class SideStream:
    """Runs work next to what the current stream does, each on what the other leaves idle.

    With `first`, its kernels get free processors before those of the current stream do, also in a recording.

    Tensors cross over safely. The work starts after everything queued before it, and whoever waits for it
    continues after it, so no storage is reused while the other stream still reads it.
    """

    def __init__(self, device: torch.device | str, *, first: bool = False) -> None:
        self._stream = torch.cuda.Stream(device, priority=-1 if first else 0)

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        """Start the work; returns a function that waits for it."""
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            work()
        return lambda: torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
