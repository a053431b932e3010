"""The page of stories: what it says, what plays, and that texts stay texts."""

from __future__ import annotations

import json
import re

import numpy as np

from recap.show.sheet import gather_patches
from recap.show.story_page import Screen, Story, build_story_page

PICTURE = np.zeros((8, 8, 3), np.uint8)
BANK = gather_patches(
    {(3, 0, 1): PICTURE, (2, 1, 0): PICTURE}, {(3, 0, 1): 0.5, (2, 1, 0): 1.0}, {2: 0.5, 3: 0.75}, 8
)


def story(text: str = "a fox", bank=BANK) -> Story:
    screens = [
        Screen("none", "a.mp4", text, False, text, [(PICTURE, text)]),
        Screen("recap", "b.mp4", text, True, text, [(PICTURE, text)], bank, text),
    ]
    scenes = [(0.0, text), (2.0, text)]
    return Story(text, text, text, 4.0, 1.0, scenes, (2, 3), [(text, "row.html", screens)])


def data_of(page: str):
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return json.loads(found)


def test_every_memory_has_a_player_a_badge_and_its_stills():
    page = build_story_page("Title", "Subtitle", [story(), story()], ["how"], {"flow": "exact"})
    assert page.count(" muted autoplay loop playsinline ") == 4 == page.count('src="data:image/png;base64,')
    assert page.count('class="badge good"') == 2 and page.count('class="badge"') == 2
    assert page.count('<div class="wall"></div>') == 2
    first, _ = data_of(page)
    assert (first["start"], first["duration"], first["scenes"]) == (1.0, 4.0, [0.0, 2.0])
    none, recap = first["banks"]
    # In order of first appearance: second, frame, row, column, score.
    assert none is None and recap["patches"] == [[0.5, 2, 1, 0, 1.0], [0.75, 3, 0, 1, 0.5]]


def test_an_empty_bank_is_an_empty_wall():
    page = build_story_page("Title", "", [story(bank=gather_patches({}, {}, {}, 8))], [], {})
    assert data_of(page)[0]["banks"][1]["patches"] == [] and '<div class="wall"></div>' in page


def test_a_verdict_that_is_the_title_is_said_once():
    page = build_story_page("a fox", "", [story()], [], {})
    assert 'class="verdict"' not in page
    assert 'class="verdict">a fox<' in build_story_page("a bus", "", [story()], [], {})


def test_nothing_is_a_tag_that_came_as_text():
    evil = "<img src=x onerror=alert(1)></script>\"'"
    page = build_story_page(evil, evil, [story(evil)], [evil], {evil: evil})
    assert "<img src=x" not in page and page.count("</script>") == 2
    assert "default-src 'none'" in page and "script-src 'sha256-" in page
