"""The page /docs: all routes and messages, written from the OpenAPI description; plain HTML without any script."""

from __future__ import annotations

from html import escape
from typing import Any


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
