"""This module gives a table the baseline of its backbone.

The paper's baselines are the public models with their own code. Self-Forcing has no sink, so its baseline is the
window alone; Infinite-Forcing and LongLive were trained with a sink and carry it in their baselines, too.
"""

from __future__ import annotations

from dataclasses import replace

from recap.backbones.wan.family import released_memory
from recap.backbones.wan.spec import PUBLIC, RELEASED
from recap.tables.recipes import Recipe
from recap.tables.rows import NONE, Row

AS_RELEASED = "as released"
"""The name of the row that is a backbone's own baseline."""


def on_backbone(recipe: Recipe, backbone: str) -> Recipe:
    """Return the recipe with the window alone replaced by what the backbone's public code keeps.

    A row that is then the same as the baseline is left out.
    """
    if backbone not in RELEASED or not RELEASED[backbone].sink_frames:
        return recipe
    rows: dict[str, Row] = {}
    for row in recipe.rows:
        made = _as_released(row, backbone) if row.memory == NONE.memory else row
        if same := next((other for other in rows.values() if _same_run(made, other)), None):
            rows[same.name] = replace(same, path=same.path or made.path)
        else:
            rows[made.name] = made
    return replace(recipe, rows=tuple(rows.values()))


def _as_released(row: Row, backbone: str) -> Row:
    released = RELEASED[backbone]
    spec = next(spec for spec in PUBLIC if spec.name == backbone)
    usual = (released.window_frames, released.phases) == (spec.window_frames, spec.phases)
    name = row.name.replace(NONE.name, AS_RELEASED, 1)
    return replace(
        row, name=name, memory=released_memory(backbone), backbone={} if usual else {"as_released": True}
    )


def _same_run(one: Row, other: Row) -> bool:
    """Tell whether two rows differ in their names alone: lambda 1 and a sink of one frame are the defaults."""

    def plain(row: Row) -> tuple[object, ...]:
        memory = {"sink_frames": 1, "reinforcement": 1.0, **row.memory}
        return memory, row.admission, dict(row.settings), dict(row.sampling), dict(row.backbone), row.seconds

    return one.memory["name"] == "sink" and plain(one) == plain(other)
