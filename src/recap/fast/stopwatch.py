"""Times named stages without waiting for the device: by events on a GPU, by the clock elsewhere."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Stopwatch:
    def __init__(self, cuda: bool) -> None:
        self._cuda = cuda
        self._spans: dict[str, list[tuple[Any, Any]]] = {}
        self._marks: dict[str, list[Any]] = {}
        # Bytes allocated on the GPU at every mark.
        self.memory: list[int] = []

    def now(self) -> Any:
        """Return the present moment: an event of the current stream on a GPU."""
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @contextmanager
    def listening(self, verbs: list[tuple[object, str, str]]) -> Iterator[None]:
        """Time every call of these (object, method, stage) until the context ends."""
        for owner, name, stage in verbs:
            setattr(owner, name, self._timed(getattr(owner, name), stage))
        try:
            yield
        finally:
            for owner, name, _ in verbs:
                # This uncovers the method of the class again.
                delattr(owner, name)

    def _timed(self, method: Callable[..., Any], stage: str) -> Callable[..., Any]:
        def call(*positional: Any, **named: Any) -> Any:
            began = self.now()
            result = method(*positional, **named)
            self._spans.setdefault(stage, []).append((began, self.now()))
            return result

        return call

    def mark(self, name: str) -> None:
        self._marks.setdefault(name, []).append(self.now())
        if self._cuda:
            self.memory.append(torch.cuda.memory_allocated())

    def fence(self) -> Callable[[], None]:
        """Return a function that waits until the device has finished the work queued so far."""
        if not self._cuda:
            return lambda: None
        event = torch.cuda.Event()
        event.record()
        return event.synchronize

    def milliseconds(self, stage: str) -> list[float]:
        return [self._between(*span) for span in self._spans.get(stage, [])]

    def periods(self, name: str) -> list[float]:
        """Return the milliseconds between neighbouring marks."""
        marks = self._marks[name]
        return [self._between(one, other) for one, other in itertools.pairwise(marks)]

    def _between(self, began: Any, ended: Any) -> float:
        return float(began.elapsed_time(ended)) if self._cuda else 1e3 * (ended - began)
