"""A memory has one colour, whatever else is on the page."""

from __future__ import annotations

from recap.registry import MEMORIES
from recap.show.chart import Bar, interval_chart
from recap.show.palette import COLOURS, MEMORY_COLOURS, colours_of


def test_a_memory_has_the_same_colour_on_every_page():
    assert len(set(MEMORY_COLOURS.values())) == len(MEMORIES)
    for names in (["none", "sink", "recap"], ["recap"], ["memrope", "mine", "recap", "none"]):
        assert colours_of(names)[names.index("recap")] == MEMORY_COLOURS["recap"]
    chart = interval_chart("t", [Bar("memrope", 0.5, 0.4, 0.6), Bar("recap", 0.6, 0.5, 0.7)])
    assert chart.count(MEMORY_COLOURS["recap"]) == chart.count(MEMORY_COLOURS["memrope"]) == 2


def test_rows_of_one_page_differ_in_colour():
    rows = ["recap, old rules", "recap", "sink, lambda 5", "mine", "recap, random"]
    found = colours_of(rows)
    assert len(set(found)) == len(rows)
    assert found[2] == MEMORY_COLOURS["sink"] and found[1] == MEMORY_COLOURS["recap"]
    many = [f"row {number}" for number in range(30)]
    assert set(colours_of(many)) == set(COLOURS)
