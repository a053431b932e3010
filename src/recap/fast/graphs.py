"""Record once, replay after: a CUDA graph per shape of the inputs; on the CPU a plain call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")
Signature = tuple[tuple[torch.Size, torch.dtype], ...]


class Recording(NamedTuple, Generic[Result]):
    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor, ...]
    result: Result


class Graphed(Generic[Result]):
    """A function of tensors, without the host's work between its kernels.

    The function may change tensors that it owns in place, but must not allocate them anew, read values on the
    host, or do anything in Python that later calls depend on: only its kernels are repeated. What a call
    returns is overwritten by the next one with inputs of the same shapes.
    """

    def __init__(self, function: Callable[..., Result]) -> None:
        self._function = function
        self._recordings: dict[Signature, Recording[Result] | None] = {}

    def __call__(self, *inputs: Tensor) -> Result:
        if not inputs[0].is_cuda:
            return self._function(*inputs)
        signature = tuple((tensor.shape, tensor.dtype) for tensor in inputs)
        if signature not in self._recordings:
            # The warm-up is a call in earnest, so that tensors changed in place change once. Kernels are compiled
            # and chosen in it, neither of which is possible while recording.
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
        # Other threads, such as a writer of files, may go on using the device meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            result = self._function(*static)
        return Recording(graph, static, result)
