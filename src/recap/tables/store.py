"""The state of a sweep: one SQLite file that survives kill -9 of anybody at any moment.

A job is waiting, claimed or done, or has failed too often. Whoever claims one holds a token and must show it to
report; a claim ends with its lease unless the holder keeps saying that it lives, and at once if the holder is a dead
process of this machine. So a job is never lost, and a result that comes too late finds that its claim is gone: no job
is done twice.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import sqlite3
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from recap.errors import refuse
from recap.tables.jobs import Job, Result, canonical

FILE = "sweep.sqlite"
VERSION = 1

_SCHEMA = """
CREATE TABLE IF NOT EXISTS about (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS jobs (
    key TEXT PRIMARY KEY, place INTEGER NOT NULL, payload TEXT NOT NULL,
    state TEXT NOT NULL DEFAULT 'waiting', not_before REAL NOT NULL DEFAULT 0,
    failures INTEGER NOT NULL DEFAULT 0, crashes INTEGER NOT NULL DEFAULT 0, error TEXT,
    token TEXT, owner TEXT, lease REAL, began REAL, seconds REAL, result TEXT);
CREATE INDEX IF NOT EXISTS by_state ON jobs (state, not_before, place);
"""


@dataclass(frozen=True, slots=True)
class Rules:
    """When to give up on somebody, and on a job."""

    lease_s: float = 60.0  # without a sign of life for so long, a claim is void
    most_failures: int = 3  # exceptions
    most_crashes: int = 6  # workers that died over it while whoever started them lived
    backoff_s: float = 2.0  # before the first retry; doubled for each further one

    def delay(self, tries: int) -> float:
        return float(self.backoff_s * 2 ** max(0, tries - 1))


class Claim(NamedTuple):
    key: str
    token: str
    payload: dict[str, Any]


class Counts(NamedTuple):
    waiting: int
    claimed: int
    done: int
    failed: int
    retries: int

    @property
    def total(self) -> int:
        return self.waiting + self.claimed + self.done + self.failed


class Store:
    """One process's connection; every process, and every thread of one, opens its own."""

    def __init__(self, folder: Path, rules: Rules | None = None):
        self.folder = folder
        self.rules = rules or Rules()
        folder.mkdir(parents=True, exist_ok=True)
        # Autocommit, as transactions are opened by hand; writers wait for each other up to half a minute.
        self._db = sqlite3.connect(folder / FILE, timeout=30, isolation_level=None, check_same_thread=False)
        try:
            self._db.execute("PRAGMA journal_mode=WAL")
            # Written through at checkpoints only: enough against killed processes; a power cut may lose the
            # last results, never the file, and what is lost is done again.
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.executescript(_SCHEMA)
        except sqlite3.DatabaseError as error:
            self._db.close()
            limit = f"cannot be read ({error})"
            raise refuse("sweep", str(folder / FILE), limit, "move it away to start anew") from error
        self._db.row_factory = sqlite3.Row

    def close(self) -> None:
        self._db.close()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """A transaction that excludes other writers from its first read on."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    def begin(self, work: str) -> None:
        """Say what the jobs are done by; a folder of other work is refused."""
        with self._writing():
            for name, value in (("version", str(VERSION)), ("work", work)):
                row = self._db.execute("SELECT value FROM about WHERE name = ?", (name,)).fetchone()
                if row is None:
                    self._db.execute("INSERT INTO about VALUES (?, ?)", (name, value))
                elif row["value"] != value:
                    limit = f"it holds a sweep of another {name} ({row['value']})"
                    raise refuse("sweep", str(self.folder), limit, "choose another folder")

    def add(self, jobs: Sequence[Job]) -> int:
        """Add what is not there yet; returns how many that were."""
        keys = {job.key for job in jobs}
        if len(keys) != len(jobs):
            raise refuse("jobs", len(jobs), f"only {len(keys)} of them differ", "name each job once")
        with self._writing():
            before = self._db.total_changes
            place = self._db.execute("SELECT COALESCE(MAX(place) + 1, 0) FROM jobs").fetchone()[0]
            self._db.executemany(
                "INSERT OR IGNORE INTO jobs (key, place, payload) VALUES (?, ?, ?)",
                [(job.key, place + i, job.payload) for i, job in enumerate(jobs)],
            )
            return self._db.total_changes - before

    def claim(self, owner: str) -> Claim | None:
        """The next job that may be done now, if there is one."""
        now, token = time.time(), secrets.token_hex(8)
        with self._writing():
            row = self._db.execute(
                "SELECT key, payload FROM jobs WHERE state = 'waiting' AND not_before <= ? ORDER BY place LIMIT 1",
                (now,),
            ).fetchone()
            if row is None:
                return None
            self._db.execute(
                "UPDATE jobs SET state = 'claimed', token = ?, owner = ?, lease = ?, began = ? WHERE key = ?",
                (token, owner, now + self.rules.lease_s, now, row["key"]),
            )
        return Claim(row["key"], token, json.loads(row["payload"]))

    def beat(self, claim: Claim) -> bool:
        """A sign of life; False if the claim is no longer held."""
        renewed = self._db.execute(
            "UPDATE jobs SET lease = ? WHERE key = ? AND token = ? AND state = 'claimed'",
            (time.time() + self.rules.lease_s, claim.key, claim.token),
        )
        return renewed.rowcount == 1

    def finish(self, claim: Claim, result: Result) -> bool:
        """Hand in a result; False, and nothing changes, if the claim is no longer held."""
        text = canonical(result)
        kept = self._db.execute(
            "UPDATE jobs SET state = 'done', result = ?, seconds = ? - began, token = NULL, owner = NULL, "
            "lease = NULL, error = NULL WHERE key = ? AND token = ? AND state = 'claimed'",
            (text, time.time(), claim.key, claim.token),
        )
        return kept.rowcount == 1

    def fail(self, claim: Claim, error: str) -> None:
        """The job raised: try again later, or give up."""
        with self._writing():
            row = self._held(claim)
            if row is not None:
                self._put_back(row, error, failures=row["failures"] + 1, crashes=row["crashes"])

    def release(self, claim: Claim, why: str) -> None:
        """Whoever did the job died over it: try again later, or give up."""
        with self._writing():
            row = self._held(claim)
            if row is not None:
                self._put_back(row, why, failures=row["failures"], crashes=row["crashes"] + 1)

    def release_owner(self, owner: str, why: str) -> None:
        """As `release`, of all that a worker held."""
        with self._writing():
            query = "SELECT * FROM jobs WHERE state = 'claimed' AND owner = ?"
            for row in self._db.execute(query, (owner,)).fetchall():
                self._put_back(row, why, failures=row["failures"], crashes=row["crashes"] + 1)

    def recover(self, known: Collection[str] = ()) -> int:
        """Free the claims of the dead: leases that ran out, and processes of this machine that are gone.

        It is nobody's fault when a whole sweep was stopped, so this counts for nothing. Whoever tends the `known`
        workers notices their deaths, and counts them.
        """
        now, freed = time.time(), 0
        with self._writing():
            for row in self._db.execute("SELECT * FROM jobs WHERE state = 'claimed'").fetchall():
                gone = row["owner"] not in known and is_dead(row["owner"])
                if gone or row["lease"] < now:
                    freed += 1
                    self._wait(row["key"], 0.0)
        return freed

    def _held(self, claim: Claim) -> Any:
        query = "SELECT * FROM jobs WHERE key = ? AND token = ? AND state = 'claimed'"
        return self._db.execute(query, (claim.key, claim.token)).fetchone()

    def _wait(self, key: str, not_before: float) -> None:
        self._db.execute(
            "UPDATE jobs SET state = 'waiting', token = NULL, owner = NULL, lease = NULL, not_before = ? "
            "WHERE key = ?",
            (not_before, key),
        )

    def _put_back(self, row: Any, error: str, *, failures: int, crashes: int) -> None:
        key = row["key"]
        self._db.execute(
            "UPDATE jobs SET failures = ?, crashes = ?, error = ? WHERE key = ?",
            (failures, crashes, error, key),
        )
        self._wait(key, time.time() + self.rules.delay(failures + crashes))
        if failures >= self.rules.most_failures or crashes >= self.rules.most_crashes:
            self._db.execute("UPDATE jobs SET state = 'failed' WHERE key = ?", (key,))

    def retry_failed(self) -> int:
        """Give the jobs that were given up another chance."""
        return self._db.execute(
            "UPDATE jobs SET state = 'waiting', failures = 0, crashes = 0, not_before = 0 WHERE state = 'failed'"
        ).rowcount

    def counts(self) -> Counts:
        rows = self._db.execute("SELECT state, COUNT(*) AS n FROM jobs GROUP BY state").fetchall()
        by_state = {row["state"]: row["n"] for row in rows}
        retries = self._db.execute("SELECT COALESCE(SUM(failures + crashes), 0) FROM jobs").fetchone()[0]
        waiting, claimed, done, failed = (
            by_state.get(state, 0) for state in ("waiting", "claimed", "done", "failed")
        )
        return Counts(waiting, claimed, done, failed, retries)

    def results(self, jobs: Sequence[Job]) -> list[Result | None]:
        """Of these jobs, in their order; None where there is none yet."""
        rows = self._db.execute("SELECT key, result FROM jobs WHERE state = 'done'").fetchall()
        texts = {row["key"]: row["result"] for row in rows}
        return [json.loads(texts[job.key]) if job.key in texts else None for job in jobs]

    def errors(self) -> dict[str, str]:
        """Why jobs were given up, by key."""
        rows = self._db.execute(
            "SELECT key, error FROM jobs WHERE state = 'failed' ORDER BY place"
        ).fetchall()
        return {row["key"]: row["error"] or "unknown" for row in rows}

    def job_seconds(self) -> list[float]:
        """How long the finished jobs took."""
        rows = self._db.execute("SELECT seconds FROM jobs WHERE state = 'done'").fetchall()
        return [float(row["seconds"]) for row in rows]


def own_name() -> str:
    """Who this process is: machine, number, and when it began, since numbers are used again."""
    return f"{socket.gethostname()}/{os.getpid()}/{_began(os.getpid())}"


def name_of(pid: int) -> str:
    """As `own_name`, of another process of this machine."""
    return f"{socket.gethostname()}/{pid}/{_began(pid)}"


def is_dead(owner: str) -> bool:
    """Whether a process of this machine is known to be gone; of other machines nothing is known."""
    host, pid, began = owner.rsplit("/", 2)
    if host != socket.gethostname():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # somebody else's: the number was used again
        return True
    return began != "" and _began(int(pid)) != began


def _began(pid: int) -> str:
    """The start of a process in clock ticks since boot, "" where the system does not tell; "gone" for zombies."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    fields = text.rpartition(")")[2].split()  # the name before it may hold spaces
    return "gone" if fields[0] in "ZX" else fields[19]
