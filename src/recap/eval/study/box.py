"""The box in which a server keeps votes: a file that is only added to."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

from recap.errors import RecapError, refuse
from recap.eval.study.design import Study
from recap.eval.study.votes import REMEDY, VoteLine, check_chain, is_half_line, parse_lines, read_line


class BallotBox:
    """Keeps votes in a file that is only added to: a line that was taken is on the disk, or none of it is."""

    MOST_RATERS = 5000

    def __init__(self, path: Path, study: Study) -> None:
        self.path, self.study = path, study
        self._lines: dict[str, list[bytes]] = {}
        self._checks: dict[str, str] = {}
        self._names: dict[str, str] = {}
        self._sheets: dict[str, int] = {}
        if path.is_file():
            self._read(path.read_bytes())

    def _read(self, data: bytes) -> None:
        """Read what the file holds; what is no file of this study's votes is refused, and left as it is."""
        rest = data[data.rfind(b"\n") + 1 :]
        # What a killed process left of its last line: its page got no confirmation of it.
        whole = data.removesuffix(rest) if is_half_line(rest, self.study) else data
        for line in parse_lines(whole, self.path, self.study) if whole else ():
            self._check(line)
            self._note(line)
        if not data or data.endswith(b"\n"):
            return
        with self.path.open("r+b") as file:
            file.truncate(len(whole))
            file.seek(len(whole))
            # An editor may have taken the end of the last line.
            file.write(b"\n" if whole == data else b"")

    def _check(self, line: VoteLine) -> bool:
        """Tell whether a line is new; refuses one that does not follow, or whose name another rater has."""
        session, number = line.values["session"], line.values["n"]
        own = self._lines.get(session, [])
        if number < len(own):
            if own[number] != line.data:
                limit = f"vote {number} of this rater was taken before, with other words"
                raise refuse("votes", line.place, limit, REMEDY)
            return False
        check_chain(line, self._checks.get(session, self.study.digest), len(own))
        return True

    def _note(self, line: VoteLine) -> None:
        session = line.values["session"]
        self._lines.setdefault(session, []).append(line.data)
        self._checks[session] = line.check
        if line.values["n"] == 0:
            self._names.setdefault(line.values["rater"].strip().casefold(), session)
            self._sheets[session] = line.values["sheet"]

    def least_used_sheet(self) -> int:
        """Return the sheet that fewest raters have, so that sheets are used evenly."""
        used = Counter(self._sheets.values())
        return min(range(len(self.study.sheets)), key=lambda sheet: used[sheet])

    def is_taken(self, rater: str, session: str) -> bool:
        """Tell whether another rater has this name."""
        return self._names.get(rater.strip().casefold(), session) != session

    def add(self, data: bytes) -> int:
        """Take the lines of a page that are not there yet; returns how many of that rater's are kept."""
        lines = [
            read_line(line, f"line {n}", self.study)
            for n, line in enumerate(data.splitlines(), 1)
            if line.strip()
        ]
        if not lines or len({line.values["session"] for line in lines}) != 1:
            limit = "must be one rater's, at least one"
            raise refuse("votes", f"{len(lines)} lines", limit, "send them by rater")
        session = lines[0].values["session"]
        if session not in self._lines:
            if len(self._lines) >= self.MOST_RATERS:
                limit = "the vote file has as many raters"
                raise refuse("raters", self.MOST_RATERS, limit, "serve the study with another --votes file")
            if lines[0].values["n"] == 0 and self.is_taken(lines[0].values["rater"], session):
                limit = "somebody else has taken part under this name"
                remedy = "choose another name, for example with a second initial"
                raise refuse("rater", lines[0].values["rater"], limit, remedy)
        before = len(self._lines.get(session, ())), self._checks.get(session)
        try:
            new = b""
            for line in lines:
                if self._check(line):
                    self._note(line)
                    new += line.data + b"\n"
            self._append(new)
        except (RecapError, OSError):
            self._forget(session, *before)
            raise
        return len(self._lines[session])

    def _forget(self, session: str, count: int, check: str | None) -> None:
        """Return to what is on the disk."""
        del self._lines.get(session, [])[count:]
        if check is not None:
            self._checks[session] = check
        else:
            self._lines.pop(session, None)
            self._checks.pop(session, None)
            self._sheets.pop(session, None)
            self._names = {name: own for name, own in self._names.items() if own != session}

    def _append(self, data: bytes) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab") as file:
            size = file.tell()
            try:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            except OSError:
                # A full disk keeps a part, which is cut off: the next line must not follow half a line.
                os.ftruncate(file.fileno(), size)
                raise
