"""The page stands alone: everything is in it, and nothing in it can break out."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import torch

from recap.io.video import ClipWriter, open_clip
from recap.show.clips import embed
from recap.show.page import (
    Measured,
    Method,
    Plot,
    Scene,
    Section,
    VideoPage,
    build_results_page,
    build_video_page,
)
from recap.show.sheet import Patches


def page(count: int = 3, title: str = "clip.mp4", remark: str = "x") -> str:
    index = np.arange(count)
    pixels = np.zeros((count, 16, 16, 3), np.uint8)
    patches = Patches(pixels, index / 4, index, index, index, np.ones(count, np.float32))
    return build_video_page(
        VideoPage(
            title=title,
            subtitle="what it is",
            duration_s=4.0,
            grid=(4, 6),
            methods=[Method(title, remark, "data:video/mp4;base64,AAAA", bank=patches, bank_about=remark)],
            cards=[(remark, title, [Plot(title, remark, [0.0, 1.0], [[0.5, None]])])],
            settings={"cycle_threshold_px": 2.0, title: remark},
            remarks=[remark],
            scenes=[Scene(0.0, title, False)],
            numbers=[("3", "things"), (title, remark)],
        )
    )


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.names: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]


def parsed(text: str) -> Tags:
    tags = Tags()
    tags.feed(text)
    return tags


def test_nothing_is_fetched() -> None:
    text = page()
    assert all(link.startswith("data:") for link in parsed(text).links)
    assert not re.search(r"https?:|//[a-z]|@import|url\(h", text.replace("</", "").replace("// ", ""))


def test_all_holes_are_filled() -> None:
    text = page(title="{{video}}")
    assert "{{" not in text.replace("{{video}}", "") and text.count("<video") == 1
    assert "cycle_threshold_px" in text and "things" in text


def test_hostile_names_stay_text() -> None:
    name = "</script><script>alert(1)</script>\"'&.mp4"
    assert parsed(page(title=name, remark=name)).names == parsed(page()).names

    def results(text: str) -> str:
        measured = Measured(text, text, [text], [[text]], text)
        section = Section(text, [text], [measured], ["<svg/>"], text, text, b"PNG", text)
        return build_results_page(text, text, [section], {text: text})

    assert parsed(results(name)).names == parsed(results("x")).names


def test_the_data_can_be_read_back() -> None:
    text = page(5)
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    assert found is not None
    data = json.loads(found[1])
    bank = data["methods"][0]["bank"]
    assert len(bank["patches"]) == 5 and bank["patches"][2] == [0.5, 2, 2, 2, 1.0]
    assert bank["sprite"].startswith("data:image/png;base64,iVBOR")
    assert data["cards"][0][2][0]["values"] == [[0.5, None]] and data["duration"] == 4


def test_a_page_without_patches() -> None:
    assert '"patches":[]' in page(0)


def test_large_clips_are_halved_or_linked(tmp_path: Path) -> None:
    video = tmp_path / "overlay.mp4"
    with ClipWriter(video, (64, 96), 16) as clip:
        clip.write(torch.rand(12, 3, 64, 96))
    size = video.stat().st_size
    source, remark = embed(video, limit=size)
    assert source.startswith("data:video/mp4;base64,") and remark == ""
    source, remark = embed(video, limit=size // 2)
    assert source.startswith("data:") and "half size" in remark and len(source) < size
    assert embed(video, limit=10) == (
        "overlay.mp4",
        "The video is too large for the page and is read from overlay.mp4 next to it.",
    )
    assert [entry.name for entry in tmp_path.iterdir()] == ["overlay.mp4"] and open_clip(video).height == 64
