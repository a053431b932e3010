"""Wraps the prose of Markdown files at 110 columns, in place: `python docs/scripts/wrap.py README.md docs/*.md`.

Code, tables, headings, comments and lines that are pictures alone stay as they are.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

WIDTH = 110
WHOLE_LINE = re.compile(r"\s*($|\||#{1,6} |<!--|:::|(!\[[^]]*\]\([^)]*\)\s*)+$)")
# Words that would begin a list, a heading, a quotation or a table if they stood first on a line.
NEVER_FIRST = re.compile(r"([-+*]|\d+[.)]|#+|>.*|=+|\|.*|```.*)$")
ITEM = re.compile(r"(\s*(?:[-*+]|\d+[.)]) |> ?|\s*)(.*)")


def fill(text: str, first: str, later: str) -> list[str]:
    """Breaks a paragraph into lines that begin with `first`, then with `later`."""
    words: list[str] = []
    for word in text.split():
        if words and NEVER_FIRST.match(word):
            words[-1] += " " + word
        else:
            words.append(word)
    lines, line = [], first + words[0]
    for word in words[1:]:
        if len(line) + 1 + len(word) > WIDTH:
            lines.append(line)
            line = later + word
        else:
            line += " " + word
    return [*lines, line]


def wrap(text: str) -> str:
    """Returns the page with every paragraph, list item and quotation filled."""
    lines: list[str] = []
    first, paragraph, in_code = "", "", False

    def flush() -> None:
        nonlocal paragraph
        if paragraph:
            lines.extend(fill(paragraph, first, first if first == "> " else " " * len(first)))
        paragraph = ""

    for line in text.split("\n"):
        fence = line.lstrip().startswith("```")
        if fence or in_code or WHOLE_LINE.match(line):
            flush()
            in_code ^= fence
            lines.append(line if fence or in_code else line.rstrip())
            continue
        start, rest = ITEM.match(line).groups()  # type: ignore[union-attr]
        continues = not start.strip() or (start.strip() == ">" and first == "> ")
        if paragraph and continues:
            paragraph += " " + rest
            continue
        flush()
        first, paragraph = ("> " if start.strip() == ">" else start), rest
        if not rest.strip():
            lines.append(start.rstrip())
            paragraph = ""
    flush()
    return "\n".join(lines)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        Path(name).write_text(wrap(Path(name).read_text()))
