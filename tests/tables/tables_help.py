"""Jobs of recipes, and their runs generated here, for the tests of tables."""

from __future__ import annotations

from recap.run import build_backbone
from recap.tables.ask import Ask
from recap.tables.generating import config_of, generate_batch
from recap.tables.recipes import Recipe, find_recipe
from recap.tables.runner import Job
from recap.tables.runs import TableRuns


def jobs_of(recipe: str | Recipe, row: str = "", **asked) -> list[Job]:
    """The jobs of a recipe, or of one of its rows; one prompt and one seed, unless more are asked for."""
    found = find_recipe(recipe) if isinstance(recipe, str) else recipe
    values = {"prompts": 1, "seeds": 1, "embedder": "hsv", "device": "cpu", "flow": "classical", **asked}
    plan = TableRuns([found], Ask(**values), {found.name: {}})
    return [plan.jobs[run.job.key] for run in plan.tables[found.name] if row in ("", run.row.name)]


def data_of(recipe: str | Recipe, row: str = "", **asked):
    """The data of the first of these jobs."""
    return jobs_of(recipe, row, **asked)[0].data


def generated(jobs, folder, embedder=None, probe=None):
    """These jobs as one batch, generated in this process."""
    return generate_batch(jobs, build_backbone(config_of(jobs[0])), folder, embedder, probe)
