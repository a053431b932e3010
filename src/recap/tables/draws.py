"""What many tables want drawn, each run once, in batches.

The same memory, prompt, seed and length serve several tables, so a run knows all jobs that look at it. Runs that
differ in prompt and seed alone can be rows of one batch: noise depends on (seed, block), and no row sees another.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from recap.config import RunConfig
from recap.errors import refuse
from recap.tables.job import job_of
from recap.tables.jobs import Job, canonical
from recap.tables.recipes import Ask, find_recipe, plan_runs
from recap.tables.scripts import Script

ONE_BY_ONE = "time"
"""The table that no batch can fill: the time of a run that shares its machine with others means nothing."""


class Wanted(NamedTuple):
    """A job of a table."""

    table: str
    job: Job


@dataclass(slots=True)
class Draw:
    """One run, and everybody who wants to look at it."""

    config: RunConfig
    script: Script
    wanted: list[Wanted] = field(default_factory=list)
    shown: bool = False  # the first of its row: tables show a few of its pictures

    @property
    def key(self) -> str:
        return hashlib.sha256(_words_of(self.config).encode()).hexdigest()[:24]

    @property
    def kind(self) -> str:
        """Equal for runs that can be rows of one batch."""
        plain = replace(
            self.config, seeds=(0,), shots=tuple(replace(s, prompt="") for s in self.config.shots)
        )
        return _words_of(plain)

    @property
    def seconds(self) -> float:
        return sum(shot.seconds for shot in self.config.shots)

    @property
    def measures(self) -> list[str]:
        return list(dict.fromkeys(name for each in self.wanted for name in each.job.data["measures"]))


def collect_draws(tables: Sequence[str], ask: Ask, embedder: str) -> list[Draw]:
    """Every run that these tables need, once, in the order in which they first ask for it."""
    draws: dict[str, Draw] = {}
    for table in dict.fromkeys(tables):
        recipe = find_recipe(table)
        if table == ONE_BY_ONE:
            limit = "the time of runs that are drawn at once means nothing"
            raise refuse("--tables", table, limit, f"recap reproduce {table} draws them one by one")
        first: tuple[str, int] | None = None
        for planned in plan_runs(recipe, ask):
            first = first or (planned.script.name, planned.seed)
            draw = draws.setdefault(_words_of(planned.config), Draw(planned.config, planned.script))
            draw.wanted.append(Wanted(table, job_of(planned, recipe, embedder, judge_flow=ask.judge_flow)))
            draw.shown = draw.shown or first == (planned.script.name, planned.seed)
            if planned.config.trace_offered and not draw.config.trace_offered:
                draw.config = planned.config
    return list(draws.values())


def batches_of(draws: Sequence[Draw], rows: int) -> Iterator[list[Draw]]:
    """Kind after kind, so many rows at a time."""
    kinds: dict[str, list[Draw]] = {}
    for draw in draws:
        kinds.setdefault(draw.kind, []).append(draw)
    for alike in kinds.values():
        # Batches as even as can be: every new size is recorded anew on a GPU, and a last small one wastes it.
        size = -(-len(alike) // -(-len(alike) // rows))
        yield from (alike[start : start + size] for start in range(0, len(alike), size))


def _words_of(config: RunConfig) -> str:
    """All that decides the pictures; how much the trace tells of them does not."""
    return canonical({name: value for name, value in config.to_dict().items() if name != "trace_offered"})
