"""This module serves the studio's page: a fixed table of files, read once; no name from a client reaches the disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import recap.show

PAGE = Path(__file__).parent / "page"
KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


def page_files() -> dict[str, tuple[bytes, str]]:
    """Return the files of the page by name, with their media types; the palette is that of all pages."""
    paths = [path for path in PAGE.iterdir() if path.suffix in KINDS]
    paths.append(Path(recap.show.__file__).parent / "look.css")
    return {path.name: (path.read_bytes(), KINDS[path.suffix]) for path in paths}


def add_page(app: Any) -> None:
    """Serve the page at `/` and what it needs at `/page/NAME`."""
    from fastapi import Response

    files = page_files()

    async def index() -> Response:
        return Response(files["index.html"][0], media_type="text/html")

    async def file(name: str) -> Response:
        if name not in files:
            return Response("there is no such file", status_code=404, media_type="text/plain")
        data, kind = files[name]
        return Response(data, media_type=kind)

    app.add_api_route("/", index, include_in_schema=False, response_model=None)
    app.add_api_route("/page/{name}", file, include_in_schema=False, response_model=None)
