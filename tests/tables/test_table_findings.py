"""What a report says of tables: sentences that are computed, one chart each, and a page that real Chromium shows."""

from __future__ import annotations

import json

import pytest

from recap.show.chart import Place, not_exceeded
from recap.tables.findings import Numbers, claim_of, plane_of
from recap.tables.report import write_report
from tests.studio.test_studio_page import browser

__all__ = ["browser"]


def cell(row, measure, mean, difference=None, spread=0.02, visible=0.01, paper=None, prompts=20):
    known = difference is not None and spread is not None
    return {
        "row": row, "measure": measure, "backend": "crops", "mean": mean, "n": 100, "prompts": prompts,
        "low": None if spread is None else mean - spread, "high": None if spread is None else mean + spread,
        "ours_minus_this": difference, "difference_low": difference - spread if known else None,
        "difference_high": difference + spread if known else None, "ours_higher": 0.5, "p_by_prompts": 0.01,
        "smallest_visible": visible, "paper": paper,
    }  # fmt: skip


def numbers(*cells, name="identity", ours="recap"):
    return Numbers(name, ours, cells)


FOUR = [
    cell("none", "identity_crop", 0.4, 0.4, paper=0.642),
    cell("sink", "identity_crop", 0.9, -0.1),
    cell("memrope", "identity_crop", 0.79, 0.01),
    cell("recap", "identity_crop", 0.8, paper=0.696),
]
PATHS = [
    cell("none", "subject_path", 0.1, 0.05, 0.01),
    cell("sink", "subject_path", 0.2, -0.05, 0.01),
    cell("memrope", "subject_path", 0.15, 0.0, 0.01),
    cell("recap", "subject_path", 0.15, None, 0.01),
]


def test_sentences_have_the_cells_numbers_and_the_right_side():
    claim = claim_of(numbers(*FOUR), [])
    assert claim.headline == (
        "With recap, likeness of the late to the early subject is 0.8 [0.78, 0.82]: "
        "higher than with none; lower than with sink; not told apart from memrope."
    )
    assert claim.sentences == [
        "Higher than none (by 0.4 [0.38, 0.42]).",
        # The side is in the word: a lower one has no minus.
        "Lower than sink (by 0.1 [0.08, 0.12]).",
        "Not told apart from memrope (0.01 [-0.01, 0.03]).",
        "The paper, of its own models and judges, has 0.642 for none and 0.696 for recap.",
    ]
    assert claim.chart.startswith("<svg") and "memrope" in claim.chart


def test_what_nobody_could_see_is_not_told_apart_however_sure():
    sure = [cell("none", "identity_crop", 0.795, 0.005, 0.001, visible=0.01), FOUR[3]]
    assert "not told apart from none" in claim_of(numbers(*sure), []).headline
    assert (
        "higher than with none"
        in claim_of(numbers({**sure[0], "smallest_visible": None}, FOUR[3]), []).headline
    )


def test_few_prompts_are_no_finding():
    few = [cell("none", "identity_crop", 0.4, 0.4, None, prompts=2), {**FOUR[3], "low": None, "high": None}]
    claim = claim_of(numbers(*few), [])
    assert claim.headline.endswith("is 0.8; with 2 prompts differences have no interval.")
    assert not [text for text in claim.sentences if "Higher" in text]


def test_many_rows_are_counted_and_motion_is_read_next_to_identity():
    rows = [cell(f"row {n}", "identity_crop", 0.4, 0.4) for n in range(8)]
    claim = claim_of(numbers(*rows, FOUR[3], *PATHS), [])
    assert "higher than with 8 of 8 other rows." in claim.headline
    assert "row 4 (by" in claim.sentences[0] and claim.sentences[0].endswith(" and 3 more.")
    assert any(text.startswith("With recap, the way of the subject") for text in claim.sentences)


def test_the_measure_of_a_table_and_its_chart():
    by_length = [cell("recap", f"dynamic_degree_{s}s", 0.9) for s in (5, 60)]
    more = [cell("recap", "dynamic_degree_60s_seed_deviation", 0.01), cell("recap", "bank_edge_share", 0.2)]
    found = numbers(*by_length, *more)
    assert found.lead == "dynamic_degree_60s" and claim_of(found, ["<svg>the curve</svg>"]).chart.endswith(
        "curve</svg>"
    )
    assert (
        numbers(cell("recap", "identity_subject", 1), cell("recap", "identity_crop", 1)).lead
        == "identity_crop"
    )
    assert numbers(cell("recap", "bank_age", 1), cell("recap", "bank_overlap", 1)).lead == "bank_overlap"
    assert claim_of(numbers(), []) is None and plane_of(numbers()) is None
    assert plane_of(numbers(*FOUR)) is None


def test_of_recurrence_who_is_the_same_comes_first_over_the_gap_and_the_gate_next():
    scores = {"gate": (1, 0.8, -0.2), "crop": (0.4, 0.8, 0.4), "kept": (0.2, 0.7, 0.5)}
    cells = []
    for name, (none, recap, difference) in scores.items():
        cells.append(cell("none", f"recurrence_{name}", none, difference))
        cells.append(cell("recap", f"recurrence_{name}", recap))
    figures = [
        "<svg>likeness by crops over gap</svg>",
        "<svg>share of returns that are the same over gap</svg>",
    ]
    claim = claim_of(numbers(*cells, name="recurrence"), figures)
    assert claim.headline == (
        "With recap, the share of returns in which the subject is the same again is 0.7 [0.68, 0.72]: "
        "higher than with none."
    )
    assert claim.sentences[-1].startswith("With recap, the share of returns whose subject is there before")
    assert claim.sentences[-1].endswith("lower than with none.") and claim.chart == figures[1]
    assert claim_of(numbers(*cells, name="recurrence"), []).chart.startswith("<svg")


def test_identity_against_motion_says_who_has_more_of_both():
    claim = plane_of(numbers(*FOUR, *PATHS))
    assert claim.headline == "Identity against motion: sink has more of both than recap."
    assert "recap has more of both than none." in claim.sentences
    assert ">none<" in claim.chart and ">sink<" in claim.chart
    turned = [cell("sink", "subject_path", 0.1, 0.05, 0.01), *(c for c in PATHS if c["row"] != "sink")]
    claim = plane_of(numbers(*FOUR, *turned))
    assert claim.headline == "Identity against motion: no other row has more of both than recap."
    assert "One is paid for with the other between recap and sink." in claim.sentences


def test_the_front_has_those_that_nobody_exceeds():
    def place(name, x, y):
        return Place(name, (x, x, x), (y, y, y), "")

    places = [place("a", 3, 1), place("b", 2, 2), place("c", 1, 1), place("d", 1, 3), place("e", 1, 2)]
    assert [each.label for each in not_exceeded(places)] == ["d", "b", "a"]


def write_table(folder, cells, title="Long-horizon identity", rows=(("recap", "0.8"),), **more):
    """A finished table, as `recap reproduce` leaves it."""
    folder.mkdir(parents=True)
    measured = {
        "name": "identity crop",
        "judge": "crops",
        "head": ["row", "here"],
        "rows": rows,
        "ours": "recap",
    }
    section = {
        "title": title,
        "remarks": ["A note."],
        "measured": [measured],
        "figures": [],
        "video": "",
        "sheet": "",
    }
    section |= {"video_about": "", "sheet_about": ""}
    table = {"table": "identity", "about": {"prompts": 20, "seeds": 5, "backbone": "embedded", **more}}
    (folder / "table.json").write_text(
        json.dumps({**table, "left_out": [], "cells": cells, "section": section})
    )
    (folder / "table.md").write_text("# Identity")


def test_a_report_of_several_folders_has_the_findings_first_and_folds_tables(tmp_path):
    write_table(tmp_path / "one" / "identity", [*FOUR, *PATHS], hardware="x")
    write_table(tmp_path / "two" / "identity", FOUR, "<b>Other</b>", [["recap", "<script>alert(1)</script>"]])
    page = write_report([tmp_path / "one", tmp_path / "two"])
    assert page == tmp_path / "one" / "report.html"
    text = page.read_text()
    assert (
        text.index("Findings")
        < text.index("sink has more of both")
        < text.index("<details>")
        < text.index("A note.")
    )
    assert text.count("<details>") == 2 and text.count("likeness of the late to the early subject") >= 4
    assert "Long-horizon identity (one)" in text and "&lt;b&gt;Other&lt;/b&gt; (two)" in text
    assert "<script>alert" not in text and "{{" not in text
    assert 'href="identity/index.html"' in text and 'href="../two/identity/index.html"' in text
    with pytest.raises(ValueError, match="two of the folders hold the same table"):
        write_report([tmp_path / "one", tmp_path / "two"], tmp_path / "results.md")
    with pytest.raises(ValueError, match="holds no finished table"):
        write_report([tmp_path / "one", tmp_path / "lost"])


def test_videos_are_in_the_page_until_they_are_too_many(tmp_path, monkeypatch):
    for name in ("one", "two"):
        write_table(tmp_path / "out" / name, FOUR)
        (tmp_path / "out" / name / "side-by-side.mp4").write_bytes(b"not looked at" * 100)
    monkeypatch.setattr("recap.tables.report.EMBED_LIMIT", 2000)
    text = write_report([tmp_path / "out"]).read_text()
    assert text.count("data:video/mp4") == 1 and 'src="two/side-by-side.mp4"' in text


def test_a_table_whose_cells_are_broken_is_refused(tmp_path):
    write_table(tmp_path / "identity", [{"row": "recap"}])
    with pytest.raises(ValueError, match="is no whole table"):
        write_report([tmp_path])


def test_the_page_in_a_browser_on_a_desk_and_a_phone_and_as_a_pdf(tmp_path, browser):
    write_table(tmp_path / "identity", [*FOUR, *PATHS])
    page = write_report([tmp_path])
    for width, scheme in ((1400, "light"), (420, "dark")):
        view = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        said: list[str] = []
        view.on("console", lambda message, said=said: said.append(message.text))
        view.on("pageerror", lambda error, said=said: said.append(str(error)))
        view.goto(page.as_uri())
        # Nothing hangs over the edge; wide charts and tables scroll by themselves.
        assert view.evaluate("document.documentElement.scrollWidth <= innerWidth") and not said
        assert view.locator("details[open]").count() == 0 and view.locator(".finding").count() == 2
        view.click("#unfold")
        assert view.locator("details[open]").count() == 1 and "A note." in view.inner_text("details")
        view.click("#unfold")
        assert view.locator("details[open]").count() == 0
        view.click("text=sink has more of both")
        assert view.evaluate("location.hash") == "#identity-motion"
    assert view.pdf().startswith(b"%PDF")
    # What is folded, and what only moves, is not printed.
    view.emulate_media(media="print")
    # A dark page is printed on white.
    assert view.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert (
        not view.is_visible("details") and not view.is_visible("#unfold") and view.is_visible(".evidence img")
    )
