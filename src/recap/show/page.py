"""This module writes every page: one skeleton and one look, with no server, no request, only the file itself."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from importlib import resources
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np

from recap.show.palette import colours_of
from recap.show.sheet import Patches, lay_out, png_bytes, png_uri
from recap.types import Role

_SPRITE_COLUMNS = 32


@dataclass(frozen=True, slots=True)
class Method:
    """Describes one video of a page, and the memory that goes with it."""

    name: str
    about: str
    # Source of the player: a data URI or a file name.
    video: str
    # Per block: role -> share of attention.
    shares: Sequence[Mapping[str, float]] = ()
    # Role -> tokens attended to in the last block.
    tokens: Mapping[str, int] = field(default_factory=dict)
    # Median time to generate a block.
    block_s: float = 0.0
    # What the bank holds at the end, of memories that have one.
    bank: Patches | None = None
    # What the bank is made of, in a sentence.
    bank_about: str = ""


class Scene(NamedTuple):
    """Describes a part of the script under one prompt, and whether the prior was dropped where it begins."""

    start_s: float
    prompt: str
    cut: bool


@dataclass(frozen=True, slots=True)
class Plot:
    """Holds curves over the video's time: a list of values per method, or None where it has none."""

    title: str
    about: str
    starts_s: Sequence[float]
    values: Sequence[Sequence[float | None] | None]
    # Top of the axis; None rounds the highest value up.
    top: float | None = None
    digits: int = 3
    # Whether a value lasts until the next one begins.
    steps: bool = False


@dataclass(frozen=True, slots=True)
class VideoPage:
    """Holds all that a page of videos shows; what blocks and plots count is the same for all methods."""

    title: str
    subtitle: str
    duration_s: float
    grid: tuple[int, int]
    methods: Sequence[Method]
    # (title, remark, plots) of every card.
    cards: Sequence[tuple[str, str, Sequence[Plot]]]
    settings: Mapping[str, object]
    remarks: Sequence[str] = ()
    scenes: Sequence[Scene] = ()
    block_starts_s: Sequence[float] = ()
    # Pairs of a value and what it is.
    numbers: Sequence[tuple[str, str]] = ()


def build_video_page(page: VideoPage) -> str:
    """Build the page as HTML."""
    methods = page.methods
    facts = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for value, name in page.numbers
    )
    body = {
        "screens": "".join(_screen(i, method) for i, method in enumerate(methods)),
        "numbers": f'<dl class="facts">{facts}</dl>' if facts else "",
        "remarks": "".join(f"<p>{escape(text)}</p>" for text in page.remarks),
        "settings": table_rows(page.settings),
        "data": script_data(_data(page)),
    }
    colours = colour_variables([method.name for method in methods])
    return skeleton(page.title, page.subtitle, "video.html", body, colours)


def colour_variables(names: Sequence[str]) -> str:
    """Name the colours of the memories of a page in CSS, `--m0` and so on."""
    variables = "".join(f"--m{i}: {colour};" for i, colour in enumerate(colours_of(names)))
    return f":root {{ {variables} }}"


def describe_bank(bank: Patches, grid: tuple[int, int], subject_share: float | None = None) -> str:
    """Describe the content of a bank: border columns come from a moving camera, and a good bank shows subjects."""
    if not len(bank):
        return "Nothing in it was new."
    edge, area = edge_share(bank, grid), 2 / grid[1]
    words = f"{len(bank)} patches were new; {edge:.0%} of them lie in the first or last column ({area:.0%} by area)"
    return words + ("." if subject_share is None else f", {subject_share:.0%} show a subject.")


def edge_share(bank: Patches, grid: tuple[int, int]) -> float:
    """Return the share of a bank's patches that lie in the first or last column."""
    return float(np.mean((bank.columns == 0) | (bank.columns == grid[1] - 1))) if len(bank) else 0.0


def _screen(index: int, method: Method) -> str:
    chip = f'<i class="chip" style="background:var(--m{index})"></i>'
    return (
        f'<figure><div class="screen"><video src="{escape(method.video)}" muted playsinline preload="auto">'
        f'</video><div class="spot"></div></div><figcaption><b>{chip}{escape(method.name)}</b>'
        f"<span>{escape(method.about)}</span></figcaption></figure>"
    )


def _data(page: VideoPage) -> dict[str, Any]:
    """Describe a page as video.js reads it."""
    shown = ("name", "shares", "tokens", "block_s", "bank_about")
    return {
        "duration": page.duration_s,
        "scenes": page.scenes,
        "blocks": page.block_starts_s,
        "grid": page.grid,
        "roles": list(Role),
        "cards": [(title, about, [asdict(plot) for plot in plots]) for title, about, plots in page.cards],
        "methods": [
            {
                **{name: getattr(method, name) for name in shown},
                "bank": None if method.bank is None else bank_data(method.bank),
            }
            for method in page.methods
        ],
    }


def bank_data(bank: Patches) -> dict[str, object]:
    """Describe a bank as wall.js reads it."""
    sprite = png_bytes(lay_out(list(bank.pixels), _SPRITE_COLUMNS)) if len(bank) else b""
    columns = bank.seconds, bank.frames, bank.rows, bank.columns, bank.scores
    return {
        "columns": _SPRITE_COLUMNS,
        "sprite": png_uri(sprite),
        "patches": list(zip(*(column.tolist() for column in columns), strict=True)),
    }


def script_data(data: object) -> str:
    """Write a structure as JSON for a script element, in which no text may look like a tag."""
    return json.dumps(_rounded(data), separators=(",", ":")).replace("<", "\\u003c")


def _rounded(value: Any) -> Any:
    """Round every number of a structure: a page shows no more than four decimals."""
    if isinstance(value, Mapping):
        return {key: _rounded(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(inner) for inner in value]
    return round(value, 4) if isinstance(value, float) else value


@dataclass(frozen=True, slots=True)
class Measured:
    """Holds the table of one measure; the row whose first cell is `ours` is highlighted."""

    name: str
    judge: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    ours: str


@dataclass(frozen=True, slots=True)
class Section:
    """Describes a table or figure of the paper, reproduced."""

    title: str
    # Each a paragraph.
    remarks: Sequence[str]
    measured: Sequence[Measured]
    # SVG
    figures: Sequence[str]
    # Source of a player, and what it shows.
    video: str = ""
    video_about: str = ""
    # PNG of the runs at a few moments, and what it shows.
    sheet: bytes = b""
    sheet_about: str = ""


def build_results_page(
    title: str, subtitle: str, sections: Sequence[Section], about: Mapping[str, object]
) -> str:
    """Build a page of tables next to the paper's numbers, with charts and videos, as HTML."""
    made = f'<section class="card"><h2>How this was made</h2><table>{table_rows(about)}</table></section>'
    return skeleton(title, subtitle, "results.html", {"sections": "".join(map(_section, sections)) + made})


def _section(section: Section) -> str:
    parts = [f'<section class="card"><h2>{escape(section.title)}</h2>']
    parts += [f'<p class="quiet">{escape(text)}</p>' for text in section.remarks if text]
    parts.append(f'<div class="figures">{"".join(map(figure, section.figures))}</div>')
    if section.sheet:
        parts.append(f'<p class="quiet">{escape(section.sheet_about)}</p>')
        parts.append(f'<img class="sheet" alt="" src="{png_uri(section.sheet)}">')
    if section.video:
        player = f'<video src="{escape(section.video)}" controls autoplay muted loop playsinline></video>'
        parts.append(f'<p class="quiet">{escape(section.video_about)}</p><div class="screen">{player}</div>')
    parts += map(measured_tables, section.measured)
    return "".join([*parts, "</section>"])


def measured_tables(table: Measured) -> str:
    """Write the table of one measure, under its name and judge."""
    head = "".join(f"<th>{escape(name)}</th>" for name in table.head)
    parts = [f'<h3>{escape(table.name)} <span class="of">judged by {escape(table.judge)}</span></h3>']
    parts.append(f'<div class="measured"><table><tr>{head}</tr>')
    for row in table.rows:
        mark = ' class="ours"' if row[0] == table.ours else ""
        parts.append(f"<tr{mark}>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>")
    return "".join([*parts, "</table></div>"])


def figure(svg: str) -> str:
    """Show a drawing as a picture, in which no script runs: it may come from a table.json of unknown origin."""
    return f'<img alt="" src="data:image/svg+xml;charset=utf-8,{quote(svg, safe=" =:/,;.-()")}">'


def table_rows(values: Mapping[str, object]) -> str:
    """Write names and values as rows of a table; a table in a value becomes rows with dotted names."""
    rows: list[str] = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            rows.append(table_rows({f"{name}.{key}": inner for key, inner in value.items()}))
        else:
            text = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
            rows.append(f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>")
    return "".join(rows)


def skeleton(title: str, subtitle: str, template: str, holes: Mapping[str, str], colours: str = "") -> str:
    """Put a filled template into the frame of all pages, which allows the scripts and styles of templates alone."""
    frame = {"title": escape(title), "subtitle": escape(subtitle), "colours": colours}
    # Read from the templates, never from the page: a hole may have brought in anything.
    scripts, styles = _inline(template, "script", holes), _inline("page.html", "style", frame)
    # A style attribute cannot run anything; `style-src` is for browsers that do not know the finer two.
    policy = (
        f"default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; style-src-elem {styles}; "
        "style-src-attr 'unsafe-inline'; img-src data: 'self' file:; media-src data: 'self' file:; "
        "base-uri 'none'; form-action 'none'"
    )
    return fill_template("page.html", {**frame, "policy": policy, "body": fill_template(template, holes)})


def _inline(name: str, tag: str, holes: Mapping[str, str]) -> str:
    """Return the digests of a template's inline scripts or styles, as a Content-Security-Policy lists them."""
    template = resources.files("recap.show").joinpath(name).read_text(encoding="utf-8")
    texts = [_fill_text(text, holes) for text in re.findall(f"<{tag}>(.*?)</{tag}>", template, re.DOTALL)]
    # Of the two alphabets of base64 the one without slashes, so that no digest reads like an address.
    digests = [base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts]
    return " ".join(f"'sha256-{digest}'" for digest in digests) or "'none'"


def fill_template(name: str, holes: Mapping[str, str]) -> str:
    """Fill the {{holes}} of a template of this folder; a hole named like a file is filled with that file."""
    return _fill_text(resources.files("recap.show").joinpath(name).read_text(encoding="utf-8"), holes)


def _fill_text(template: str, holes: Mapping[str, str]) -> str:
    folder = resources.files("recap.show")
    # One pass over the template: a hole's content is never searched for holes.
    pieces = template.split("{{")
    filled = [pieces[0]]
    for piece in pieces[1:]:
        hole, rest = piece.split("}}", 1)
        filled += [holes[hole] if hole in holes else folder.joinpath(hole).read_text(encoding="utf-8"), rest]
    return "".join(filled)
