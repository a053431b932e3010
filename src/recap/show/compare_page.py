"""The page of one run, or of runs of one script with several memories, played and measured next to each other."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from recap.contracts import Curve, Judge
from recap.show.page import bank_data, fill_template, script_data, table_rows
from recap.show.palette import colours_of
from recap.show.sheet import Patches
from recap.types import Role

_ROLES = [role.value for role in Role]


@dataclass(frozen=True, slots=True)
class Method:
    """The run of one memory, as the page shows it."""

    name: str
    about: str
    # Source of the player: a data URI or a file name.
    video: str
    # Of the judge, one value per sample.
    curves: Sequence[Curve]
    contrast: Sequence[float]
    # Per block: role -> share of attention.
    shares: Sequence[Mapping[str, float]]
    # Role -> tokens attended to in the last block.
    tokens: Mapping[str, int]
    # Median time to generate a block.
    block_s: float
    # Per block, of memories that detect what is new.
    fired: Sequence[int] | None = None
    # At the end, of memories that have one.
    bank: Patches | None = None
    # What the bank is made of, in a sentence.
    bank_about: str = ""


@dataclass(frozen=True, slots=True)
class Scene:
    """A part of the script under one prompt."""

    start_s: float
    prompt: str
    # Whether the prior was dropped here.
    cut: bool


@dataclass(frozen=True, slots=True)
class Comparison:
    """All that the page shows. Blocks and samples are the same for all methods."""

    title: str
    subtitle: str
    duration_s: float
    scenes: Sequence[Scene]
    block_starts_s: Sequence[float]
    # Time between two samples of a curve; the first is picture 0.
    sample_s: float
    judge: Judge
    grid: tuple[int, int]
    methods: Sequence[Method]
    remarks: Sequence[str]
    settings: Mapping[str, object]


def build_compare_page(comparison: Comparison) -> str:
    """Build the page as HTML."""
    escape = html.escape
    names = [method.name for method in comparison.methods]
    holes = {
        "title": escape(comparison.title),
        "subtitle": escape(comparison.subtitle),
        "judge": escape(comparison.judge.name),
        "about-judge": escape(comparison.judge.about),
        "colours": " ".join(f"--m{i}: {colour};" for i, colour in enumerate(colours_of(names))),
        "screens": "".join(_screen(i, method) for i, method in enumerate(comparison.methods)),
        "remarks": "".join(f"<p>{escape(remark)}</p>" for remark in comparison.remarks if remark),
        "table": _table(comparison.methods),
        "walls": "".join(_wall(i, m) for i, m in enumerate(comparison.methods) if m.bank is not None),
        "settings": table_rows(comparison.settings),
        "data": script_data(_data(comparison)),
    }
    return fill_template("compare.html", holes)


def _chip(index: int, name: str) -> str:
    return f'<i class="chip" style="background:var(--m{index})"></i>{html.escape(name)}'


def _screen(index: int, method: Method) -> str:
    return (
        f'<figure><div class="screen"><video src="{html.escape(method.video)}" muted playsinline preload="auto">'
        f'</video><div class="spot"></div></div><figcaption><b>{_chip(index, method.name)}</b>'
        f"<span>{html.escape(method.about)}</span></figcaption></figure>"
    )


def _wall(index: int, method: Method) -> str:
    return (
        f'<section class="card"><div class="bar-top"><h2>What the bank of {_chip(index, method.name)} '
        f'remembers at the end</h2><div class="switch" role="group" aria-label="How to show the patches">'
        f'<button aria-pressed="true">Cut-outs</button><button aria-pressed="false">Patches</button></div></div>'
        f'<p class="quiet"></p><p class="made-of">{html.escape(method.bank_about)}</p>'
        f'<div class="wall" data-method="{index}"></div></section>'
    )


def _table(methods: Sequence[Method]) -> str:
    roles = [role for role in _ROLES if any(role in method.tokens for method in methods)]
    head = "".join(f"<th>{html.escape(name)}</th>" for name in ("", *roles, "tokens in all", "s per block"))
    rows = []
    for index, method in enumerate(methods):
        counts = [f"{method.tokens[role]:,}" if role in method.tokens else "–" for role in roles]
        cells = [*counts, f"{sum(method.tokens.values()):,}", f"{method.block_s:.2f}"]
        row = "".join(f"<td>{cell}</td>" for cell in cells)
        rows.append(f"<tr><th>{_chip(index, method.name)}</th>{row}</tr>")
    return f"<tr>{head}</tr>{''.join(rows)}"


def _data(comparison: Comparison) -> dict[str, Any]:
    def rounded(values: Sequence[float | None]) -> list[float | None]:
        return [None if value is None else round(value, 4) for value in values]

    return {
        "duration": round(comparison.duration_s, 3),
        "scenes": [[round(s.start_s, 3), s.prompt, s.cut] for s in comparison.scenes],
        "blocks": rounded(comparison.block_starts_s),
        "sample": comparison.sample_s,
        "grid": comparison.grid,
        "subjects": [curve.subject for curve in comparison.methods[0].curves],
        "roles": [role for role in _ROLES if any(role in s for m in comparison.methods for s in m.shares)],
        "methods": [
            {
                "name": method.name,
                "curves": [rounded(curve.values) for curve in method.curves],
                "contrast": rounded(method.contrast),
                "fired": method.fired,
                "shares": [{role: round(v, 4) for role, v in share.items()} for share in method.shares],
                "bank": None if method.bank is None else bank_data(method.bank),
            }
            for method in comparison.methods
        ],
    }
