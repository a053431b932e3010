"""This module writes the page of a study: plain files that work from any server, and from a disk."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from importlib import resources
from typing import Any

from recap.show.page import fill_template, script_data

PAGE = "index.html"
PARTS = ("look.css", "study.css", "votes.js", "study.js")


def study_files(title: str, data: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the files of the page by name; `data` is what study.js reads."""
    folder = resources.files("recap.show")
    page = fill_template("study.html", {"title": escape(title), "data": script_data(data)})
    return {PAGE: page.encode(), **{name: folder.joinpath(name).read_bytes() for name in PARTS}}
