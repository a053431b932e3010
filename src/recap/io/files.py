"""This module writes files that are complete or absent, and finds the folder for fetched files.

Everything is written under a hidden name next to its final path and renamed when it is complete, so a reader or a
second run never finds half a result. `OSError` (no permission, no space) is not caught.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from recap.errors import refuse

OFFLINE = "RECAP_OFFLINE"
# The file with which a process locks a folder.
LOCK = ".lock"
_PREFIX = ".recap-"
# Bytes hashed between two reports.
_PIECE = 1 << 22


def from_home(path: str | Path) -> Path:
    """Return a path with the home folder for its ~; that of an unknown user stays, and is not found later."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def weights_folder() -> Path:
    """Return $RECAP_HOME, or `recap` in the user's cache."""
    if home := os.environ.get("RECAP_HOME"):
        return from_home(home)
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # By the XDG rules a relative path is invalid and must be ignored.
    return (cache if cache.is_absolute() else Path.home() / ".cache") / "recap"


def is_offline() -> bool:
    """Tell whether $RECAP_OFFLINE forbids the network: any value except an empty one, 0, false or no."""
    return os.environ.get(OFFLINE, "").strip().lower() not in ("", "0", "false", "no")


def sha256_of(path: Path, advance: Callable[[int], None]) -> str:
    """Hash a file in hexadecimal; `advance` is called with the number of bytes read since its last call."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
            advance(len(piece))
    return digest.hexdigest()


@contextmanager
def staged_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to; it becomes `path` on success and is deleted on failure."""
    path = _resolved(path)
    if path.is_dir():
        raise refuse("output file", str(path), "it is a folder", "name a file in it")
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = _hidden(path)
    try:
        yield staged
        _flush(staged)
        staged.replace(path)
    except BaseException:
        staged.unlink(missing_ok=True)
        raise


def write_whole(path: Path, data: bytes) -> None:
    """Write a file in one step: readers see the old content or the new content, never a part."""
    with staged_file(path) as staged:
        staged.write_bytes(data)


def append_line(path: Path, record: Mapping[str, Any]) -> bytes:
    """Append a record to a file of JSON lines, and return the line."""
    line = json.dumps(record).encode() + b"\n"
    with path.open("ab") as file:
        file.write(line)
    return line


@contextmanager
def staged_folder(out: Path, names: Collection[str]) -> Iterator[Path]:
    """Yield a temporary folder that replaces `out` on success; on failure `out` stays as it was.

    An existing `out` is replaced only if it contains nothing but `names`, the files of an earlier result.
    """
    out = _resolved(out)
    # Checked before the work too, so that a refusal comes at once.
    _check_replaceable(out, names)
    out.parent.mkdir(parents=True, exist_ok=True)
    staged = _hidden(out)
    staged.mkdir()
    try:
        yield staged
        _check_replaceable(out, names)
        _swap(staged, out)
    except BaseException:
        shutil.rmtree(staged, ignore_errors=True)
        raise


def is_vacant(folder: Path, ignored: Collection[str] = ()) -> bool:
    """Tell whether a folder has nothing but `ignored` names and what a killed process left: a lock, half a file."""
    names = {path.name for path in folder.iterdir() if not path.name.startswith(_PREFIX)}
    return names <= {LOCK, *ignored}


def check_plain(folder: Path, field: str) -> None:
    """Refuse a folder with links or devices in it: through them, files elsewhere would be read or replaced."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                check_plain(Path(entry.path), field)
            elif not entry.is_file(follow_symlinks=False):
                limit = "is a link or a device, and a run's files are its own"
                raise refuse(field, entry.path, limit, "put the file itself in its place, or delete it")


def remove_strays(folder: Path) -> None:
    """Delete half-written files that a killed process left in a folder to which no other process writes."""
    for stray in folder.glob(f"{_PREFIX}*"):
        stray.unlink(missing_ok=True)


def _resolved(path: Path) -> Path:
    # Links are followed, so that the target of a link is replaced and the link survives.
    return from_home(path).resolve()


def _hidden(path: Path) -> Path:
    # The suffix stays, because some writers choose their format by it; the name does not, because it may already
    # be as long as the file system allows.
    return path.parent / f"{_PREFIX}{secrets.token_hex(8)}{path.suffix[:16]}"


def _flush(path: Path) -> None:
    # Windows flushes only what is open for writing.
    with path.open("r+b" if os.access(path, os.W_OK) else "rb") as file:
        os.fsync(file.fileno())


def _check_replaceable(out: Path, names: Collection[str]) -> None:
    if not out.exists():
        return
    if not out.is_dir():
        raise refuse("--out", str(out), "it is a file, and results are a folder", "choose another --out")
    if out == Path.cwd():
        raise refuse("--out", str(out), "it is the current folder", "name a folder in it")
    foreign = sorted(path.name for path in out.iterdir() if path.name not in names)
    if foreign:
        limit = f"it contains {foreign[0]!r}, which is not part of an earlier result"
        raise refuse("--out", str(out), limit, "choose another --out, or move that file away")


def _swap(staged: Path, out: Path) -> None:
    for file in staged.rglob("*"):
        if file.is_file():
            _flush(file)
    if not out.exists():
        staged.rename(out)
        return
    # A folder cannot be renamed over a full one: the old result is moved away, and back if the new one fails.
    old = _hidden(out)
    out.rename(old)
    try:
        staged.rename(out)
    except BaseException:
        old.rename(out)
        raise
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def alone_in(folder: Path, field: str, limit: str, remedy: str) -> Iterator[None]:
    """Refuse other processes in this folder; the system releases the lock with the process, however it ends."""
    try:
        import fcntl
    except ImportError:
        # Windows has no such locks.
        yield
        return
    path = folder / LOCK
    # Opened to append and not through a link: whatever file has this name, nothing in it is lost.
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644), "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise refuse(field, str(folder), limit, remedy) from error
        # The file is removed with the lock: one that was opened just before that has no name, and locks nothing.
        if os.fstat(file.fileno()).st_nlink == 0:
            raise refuse(field, str(folder), limit, remedy)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def read_json(path: Path) -> Any:
    """Read a JSON file that a user named or may have edited."""
    if path.exists() and not path.is_file() and not path.is_dir() and not _is_stream(path):
        raise refuse("file", str(path), "is not a regular file", "save it as a file first, or use /dev/stdin")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise refuse("file", str(path), f"cannot be read ({error.strerror})", "check the path") from error
    except UnicodeDecodeError as error:
        raise refuse("file", str(path), "is not text", "give a JSON file") from error
    except (ValueError, RecursionError) as error:
        raise refuse("file", str(path), f"is not JSON ({error})", "correct it or write it again") from error


def _is_stream(path: Path) -> bool:
    """Tell whether a path is a stream that the shell opened, to which another process writes."""
    return str(path) == "/dev/stdin" or path.parent in (Path("/dev/fd"), Path("/proc/self/fd"))
