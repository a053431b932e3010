"""This module writes the page of stories: a verdict, then the videos that it was counted from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from recap.io.video import Picture
from recap.show.page import bank_data, colour_variables, script_data, skeleton, table_rows
from recap.show.sheet import Patches, png_bytes, png_uri


@dataclass(frozen=True, slots=True)
class Screen:
    """Describes the video of one memory and seed, and what was found in it."""

    memory: str
    # Source of the player: a data URI or a file name.
    video: str
    # The verdict in a few words, and whether it is a good one.
    badge: str
    good: bool
    about: str
    # Pictures with what is written below them.
    stills: Sequence[tuple[Picture, str]] = ()
    # The content of the bank at the return, of memories that have one.
    bank: Patches | None = None
    bank_about: str = ""


@dataclass(frozen=True, slots=True)
class Story:
    """Describes one script, generated with several memories; every row of screens has a name and a link."""

    title: str
    # What was counted.
    verdict: str
    about: str
    duration_s: float
    # Where the videos begin to play.
    start_s: float
    # Second -> what happens from there on.
    scenes: Sequence[tuple[float, str]]
    grid: tuple[int, int]
    rows: Sequence[tuple[str, str, Sequence[Screen]]]


def build_story_page(
    title: str,
    subtitle: str,
    stories: Sequence[Story],
    remarks: Sequence[str],
    settings: Mapping[str, object],
) -> str:
    """Build the page as HTML."""
    memories = list(dict.fromkeys(screen.memory for story in stories for screen in _screens(story)))
    holes = {
        "stories": "".join(_section(story, memories, title) for story in stories),
        "remarks": "".join(f"<p>{escape(text)}</p>" for text in remarks),
        "settings": table_rows(settings),
        "data": script_data([_data(story) for story in stories]),
    }
    return skeleton(title, subtitle, "story.html", holes, colour_variables(memories))


def _screens(story: Story) -> list[Screen]:
    return [screen for _, _, row in story.rows for screen in row]


def _section(story: Story, memories: Sequence[str], page_title: str) -> str:
    scenes = "".join(f"<button>{escape(label)}</button>" for _, label in story.scenes)
    verdict = "" if story.verdict == page_title else f'<p class="verdict">{escape(story.verdict)}</p>'
    parts = [
        f'<section class="card story"><h2>{escape(story.title)}</h2>{verdict}',
        f'<p class="quiet">{escape(story.about)}</p>',
        f'<div class="strip"><button class="stop">Pause</button><div>{scenes}<i></i></div></div>',
    ]
    for name, link, row in story.rows:
        detail = f'<a href="{escape(link)}">curves and attention</a>' if link else ""
        parts.append(f'<h3>{escape(name)} {detail}</h3><div class="trio">')
        parts += [_figure(screen, memories.index(screen.memory)) for screen in row]
        parts.append("</div>")
        for screen in row:
            if screen.bank is not None:
                parts.append(f'<p class="quiet">{escape(screen.bank_about)}</p><div class="wall"></div>')
    return "".join([*parts, "</section>"])


def _figure(screen: Screen, colour: int) -> str:
    stills = "".join(
        f'<span><img alt="" src="{png_uri(png_bytes(picture))}">{escape(label)}</span>'
        for picture, label in screen.stills
    )
    return (
        f'<figure><figcaption><b><i class="chip" style="background:var(--m{colour})"></i>{escape(screen.memory)}</b>'
        f' <em class="badge{" good" if screen.good else ""}">{escape(screen.badge)}</em></figcaption>'
        f'<div class="screen"><video src="{escape(screen.video)}" muted autoplay loop playsinline preload="auto">'
        f'</video><div class="spot"></div></div><p class="quiet">{escape(screen.about)}</p>'
        f'<div class="stills">{stills}</div></figure>'
    )


def _data(story: Story) -> dict[str, object]:
    """Describe a story as story.js reads it."""
    return {
        "duration": story.duration_s,
        "start": story.start_s,
        "scenes": [second for second, _ in story.scenes],
        "grid": story.grid,
        "banks": [None if screen.bank is None else bank_data(screen.bank) for screen in _screens(story)],
    }
