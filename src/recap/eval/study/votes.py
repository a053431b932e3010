"""Votes are JSON lines that a rater's page writes one after the other; here they are checked and read.

The first line of a rater names rater and sheet, each later one has the answers to one trial; the last answers to a
trial count. A line ends with a checksum over itself and the checksum before it, so a changed, lost or added line is
found. This guards against slips and hand edits; a forger could compute it, too.
"""

from __future__ import annotations

import json
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from recap.errors import refuse
from recap.eval.study.design import VERSION, Study

A, B, TIE = "A", "B", "tie"
ANSWERS = (A, B, TIE)
MOST_LINE_BYTES = 16 * 1024
MOST_NAME = 60
LONGEST_S = 1e6
# How often a rater may answer, for each trial.
MOST_REVISIONS = 20
_END = re.compile(rb',"check":"([0-9a-f]{8})"\}\Z')
_SESSION = re.compile(r"[0-9a-f]{32}")
_WHEN = re.compile(r"[0-9TZ:.+-]{10,40}")
REMEDY = "put it back as the page wrote it, or leave that file out"


class VoteLine(NamedTuple):
    """Holds one line of a vote file: its place in words, its bytes without the end of line, and its values."""

    place: str
    data: bytes
    values: Mapping[str, Any]

    @property
    def check(self) -> str:
        return str(self.values["check"])


@dataclass(frozen=True, slots=True)
class Ballot:
    """Holds what one rater answered: trial -> question -> answer; and the seconds each trial took."""

    session: str
    rater: str
    sheet: int
    answers: dict[int, dict[str, str]] = field(default_factory=dict)
    took_s: dict[int, float] = field(default_factory=dict)


def seal(record: Mapping[str, Any], before: str) -> bytes:
    """Write a record as a line of votes; `before` is the checksum of the line before it, or the study's digest."""
    body = json.dumps(record, separators=(",", ":"), ensure_ascii=False).encode()[:-1]
    return body + f',"check":"{checksum(body, before)}"}}'.encode()


def checksum(body: bytes, before: str) -> str:
    """Return the checksum of a line without its own end, as the page computes it."""
    return f"{zlib.crc32(body, zlib.crc32(before.encode())):08x}"


def read_ballots(paths: Iterable[Path], study: Study) -> list[Ballot]:
    """Read the votes of all raters, in the order in which they began; the same votes in two files count once."""
    lines: dict[str, dict[int, VoteLine]] = {}
    for path in paths:
        for line in read_lines(path, study):
            own, number = lines.setdefault(line.values["session"], {}), line.values["n"]
            if own.setdefault(number, line).data != line.data:
                other = own[number].place
                limit = f"says something else than {other}, and both are vote {number} of one rater"
                raise refuse("votes", line.place, limit, REMEDY)
    return keep_apart([join_lines(own, study) for own in lines.values()])


def read_lines(path: Path, study: Study) -> list[VoteLine]:
    """Read the lines of a vote file, each by itself."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise refuse("votes", str(path), f"cannot be read ({error.strerror})", "check the path") from error
    rest = data[data.rfind(b"\n") + 1 :]
    if rest and is_half_line(rest, study):
        limit = "is half a line, as a server that was killed leaves it"
        remedy = "`recap study serve` with this file cuts it off, and its rater's page sends it again"
        raise refuse("votes", f"{path}, last line", limit, remedy)
    return parse_lines(data, path, study)


def parse_lines(data: bytes, path: Path, study: Study) -> list[VoteLine]:
    """Read lines out of what a vote file holds."""
    if not data.strip():
        raise refuse("votes", str(path), "the file is empty", "leave it out")
    return [
        read_line(line.removesuffix(b"\r"), f"{path}, line {number}", study)
        for number, line in enumerate(data.split(b"\n"), 1)
        if line.strip()
    ]


def is_half_line(data: bytes, study: Study) -> bool:
    """Tell whether this is the beginning of a line of this study's votes, without its end."""
    head = f'{{"v":{VERSION},"study":"{study.digest}"'.encode()
    return (data.startswith(head) or head.startswith(data)) and not _END.search(data)


def read_line(data: bytes, place: str, study: Study) -> VoteLine:
    """Read one line; refuses what no page of this study could have written."""
    if len(data) > MOST_LINE_BYTES:
        raise refuse("votes", place, f"is longer than {MOST_LINE_BYTES} bytes", REMEDY)
    try:
        values = json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise refuse("votes", place, "is not a line of votes (no JSON)", REMEDY) from error
    if not isinstance(values, dict) or not _END.search(data):
        raise refuse("votes", place, "is not a line of votes", REMEDY)
    if values.get("study") != study.digest:
        limit = f"is of the study {str(values.get('study'))[:40]!r}, and this is {study.digest!r}"
        raise refuse("votes", place, limit, "give the key of that study, or leave the file out")
    problem = _problem(values, study)
    if problem:
        raise refuse("votes", place, f"{problem}: no page wrote this", REMEDY)
    return VoteLine(place, data, values)


def _problem(values: dict[str, Any], study: Study) -> str:
    """Say what is impossible in a line, or nothing."""
    if values.get("v") != VERSION:
        return f"v is {values.get('v')!r:.40}"
    match values:
        case {"session": str(session), "n": int(number)}:
            if not _SESSION.fullmatch(session):
                return f"session is {session[:40]!r}"
            if isinstance(number, bool) or not 0 <= number <= MOST_REVISIONS * study.trials:
                return f"n is {number!r}"
        case _:
            return "session or n is missing"
    if values["n"] == 0:
        return _begin_problem(values, study)
    return _vote_problem(values, study)


def _begin_problem(values: dict[str, Any], study: Study) -> str:
    match values:
        case {"rater": str(rater), "sheet": int(sheet), "at": str(at)} if len(values) == 8:
            if not rater.strip() or len(rater) > MOST_NAME or not rater.isprintable():
                return f"rater is {rater[:MOST_NAME]!r}"
            if isinstance(sheet, bool) or not 0 <= sheet < len(study.sheets):
                return f"sheet is {sheet!r}, and there are {len(study.sheets)}"
            return "" if _WHEN.fullmatch(at) else f"at is {at[:40]!r}"
    return "rater, sheet or at is missing, or there is more"


def _vote_problem(values: dict[str, Any], study: Study) -> str:
    match values:
        case {"trial": int(trial), "answers": dict(answers), "took_s": took_s} if len(values) == 8:
            if isinstance(trial, bool) or not 0 <= trial < study.trials:
                return f"trial is {trial!r}, and there are {study.trials}"
            if answers.keys() != study.questions.keys():
                return f"answers are to {', '.join(map(repr, answers))[:80]}"
            wrong = [answer for answer in answers.values() if answer not in ANSWERS]
            if wrong:
                return f"an answer is {str(wrong[0])[:40]!r}, and answers are {', '.join(ANSWERS)}"
            good = (
                isinstance(took_s, int | float) and not isinstance(took_s, bool) and 0 <= took_s <= LONGEST_S
            )
            return "" if good else f"took_s is {str(took_s)[:40]!r}"
    return "trial, answers or took_s is missing, or there is more"


def check_chain(line: VoteLine, before: str, number: int) -> None:
    """Refuse a line that does not follow the one before it."""
    if line.values["n"] != number:
        limit = f"is vote {line.values['n']} of its rater, and vote {number} is missing"
        raise refuse("votes", line.place, limit, REMEDY)
    body = line.data[: -len(f',"check":"{line.check}"}}')]
    if checksum(body, before) != line.check:
        limit = "was changed since the page wrote it, or the line before it was"
        raise refuse("votes", line.place, limit, REMEDY)


def join_lines(lines: Mapping[int, VoteLine], study: Study) -> Ballot:
    """Join the lines of one rater, by their numbers."""
    before = study.digest
    ballot: Ballot | None = None
    for number, at in enumerate(sorted(lines)):
        line = lines[at]
        check_chain(line, before, number)
        before = line.check
        values = line.values
        if ballot is None:
            ballot = Ballot(values["session"], values["rater"].strip(), values["sheet"])
        else:
            ballot.answers[values["trial"]] = dict(values["answers"])
            ballot.took_s[values["trial"]] = float(values["took_s"])
    assert ballot is not None
    return ballot


def keep_apart(ballots: list[Ballot]) -> list[Ballot]:
    """Add the beginning of the session to names that several raters gave: they count as several."""
    names = Counter(ballot.rater.casefold() for ballot in ballots)
    return [
        replace(ballot, rater=f"{ballot.rater} ({ballot.session[:6]})")
        if names[ballot.rater.casefold()] > 1
        else ballot
        for ballot in ballots
    ]
