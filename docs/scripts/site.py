"""What `mkdocs build` does to our pages: the README is the first one, and links into the source become plain text.

The pages are also read in the repository, where such links work; on the site there is nothing behind them.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

README = Path(__file__).resolve().parents[2] / "README.md"
OUTSIDE = re.compile(r"(?<!!)\[([^]]+)\]\(((?:\.\./)+|(?=LICENSE|SECURITY|src/))(?!http)[^)]*\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Called by mkdocs for every page before it is rendered."""
    if page.file.src_uri == "index.md":
        markdown = README.read_text(encoding="utf-8").replace("](docs/", "](")
    folders = page.file.src_uri.count("/")
    # Inside docs/, a page of a folder may link one level up for each folder it is in.
    return OUTSIDE.sub(lambda link: link[0] if 0 < link[2].count("../") <= folders else link[1], markdown)
