"""Quality, Semantic and Total, compared with each cell of the paper's tables."""

from __future__ import annotations

import pytest

from recap.tables.paper_numbers import paper_table
from recap_vbench.scores import DIMENSIONS, QUALITY, group_score, missing, total_score

MAIN = paper_table("main")
# The paper's column heads, in the order of VBench's dimensions.
HEADS = "SC BC TF MS DD AQ IQ OC MO HA C SR S AS TS OvC"
COLUMNS = dict(zip(HEADS.split(), DIMENSIONS, strict=True))
# The paper prints these again in a second table, with the same numbers.
SECOND_TABLE = ("Self-Forcing", "Self-Forcing+Ours")


def dims(row, nudge=0.0):
    return {name: (float(row[column]) + nudge) / 100 for column, name in COLUMNS.items()}


def test_the_paper_has_42_cells():
    rows = [row["method"] for row in MAIN]
    assert len(rows) == 12 and 3 * len([*rows, *SECOND_TABLE]) == 42
    assert len(COLUMNS) == len(DIMENSIONS) == 16


@pytest.mark.parametrize("row", MAIN, ids=lambda row: row["method"])
@pytest.mark.parametrize("column", ["Q", "Sem", "Total"])
def test_aggregation_gives_the_paper_s_cells(row, column):
    """The difference is within the rounding of the sixteen inputs to one decimal, and at most 0.08."""

    def score(nudge):
        values = dims(row, nudge)
        if column == "Total":
            return 100 * total_score(values)
        return 100 * group_score(values, "quality" if column == "Q" else "semantic")

    low, high = score(-0.05) - 0.05, score(0.05) + 0.05
    printed = float(row[column])
    assert low - 1e-9 <= printed <= high + 1e-9
    assert abs(score(0) - printed) <= 0.08


def test_most_cells_are_equal_to_the_last_digit():
    """33 of 42 cells are equal to the last digit."""
    equal = 0
    for row in MAIN:
        values = dims(row)
        made = (group_score(values, "quality"), group_score(values, "semantic"), total_score(values))
        weight = 2 if row["method"] in SECOND_TABLE else 1
        equal += weight * sum(
            abs(100 * m - float(row[c])) <= 0.05 for m, c in zip(made, ("Q", "Sem", "Total"), strict=True)
        )
    assert equal == 33


def test_a_missing_dimension_means_no_total():
    values = dims(MAIN[0])
    del values["scene"]
    assert missing(values) == ["scene"] and missing(values, QUALITY) == []
    group_score(values, "quality")
    with pytest.raises(ValueError, match=r"without scene.*all 16 dimensions"):
        total_score(values)
    with pytest.raises(ValueError, match="semantic is 'scene'"):
        group_score(values, "semantic")
    with pytest.raises(ValueError, match="divide percentages by 100"):
        total_score({**dims(MAIN[0]), "scene": 12.1})
    with pytest.raises(ValueError, match="did you mean 'scene'"):
        missing({"scenes": 0.5})
