"""Whoever writes a table.json, a trace or a prompt cannot run a script in a page, nor make it load anything."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from recap import generate
from recap.show.page import skeleton
from recap.show.run_page import write_run_page
from recap.tables.report import write_report

EVIL = "<script>document.title='RAN'</script><img src=x onerror=\"document.title='RAN'\">"


def poisoned_table(folder: Path) -> Path:
    """Write a table whose every text is an attack."""
    measured = {"name": EVIL, "judge": EVIL, "head": [EVIL], "rows": [[EVIL]], "ours": EVIL}
    section = {"title": EVIL, "remarks": [EVIL], "measured": [measured], "figures": [EVIL]}
    section |= {"video": EVIL, "video_about": EVIL, "sheet": "", "sheet_about": EVIL}
    names = (
        "mean",
        "low",
        "high",
        "ours_minus_this",
        "difference_low",
        "difference_high",
        "smallest_visible",
        "paper",
    )
    cell = {"measure": EVIL, "backend": EVIL, "n": 100, "prompts": 20, **dict.fromkeys(names, 0.5)}
    cells = [{"row": EVIL, **cell}, {"row": f"{EVIL} 2", **cell}]
    table = {
        "table": EVIL,
        "about": {EVIL: EVIL, "prompts": 1, "seeds": 1},
        "section": section,
        "cells": cells,
    }
    (folder / "evil").mkdir(parents=True)
    (folder / "evil" / "table.json").write_text(json.dumps(table))
    (folder / "evil" / "table.md").write_text(EVIL)
    return folder


def scripts_of(page: str) -> list[str]:
    return re.findall(r"<script>(.*?)</script>", page, re.DOTALL)


def check_page(page: str) -> None:
    """Check that nothing of the attack is a tag, and that the page's policy allows its own scripts alone."""
    assert "<script>document" not in page and "<img src=x" not in page
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]+)"', page)
    assert "default-src 'none'" in policy and page.index("Content-Security-Policy") < page.index("<title>")
    allowed = re.search(r"script-src ([^;]*);", policy)
    assert allowed is not None and "unsafe" not in allowed[1]
    own = [
        base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts_of(page)
    ]
    assert [f"'sha256-{digest}'" for digest in own] == (allowed[1].split() if own else [])


def test_a_poisoned_table_is_only_text(tmp_path: Path) -> None:
    page = write_report([poisoned_table(tmp_path)]).read_text()
    check_page(page)
    assert page.count("data:image/svg+xml;charset=utf-8,%3Cscript%3E") == 1


def test_prompts_names_and_traces_are_only_text(tmp_path: Path) -> None:
    run = generate(EVIL, seconds=0.5, backbone="untrained", folder=tmp_path / "run", flow="classical")
    trace = run.folder / "trace.jsonl"
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    for line in lines:
        line |= {"prompts": [EVIL], "notes": {EVIL: EVIL}}
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    check_page(write_run_page(run.folder).read_text())


def test_a_hole_cannot_allow_its_own_script() -> None:
    evil = "<script>evil()</script>"
    page = skeleton(evil, evil, "results.html", {"sections": evil})
    assert "script-src 'none';" in page


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium on this machine")
def test_in_a_browser_nothing_runs_but_our_own_script(tmp_path: Path) -> None:
    def shown(page: Path) -> tuple[str, str]:
        command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
        found = subprocess.run(
            [*command, "--virtual-time-budget=3000", "--dump-dom", page.as_uri()],
            capture_output=True, text=True, timeout=120, check=True,
        )  # fmt: skip
        return found.stdout, found.stderr

    dom, _ = shown(write_report([poisoned_table(tmp_path / "tables")]))
    assert "<title>RECAP: results</title>" in dom
    run = generate(EVIL, seconds=0.5, backbone="untrained", folder=tmp_path / "run", flow="classical")
    dom, log = shown(run.folder / "index.html")
    assert "<title>RAN" not in dom and "Content Security Policy" not in log, log
    # Our own script ran: it draws the charts.
    assert dom.count('<svg class="chart"') > 0
