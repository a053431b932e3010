"""What happened in each block, as JSON lines.

A trace holds no times: the same run gives the same bytes, resumed or not. Times go to a file of their own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from recap.errors import refuse
from recap.types import Candidates, GeneratedBlock


def block_record(made: GeneratedBlock, *, offered: bool = False) -> dict[str, Any]:
    """One line of the trace; reading the tensors is where the device is waited for.

    `offered` adds the scores of all tokens that the bank could choose from, which most readers have no use for.
    """
    memory = made.memory
    record: dict[str, Any] = {
        "block": made.block.index,
        "first_frame": made.block.first_frame,
        "first_pictures": list(made.first_pictures),
        "prompts": list(made.block.prompts),
        "clears_prior": made.block.clears_prior,
        "attended_tokens": {role.value: count for role, count in memory.tokens.items()},
        "attention_share": {role.value: share.tolist() for role, share in made.shares.items()},
    }
    if made.stage_shares:
        record["attention_share_by_stage"] = [
            {role.value: share.tolist() for role, share in made.stage_shares[stage].items()}
            for stage in sorted(made.stage_shares)
        ]
    if memory.notes:
        record["notes"] = dict(memory.notes)
    if memory.fired is not None:
        record["fired_tokens"] = memory.fired.tolist()
    if memory.edge_share is not None:
        record["bank_edge_share"] = memory.edge_share.tolist()
    if memory.admitted is not None:
        record["admitted"] = _entries(memory.admitted)
    if memory.evicted is not None:
        record["evicted"] = _entries(memory.evicted)
    if offered and memory.offered is not None:
        source = memory.offered.source[0]  # whole frames, row-major, the same of all rows
        grid = (source[:, 1:].amax(dim=0) + 1).tolist()
        frames = source[:: grid[0] * grid[1], 0].tolist()
        record["offered"] = {"frames": frames, "grid": grid, "scores": memory.offered.score.tolist()}
    return record


def _entries(candidates: Candidates) -> list[list[list[float]]]:
    """Per row a list of [frame, row, column, score], without the slots where nothing happened."""
    return [
        [[*place, score] for place, score in zip(places, scores, strict=True) if score >= 0]
        for places, scores in zip(candidates.source.tolist(), candidates.score.tolist(), strict=True)
    ]


def picture_of_frame(trace: Sequence[Mapping[str, Any]]) -> dict[int, int]:
    """The index in the video of the first picture of every frame; backbones differ in how many a frame has."""
    found: dict[int, int] = {}
    for line in trace:
        if not line.get("first_pictures"):
            limit = "does not tell which pictures its frames are, as an older version wrote it"
            raise refuse("trace", f"block {line.get('block')}", limit, "draw the run again")
        found |= {line["first_frame"] + i: picture for i, picture in enumerate(line["first_pictures"])}
    return found


def append_line(path: Path, record: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a JSON-lines file; a last line cut short by a kill is left out."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        lines = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    except json.JSONDecodeError as error:
        raise refuse("file", str(path), f"is not lines of JSON ({error})", "put it back") from error
    if not all(isinstance(line, dict) for line in lines):
        raise refuse("file", str(path), "holds lines that are no tables", "put it back")
    return lines
