"""Replays CUDA graphs, without the host's work between kernels, and runs work on a second stream."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor

Result = TypeVar("Result")
Signature = tuple[tuple[torch.Size, torch.dtype], ...]

# Calls before a tuned recording: one compiles, one chooses convolution kernels, one runs as it will be recorded.
TUNING_RUNS = 3


class RecordingRoom:
    """Makes the recordings that one thread replays on one stream: on a stream of its own, in memory that they share.

    Such recordings never run at the same time, so what one needs only while it runs may be where another has the
    same. The next replay of any of them may overwrite what one returned, so callers copy that at once.
    """

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()
        self._handle: Any = None

    @classmethod
    def current(cls) -> RecordingRoom:
        """Return the room of this thread's current stream."""
        rooms: dict[torch.cuda.Stream, RecordingRoom] = vars(_ROOMS).setdefault("by_stream", {})
        stream = torch.cuda.current_stream()
        if stream not in rooms:
            rooms[stream] = cls()
        return rooms[stream]

    def run(self, work: Callable[[], Result]) -> Result:
        """Run work apart from the current stream, which waits for it.

        A stream has memory of its own. What the work needs only for a moment, gigabytes in a decoder, leaves no hole
        between tensors that stay, and the next recording gives it back.
        """
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            result = work()
        current.wait_stream(self._stream)
        return result

    def record(self, work: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
        """Record work as a graph; also return what it returned, which every replay overwrites."""
        graph = torch.cuda.CUDAGraph()
        # Recordings without a reference must not count.
        gc.collect()
        if not self._graphs:
            # torch gives up the memory with the last recording in it, and refuses its handle from then on.
            self._handle = torch.cuda.graph_pool_handle()
        # Other threads, such as a writer of files, may use the device in the meantime.
        mode = "thread_local"
        taking = torch.cuda.graph(graph, pool=self._handle, stream=self._stream, capture_error_mode=mode)
        reason: Exception | None = None
        try:
            with no_collection(), taking:
                try:
                    result = work()
                except Exception as error:
                    reason = error
                    raise
        except Exception as ending:
            # A recording that failed cannot be ended properly: the error of that would hide why, such as no room.
            raise reason or ending from None
        self._graphs.add(graph)
        return graph, result


@contextmanager
def no_collection() -> Iterator[None]:
    """Keep Python from collecting garbage: a dropped recording or event must not be destroyed amid another one."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


# By thread, because two of them may be between a replay and the copy of its result at the same time.
_ROOMS = threading.local()


@dataclass(frozen=True, slots=True)
class Recording(Generic[Result]):
    """Keeps a graph, the tensors that it reads, and those that it writes."""

    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor, ...]
    result: Result


class Graphed(Generic[Result]):
    """Records a function of tensors once per shape of its inputs, then replays it; on the CPU it is just called.

    The function may change tensors that it owns in place, but must not allocate new ones for them, read values
    on the host, or do anything in Python that later calls depend on: only its kernels are repeated. The next call
    of this or any other recorded function may overwrite what a call returned: see `RecordingRoom`.

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
            result = RecordingRoom.current().run(lambda: self._function(*inputs))
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
        static, room = tuple(tensor.clone() for tensor in inputs), RecordingRoom.current()
        with _timed_convolutions() if self._tune else nullcontext():
            for _ in range(TUNING_RUNS if self._tune else 0):
                room.run(lambda: self._function(*static))
            graph, result = room.record(lambda: self._function(*static))
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
