"""The published scores of all runs give the published tables, and settings that are as usual change no key."""

from __future__ import annotations

import lzma
from dataclasses import replace
from pathlib import Path

import pytest
from tables_help import jobs_of

from recap.config import RunConfig
from recap.tables.ask import Ask
from recap.tables.generating import config_of
from recap.tables.recipes import find_recipe
from recap.tables.reproduce import How, reproduce
from recap.tables.rows import RECAP

RESULTS = Path(__file__).parents[2] / "docs" / "results"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("table", "half"),
    [
        *((name, "") for name in ("components", "bank", "motion", "length", "recurrence", "entering")),
        *((f"confirm{question}", "confirm") for question in ("", "-60s", "-entering")),
        *((f"beyond{question}", "search") for question in ("", "-60s", "-entering")),
    ],
)
def test_tables_are_made_again_from_the_published_scores(table, half, tmp_path):
    """What is published of a table is every row whose runs are all in the published store."""
    (tmp_path / "runs.jsonl").write_bytes(lzma.decompress((RESULTS / "runs.jsonl.xz").read_bytes()))
    ask = Ask(flow="raft-small", device="cuda", embedder="hsv", half=half)
    done = reproduce([table], ask, tmp_path, How(stored=True), notice=lambda _: None)
    assert not done.left
    made = (tmp_path / table / "table.csv").read_text()
    assert made == (RESULTS / f"{table}.csv").read_text()
    # Asked again, it is no smaller result.
    again = reproduce([table], ask, tmp_path, How(stored=True), notice=lambda _: None)
    assert not again.left and (tmp_path / table / "table.csv").read_text() == made


def test_a_setting_that_is_as_usual_changes_no_key_and_any_other_does():
    def key(memory, settings=None):
        row = replace(RECAP, memory={**RECAP.memory, **memory}, settings=settings or {})
        return jobs_of(replace(find_recipe("bank"), rows=(row,)))[0].key

    plain = key({})
    assert plain == key({"capacity_frames": 1.0, "zero_scores_fill": True}, {"cycle_threshold_px": 2.0})
    others = [
        key({"capacity_frames": 2.0}),
        key({"reinforcement": 1.0}),
        key({}, {"cycle_threshold_px": 1.0}),
    ]
    assert len({plain, *others}) == 4


def test_a_job_names_the_whole_config():
    (job,) = jobs_of("bank")
    config = config_of(job)
    assert config == RunConfig.from_dict(config.to_dict())
    assert config.memory.settings.capacity_frames == 1.0 and config.flow == "classical"
