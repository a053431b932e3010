"""A table of results that batches left, drawn and scored on another machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from recap.errors import refuse
from recap.eval.scores import Score
from recap.tables.drawn_file import MADE_BY, JobAt, look_of, question, read_all, read_looks
from recap.tables.folder import BEFORE, Finished, claim_folder, write_table
from recap.tables.job import job_of
from recap.tables.looks import Look
from recap.tables.recipes import Ask, Planned, Recipe, find_recipe, plan_runs
from recap.tables.reproduce import Reproduction
from recap.tables.table import Line

FIELD = "--import"
Place = tuple[str, str, int]
"""Row, prompt and seed."""
Lines = Sequence[Mapping[str, Any]]


class Found(NamedTuple):
    """A job's result, as a file of batches holds it."""

    line: Line
    key: str
    run: str
    call: Mapping[str, Any]  # what the call that drew it said about itself


def import_table(
    table: str,
    file: Path,
    out: Path,
    prompts: int | None = None,
    seeds: int | None = None,
    notice: Callable[[str], None] = print,
) -> Reproduction:
    """Write the folder of a table from a results.jsonl.gz, or all of them below a folder."""
    recipe, lines = find_recipe(table), read_all(file)
    try:
        done, wanted = _finish(recipe, lines, file, prompts, seeds, notice)
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        limit = f"it is not as batches write it ({type(error).__name__}: {error})"
        raise refuse(FIELD, str(file), limit, "draw it anew by this version") from error
    claim_folder(out, wanted, {line.row for line in done.lines})
    write_table(out, done)
    return Reproduction(out, len(done.lines), tuple(done.left_out))


def _finish(
    recipe: Recipe,
    lines: Lines,
    file: Path,
    prompts: int | None,
    seeds: int | None,
    notice: Callable[[str], None],
) -> tuple[Finished, dict[str, Any]]:
    """The table, and what its folder is begun with."""
    table = recipe.name
    abouts = _abouts(table, lines, file)
    asked, embedder = {**BEFORE, **abouts[-1]["ask"]}, abouts[-1]["embedder"]
    most_seeds = max(each["ask"]["seeds"] or recipe.seeds for each in abouts)
    many = {
        "prompts": max(each["ask"]["prompts"] for each in abouts) if prompts is None else prompts,
        "seeds": most_seeds if seeds is None else seeds,
    }
    # Planned for here: what drew the runs may not be in this machine.
    planned = list(plan_runs(recipe, Ask(**{**asked, "device": "cpu", **many})))
    keys = {_place(each): _key(each, recipe, embedder, asked) for each in planned}
    results, others = _results(recipe, lines, keys, file)
    there = {row for row, _, _ in results}
    told = {each["row"] for each in _told(lines, "left_out", table)} - there
    planned = [each for each in planned if each.row.name not in told]
    if not planned:
        limit = f"all rows of {table} were left out: {', '.join(sorted(told))}"
        raise refuse(FIELD, str(file), limit, "draw it where they can be drawn")
    _check_complete(table, planned, results, others, lines, file)
    if others:
        notice(f"{len(others)} runs of {table} are also there as drawn by other settings; those are not used")
    found = [results[_place(each)] for each in planned]
    about = abouts[-1]["tables"][table] | many | {"runs": len(planned)}
    calls = list({id(each.call): each.call for each in found}.values())
    _check_one_question([*calls, *abouts], file)
    for name in ("hardware", "commit"):
        about[name] = " and ".join(sorted({_of_call(call, name) for call in calls}))
    made_by = {name: about[name] for name in MADE_BY}
    wanted = {"table": table, "embedder": embedder, "detector": "", **made_by, **asked, **many}
    kept = {each.row.name for each in planned}
    left_out = [row.name for row in recipe.rows if row.name not in kept]
    looks = _looks(read_looks(file), planned, results)
    all_lines, all_keys = [each.line for each in found], [each.key for each in found]
    return Finished(recipe, all_lines, all_keys, about, planned[0], looks, left_out), wanted


def _abouts(table: str, lines: Lines, file: Path) -> list[dict[str, Any]]:
    """What was asked in the calls for a table, if they belong together and this version knows it."""
    abouts = [line["about"] for line in lines if table in line.get("about", {}).get("tables", {})]
    if not abouts:
        limit = f"it holds nothing of the table {table!r}"
        raise refuse(FIELD, str(file), limit, "name the results.jsonl.gz of batches with that table")
    _check_one_question(abouts, file)
    known = {each.name for each in fields(Ask)}
    for each in abouts:
        if unknown := each["ask"].keys() - known:
            limit = f"what was asked has the fields {sorted(unknown)}, which this version does not know"
            raise refuse(FIELD, str(file), limit, "import it by the version that drew it")
    return abouts


def _check_one_question(abouts: Sequence[Mapping[str, Any]], file: Path) -> None:
    same = question(abouts[-1])
    if other := next((question(each) for each in abouts if question(each) != same), None):
        limit = f"it mixes results of {other} and {same}"
        raise refuse(FIELD, str(file), limit, "keep them in two folders")


def _of_call(call: Mapping[str, Any], name: str) -> str:
    """The same for all tables of a call."""
    return str(next(iter(call["tables"].values()))[name])


def _place(planned: Planned) -> Place:
    return planned.row.name, planned.script.name, planned.seed


def _key(planned: Planned, recipe: Recipe, embedder: str, asked: Mapping[str, Any]) -> str:
    """Of the job as it was on the device that drew it."""
    job = job_of(planned, recipe, embedder, judge_flow=asked["judge_flow"])
    return replace(job, data={**job.data, "config": {**job.data["config"], "device": asked["device"]}}).key


def _told(lines: Lines, what: str, table: str) -> list[dict[str, Any]]:
    """Rows of a table of which something is said."""
    return [line[what] for line in lines if line.get(what, {}).get("table") == table]


def _results(
    recipe: Recipe, lines: Lines, keys: Mapping[Place, str], file: Path
) -> tuple[dict[Place, Found], set[Place]]:
    """The last result of every job with one of these keys, and where results of other settings are."""
    results, others = {}, set()
    call: Mapping[str, Any] = {}
    for line in lines:
        call = line.get("about", call)
        for job in (JobAt(*values) for values in line.get("jobs", [])):
            place = job.row, job.prompt, job.seed
            # By key, whichever table it was drawn for: two tables may want the same job.
            if job.key != keys.get(place):
                if job.table == recipe.name and place in keys:
                    others.add(place)
                continue
            scores = {}
            for measure in recipe.measures:
                if measure not in line["scores"]:
                    limit = f"the run {line['run']} has no scores of {measure!r}"
                    raise refuse(FIELD, str(file), limit, "draw it anew by this version")
                scores.update(line["scores"][measure])
            for told in scores.values():
                Score(**told)  # fails where it is none
            results[place] = Found(Line(job.row, job.prompt, job.seed, scores), job.key, line["run"], call)
    return results, others


def _check_complete(
    table: str,
    planned: Sequence[Planned],
    results: Mapping[Place, Found],
    others: set[Place],
    lines: Lines,
    file: Path,
) -> None:
    """See that every run is there, or say which is not and why."""
    missing = [place for each in planned if (place := _place(each)) not in results]
    if not missing:
        return
    limit = f"{len(missing)} of {len(planned)} runs of {table} are missing; the first: {missing[0]}"
    if strange := len(others.intersection(missing)):
        limit += f"; {strange} of them are there, but were drawn by other settings"
    why = {each["row"]: each["why"] for each in _told(lines, "gave_up", table)}
    rows = dict.fromkeys(row for row, _, _ in missing if row in why)
    if rows:
        limit += f"; given up: {', '.join(f'{row} ({why[row]})' for row in rows)}"
    raise refuse(FIELD, str(file), limit, "draw them with --resume, or ask for fewer --prompts or --seeds")


def _looks(lines: Lines, planned: Sequence[Planned], results: Mapping[Place, Found]) -> dict[str, Look]:
    """At the runs of the first prompt and seed, by row; those of equal length, whose moments are the same."""
    known = {line["run"]: line for line in lines}
    first = planned[0]
    same = [each for each in planned if (each.script, each.seed) == (first.script, first.seed)]
    runs = {each.row.name: results[_place(each)].run for each in same}
    return {row: look_of(known[run]) for row, run in runs.items() if run in known}
