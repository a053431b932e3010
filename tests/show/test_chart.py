"""Drawings say what the numbers say: places, intervals, gaps."""

from __future__ import annotations

import math
import re
from itertools import combinations
from xml.etree import ElementTree

import pytest

from recap.show.chart import (
    BankHistory,
    Bar,
    Line,
    Place,
    draw_bank,
    interval_chart,
    line_chart,
    panel_chart,
    plane_chart,
)
from recap.show.labels import Area, find_spots

NAN = math.nan
LEFT, RIGHT, BOTTOM = 60.0, 730.0, 300.0


def drawn(svg, tag):
    return [part.attrib for part in ElementTree.fromstring(svg).iter() if part.tag.endswith("}" + tag)]


def whiskers(svg):
    """Upright strokes: x, upper and lower end, in pixels."""
    found = [{name: float(line[name]) for name in ("x1", "y1", "x2", "y2")} for line in drawn(svg, "line")]
    return [(line["x1"], line["y1"], line["y2"]) for line in found if line["x1"] == line["x2"]]


def test_a_curve_has_whiskers_where_its_interval_is_known():
    svg = line_chart("t", [Line("a", [1, 2, 4], [0.4, 0.5, 0.6], [(0.3, 0.5), (NAN, NAN), (0.5, 0.9)])], "x")
    points = [point.split(",") for point in drawn(svg, "polyline")[0]["points"].split()]
    (first, upper, lower), (last, top, bottom) = whiskers(svg)
    assert (first, last) == (float(points[0][0]), float(points[2][0]))
    assert upper < float(points[0][1]) < lower and top < float(points[2][1]) < bottom
    assert (bottom - top) / (lower - upper) == pytest.approx(2, rel=0.01)
    assert not whiskers(line_chart("t", [Line("a", [1, 2], [0.4, 0.5])], "x"))


def test_whiskers_of_two_curves_stand_next_to_each_other_and_inside_the_drawing():
    spans = [(0.0, 1.0)]
    svg = line_chart("t", [Line("a", [1], [0.5], spans), Line("b", [1], [0.5], spans)], "x")
    (one, top, bottom), (other, *_) = whiskers(svg)
    assert one < other and 44 < top < bottom < 300


def test_a_gap_in_a_curve_stays_one():
    svg = line_chart("a & b", [Line("a", [0, 1, 2, 3, 4], [1, 2, None, 4, 5])], "seconds")
    assert len(drawn(svg, "polyline")) == 2 and "a &amp; b" in svg


def test_rows_without_an_interval_have_a_dot_and_the_papers_number_a_diamond():
    svg = interval_chart(
        "t", [Bar("a", 0.5, NAN, NAN, 0.7), Bar("b", 0.6, 0.5, 0.7), Bar("c", NAN, NAN, NAN)]
    )
    assert len(drawn(svg, "circle")) == 2 and len(drawn(svg, "polygon")) == 1
    assert len([line for line in drawn(svg, "line") if line.get("stroke-width") == "3"]) == 1
    assert "nan" not in re.sub(r"<text.*?</text>", "", svg)


def bands(svg: str) -> list[tuple[float, float, float, float, float]]:
    """x, width, y, height and opacity of every band."""
    found = re.findall(
        r'<rect x="([\d.]+)" y="([\d.]+)" width="([\d.]+)" height="([\d.]+)" fill="#\w+" fill-opacity="([\d.]+)"',
        svg,
    )
    return [
        (x, width, y, height, shade) for x, y, width, height, shade in (map(float, each) for each in found)
    ]


def test_a_kept_slot_is_a_level_band_and_a_lost_one_ends():
    """Four blocks of a second. Four slots of second 0; three of them make room for second 2."""
    history = BankHistory([1, 2, 3, 4], [{0.25: 4}, {0.25: 4}, {0.25: 1, 2.5: 3}, {0.25: 1, 2.5: 3}], [2.0])
    svg = draw_bank("a <bank>", history)
    ElementTree.fromstring(svg)
    assert "a &lt;bank&gt;" in svg and svg.count("stroke-dasharray") == 1
    per_s = (RIGHT - LEFT) / 4
    full, rest, late = bands(svg)
    # From the end of block 0 to that of block 2.
    assert full[:2] == pytest.approx((LEFT + per_s, 2 * per_s), abs=0.1)
    assert rest[:2] == pytest.approx((LEFT + 3 * per_s, per_s), abs=0.1) and rest[2] == full[2]
    assert late[0] == rest[0] and late[2] < rest[2]  # later sources stand higher
    assert full[4] == 1 and rest[4] == pytest.approx(0.5) and rest[4] < late[4] < 1
    assert full[2] + full[3] == pytest.approx(BOTTOM, abs=0.2)


def test_long_videos_have_few_bands():
    ends = [0.75 * (i + 1) for i in range(400)]
    follows = [{end - 0.5: 104} for end in ends]  # a bank that keeps nothing
    svg = draw_bank("recent", BankHistory(ends, follows))
    assert len(bands(svg)) <= 31 and len(svg) < 20_000
    assert draw_bank("empty", BankHistory([1.0], [{}])).count("<rect") == 1


def test_a_plane_joins_the_places_of_a_path_and_leaves_out_what_was_not_measured():
    places = [
        Place("none", (0.5, 0.4, 0.6), (0.3, 0.2, 0.4)),
        Place("recap, lambda 1", (0.4, 0.3, 0.5), (0.7, 0.6, 0.8), "recap"),
        Place("recap, lambda 5", (0.2, NAN, NAN), (0.8, NAN, NAN), "recap"),
        Place("lost", (NAN, NAN, NAN), (0.1, 0.1, 0.1)),
    ]
    svg = plane_chart("identity against motion", places, "motion", "identity")
    assert all(f">{label}<" in svg for label in ("none", "recap, lambda 1", "5")) and "lost" not in svg
    dots = [(float(dot["cx"]), float(dot["cy"])) for dot in drawn(svg, "circle")]
    assert len(dots) == 3 and dots[0][0] > dots[1][0] > dots[2][0] and dots[0][1] > dots[1][1] > dots[2][1]
    (path,) = drawn(svg, "polyline")
    assert [tuple(map(float, point.split(","))) for point in path["points"].split()] == dots[1:]
    # Two measures of two places have intervals.
    assert sum("stroke-opacity" in line for line in drawn(svg, "line")) == 4


def test_later_places_of_a_path_are_labelled_with_their_number_alone():
    names = ["sink, lambda 1", "sink, lambda 2.5", "sink", "recap, lambda 2.5"]
    places = [
        Place(name, (i, NAN, NAN), (i * i, NAN, NAN), name.split(",")[0]) for i, name in enumerate(names)
    ]
    words = [part.text for part in ElementTree.fromstring(plane_chart("t", places, "x", "y")).iter()]
    # Nothing has an interval, so nothing explains crosses.
    assert words[-4:] == ["sink, lambda 1", "2.5", "sink", "recap, lambda 2.5"]
    assert "pale crosses: intervals" not in words


def test_an_outlier_is_at_the_border_with_its_value_and_squeezes_nobody():
    """`none` keeps 0.437 of the identity, all others 0.84 to 0.91: they had a tenth of the height."""
    near = [(0.14 + i / 1000, 0.85 + i / 100) for i in range(6)]
    places = [Place(f"m{i}", (x, x, x), (y, y - 0.01, y + 0.01)) for i, (x, y) in enumerate(near)]
    below = Place("none", (0.142, 0.141, 0.143), (0.437, 0.36, 0.51))
    svg = plane_chart("t", [below, *places], "motion", "identity")
    heights = [float(dot["cy"]) for dot in drawn(svg, "circle")]
    assert len(heights) == 6 and max(heights) - min(heights) > 200
    assert ">none: identity 0.437<" in svg
    (arrow,) = drawn(svg, "polygon")
    tip, *base = (tuple(map(float, corner.split(","))) for corner in arrow["points"].split())
    # At the lower border, which is where the upright lines of the grid end, and downwards.
    assert tip[1] == max(bottom for _, _, bottom in whiskers(svg)) and all(y < tip[1] for _, y in base)
    right = Place("far", (0.9, NAN, NAN), (0.86, NAN, NAN))
    svg = plane_chart("t", [*places, below, right], "motion", "identity")
    assert ">far: motion 0.9<" in svg and len(drawn(svg, "polygon")) == 2
    both = Place("lost", (0.9, NAN, NAN), (0.437, NAN, NAN))
    assert ">lost: motion 0.9, identity 0.437<" in plane_chart("t", [*places, both], "motion", "identity")


def test_few_places_or_places_all_over_the_plane_are_all_on_the_axes():
    for ys in ((0.4, 0.86, 0.87), (0.1, 0.3, 0.5, 0.6, 0.8, 0.9)):
        places = [Place(f"m{i}", (i, NAN, NAN), (y, NAN, NAN)) for i, y in enumerate(ys)]
        svg = plane_chart("t", places, "x", "y")
        assert len(drawn(svg, "circle")) == len(ys) and not drawn(svg, "polygon")


@pytest.mark.parametrize("apart", [1, 14, 25, 60])
def test_every_label_is_nearest_to_its_point_or_has_a_line_back(apart):
    """Labels that had to move stood at other points: 'lambda 8' at that of 2.5."""
    points = [(300 + apart * (i % 4) + i // 4, 200 + apart * (i // 4)) for i in range(12)]
    labels = [f"recap, lambda {i}" for i in range(12)]
    page = Area(60, 60, 760, 500)
    spots = find_spots(labels, points, [points[:4]], page)
    for point, spot in zip(points, spots, strict=True):
        assert page.holds(spot.box)
        if spot.leader:
            assert spot.leader == (point, spot.box.nearest(point))
        else:
            away = [spot.box.distance(other) for other in points if other != point]
            assert spot.box.distance(point) < min(away)
    assert not any(one.box.touches(other.box) for one, other in combinations(spots, 2))


def test_in_a_chart_lines_back_lead_from_dots_and_lone_labels_have_none():
    def leaders(svg):
        return [line for line in drawn(svg, "line") if line.get("stroke-width") == "0.8"]

    crowd = [Place(f"recap, layers {i}", (i / 100, NAN, NAN), (0.5, NAN, NAN)) for i in range(2)]
    ends = [Place("a", (-9, NAN, NAN), (0, NAN, NAN)), Place("b", (9, NAN, NAN), (1, NAN, NAN))]
    assert not leaders(plane_chart("t", ends, "x", "y"))
    svg = plane_chart("t", [*crowd, *ends], "x", "y")
    dots = {(dot["cx"], dot["cy"], dot["fill"]) for dot in drawn(svg, "circle")}
    lines = leaders(svg)
    assert lines and all((line["x1"], line["y1"], line["stroke"]) in dots for line in lines)


def test_panels_have_a_line_for_every_label_and_an_axis_each():
    one = [Bar("sink", 0.2, 0.1, 0.3), Bar("recap", 0.8, 0.7, 0.9)]
    other = [Bar("recap", 50.0, NAN, NAN), Bar("memrope", NAN, NAN, NAN)]
    svg = panel_chart("t", {"likeness": one, "path": other}, "recap")
    words = [part.text for part in ElementTree.fromstring(svg).iter() if part.tag.endswith("}text")]
    assert {"likeness", "path"} < set(words)
    assert [word for word in words if word in ("sink", "recap", "memrope")] == ["sink", "recap", "memrope"]
    dots = [(float(dot["cx"]), float(dot["cy"])) for dot in drawn(svg, "circle")]
    assert len(dots) == 3 and dots[0][0] < dots[1][0] < dots[2][0]
    assert dots[1][1] == dots[2][1] != dots[0][1], "a label is on one line in all panels"
    level = [line for line in drawn(svg, "line") if line["y1"] == line["y2"]]
    assert len(level) == 2, "an interval where there is one"
    assert sum("stroke-dasharray" in line for line in drawn(svg, "line")) == 2, "ours is marked in both"
