"""This module serves the studio's page and the page /docs, which lists all routes and messages without any script.

The files are a fixed table, read once: no name from a client reaches the disk.
"""

from __future__ import annotations

from html import escape
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


def reference_page(api: dict[str, Any]) -> str:
    """Return the page of an OpenAPI description."""
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><title>recap studio: the interface</title>",
        '<link rel=stylesheet href="page/look.css">',
        "<h1>recap studio: the interface, version 1</h1>",
        '<p>The same for programs: <a href="openapi.json">openapi.json</a>. The stream is a WebSocket at',
        "<code>/v1/sessions/ID/stream</code>, which takes the messages of <code>commands</code>.</p>",
    ]
    for path, methods in sorted(api["paths"].items()):
        for method, about in methods.items():
            parts.append(f"<h2><code>{escape(method.upper())} {escape(path)}</code></h2>")
            parts.append(f"<p>{escape(about.get('description', ''))}</p>")
            parts.append(_fields(about.get("parameters", ())))
            body = about.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
            for schema in (body or {}).get("oneOf", [body] if body else []):
                parts.append(_message(schema))
    return "\n".join(part for part in parts if part)


def _fields(parameters: Any) -> str:
    named = [f"<code>{escape(each['name'])}</code> ({escape(_kind(each['schema']))})" for each in parameters]
    return f"<p>{', '.join(named)}</p>" if named else ""


def _message(schema: dict[str, Any]) -> str:
    """Return a table of the fields of a message."""
    needed = schema.get("required", ())
    rows = []
    for name, about in schema.get("properties", {}).items():
        default = "required" if name in needed else f"default {about.get('default')!r}"
        cells = (name, _kind(about), default)
        rows.append("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in cells) + "</tr>")
    text = escape(schema.get("description", schema.get("title", "")))
    return f"<p>{text}</p><table>{''.join(rows)}</table>"


def _kind(about: dict[str, Any]) -> str:
    if "const" in about:
        return repr(about["const"])
    if "enum" in about:
        return " or ".join(map(repr, about["enum"]))
    if "anyOf" in about:
        return " or ".join(_kind(each) for each in about["anyOf"])
    if about.get("type") == "array":
        return f"list of {_kind(about.get('items', {}))}"
    return str(about.get("type", "any"))
