"""Results of batches on their way to another machine: lines of JSON, packed, added to as they come.

`results.jsonl.gz` begins with what was asked and by what it was made; then a line per run with the scores of all
measures and the jobs they are for, and a line per row that could not be drawn or was given up. `looks.jsonl.gz` holds
what pages show. Every addition is a packed part of its own, so a kill loses no more than the last.
"""

from __future__ import annotations

import base64
import gzip
import json
import re
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from recap.errors import refuse
from recap.eval.scores import Score
from recap.io.files import write_whole
from recap.show.bank_chart import BankHistory
from recap.tables.draws import Draw
from recap.tables.folder import BEFORE, GROWING
from recap.tables.looks import Look

RESULTS, LOOKS = "results.jsonl.gz", "looks.jsonl.gz"
MADE_BY = ("recap", "torch")
HEADER = b"\x1f\x8b\x08\x00"  # how packed parts begin
PIECE = 1 << 14  # bytes unpacked at once


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
    """All lines; of a last part cut short by a kill those that are whole. Damage elsewhere is refused."""
    data = file.read_bytes() if file.is_file() else b""
    lines: list[dict[str, Any]] = []
    begin, number = 0, 1
    while begin < len(data):
        last = data.find(HEADER, begin + 1) < 0
        try:
            text, begin = _unpack(data, begin, may_be_cut=last)
        except zlib.error as error:
            # A first part may be all that there is, since `mend` makes one of many: it is not to be dropped.
            if last and number > 1:
                break
            raise _damaged(file, number, error) from error
        lines += _lines(text, file, number)
        number += 1
    return lines


def _unpack(data: bytes, begin: int, *, may_be_cut: bool) -> tuple[bytes, int]:
    """The text of the part that begins there, whole lines of it if it is cut short, and where it ends."""
    unpacker, texts, view = zlib.decompressobj(wbits=31), [], memoryview(data)
    while not unpacker.eof and begin < len(data):
        # In pieces, as what follows the part is copied with the last of them.
        texts.append(unpacker.decompress(view[begin : begin + PIECE]))
        begin = min(begin + PIECE, len(data))
    text = b"".join(texts)
    if unpacker.eof:
        return text, begin - len(unpacker.unused_data)
    if not may_be_cut:
        raise zlib.error("it has no end")
    return text[: text.rfind(b"\n") + 1], begin


def _lines(text: bytes, file: Path, number: int) -> list[dict[str, Any]]:
    try:
        lines = [json.loads(line) for line in text.splitlines()]
    except ValueError as error:
        raise _damaged(file, number, error) from error
    for line in lines:
        if not isinstance(line, dict):
            limit = f"holds the line {str(line)[:40]!r}, which is no object"
            raise refuse("results", str(file), limit, "name a file that batches wrote")
    return lines


def _damaged(file: Path, number: int, error: Exception) -> ValueError:
    limit = f"cannot be read: part {number} is damaged ({error})"
    return refuse("results", str(file), limit, "copy it again, or name another")


def read_all(place: Path) -> list[dict[str, Any]]:
    """The results of a file, or of all files of that name in a folder and below it, those numbered higher later."""
    if not place.exists():
        raise refuse("--import", str(place), "there is no such file or folder", "check the path")
    files = _below(place, RESULTS) if place.is_dir() else [place]
    return [line for file in files for line in read_packed(file)]


def read_looks(place: Path) -> list[dict[str, Any]]:
    """The looks in a folder and below it, or of the file that lies beside one of results."""
    files = _below(place, LOOKS) if place.is_dir() else [place.with_name(LOOKS)]
    return [line for file in files for line in read_packed(file)]


def _below(folder: Path, name: str) -> list[Path]:
    """In an order that knows numbers: 2 before 10."""

    def words(file: Path) -> list[tuple[int, str]]:
        parts = re.findall(r"\d+|\D+", file.relative_to(folder).as_posix())
        return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]

    return sorted(folder.rglob(name), key=words)


def mend(file: Path) -> None:
    """Write a file that is to be added to anew, without what a kill cut short."""
    if file.is_file():
        text = "".join(json.dumps(line) + "\n" for line in read_packed(file))
        write_whole(file, gzip.compress(text.encode()))


def asked_before(places: Iterable[Path]) -> dict[str, Any]:
    """What the last earlier call in these folders asked for; nothing where there was none."""
    lines = [line for place in places if place.exists() for line in read_all(place)]
    abouts = [line["about"] for line in lines if "about" in line]
    asked = abouts[-1].get("ask") if abouts and isinstance(abouts[-1], dict) else None
    return {**BEFORE, **asked} if isinstance(asked, dict) else {}


def question(about: Mapping[str, Any]) -> dict[str, Any]:
    """What must be the same in all calls for one table, the code too; more prompts and seeds may follow."""
    try:
        asked = {**BEFORE, **{name: value for name, value in about["ask"].items() if name not in GROWING}}
        made = {name: each[name] for each in about["tables"].values() for name in MADE_BY}
        return {**asked, "embedder": about["embedder"], **made}
    except (AttributeError, KeyError, TypeError) as error:
        limit = f"it does not say what was asked ({type(error).__name__}: {error})"
        raise refuse("results", str(about)[:60], limit, "name a file that batches wrote") from error


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
