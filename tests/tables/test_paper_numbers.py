"""The numbers of the paper that tables print next to ours."""

from __future__ import annotations

from recap.tables.paper_numbers import TABLES, paper_table, paper_value


def test_every_table_of_the_paper_is_there():
    assert all(paper_table(name) for name in TABLES)
    assert paper_value("main", "DD", method="LongLive") == 20.3
    assert paper_value("identity", "frame_wins", table="identity_long", config="baseline") is None
