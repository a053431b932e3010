"""Files that are there whole or not at all, and the folder for those that the package fetches.

Everything is written under a hidden name beside its goal and renamed when it is finished, so a reader or a
second run never meets half a result. `OSError` (no permission, no space) passes through untouched.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from recap.errors import refuse

OFFLINE = "RECAP_OFFLINE"
LOCK = ".lock"  # the file by which a process has a folder to itself
_PREFIX = ".recap-"
_PIECE = 1 << 22  # bytes hashed between two reports


def weights_folder() -> Path:
    """$RECAP_HOME, or `recap` in the user's cache."""
    if home := os.environ.get("RECAP_HOME"):
        return Path(home).expanduser()
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The XDG rules say that a relative path there is invalid and to be ignored.
    return (cache if cache.is_absolute() else Path.home() / ".cache") / "recap"


def is_offline() -> bool:
    """Whether $RECAP_OFFLINE forbids the network: anything but nothing, 0, false or no."""
    return os.environ.get(OFFLINE, "").strip().lower() not in ("", "0", "false", "no")


def sha256_of(path: Path, advance: Callable[[int], None]) -> str:
    """Hash a file in hexadecimal; `advance` hears how many bytes were read since it was last called."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
            advance(len(piece))
    return digest.hexdigest()


@contextmanager
def staged_file(path: Path) -> Iterator[Path]:
    """A temporary path to write to; it becomes `path` on success and vanishes on failure."""
    path = _goal(path)
    if path.is_dir():
        raise refuse("output file", str(path), "it is a folder", "name a file in it")
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = _beside(path)
    try:
        yield staged
        _flush(staged)
        staged.replace(path)
    except BaseException:
        staged.unlink(missing_ok=True)
        raise


def write_whole(path: Path, data: bytes) -> None:
    """Write a file in one step: readers see the old content or the new, never a part."""
    with staged_file(path) as staged:
        staged.write_bytes(data)


@contextmanager
def staged_folder(out: Path, names: Collection[str]) -> Iterator[Path]:
    """A temporary folder that takes the place of `out` on success; on failure `out` stays as it was.

    An old `out` is replaced only if it holds nothing but files of these `names`, those of an earlier result.
    """
    out = _goal(out)
    _check_replaceable(out, names)  # before the work, so that nobody waits for a refusal
    out.parent.mkdir(parents=True, exist_ok=True)
    staged = _beside(out)
    staged.mkdir()
    try:
        yield staged
        _check_replaceable(out, names)
        _swap(staged, out)
    except BaseException:
        shutil.rmtree(staged, ignore_errors=True)
        raise


def remove_strays(folder: Path) -> None:
    """Delete half-written files that a killed process left in a folder nobody else is writing to."""
    for stray in folder.glob(f"{_PREFIX}*"):
        stray.unlink(missing_ok=True)


def _goal(path: Path) -> Path:
    # Through links, so that a linked result is renewed where it really lies and the link survives.
    return Path(path).expanduser().resolve()


def _beside(path: Path) -> Path:
    # The suffix stays, because some writers choose their format by it; the name does not, as it may be at the
    # file system's limit already.
    return path.parent / f"{_PREFIX}{secrets.token_hex(8)}{path.suffix[:16]}"


def _flush(path: Path) -> None:
    with path.open("rb") as file:
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
        limit = f"it holds {foreign[0]!r}, which is not part of an earlier result"
        raise refuse("--out", str(out), limit, "choose another --out, or move that away")


def _swap(staged: Path, out: Path) -> None:
    for file in staged.rglob("*"):
        if file.is_file():
            _flush(file)
    if not out.exists():
        staged.rename(out)
        return
    # A folder cannot be renamed over a full one: the old result steps aside, and back if the new one fails.
    old = _beside(out)
    out.rename(old)
    try:
        staged.rename(out)
    except BaseException:
        old.rename(out)
        raise
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def alone_in(folder: Path, field: str, limit: str, remedy: str) -> Iterator[None]:
    """One process per folder, others are refused; the system drops the lock with the process, however it ends."""
    try:
        import fcntl
    except ImportError:  # no such locks on Windows
        yield
        return
    path = folder / LOCK
    with path.open("w") as file:
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
