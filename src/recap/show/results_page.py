"""Results on one page: tables next to the paper's numbers, charts, and a look at the videos themselves."""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import quote

from recap.show.page import fill_template, table_rows


@dataclass(frozen=True, slots=True)
class Measured:
    """One measure's table."""

    name: str
    judge: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    # First cell of the row to stand out.
    ours: str


@dataclass(frozen=True, slots=True)
class Section:
    """A table or figure of the paper, reproduced."""

    title: str
    said: Sequence[str]  # remarks, each a paragraph
    measured: Sequence[Measured]
    figures: Sequence[str]  # SVG
    video: str = ""  # source of a player
    video_said: str = ""
    sheet: bytes = b""  # PNG: the runs side by side at a few moments
    sheet_said: str = ""


@dataclass(frozen=True, slots=True)
class Results:
    title: str
    subtitle: str
    sections: Sequence[Section]
    about: Mapping[str, object] = field(default_factory=dict)


def build_results_page(results: Results) -> str:
    """Build the page as HTML, complete in itself."""
    escape = html.escape
    return fill_template(
        "results.html",
        {
            "title": escape(results.title),
            "subtitle": escape(results.subtitle),
            "sections": "".join(_section(section) for section in results.sections),
            "about": table_rows(results.about),
        },
    )


def _section(section: Section) -> str:
    escape = html.escape
    parts = [f'<section class="card"><h2>{escape(section.title)}</h2>']
    parts += [f'<p class="quiet">{escape(text)}</p>' for text in section.said if text]
    parts.append(f'<div class="figures">{"".join(_figure(figure) for figure in section.figures)}</div>')
    if section.sheet:
        picture = base64.b64encode(section.sheet).decode()
        parts.append(f'<p class="quiet">{escape(section.sheet_said)}</p>')
        parts.append(f'<img class="sheet" alt="" src="data:image/png;base64,{picture}">')
    if section.video:
        parts.append(f'<p class="quiet">{escape(section.video_said)}</p><div class="screen">')
        parts.append(
            f'<video src="{escape(section.video)}" controls autoplay muted loop playsinline></video></div>'
        )
    parts += [_table(measured) for measured in section.measured]
    return "".join([*parts, "</section>"])


def _figure(svg: str) -> str:
    """Show a drawing as a picture, in which no script runs: it may come from somebody else's table.json."""
    return f'<img alt="" src="data:image/svg+xml;charset=utf-8,{quote(svg, safe=" =:/,;.-()")}">'


def _table(measured: Measured) -> str:
    escape = html.escape
    head = "".join(f"<th>{escape(name)}</th>" for name in measured.head)
    rows = "".join(
        ('<tr class="ours">' if row[0] == measured.ours else "<tr>")
        + "".join(f"<td>{escape(cell)}</td>" for cell in row)
        + "</tr>"
        for row in measured.rows
    )
    judge = f'<span class="of">judged by {escape(measured.judge)}</span>'
    return (
        f"<h3>{escape(measured.name)} {judge}</h3>"
        f'<div class="wide"><table class="numbers"><tr>{head}</tr>{rows}</table></div>'
    )
