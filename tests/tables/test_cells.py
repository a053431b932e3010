"""Cells of a table: pairs, the paper's numbers, what a viewer could see, and the figures made of them."""

from __future__ import annotations

import pytest

from recap.eval.metrics import all_measures
from recap.eval.scores import Estimate
from recap.tables.looks import describe_looks
from recap.tables.page import figures_of
from recap.tables.paper_numbers import paper_table
from recap.tables.recipes import find_recipe
from recap.tables.table import COLUMNS, ScoredRun, as_markdown, build_cells


def score(value, backend="x", name="identity_frame"):
    return {name: {"name": name, "value": value, "backend": backend, "n": 1, "details": {}}}


def test_the_table_compares_pairs_and_shows_the_paper():
    recipe = find_recipe("identity")
    lines = [
        ScoredRun(row, f"p{prompt}", seed, score(0.5 + 0.2 * (row == "recap") + 0.01 * prompt))
        for prompt in range(5) for seed in range(2) for row in ("none", "recap")
    ]  # fmt: skip
    none, ours = build_cells(recipe, lines)
    assert none.value.mean == pytest.approx(0.52) and (none.value.n, none.value.clusters) == (10, 5)
    assert none.against == pytest.approx(Estimate(0.2, 0.2, 0.2, 10, 5)) and none.wins == 1
    assert ours.against is None and (none.paper, ours.paper) == (0.745, 0.850)
    text = as_markdown(recipe, [none, ours], {"backbone": "made up"})
    assert "| none | 0.52 [" in text and "0.745" in text and "judged by: x" in text
    same = [ScoredRun("recap", line.prompt, line.seed, score(0.5 + 1e-9 * line.seed)) for line in lines[::2]]
    even = [ScoredRun("none", line.prompt, line.seed, score(0.5)) for line in same]
    tied = build_cells(recipe, [*even, *same])[0]
    assert tied.against == Estimate(0, 0, 0, 10, 5) and tied.wins == 0.5
    lines[0] = ScoredRun("none", "p0", 0, score(0.5, "y"))
    with pytest.raises(ValueError, match="one judge"):
        build_cells(recipe, lines)


def test_no_p_of_a_difference_that_nobody_could_see():
    """The small difference is as certain as the large one, and says nothing."""
    recipe = find_recipe("identity")
    for step, backend, name, shown in (
        (0.2, "x", "identity_frame", "0.031"),
        (0.009, "x", "identity_frame", "not visible (< 0.01)"),
        (0.04, "probe", "identity_subject", "not visible (< 0.046)"),
        (0.04, "x", "identity_subject", "0.031"),
    ):
        lines = [
            ScoredRun(row, f"p{prompt}", seed, score(0.5 + step * (row == "recap"), backend, name))
            for prompt in range(6) for seed in range(2) for row in ("none", "recap")
        ]  # fmt: skip
        cell = build_cells(recipe, lines)[0]
        assert cell.against.mean == pytest.approx(step) and cell.texts()[5] == shown
        values = dict(zip(COLUMNS, cell.values(), strict=True))
        assert (values["p_by_prompts"] is None) == shown.startswith("not")
        assert shown in as_markdown(recipe, [cell], {})


def test_a_table_of_many_rows_says_which_differ_if_their_number_is_counted():
    recipe = find_recipe("entering")

    def runs(number, seen=0.3):
        """One row that differs in every prompt, others that differ by chance."""
        near = [f"row {n}" for n in range(number)]
        return [
            ScoredRun(row, f"p{prompt}", seed, score(value, name="return_kept"))
            for prompt in range(8) for seed in range(2)
            for row, value in (
                ("recap", 0.9), ("sink", 0.9 - seen),
                *((name, 0.9 + 0.2 * ((prompt * 7 + n * 3 + seed) % 5 - 2)) for n, name in enumerate(near)),
            )
        ]  # fmt: skip

    text = describe_looks(recipe, runs(6))
    assert "Corrected for 7 looks" in text and "return kept: sink (lower, p 0.0078)." in text
    # Nobody could see it, however certain it is.
    assert "return kept: no row" in describe_looks(recipe, runs(6, seen=0.04))
    # One row is one look, and without ours nothing is compared.
    assert not describe_looks(recipe, runs(0))
    assert not describe_looks(recipe, [run for run in runs(3) if run.row != "recap"])
    assert not describe_looks(find_recipe("bank"), runs(3)), "a table without panels"
    few = [run for run in runs(6) if run.prompt in ("p0", "p1")]
    assert not describe_looks(recipe, few), "two prompts have no p"


def test_every_comparison_of_pictures_says_what_a_viewer_could_see():
    """What is not of pictures has no viewer: the bank, attention, time."""
    for measure in all_measures().values():
        if measure.name not in ("bank", "content", "attention", "time"):
            assert measure.visible and set(measure.headlines) <= set(measure.visible), measure.name
            assert all(0 < measure.smallest_visible(name, "probe") < 0.1 for name in measure.visible)


def test_each_backbone_stands_next_to_its_own_line_of_the_paper():
    recipe = find_recipe("main")
    scores = {
        "dynamic_degree": {"name": "dynamic_degree", "value": 0.5, "backend": "dis", "n": 1, "details": {}}
    }
    lines = [ScoredRun(row, "p", 0, scores) for row in ("none", "sink", "recap")]
    shown = {
        backbone: [cell.paper for cell in build_cells(recipe, lines, backbone)]
        for backbone in ("self-forcing", "embedded", "longlive")
    }
    assert shown["self-forcing"] == shown["embedded"] == pytest.approx([0.275, 0.304, 0.581])
    baseline, sink, ours = shown["longlive"]
    assert sink is None  # the paper has no such line
    numbers = {row["method"]: float(row["DD"]) / 100 for row in paper_table("main")}
    assert (baseline, ours) == pytest.approx((numbers["LongLive"], numbers["LongLive+Ours"]))


def test_times_are_compared_at_one_length_and_next_to_the_papers():
    recipe = find_recipe("time")
    lines = [
        ScoredRun(row.name, "p", 0, score(row.seconds * (1 + (row.paper == "ours")), "native", "seconds"))
        for row in recipe.rows
    ]
    cells = {cell.row: cell for cell in build_cells(recipe, lines)}
    assert [cells[f"none, {m} min"].against.mean for m in (1, 2, 5)] == [60, 120, 300]
    assert cells["recap, 5 min"].against is None
    assert (cells["none, 5 min"].paper, cells["recap, 5 min"].paper) == (1435, 2239)
    written = as_markdown(recipe, list(cells.values()), {})
    assert "| recap - row | recap higher |" in written and "| 1435 |" in written


def test_rows_of_motion_say_how_their_videos_are_spread():
    flows = {"none": [1, 1, 1, 1, 3], "sink": [1, 1, 1, 1, 1], "recap": [2, 2, 2, 2, 2.5]}
    lines = [
        ScoredRun(row, f"p{prompt}", 0, {"total_flow": {"name": "total_flow", "value": float(value), "backend": "dis",
                                                  "n": 1, "details": {}}})
        for row, values in flows.items() for prompt, value in enumerate(values)
    ]  # fmt: skip
    cells = {(cell.row, cell.measure): cell for cell in build_cells(find_recipe("motion"), lines)}
    assert [cells[row, "drift_tail"].value.mean for row in flows] == [0.2, 0, 0]
    assert [cells[row, "drift_tail_of_baseline"].value.mean for row in flows] == [0.2, 0, 0.2]
    tail = cells["none", "drift_tail"]
    assert tail.value.low == 0 < tail.value.high <= 1 and tail.paper == pytest.approx(37 / 128)
    assert cells["recap", "total_flow_sd"].paper == 1.9 and cells["sink", "total_flow_sd"].paper is None
    assert (
        cells["none", "total_flow_sd"].value.mean == pytest.approx(0.8)
        and not cells["none", "drift_tail"].against
    )


def test_lengths_stand_in_order_and_are_shown_as_a_curve():
    lines = [
        ScoredRun(row, f"p{prompt}", 0, {
            name: {"name": name, "value": 0.1 * prompt, "backend": "dis", "n": 1, "details": {}}
            for name in ("dynamic_degree_10s", "dynamic_degree_5s")
        })
        for row in ("none", "recap") for prompt in range(5)
    ]  # fmt: skip
    recipe = find_recipe("length")
    cells = build_cells(recipe, lines)
    assert [cell.measure for cell in cells[:2]] == ["dynamic_degree_5s", "dynamic_degree_10s"]
    first = figures_of(recipe, cells, lines)[0]
    assert "dynamic degree over length" in first and first.count("<polyline") == 2


def test_no_figure_is_empty():
    """Curves over a setting are only of tables that vary one."""
    recipe = find_recipe("identity")
    runs = [ScoredRun(row, f"p{n}", 0, score(0.1 * n)) for row in ("none", "recap") for n in range(5)]
    (figure,) = figures_of(recipe, build_cells(recipe, runs), runs)
    assert ">none<" in figure and ">recap<" in figure


def test_a_measure_without_a_value_has_no_figure_and_no_table():
    """And pages have plain words where files have names of code."""
    recipe = find_recipe("reappearance")
    about = {"backend": "standin:hsv-8x4x4 in whole picture", "n": 1, "details": {}}
    values = {"found_in_B": 0.5, "reappearance_subject": None}
    scores = {name: {"name": name, "value": value, **about} for name, value in values.items()}
    runs = [ScoredRun("none", f"p{n}", 0, scores) for n in range(5)]
    cells = build_cells(recipe, runs)
    (figure,) = figures_of(recipe, cells, runs)
    assert ">found in B<" in figure
    page = as_markdown(recipe, cells, {})
    assert "reappearance" not in page.partition("**")[2] and "found_in" not in page and "standin" not in page
    assert "**found in B** (judged by: colour histograms (in place of DINOv2) in whole picture)" in page
