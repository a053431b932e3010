"""The pages: links lead somewhere, lines stay readable, results have their tables next to them."""

from __future__ import annotations

import csv
import re
import runpy
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
WIDTH = 110
LINK = re.compile(r"\[(?:[^][]|\[[^]]*\])*\]\(([^)\s]+)\)")


def prose(page: Path) -> list[str]:
    """The lines of a page outside code blocks."""
    parts = re.split(r"^\s*```.*$", page.read_text(), flags=re.MULTILINE)
    return "\n".join(parts[::2]).splitlines()


def anchors(page: Path) -> set[str]:
    """The names that a link to a place of this page may use, as GitHub and the site make them of headings."""
    text = "\n".join(prose(page))
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings]
    return {*plain, *re.findall(r'id="([^"]+)"', text)}


def broken_links(page: Path) -> list[str]:
    broken = []
    for link in LINK.findall("\n".join(prose(page))):
        if link.startswith(("http://", "https://")):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page):
    assert broken_links(page) == []


def test_a_broken_link_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# A heading\n[a](#a-heading) [b](#no-heading) [c](page.md) ![d](none.png)\n```\n[e](f)\n```\n"
    )
    assert broken_links(page) == ["#no-heading", "none.png"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_lines_fit_a_window(page):
    """Rows of tables, headings and pictures cannot be wrapped; `docs/scripts/wrap.py` wraps everything else."""
    free = re.compile(r"\s*(\||#|!\[)")
    assert [line for line in prose(page) if len(line) > WIDTH and not free.match(line)] == []


def test_the_site_has_every_page():
    named = re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text())
    assert sorted(named) == sorted(str(page.relative_to(DOCS)) for page in PAGES[1:])


def test_results_are_findings_with_their_tables_next_to_them():
    page = DOCS / "results.md"
    text = page.read_text()
    assert len(text.splitlines()) <= 150
    tables = sorted((DOCS / "results").glob("*.csv"))
    assert {f"results/{table.name}" for table in tables} == set(
        re.findall(r"\((results/[\w-]+\.csv)\)", text)
    )
    for table in tables:
        rows = list(csv.DictReader(table.read_text().splitlines()))
        assert rows and all(float(row["mean"]) <= float(row["high"] or "inf") for row in rows), table
        assert all(float(row["mean"]) >= float(row["low"] or "-inf") for row in rows), table


def test_no_figure_rests_on_a_script_that_nobody_has():
    for page in PAGES:
        assert "not kept" not in " ".join(page.read_text().split()), page


def test_the_site_begins_with_the_readme_and_has_no_links_into_the_source():
    """Such links work in the repository; on the site there is nothing behind them."""
    render = runpy.run_path(str(DOCS / "scripts" / "site.py"))["on_page_markdown"]

    def shown(name: str, text: str) -> str:
        return render(text, types.SimpleNamespace(file=types.SimpleNamespace(src_uri=name)))

    first = shown("index.md", "")
    assert first.startswith("# RECAP") and "](images/return.gif)" in first
    assert not re.search(r"\]\((docs/|src/|\.\./|LICENSE|SECURITY)", first)
    assert (
        shown("wan.md", "[a](../src/a.py) [b](log.md) ![c](images/c.png)")
        == "a [b](log.md) ![c](images/c.png)"
    )
    assert shown("how-to/x.md", "[a](../wan.md) [b](../../src/b.py)") == "[a](../wan.md) b"


def test_the_wrapper_keeps_every_word_and_makes_no_lists():
    wrap = runpy.run_path(str(DOCS / "scripts" / "wrap.py"))["wrap"]
    long = "words " * 17 + "then 1 - 2 - 3 # 4 and so on, to the end of it"
    page = f"# {long}\n\n{long}\n- {long}\n  more\n\n> {long}\n> more\n\n```\n{long}\n```\n| {long} |\n"
    wrapped = wrap(page)
    assert wrapped.replace(">", "").split() == page.replace(">", "").split()
    assert wrap(wrapped) == wrapped
    free = [line for line in wrapped.splitlines() if len(line) > WIDTH]
    assert free == [f"# {long}", long, f"| {long} |"]
    assert not [line for line in wrapped.splitlines() if line.lstrip().startswith(("- 2", "- 3", "# 4"))]
