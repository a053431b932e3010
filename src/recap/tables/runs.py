"""The runs that tables ask for, each once: the same memory, prompts, seed and length serve several tables."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from recap.tables.generating import LOOK
from recap.tables.jobs import Job
from recap.tables.recipes import Ask, Planned, Recipe, plan_runs
from recap.tables.store import Store


class AskedRun(NamedTuple):
    """A run as a table asks for it, and the key of its job."""

    planned: Planned
    key: str

    @property
    def row(self) -> str:
        return self.planned.row.name


class TableRuns:
    """The jobs of some tables by key, and the runs of every table by its name, without the rows left out."""

    def __init__(self, recipes: Sequence[Recipe], ask: Ask, left_out: Mapping[str, Collection[str]]):
        self.jobs: dict[str, Job] = {}
        self.tables: dict[str, list[AskedRun]] = {}
        for recipe in recipes:
            planned = [each for each in plan_runs(recipe, ask) if each.row.name not in left_out[recipe.name]]
            self.tables[recipe.name] = [
                AskedRun(each, self._add(each, recipe, ask, shown=same_prompt(each, planned[0])))
                for each in planned
            ]

    def _add(self, planned: Planned, recipe: Recipe, ask: Ask, *, shown: bool) -> str:
        config = planned.config.to_dict() | {"device": ask.device}
        # These change no picture: how much is traced, by which path, and how often a state is kept.
        offered = config.pop("trace_offered")
        del config["eager"], config["checkpoint_every"]
        data = {
            "config": config, "subject": planned.script.subject, "late_subject": planned.script.late_subject,
            "embedder": ask.embedder, "detector": ask.detector, "judge_flow": ask.judge_flow,
        }  # fmt: skip
        name = f"{planned.row.name} of {recipe.name}, {planned.script.name}, seed {planned.seed}"
        wants = frozenset([*recipe.measures, *([LOOK] if shown else [])])
        job = Job(name, data, wants, size=sum(shot.seconds for shot in planned.config.shots))
        known = self.jobs.get(job.key, job)
        options = {"trace_offered": offered or known.options.get("trace_offered", False)}
        self.jobs[job.key] = replace(known, wants=known.wants | wants, options=options)
        return job.key

    def keys(self, table: str) -> list[str]:
        return [run.key for run in self.tables[table]]

    def missing(self, store: Store, keys: Collection[str] | None = None) -> list[Job]:
        """The jobs to do, for those entries alone that are not there; a page can do without a look."""
        lacks = {key: store.lacks(self.jobs[key]) for key in (self.jobs if keys is None else keys)}
        return [replace(self.jobs[key], wants=wants) for key, wants in lacks.items() if wants - {LOOK}]


def same_prompt(one: Planned, other: Planned) -> bool:
    """Whether two runs have the same prompts and seed."""
    return (one.script.name, one.seed) == (other.script.name, other.seed)
