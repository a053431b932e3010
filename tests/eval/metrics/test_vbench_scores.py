"""Consistency with its fusion, and the aggregation compared with each cell of the paper's tables."""

from __future__ import annotations

import numpy as np
import pytest
from made_clips import still, write

from recap.eval.metrics.consistency import consistency, fused, mapped, sequence_consistency
from recap.eval.metrics.vbench import dimensions, group_score, missing, total_score
from recap.eval.sampling import clip_spans
from recap.io.video import open_clip
from recap.tables.paper_numbers import TABLES, paper_table, paper_value

MAIN = paper_table("main")
# The paper's column heads, in the order of VBench's dimensions.
HEADS = "SC BC TF MS DD AQ IQ OC MO HA C SR S AS TS OvC"
COLUMNS = dict(zip(HEADS.split(), dimensions(), strict=True))
# The paper prints these again in a second table, with the same numbers.
SECOND_TABLE = ("Self-Forcing", "Self-Forcing+Ours")


def dims(row, nudge=0.0):
    return {name: (float(row[column]) + nudge) / 100 for column, name in COLUMNS.items()}


def test_the_paper_has_42_cells():
    rows = [row["method"] for row in MAIN]
    assert len(rows) == 12 and 3 * len([*rows, *SECOND_TABLE]) == 42
    assert len(COLUMNS) == len(dimensions()) == 16


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
    assert missing(values).semantic == ("scene",) and missing(values).quality == ()
    group_score(values, "quality")
    with pytest.raises(ValueError, match=r"without scene.*all 16 dimensions"):
        total_score(values)
    with pytest.raises(ValueError, match="semantic is 'scene'"):
        group_score(values, "semantic")
    with pytest.raises(ValueError, match="divide percentages by 100"):
        total_score({**dims(MAIN[0]), "scene": 12.1})
    with pytest.raises(ValueError, match="did you mean 'scene'"):
        missing({"scenes": 0.5})


def test_every_table_of_the_paper_is_there():
    assert all(paper_table(name) for name in TABLES)
    assert paper_value("main", "DD", method="LongLive") == 20.3
    assert paper_value("identity", "frame_wins", table="identity_long", config="baseline") is None


def test_the_fusion_table():
    """The table maps known similarities to known values, with linear interpolation between."""
    assert mapped(0.5, "subject") == pytest.approx(0.9327, abs=1e-4)
    assert mapped(0.5, "background") == pytest.approx(0.9461, abs=1e-4)
    assert mapped(1, "subject") == 1 and mapped(0, "subject") == 0
    assert mapped(0.505, "subject") == pytest.approx((0.932675 + 0.933939) / 2)
    assert fused(0.9, 0.0, "subject") == 0.9 and fused(0.9, 1.0, "subject") == pytest.approx(0.95)
    points = [mapped(x / 100, "background") for x in range(101)]
    assert points == sorted(points)


class FirstPixel:
    """This embedder maps a bright corner to one vector and a dark corner to an orthogonal one."""

    backend = "corner"

    def embed(self, pictures):
        return np.array([(1, 0) if p[0, 0].mean() > 127 else (0, 1) for p in pictures], np.float32)


def test_consistency_within_and_between_clips(tmp_path):
    assert sequence_consistency(np.array([[1, 0]] * 5, np.float32)) == 1
    assert sequence_consistency(np.array([[1, 0], [0, 1], [0, 1]], np.float32)) == 0.25
    pictures = still(96).copy()
    pictures[:, :16, :16] = 255
    same = consistency(open_clip(write(tmp_path / "a.mp4", pictures)), 96, "subject", FirstPixel())
    assert same.value == 1 and same.n == 3 and same.backend == "corner"
    pictures[32:, :16, :16] = 0
    other = consistency(open_clip(write(tmp_path / "b.mp4", pictures)), 96, "subject", FirstPixel())
    # Each clip is consistent in itself; two of the three first pictures differ from the very first.
    assert other.details["slow"] == 1 and other.details["fast_raw"] == 0.25
    assert other.value == pytest.approx((1 + mapped(0.25, "subject")) / 2)


def test_cuts_are_those_of_vbench():
    """The counts and last starts are those of VBench's own cutter."""
    assert [len(clip_spans(n, 16, 2)) for n in (81, 957, 4797)] == [3, 30, 150]
    assert [len(clip_spans(n, 16, 10)) for n in (81, 957, 4797)] == [1, 6, 30]
    assert clip_spans(81, 16, 2)[-1] == (49, 81) and clip_spans(957, 16, 2)[-1] == (925, 957)
    assert clip_spans(957, 16, 10)[-1] == (797, 957) and clip_spans(81, 16, 10) == [(0, 81)]
    assert clip_spans(64, 16, 2) == [(0, 32), (32, 64)]
    with pytest.raises(ValueError, match="at least 1 picture"):
        clip_spans(0, 16, 2)
