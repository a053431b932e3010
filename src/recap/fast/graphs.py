"""CUDA graphs: a function is recorded once per shape of its inputs, then replayed. On the CPU it is just called."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")
Signature = tuple[tuple[torch.Size, torch.dtype], ...]

# Calls before a tuned recording: one compiles, one chooses convolution kernels, one runs as it will be recorded.
TUNING_RUNS = 3


class Recording(NamedTuple, Generic[Result]):
    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor, ...]
    result: Result


class Graphed(Generic[Result]):
    """A function of tensors that runs without the host's work between its kernels.

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
        static = tuple(tensor.clone() for tensor in inputs)
        graph = torch.cuda.CUDAGraph()
        if not self._tune:
            return Recording(graph, static, self._capture(graph, static))
        current, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(current)
        with _timed_convolutions():
            with torch.cuda.stream(side):
                for _ in range(TUNING_RUNS):
                    self._function(*static)
            current.wait_stream(side)
            return Recording(graph, static, self._capture(graph, static))

    def _capture(self, graph: torch.cuda.CUDAGraph, static: tuple[Tensor, ...]) -> Result:
        # Other threads, such as a writer of files, may use the device in the meantime.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            return self._function(*static)


@contextmanager
def _timed_convolutions() -> Iterator[None]:
    """Let cuDNN choose its convolution kernels by timing them."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before
