"""This module lists the runs that tables ask for, and makes one job of all that are the same.

The same memory, prompts, seed and length serve several tables.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, replace
from itertools import product
from typing import Any, NamedTuple

from recap.config import PARTS, RunConfig
from recap.eval.metrics import find_measures
from recap.io.code import code_of, digest_code
from recap.tables.ask import MOST_SEEDS, Ask
from recap.tables.recipes import Recipe
from recap.tables.rows import Row
from recap.tables.runner import Job, ResultStore
from recap.tables.scripts import Script, scripts

LOOK = "look"
"""The entry of a result that pages show, of the first prompt and seed of a row; all other entries are measures."""


def entry_of(measure: str) -> str:
    """Return the entry of a result with a measure's scores: of code outside the package it names the digest."""
    return "@".join((measure, *digest_code([measure]).values()))


def measure_of(entry: str) -> str:
    """Return the name of the measure of an entry."""
    return entry.partition("@")[0]


class Planned(NamedTuple):
    """Describes one run of a recipe; its config names the CPU, as the device of a job need not be here."""

    row: Row
    script: Script
    seed: int
    config: RunConfig
    job: Job


def plan_runs(recipe: Recipe, ask: Ask) -> Iterator[Planned]:
    """Yield every run of a recipe, prompt by prompt, seed by seed, table row by table row; unknown rows are left out.

    Seed k of a prompt is the same for all rows, and a block's noise depends on seed and block alone: arms are paired.
    """
    numbers, seeds = ask.numbers(), ask.own_seeds(recipe.seeds)
    for number, seed, row in product(numbers, seeds, recipe.rows):
        if row.unknown:
            continue
        seconds = row.seconds or recipe.seconds
        if ask.seconds is not None:
            seconds *= ask.seconds / recipe.seconds
        files = ask.schedules, ask.prompt_file
        script = scripts(recipe.script, ask.backbone, seconds, ask.prompts, *files)[number]
        own_seed = MOST_SEEDS * number + seed
        config = _config(recipe, row, script, ask, own_seed)
        shown = [LOOK] if (number, seed) == (numbers[0], seeds[0]) else []
        wants = (*map(entry_of, (*recipe.measures, *recipe.later)), *shown)
        name = f"{row.name} of {recipe.name}, {script.name}, seed {own_seed}"
        job = _job(name, config, script, ask, wants)
        # What was generated in a batch for another table has no time: a run that is timed shares nothing.
        job = replace(job, data={**job.data, "alone": True}) if recipe.alone else job
        yield Planned(row, script, own_seed, config, job)


def _config(recipe: Recipe, row: Row, script: Script, ask: Ask, seed: int) -> RunConfig:
    return RunConfig.from_dict(
        {
            "shots": [{"prompt": s.prompt, "seconds": s.seconds, "cut": s.cut} for s in script.shots],
            "backbone": {"name": ask.backbone, **row.backbone},
            "memory": dict(row.memory),
            "admission": {"name": row.admission, **row.settings},
            "flow": ask.flow,
            **row.sampling,
            "seeds": [seed],
            "dtype": ask.dtype,
            "precision": row.precision,
            "trace_offered": any(each.reads_offered for each in find_measures(recipe.measures)),
        }
    )


def _job(name: str, run_config: RunConfig, script: Script, ask: Ask, wants: Iterable[str]) -> Job:
    config = _unusual(run_config) | {"device": ask.device, "dtype": ask.dtype}
    # These change no picture: how much is traced, by which path, and how often a state is kept.
    options = {"trace_offered": config.pop("trace_offered", False)}
    for unseen in ("eager", "checkpoint_every"):
        config.pop(unseen, None)
    data: dict[str, Any] = {"config": config, "subject": script.subject, "late_subject": script.late_subject}
    data |= {"embedder": ask.embedder, "detector": ask.detector, "judge_flow": ask.judge_flow}
    # Older runs know neither, and keep their keys.
    data |= {"stage": _stage(script)} if script.stage else {}
    data |= {"judge": ask.judge} if ask.judge else {}
    # Of code outside the package no version tells whether it changed.
    data |= {"code": code} if (code := code_of(config)) else {}
    return Job(name, data, frozenset(wants), options, size=sum(shot.seconds for shot in script.shots))


def _stage(script: Script) -> list[list[str]]:
    """Return who is on stage in every stretch: a shot that changes neither prompt nor scene is part of the last."""
    found: list[list[str]] = []
    before = None
    for shot, cast in zip(script.shots, script.stage, strict=True):
        if before is None or shot.cut or shot.prompt != before.prompt:
            found.append(list(cast))
        before = shot
    return found


def _unusual(config: RunConfig) -> dict[str, Any]:
    """Return the plain data of a config without what is left as usual, so that a new setting renames no older run.

    Whoever changes what is usual must raise the version: results of two versions do not meet in a table.
    """
    values = config.to_dict()
    for part in PARTS:
        own = getattr(config, part)
        values[part] = {"name": own.name, **_changed(own.settings, values[part])}
    always = ("seeds", "flow", *PARTS)
    return _changed(config, values) | {name: values[name] for name in always}


def _changed(settings: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of the values that differ from the defaults of a dataclass."""
    return {
        each.name: values[each.name]
        for each in fields(settings)
        if getattr(settings, each.name)
        != (each.default if each.default_factory is MISSING else each.default_factory())
    }


class TableRuns:
    """Holds the runs of every table by its name, without the rows left out, and the jobs of all by key."""

    def __init__(self, recipes: Sequence[Recipe], ask: Ask, left_out: Mapping[str, Collection[str]]):
        self.tables = {
            recipe.name: [run for run in plan_runs(recipe, ask) if run.row.name not in left_out[recipe.name]]
            for recipe in recipes
        }
        # A page can do without a look, and a table without measures that came after its runs.
        self._needed: dict[str, set[str]] = {}
        for recipe in recipes:
            for run in self.tables[recipe.name]:
                self._needed.setdefault(run.job.key, set()).update(map(entry_of, recipe.measures))
        self.jobs: dict[str, Job] = {}
        for job in (run.job for runs in self.tables.values() for run in runs):
            known = self.jobs.get(job.key, job)
            offered = known.options["trace_offered"] or job.options["trace_offered"]
            wants, options = known.wants | job.wants, {"trace_offered": offered}
            self.jobs[job.key] = replace(known, wants=wants, options=options)

    def keys(self, table: str) -> list[str]:
        return [run.job.key for run in self.tables[table]]

    def missing(self, store: ResultStore, keys: Collection[str] | None = None) -> list[Job]:
        """Return the jobs to do, for those entries alone that are not there; some a table can do without."""
        lacks = {key: store.lacks(self.jobs[key]) for key in (self.jobs if keys is None else keys)}
        return [
            replace(self.jobs[key], wants=wants) for key, wants in lacks.items() if wants & self._needed[key]
        ]

    def incomplete_rows(self, store: ResultStore) -> dict[str, dict[str, str]]:
        """Return, by table, the rows of which runs are missing, and how many of how many are."""
        lacking = {job.key for job in self.missing(store)}
        found: dict[str, dict[str, str]] = {}
        for table, runs in self.tables.items():
            counts = Counter(run.row.name for run in runs)
            absent = Counter(run.row.name for run in runs if run.job.key in lacking)
            found[table] = {
                row: f"{absent[row]} of {count} runs are missing"
                for row, count in counts.items()
                if absent[row]
            }
        return found
