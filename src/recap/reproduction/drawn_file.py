"""Results of batches on their way to another machine: lines of JSON, packed, added to as they come.

`results.jsonl.gz` begins with what was asked and by what it was made; then a line per run with the scores of all
measures and the jobs they are for, and a line per row that could not be drawn. `looks.jsonl.gz` holds what pages
show. Every addition is a packed part of its own, so a kill loses no more than the last.
"""

from __future__ import annotations

import base64
import gzip
import json
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from recap.errors import refuse
from recap.eval.scores import Score
from recap.files import write_whole
from recap.reproduction.draws import Draw
from recap.reproduction.folder import GROWING
from recap.reproduction.looks import Look
from recap.show.bank_chart import BankHistory

RESULTS, LOOKS = "results.jsonl.gz", "looks.jsonl.gz"


class JobAt(NamedTuple):
    """Whose result a run's scores are."""

    table: str
    row: str
    prompt: str
    seed: int
    key: str


def append_lines(file: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Add lines as one packed part."""
    text = "".join(json.dumps(line) + "\n" for line in lines)
    with file.open("ab") as out:
        out.write(gzip.compress(text.encode()))


def read_packed(file: Path) -> list[dict[str, Any]]:
    """All whole lines; a last part cut short by a kill is left out."""
    if not file.is_file():
        return []
    lines: list[dict[str, Any]] = []
    try:
        with gzip.open(file, "rt", encoding="utf-8") as packed:
            lines.extend(json.loads(line) for line in packed)
    except (EOFError, zlib.error):
        pass
    except (gzip.BadGzipFile, UnicodeDecodeError, json.JSONDecodeError) as error:
        if not lines:
            raise refuse("results", str(file), f"cannot be read ({error})", "copy it again") from error
    return lines


def read_all(place: Path, name: str = RESULTS) -> list[dict[str, Any]]:
    """The lines of all files of that name in a folder and below it, or of the one that lies beside a file."""
    files = sorted(place.rglob(name)) if place.is_dir() else [place.with_name(name)]
    return [line for file in files for line in read_packed(file)]


def mend(file: Path) -> None:
    """Write a file that is to be added to anew, without what a kill cut short."""
    lines = read_packed(file)
    if lines:
        text = "".join(json.dumps(line) + "\n" for line in lines)
        write_whole(file, gzip.compress(text.encode()))


def question(about: Mapping[str, Any]) -> dict[str, Any]:
    """What must be the same in all calls for one table; more prompts and seeds may follow."""
    asked = {name: value for name, value in about["ask"].items() if name not in GROWING}
    return {**asked, "embedder": about["embedder"]}


def run_line(draw: Draw, scores: Mapping[str, Iterable[Score]]) -> dict[str, Any]:
    jobs = [JobAt(w.table, w.job.row, w.job.prompt, w.job.seed, w.job.key) for w in draw.wanted]
    told = {measure: {each.name: asdict(each) for each in said} for measure, said in scores.items()}
    return {"run": draw.key, "jobs": jobs, "scores": told}


def look_line(draw: Draw, look: Look) -> dict[str, Any]:
    """Pictures as their differences from row to row, packed: a sixth of the bytes."""
    steps = np.diff(look.pictures, axis=1, prepend=np.uint8(0))
    return {
        "run": draw.key,
        "moments": list(look.moments),
        "shape": list(look.pictures.shape),
        "pictures": base64.b64encode(zlib.compress(steps.tobytes(), 9)).decode(),
        "bank": None if look.bank is None else [
            list(look.bank.ends), [list(held.items()) for held in look.bank.held], list(look.bank.cuts)
        ],
    }  # fmt: skip


def look_of(line: Mapping[str, Any]) -> Look:
    """What `look_line` wrote down."""
    steps = np.frombuffer(zlib.decompress(base64.b64decode(line["pictures"])), np.uint8)
    pictures = np.cumsum(steps.reshape(line["shape"]), axis=1, dtype=np.uint8)
    bank = None
    if line["bank"] is not None:
        ends, held, cuts = line["bank"]
        bank = BankHistory(ends, [dict(map(tuple, each)) for each in held], cuts)
    return Look(pictures, line["moments"], bank)
