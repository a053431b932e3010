"""Reports of progress add up."""

from __future__ import annotations

from recap.io.report import SILENT, Reporter


def test_a_counter_reports_the_sum_of_what_is_done(capsys):
    reports = []
    advance = Reporter(progress=lambda *report: reports.append(report)).counter(10)
    for size in (3, 5, 2):
        advance(size)
    assert [report[:2] for report in reports] == [(3, 10), (8, 10), (10, 10)]
    assert all(rate > 0 for _, _, rate in reports)
    SILENT.notice("nothing")
    SILENT.counter(1)(1)
    Reporter().notice("a line")
    assert capsys.readouterr().out == "a line\n"
