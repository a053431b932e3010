"""The drawing of what a bank remembers: bands where the slots come from, for as long as they are held."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from recap.show.bank_chart import BankHistory, draw_bank

LEFT, RIGHT, TOP, BOTTOM = 60.0, 730.0, 44.0, 300.0


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
    assert full[:2] == pytest.approx(
        (LEFT + per_s, 2 * per_s), abs=0.1
    )  # from the end of block 0 to that of block 2
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
