"""This module writes the page of a report: findings first, a chart and videos for each, tables folded away."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

from recap.show.page import Section, figure, measured_tables, skeleton, table_rows
from recap.show.sheet import png_uri


class FindingCard(NamedTuple):
    """Describes one finding: its headline, the sentences and the chart (SVG) that go with it, and its table."""

    anchor: str
    title: str
    headline: str
    sentences: Sequence[str]
    chart: str
    judge: str
    section: Section | None = None
    # The page of the table alone, from the page.
    link: str = ""


def build_report_page(
    title: str, subtitle: str, cards: Sequence[FindingCard], about: Mapping[str, object]
) -> str:
    """Build the page as HTML; `about` is what all tables have in common."""
    holes = {
        "findings": "".join(
            f'<li><a href="#{escape(card.anchor)}">{escape(card.headline)}</a> '
            f'<span class="of">{escape(card.title)}</span></li>'
            for card in cards
        ),
        "cards": "".join(map(_card, cards)),
        "about": table_rows(about),
    }
    return skeleton(title, subtitle, "report.html", holes)


def _card(card: FindingCard) -> str:
    parts = [f'<section class="card finding" id="{escape(card.anchor)}">']
    parts.append(f'<p class="of">{escape(card.title)}</p><h2>{escape(card.headline)}</h2>')
    words = "".join(f"<p>{escape(text)}</p>" for text in card.sentences)
    words += f'<p class="of">Judged by {escape(card.judge)}.</p>' if card.judge else ""
    chart = figure(card.chart) if card.chart else ""
    # Next to the chart are the videos, or where there are none, the words.
    videos = _videos(card.section) if card.section else ""
    left, right = (chart + words, videos) if videos else (chart, words)
    parts.append(f'<div class="evidence"><div>{left}</div><div>{right}</div></div>')
    if card.section is not None:
        parts.append(_fold(card.section, card.link))
    return "".join([*parts, "</section>"])


def _videos(section: Section) -> str:
    """Show the first runs: in motion, and at a few moments, which is what a print has."""
    parts = []
    if section.video:
        source = escape(section.video)
        parts.append(
            f'<div class="screen"><video src="{source}" controls muted loop playsinline></video></div>'
        )
        parts.append(f'<p class="of">{escape(section.video_about)}</p>' if section.video_about else "")
    if section.sheet:
        parts.append(f'<p class="of">{escape(section.sheet_about)}</p>')
        parts.append(f'<img class="sheet" alt="" src="{png_uri(section.sheet)}">')
    return "".join(parts)


def _fold(section: Section, link: str) -> str:
    count = len(section.measured)
    parts = [f"<details><summary>{count} measure{'' if count == 1 else 's'}, in full</summary>"]
    parts += [f'<p class="quiet">{escape(text)}</p>' for text in section.remarks if text]
    parts.append(f'<p class="quiet"><a href="{escape(link)}">Its own page</a></p>' if link else "")
    parts.append(f'<div class="figures">{"".join(map(figure, section.figures))}</div>')
    return "".join([*parts, *map(measured_tables, section.measured), "</details>"])
