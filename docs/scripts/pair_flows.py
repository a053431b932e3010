"""Compare two flows of the bank pair by pair, from the published scores: `python docs/scripts/pair_flows.py`

Reads docs/results/runs.jsonl.xz; a pair is one row, prompt and seed of the table `flows`, drawn with each flow.
"""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

from recap.eval.scores import paired_interval
from recap.tables.ask import Ask
from recap.tables.recipes import find_recipe
from recap.tables.runs import TableRuns

RUNS = Path(__file__).parents[1] / "results" / "runs.jsonl.xz"
TABLE, OURS, THEIRS = "flows", "world-flow", "raft-small"
SCORES = ("same_again", "reappearance_crop", "bank_actor_share")


def scores_of(results: dict[str, Any], flow: str) -> dict[tuple[str, str, int], dict[str, float | None]]:
    """Return the scores of every row, prompt and seed that was drawn with a flow."""
    ask = Ask(flow=flow, device="cuda", embedder="hsv")
    runs = TableRuns([find_recipe(TABLE)], ask, {TABLE: {}}).tables[TABLE]
    found = {}
    for run in runs:
        measures = results[run.job.key].values()
        found[run.row.name, run.script.name, run.seed] = {
            name: score["value"] for measure in measures for name, score in measure.items()
        }
    return found


def main() -> None:
    with lzma.open(RUNS, "rt") as lines:
        results = {line["key"]: line["result"] for line in map(json.loads, lines)}
    ours, theirs = (scores_of(results, flow) for flow in (OURS, THEIRS))
    for row in dict.fromkeys(name for name, _, _ in ours):
        pairs = [pair for pair in ours if pair[0] == row]
        for score in SCORES:
            values = ([each[pair][score] for pair in pairs] for each in (ours, theirs))
            gap = paired_interval(*values, [prompt for _, prompt, _ in pairs])
            print(
                f"{row}: {score}: {OURS} - {THEIRS} = {gap.mean:.3f} [{gap.low:.3f}, {gap.high:.3f}], n = {gap.n}"
            )


if __name__ == "__main__":
    main()
