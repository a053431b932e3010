"""A table of results that batches left, drawn and scored on another machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from recap.errors import refuse
from recap.recipes.tables import Ask, Planned, Recipe, find_recipe, plan_runs
from recap.reproduction.drawn_file import LOOKS, JobAt, look_of, question, read_all
from recap.reproduction.folder import Finished, claim_folder, write_table
from recap.reproduction.looks import Look
from recap.reproduction.reproduce import Reproduction
from recap.reproduction.table import Line


class Found(NamedTuple):
    """A job's result, as a file of batches holds it."""

    line: Line
    key: str
    run: str


def import_table(table: str, file: Path, out: Path, prompts: int, seeds: int | None = None) -> Reproduction:
    """Write the folder of a table from a results.jsonl.gz, or all of them below a folder."""
    recipe, lines = find_recipe(table), read_all(file)
    abouts = [line["about"] for line in lines if table in line.get("about", {}).get("tables", {})]
    if not abouts:
        limit = f"it holds nothing of the table {table!r}"
        raise refuse("--import", str(file), limit, "name the results.jsonl.gz of batches with that table")
    asked, same = abouts[-1]["ask"], question(abouts[-1])
    if other := next((question(each) for each in abouts if question(each) != same), None):
        raise refuse(
            "--import", str(file), f"it mixes results of {other} and {same}", "keep them in two folders"
        )
    most_prompts = max(each["ask"]["prompts"] for each in abouts)
    most_seeds = max(each["ask"]["seeds"] or recipe.seeds for each in abouts)
    # Planned for here: what drew the runs may not be in this machine.
    many = {"prompts": min(prompts, most_prompts), "seeds": seeds or most_seeds}
    ask = Ask(**{**asked, "device": "cpu", **many})
    told = [line["left_out"] for line in lines if line.get("left_out", {}).get("table") == table]
    left_out = tuple(dict.fromkeys(each["row"] for each in told))
    planned = [each for each in plan_runs(recipe, ask) if each.row.name not in left_out]
    results = _results(recipe, lines)
    found = [results[_place(each)] for each in planned if _place(each) in results]
    if len(found) < len(planned):
        missing = next(_place(each) for each in planned if _place(each) not in results)
        limit = (
            f"{len(planned) - len(found)} of {len(planned)} runs of {table} are missing; the first: {missing}"
        )
        raise refuse("--import", str(file), limit, "draw them with --resume, or ask for fewer --seeds")
    about = abouts[-1]["tables"][table] | many | {"runs": len(planned)}
    about["commit"] = " and ".join(dict.fromkeys(each["tables"][table]["commit"] for each in abouts))
    made_by = {name: about[name] for name in ("recap", "torch")}
    wanted = {"table": table, "embedder": abouts[-1]["embedder"], "detector": "", **made_by, **asked}
    claim_folder(out, wanted | many)
    looks = _looks(read_all(file, LOOKS), planned, results)
    lines_of = [each.line for each in found]
    keys = [each.key for each in found]
    write_table(out, Finished(recipe, lines_of, keys, about, planned[0], looks, left_out))
    return Reproduction(out, len(planned), left_out)


def _place(planned: Planned) -> tuple[str, str, int]:
    return planned.row.name, planned.script.name, planned.seed


def _results(recipe: Recipe, lines: list[dict[str, Any]]) -> dict[tuple[str, str, int], Found]:
    results = {}
    for line in lines:
        for job in (JobAt(*values) for values in line.get("jobs", [])):
            if job.table == recipe.name:
                scores = {n: s for measure in recipe.measures for n, s in line["scores"][measure].items()}
                own = Line(job.row, job.prompt, job.seed, scores)
                results[job.row, job.prompt, job.seed] = Found(own, job.key, line["run"])
    return results


def _looks(
    lines: list[dict[str, Any]], planned: list[Planned], results: dict[tuple[str, str, int], Found]
) -> dict[str, Look]:
    """At the runs of the first prompt and seed, by row; those of equal length, whose moments are the same."""
    known = {line["run"]: line for line in lines}
    first = planned[0]
    same = [each for each in planned if (each.script, each.seed) == (first.script, first.seed)]
    runs = {each.row.name: results[_place(each)].run for each in same}
    return {row: look_of(known[run]) for row, run in runs.items() if run in known}
