"""Takes the times of a rollout, stage by stage and block by block, and plots them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from recap.show import svg

WIDTH, HEIGHT, MARGIN = 720.0, 240.0, 44.0
TIME_COLOUR, MEMORY_COLOUR = "#1f6feb", "#b35900"


class Stopwatch:
    """Times named stages without waiting for the device: by events on a GPU, by the clock elsewhere."""

    def __init__(self, cuda: bool) -> None:
        self._cuda = cuda
        self._spans: dict[str, list[tuple[Any, Any]]] = {}
        self._marks: list[Any] = []
        # Bytes allocated on the GPU at every mark.
        self.memory: list[int] = []

    @contextmanager
    def timing(self, methods: list[tuple[object, str]]) -> Iterator[None]:
        """Time every call of these methods, each a stage by its name, until the context ends."""
        for owner, name in methods:
            setattr(owner, name, self._timed(getattr(owner, name), name))
        try:
            yield
        finally:
            for owner, name in methods:
                # This uncovers the method of the class again.
                delattr(owner, name)

    def mark(self) -> None:
        """Mark the end of a block, and the memory that is in use then."""
        self._marks.append(self._now())
        if self._cuda:
            self.memory.append(torch.cuda.memory_allocated())

    def milliseconds(self, stage: str) -> list[float]:
        """Return the time of every call of a stage."""
        return [self._between(*span) for span in self._spans.get(stage, [])]

    def periods(self) -> list[float]:
        """Return the milliseconds between neighbouring marks."""
        return [self._between(one, other) for one, other in itertools.pairwise(self._marks)]

    def _timed(self, method: Callable[..., Any], stage: str) -> Callable[..., Any]:
        def call(*positional: Any, **named: Any) -> Any:
            began = self._now()
            result = method(*positional, **named)
            self._spans.setdefault(stage, []).append((began, self._now()))
            return result

        return call

    def _now(self) -> Any:
        """Return the present moment: an event of the current stream on a GPU."""
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, began: Any, ended: Any) -> float:
        return float(began.elapsed_time(ended)) if self._cuda else 1e3 * (ended - began)


def draw_curve(times_ms: Sequence[float], memory_gb: Sequence[float], title: str) -> str:
    """Return an SVG with the time per block and, where it was measured, the memory in use; both should be flat."""
    right = WIDTH - MARGIN
    # The slowest two in a hundred may leave the top of the picture.
    top = max(sorted(times_ms)[int(0.98 * (len(times_ms) - 1))] * 1.25, 1e-9)
    parts = [
        svg.title(title),
        _curve(times_ms, top, TIME_COLOUR),
        svg.note(MARGIN, HEIGHT - 8, "block 1"),
        svg.note(right, HEIGHT - 8, f"block {len(times_ms)}", "end"),
        svg.text(MARGIN, 40, f"ms per block, {top:.0f} at the top", fill=TIME_COLOUR),
    ]
    if memory_gb:
        most = max(memory_gb) * 1.25
        parts.append(_curve(memory_gb, most, MEMORY_COLOUR))
        parts.append(svg.text(right, 40, f"GB in use, {most:.0f} at the top", "end", fill=MEMORY_COLOUR))
    return svg.drawing(WIDTH, HEIGHT, parts)


def _curve(values: Sequence[float], top: float, colour: str) -> str:
    across = svg.scale(0, max(len(values) - 1, 1), MARGIN, WIDTH - MARGIN)
    up = svg.scale(0, top, HEIGHT - MARGIN, MARGIN)
    points = [(across(i), up(min(value, top))) for i, value in enumerate(values)]
    return svg.polyline(points, stroke=colour, stroke_width=1.5)
