"""A snapshot store keeps bytes by name where every replica finds them: in a folder, or behind an fsspec address.

Every object begins with the SHA-256 of what follows, so that damage is found when it is read. An object is written
whole or not at all: in a folder by renaming, elsewhere as the address's own kind of storage does it.
"""

from __future__ import annotations

import shutil
import uuid
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from recap.errors import refuse
from recap.io.extras import import_extra
from recap.io.files import write_whole
from recap.io.run_folder import digest_of

DIGEST_BYTES = 64


class SnapshotStore(ABC):
    """Keeps sealed objects by name; names are parts joined by `/`. Subclasses know where the bytes are."""

    def write(self, name: str, data: bytes) -> None:
        """Seal and keep an object, in place of an older one."""
        self._put(name, _digest(data) + data)

    def read(self, name: str) -> bytes | None:
        """Return an object, checked; None if there is none."""
        try:
            sealed = self._get(name)
        except FileNotFoundError:
            return None
        data = sealed[DIGEST_BYTES:]
        if _digest(data) != sealed[:DIGEST_BYTES]:
            limit = "its digest is not that of its bytes: it is damaged"
            raise refuse("snapshot", name, limit, "delete the session, or put the file back")
        return data

    @abstractmethod
    def _put(self, name: str, sealed: bytes) -> None: ...

    @abstractmethod
    def _get(self, name: str) -> bytes: ...

    @abstractmethod
    def names(self, prefix: str) -> list[str]:
        """Return the names below a prefix, sorted."""

    @abstractmethod
    def children(self, prefix: str) -> list[str]:
        """Return the first parts of the names below a prefix, sorted."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Delete an object, if it is there."""

    @abstractmethod
    def delete_all(self, prefix: str) -> None:
        """Delete every object below a prefix."""


def _digest(data: bytes) -> bytes:
    return digest_of(data).encode()


class FolderStore(SnapshotStore):
    """Keeps objects as files of a folder that all machines see."""

    def __init__(self, root: Path) -> None:
        self._root = root.expanduser().resolve()
        self._root.mkdir(parents=True, exist_ok=True)

    def _put(self, name: str, sealed: bytes) -> None:
        write_whole(self._root / name, sealed)

    def _get(self, name: str) -> bytes:
        return (self._root / name).read_bytes()

    def names(self, prefix: str) -> list[str]:
        found = (self._root / prefix).rglob("*")
        # What is being written has a hidden name.
        files = (path for path in found if not path.name.startswith(".") and path.is_file())
        return sorted(path.relative_to(self._root).as_posix() for path in files)

    def children(self, prefix: str) -> list[str]:
        folder = self._root / prefix
        return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []

    def delete(self, name: str) -> None:
        (self._root / name).unlink(missing_ok=True)

    def delete_all(self, prefix: str) -> None:
        shutil.rmtree(self._root / prefix, ignore_errors=True)


class AddressStore(SnapshotStore):
    """Keeps objects behind an address that fsspec knows, such as `s3://bucket/folder`."""

    def __init__(self, address: str) -> None:
        fsspec = import_extra("fsspec", f"the store {address}", "ray")
        try:
            self._files: Any
            self._files, self._root = fsspec.core.url_to_fs(address)
        except (ImportError, ValueError) as error:
            limit = f"fsspec cannot open it ({error})"
            remedy = "install what that address needs, or name a folder"
            raise refuse("--store", address, limit, remedy) from error
        self._root = self._root.rstrip("/")

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}".rstrip("/")

    def _put(self, name: str, sealed: bytes) -> None:
        path = self._path(name)
        self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
        self._files.pipe_file(path, sealed)

    def _get(self, name: str) -> bytes:
        data: bytes = self._files.cat_file(self._path(name))
        return data

    def names(self, prefix: str) -> list[str]:
        self._files.invalidate_cache()
        return sorted(path.removeprefix(f"{self._root}/") for path in self._files.find(self._path(prefix)))

    def children(self, prefix: str) -> list[str]:
        start = f"{prefix}/"
        return sorted({name.removeprefix(start).split("/")[0] for name in self.names(prefix)})

    def delete(self, name: str) -> None:
        if self._files.exists(self._path(name)):
            self._files.rm_file(self._path(name))

    def delete_all(self, prefix: str) -> None:
        self._files.invalidate_cache()
        if self._files.exists(self._path(prefix)):
            self._files.rm(self._path(prefix), recursive=True)


def open_store(address: str) -> SnapshotStore:
    """Open a store: an address with `://`, or a folder."""
    return AddressStore(address) if "://" in address else FolderStore(Path(address))


def check_store(address: str) -> None:
    """Refuse a store that cannot be written to, before replicas are started that would all fail."""
    name = f"check/{uuid.uuid4().hex}"
    try:
        store = open_store(address)
        store.write(name, b"kept")
        kept = store.read(name)
        store.delete(name)
    except OSError as error:
        limit = f"nothing can be kept there ({error})"
        raise refuse("--store", address, limit, "name a folder you may write to") from error
    if kept != b"kept":
        raise refuse("--store", address, "what was written there is not found again", "name another store")
