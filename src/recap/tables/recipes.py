"""This module lists the tables and figures of the paper: their rows, and what these are measured by.

To add a table, add a `Recipe` to `RECIPES`; a table outside the package is named as `module:NAME`, which is a recipe
or a function that returns one. The order of its measures is the order in which the table shows them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from recap.backbones.wan.quantised import PRECISIONS
from recap.errors import refuse
from recap.io.lookup import look_up
from recap.tables.notes import NOTES
from recap.tables.rows import (
    ADMISSION_RULES,
    ARMS,
    BANK,
    BEYOND,
    CAPACITIES,
    COMPONENTS,
    CONFIRMED,
    FLOW_RULES,
    LAMBDAS,
    MAIN_NONE,
    MAIN_RECAP,
    MATCHED,
    NONE,
    OLD_RULES,
    OTHER_RULES,
    OVERLAP,
    PLUS,
    READINGS,
    RECAP,
    RIVALS,
    SINK,
    SINK_5,
    TIMED,
    Row,
)

BANK_CONTENT = "content"
"""The measure of how much of a bank lies at the border, and how much on actors."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Describes a table or figure; one with a row that may keep a bank also says what the bank is made of."""

    name: str
    title: str
    rows: tuple[Row, ...]
    measures: tuple[str, ...]
    script: str = "identity"
    seconds: float = 60.0
    seeds: int = 5
    # The row that the others are compared with, pair by pair.
    ours: str = "recap"
    # A table of recap.tables.paper_numbers, and what else picks its line.
    paper_table: str = ""
    paper_key: Mapping[str, str] = field(default_factory=dict)
    note: str = ""
    # Scores that the first figure has side by side, a line a row; rows are corrected for their number in these.
    panels: tuple[str, ...] = ()
    # Two scores: the next figure has one over the other.
    plane: tuple[str, str] | None = None
    # Its runs are timed, so nothing may run next to them.
    alone: bool = False
    # Measures that came later: new runs have them, and a table shows them if all its runs do.
    later: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        names = [row.name for row in self.rows]
        if not names:
            raise refuse(f"rows of {self.name!r}", "()", "a table has at least one", "add a Row")
        if twice := {name for name in names if names.count(name) > 1}:
            limit = f"{len(names)} rows have {len(set(names))} names"
            raise refuse(
                f"a row of {self.name!r}", sorted(twice)[0], limit, "give each row a name of its own"
            )
        if len(names) > 1 and self.ours not in names:
            limit = f"the other rows are compared with it, and the rows are {', '.join(names)}"
            raise refuse(
                f"ours of {self.name!r}", self.ours, limit, f"say which row is yours: ours={names[0]!r}"
            )
        if BANK_CONTENT not in self.measures and any(row.may_keep_bank for row in self.rows):
            object.__setattr__(self, "measures", (*self.measures, BANK_CONTENT))

    def compared_with(self, row: Row) -> str:
        """Return the row that this one is compared with: ours, and of the same length where lengths differ."""
        alike = (each.name for each in self.rows if each.seconds == row.seconds and each.paper == RECAP.paper)
        return self.ours if row.seconds is None else next(alike, self.ours)


IDENTITY = ("identity", "dynamics")
# Drawn before the camera was measured on its own, these tables have it where all their runs are newer.
CAMERA = ("camera_motion",)
REAPPEARANCE = Recipe(
    "reappearance",
    "Controlled reappearance",
    ARMS,
    ("reappearance", "subject_motion", "haunting"),
    script="reappearance",
    seconds=24.0,
    paper_table="identity",
    paper_key={"table": "reappear_ctrl"},
    panels=("same_again", "reappearance_crop", "haunting", "subject_path", "camera_path"),
    later=CAMERA,
)
# Who comes late and leaves again is in no opening, and no cut tells a memory to keep it.
ENTERING = Recipe(
    "entering",
    "A second subject enters, leaves and returns",
    (NONE, SINK, SINK_5, *RIVALS, BANK, MATCHED, *OTHER_RULES, RECAP, PLUS),
    ("entering", "identity", "subject_motion"),
    script="entering",
    panels=(
        *("identity_crop", "return_kept", "late_found_on_return", "late_haunting"),
        *("subject_path", "camera_path"),
    ),
    later=CAMERA,
)
RETENTION = Recipe(
    "retention",
    "Identity retention over 60 s",
    ARMS,
    ("retention",),
    paper_table="retention",
    paper_key={"horizon": "60s"},
)


def three_questions(name: str, about: str, rows: tuple[Row, ...], ours: str) -> tuple[Recipe, ...]:
    """Ask of these rows who is the same after a cut, over a minute in sight, and after leaving without a cut."""
    return (
        replace(REAPPEARANCE, name=name, title=f"{about}: controlled reappearance", rows=rows, ours=ours),
        Recipe(
            f"{name}-60s",
            f"{about}: one scene of a minute",
            rows,
            (*IDENTITY, "subject_motion"),
            ours=ours,
            panels=("identity_crop", "identity_subject", "subject_path", "camera_path", "dynamic_degree"),
            later=CAMERA,
            plane=("subject_path", "identity_crop"),
        ),
        replace(
            ENTERING,
            name=f"{name}-entering",
            title=f"{about}: a second subject enters, leaves and returns",
            rows=rows,
            ours=ours,
            plane=("late_found_on_return", "return_crop"),
        ),
    )


RECIPES = (
    Recipe(
        "main",
        "VBench-Long, main table",
        (MAIN_NONE, replace(SINK, paper="Self-Forcing+Sink(l=1)"), MAIN_RECAP),
        ("dynamics",),
        paper_table="main",
    ),
    Recipe("rivals", "Training-free rivals", (MAIN_NONE, *RIVALS, MAIN_RECAP), IDENTITY, paper_table="main"),
    Recipe(
        "components",
        "Sink and bank, one by one",
        COMPONENTS,
        (*IDENTITY, "subject_motion"),
        paper_table="ablation",
        paper_key={"table": "components"},
    ),
    Recipe(
        "admission",
        "What is admitted to the bank",
        ADMISSION_RULES,
        IDENTITY,
        paper_table="ablation",
        paper_key={"table": "admission"},
    ),
    Recipe(
        "capacity",
        "Capacity of the bank",
        CAPACITIES,
        ("identity", "dynamics", "bank", "time"),
        ours="1 frames",
    ),
    Recipe(
        "lambda", "Reinforcement of the sink", LAMBDAS, ("identity", "dynamics", "attention"), ours="lambda 5"
    ),
    # Not in the paper: what a stronger sink gains and what it costs, with and without a bank, next to all others.
    Recipe(
        "front",
        "Identity against motion, every memory",
        (
            NONE,
            *RIVALS,
            *(
                Row(f"{name}, lambda {x:g}", {"name": name, "reinforcement": x}, path=name)
                for name in ("sink", "recap")
                for x in (1.0, 2.5, 5.0, 8.0, 12.0)
            ),
            PLUS,
        ),
        (*IDENTITY, "subject_motion"),
        ours="recap, lambda 5",
        panels=("identity_crop", "subject_path", "camera_path"),
        later=CAMERA,
        # Dynamic degree is 0.98 to 1 with every memory on the embedded model, and a camera alone can raise it.
        plane=("subject_path", "identity_crop"),
    ),
    Recipe(
        "length",
        "Motion and consistency over length",
        (NONE, SINK, RECAP),
        ("length",),
        later=("length_consistency",),
    ),
    Recipe(
        "identity",
        "Long-horizon identity",
        ARMS,
        ("identity", "subject_motion"),
        paper_table="identity",
        paper_key={"table": "identity_long"},
    ),
    RETENTION,
    replace(
        RETENTION,
        name="retention-5min",
        title="Identity retention over 5 minutes",
        seconds=300.0,
        paper_key={"horizon": "5min"},
    ),
    REAPPEARANCE,
    # This and the next five are not in the paper. It is the one task that asks for more than the opening.
    replace(
        REAPPEARANCE,
        name="reappearance-all",
        title="Controlled reappearance, every memory and rule",
        rows=(*RIVALS, BANK, MATCHED, *OTHER_RULES, RECAP, PLUS),
    ),
    replace(
        REAPPEARANCE,
        name="rules",
        title="Readings of the novelty rule: controlled reappearance",
        rows=(
            *READINGS,
            Row("recap, literal borders", RECAP.memory, settings={"borders": "literal"}),
            Row("recap, no zero scores", {**RECAP.memory, "zero_scores_fill": False}),
        ),
    ),
    Recipe(
        "rules-60s",
        "Readings of the novelty rule: one scene of a minute",
        (SINK, Row("bank, lambda 1, old rules", BANK.memory, settings=OLD_RULES), BANK, *READINGS),
        (*IDENTITY, "subject_motion"),
    ),
    *three_questions("beyond", "Options beyond the paper", BEYOND, RECAP.name),
    *three_questions("confirm", "recap-plus and its rivals", CONFIRMED, PLUS.name),
    # The rows whose bank is filled by flow: what another --flow changes is all in them.
    replace(REAPPEARANCE, name="flows", title="The flow of the bank: reappearance", rows=(BANK, RECAP)),
    Recipe("flows-60s", "The flow of the bank: one scene of a minute", FLOW_RULES, IDENTITY),
    ENTERING,
    # Several come and go for minutes, with cuts: likeness over the length of their absence.
    Recipe(
        "recurrence",
        "Recurrence over minutes",
        (NONE, SINK, SINK_5, *RIVALS, BANK, RECAP, PLUS),
        ("recurrence", "drift", "subject_motion"),
        script="recurrence",
        seconds=300.0,
        seeds=3,
    ),
    # Whether 8 bits change what is measured: the measures of `components`.
    Recipe(
        "precision",
        "The transformer in 8 bits",
        (RECAP, *(replace(RECAP, name=f"recap, {name}", precision=name) for name in PRECISIONS[1:])),
        (*IDENTITY, "subject_motion"),
    ),
    Recipe("bank", "What the bank retains", (replace(RECAP, printed=OVERLAP),), ("bank",)),
    Recipe("time", "Generation time", TIMED, ("time",), seeds=1, ours="recap, 1 min", alone=True),
    Recipe(
        "motion",
        "Camera and object motion",
        (NONE, SINK, RECAP),
        ("motion",),
        seeds=1,
        paper_table="motion",
        # The homography of `motion` takes a subject for the camera where the camera stands still.
        later=("camera_motion", "subject_motion"),
    ),
)
TABLES = {recipe.name: replace(recipe, note=NOTES.get(recipe.name, "")) for recipe in RECIPES}


def find_recipe(name: str) -> Recipe:
    """Return the recipe of that name, or the one that `module:NAME` points at or returns."""
    found = look_up("table", name, TABLES)
    try:
        made = found() if callable(found) else found
    # A user's function may raise anything.
    except Exception as error:
        limit = f"cannot be made ({type(error).__name__}: {error})"
        raise refuse(
            "table", name, limit, "name a Recipe, or a function without arguments that returns one"
        ) from error
    if not isinstance(made, Recipe):
        raise refuse("table", name, "is not a Recipe", "make one by recap.tables.recipes.Recipe(...)")
    return made
