"""Times of named stages, without making anybody wait: events on a GPU, the clock elsewhere."""

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
        self.held: list[int] = []  # bytes at every mark, on a GPU

    def now(self) -> Any:
        """A moment of the current stream."""
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @contextmanager
    def listening(self, verbs: list[tuple[object, str, str]]) -> Iterator[None]:
        """Time every call of these methods, each as its stage, until the end."""
        for owner, name, stage in verbs:
            setattr(owner, name, self._timed(getattr(owner, name), stage))
        try:
            yield
        finally:
            for owner, name, _ in verbs:
                delattr(owner, name)  # the method of the class shows again

    def _timed(self, method: Callable[..., Any], stage: str) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            began = self.now()
            found = method(*given, **named)
            self._spans.setdefault(stage, []).append((began, self.now()))
            return found

        return call

    def mark(self, name: str) -> None:
        self._marks.setdefault(name, []).append(self.now())
        if self._cuda:
            self.held.append(torch.cuda.memory_allocated())

    def fence(self) -> Callable[[], None]:
        """A call that waits until the device has come as far as it is asked to by now."""
        if not self._cuda:
            return lambda: None
        event = torch.cuda.Event()
        event.record()
        return event.synchronize

    def milliseconds(self, stage: str) -> list[float]:
        return [self._between(*span) for span in self._spans.get(stage, [])]

    def periods(self, name: str) -> list[float]:
        """Between neighbouring marks."""
        marks = self._marks[name]
        return [self._between(one, other) for one, other in itertools.pairwise(marks)]

    def _between(self, began: Any, ended: Any) -> float:
        return float(began.elapsed_time(ended)) if self._cuda else 1e3 * (ended - began)
