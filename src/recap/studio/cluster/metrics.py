"""This module writes metrics in the text form that Prometheus reads."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from threading import Lock


@dataclass(frozen=True, slots=True)
class Metric:
    """Describes one number: its name, its meaning, its kind (counter or gauge) and labels."""

    name: str
    about: str
    kind: str
    value: float
    labels: Mapping[str, str] = field(default_factory=dict)


def as_text(metrics: Iterable[Metric]) -> str:
    """Return metrics as text; those of one name must follow each other."""
    lines: list[str] = []
    last = ""
    for metric in metrics:
        name = f"recap_{metric.name}"
        if name != last:
            lines += [f"# HELP {name} {metric.about}", f"# TYPE {name} {metric.kind}"]
            last = name
        labels = ",".join(f'{key}="{_escaped(value)}"' for key, value in metric.labels.items())
        lines.append(f"{name}{{{labels}}} {metric.value:.10g}" if labels else f"{name} {metric.value:.10g}")
    return "\n".join(lines) + "\n"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


class Stages:
    """Adds up how long the stages of blocks took; safe to call from any thread."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self.blocks = 0

    def add(self, times_ms: Mapping[str, float]) -> None:
        """Note the times of one block."""
        with self._lock:
            self.blocks += 1
            for stage, spent in times_ms.items():
                self._seconds[stage] += spent / 1e3

    def shown(self) -> list[Metric]:
        with self._lock:
            about = "Seconds that a stage took in all blocks: generate, encode, store."
            stages = [
                Metric("stage_seconds_total", about, "counter", spent, {"stage": stage})
                for stage, spent in sorted(self._seconds.items())
            ]
            return [Metric("blocks_total", "Blocks that were generated.", "counter", self.blocks), *stages]
