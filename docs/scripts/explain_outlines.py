"""Ask whether the kind or the memory decides how outlines change: `python docs/scripts/explain_outlines.py`

Reads docs/results/runs.jsonl.xz; takes the runs of the table `front`.
"""

from __future__ import annotations

import json
import lzma
from collections import defaultdict
from pathlib import Path

import numpy as np

from recap.tables.ask import Ask
from recap.tables.recipes import find_recipe
from recap.tables.runs import plan_runs

RUNS = Path(__file__).parents[1] / "results" / "runs.jsonl.xz"
TABLE = "front"
KIND = "turtle"


def explained(groups: dict[str, list[float]]) -> float:
    """Return the share of the variance that lies between the groups."""
    values = np.concatenate([np.asarray(group) for group in groups.values()])
    between = sum(len(group) * (np.mean(group) - values.mean()) ** 2 for group in groups.values())
    return float(between / len(values) / values.var())


def main() -> None:
    with lzma.open(RUNS, "rt") as lines:
        results = {line["key"]: line["result"] for line in map(json.loads, lines)}
    by_kind, by_memory = defaultdict(list), defaultdict(list)
    of_kind = defaultdict(list)
    for run in plan_runs(find_recipe(TABLE), Ask(flow="raft-small", device="cuda", embedder="hsv")):
        change = results[run.job.key]["subject_motion"]["subject_shape_change"]["value"]
        if change is not None:
            by_kind[run.script.subject].append(change)
            by_memory[run.row.name].append(change)
            if run.script.subject == KIND:
                of_kind[run.row.name].append(change)
    print(
        f"{TABLE}: {sum(map(len, by_kind.values()))} videos, {len(by_kind)} kinds, {len(by_memory)} memories"
    )
    print(f"of the variance of subject_shape_change, kinds explain {explained(by_kind):.0%}")
    print(f"and memories {explained(by_memory):.0%}")
    means = sorted((float(np.mean(changes)), name) for name, changes in of_kind.items())
    print(f"{KIND}: from {means[0][0]:.2f} ({means[0][1]}) to {means[-1][0]:.2f} ({means[-1][1]})")


if __name__ == "__main__":
    main()
