"""The page of an inspected clip, and what all pages share: no server, no request, only the file itself."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources

from recap.show.png import png_bytes
from recap.show.sheet import Patches, sprite
from recap.show.timeline import Timeline, draw_timeline

_SPRITE_COLUMNS = 32


@dataclass(frozen=True, slots=True)
class Story:
    """All that the page of a clip shows."""

    title: str
    subtitle: str
    # Source of the player: a data URI or a file name.
    video: str
    remarks: Sequence[str]
    # Pairs of a value and what it is.
    numbers: Sequence[tuple[str, str]]
    settings: Mapping[str, object]
    timeline: Timeline
    grid: tuple[int, int]
    patches: Patches


def build_page(story: Story) -> str:
    """Build the page as HTML."""
    holes = {
        "title": html.escape(story.title),
        "subtitle": html.escape(story.subtitle),
        "video": html.escape(story.video),
        "remarks": "".join(
            f"<p>{html.escape(remark[0].upper() + remark[1:])}</p>" for remark in story.remarks if remark
        ),
        "numbers": "".join(
            f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd></div>"
            for value, name in story.numbers
        ),
        "settings": table_rows(story.settings),
        "timeline": draw_timeline(story.timeline),
        "data": script_data(
            {
                "duration": round(story.timeline.duration, 3),
                "grid": story.grid,
                **bank_data(story.patches),
            }
        ),
    }
    return fill_template("page.html", holes)


def table_rows(values: Mapping[str, object]) -> str:
    """Write names and values as rows of a table; a table in a value becomes rows with dotted names."""
    rows: list[str] = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            rows.append(table_rows({f"{name}.{key}": inner for key, inner in value.items()}))
        else:
            text = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
            rows.append(f"<tr><th>{html.escape(name)}</th><td>{html.escape(text)}</td></tr>")
    return "".join(rows)


def fill_template(name: str, holes: Mapping[str, str]) -> str:
    """Fill the {{holes}} of a template of this folder; a hole named like a file is filled with that file."""
    folder = resources.files("recap.show")

    def fill(template: str) -> str:
        # One pass over the template: a hole's content is never searched for holes.
        pieces = template.split("{{")
        filled = [pieces[0]]
        for piece in pieces[1:]:
            hole, rest = piece.split("}}", 1)
            content = holes[hole] if hole in holes else folder.joinpath(hole).read_text(encoding="utf-8")
            filled += [content, rest]
        return "".join(filled)

    template = folder.joinpath(name).read_text(encoding="utf-8")
    # Only what stands in the template itself is allowed, never what a hole may have brought in.
    parts = {tag: re.findall(f"<{tag}>(.*?)</{tag}>", template, re.DOTALL) for tag in ("script", "style")}
    policy = content_policy([fill(text) for text in parts["script"]], [fill(text) for text in parts["style"]])
    meta = f'<meta charset="utf-8">\n<meta http-equiv="Content-Security-Policy" content="{policy}">'
    return fill(template.replace('<meta charset="utf-8">', meta, 1))


def content_policy(scripts: Sequence[str], styles: Sequence[str]) -> str:
    """Return a Content-Security-Policy: these scripts and styles run, pictures and videos load, nothing else does."""

    def hashed(texts: Sequence[str]) -> str:
        digests = (hashlib.sha256(text.encode()).digest() for text in texts)
        return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests) or "'none'"

    # `style-src` is for browsers that do not know the finer two; a style attribute cannot run anything.
    return (
        f"default-src 'none'; script-src {hashed(scripts)}; style-src 'unsafe-inline'; "
        f"style-src-elem {hashed(styles)}; style-src-attr 'unsafe-inline'; "
        "img-src data: 'self' file:; media-src data: 'self' file:; base-uri 'none'; form-action 'none'"
    )


def bank_data(patches: Patches) -> dict[str, object]:
    """Describe a bank as wall.js reads it."""
    picture = base64.b64encode(png_bytes(sprite(patches, _SPRITE_COLUMNS))).decode() if len(patches) else ""
    return {
        "columns": _SPRITE_COLUMNS,
        "sprite": f"data:image/png;base64,{picture}",
        "patches": [
            [round(second, 3), frame, row, column, round(score, 3)]
            for second, frame, row, column, score in zip(
                patches.seconds.tolist(),
                patches.frames.tolist(),
                patches.rows.tolist(),
                patches.columns.tolist(),
                patches.scores.tolist(),
                strict=True,
            )
        ],
    }


def script_data(data: object) -> str:
    """Write JSON for a script element, in which no text can look like a tag."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
