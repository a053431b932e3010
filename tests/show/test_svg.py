"""The writer of drawings: numbers in place, text escaped, ticks round."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from recap.fast.stopwatch import draw_curve
from recap.show import svg


def test_attributes_are_short_and_escaped():
    assert svg.line(0, 1.0, 2.346, 10, stroke_width=1.5) == (
        '<line x1="0" y1="1" x2="2.35" y2="10" stroke-width="1.5"/>'
    )
    assert svg.text(1, 2, "a < b", id='x"y') == (
        '<text x="1" y="2" text-anchor="start" id="x&quot;y">a &lt; b</text>'
    )


@pytest.mark.parametrize(
    ("low", "high", "most", "wanted"),
    [
        (0, 1, 6, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (0.43, 0.61, 6, [0.45, 0.5, 0.55, 0.6]),
        (-3, 3, 6, [-3, -2, -1, 0, 1, 2, 3]),
        (0, 60, 12, [0, 5, 10, 15, 20, 25, 30, 35, 40, 45, 50, 55, 60]),
        (2, 2, 6, [2]),
    ],
)
def test_ticks_are_round_and_inside(low, high, most, wanted):
    assert svg.round_ticks(low, high, most) == wanted


def test_the_curve_of_a_long_rollout_is_a_drawing():
    drawing = draw_curve([10.0] * 99 + [500.0], [2.0] * 100, "a & b")
    parts = [part for part in ElementTree.fromstring(drawing).iter() if part.tag.endswith("polyline")]
    times = [float(point.split(",")[1]) for point in parts[0].attrib["points"].split()]
    assert len(parts) == 2 and len(times) == 100
    assert len(set(times[:99])) == 1 and times[99] == 44  # an outlier is cut at the top
    assert (
        len([p for p in ElementTree.fromstring(draw_curve([1.0], [], "t")).iter() if "polyline" in p.tag])
        == 1
    )
