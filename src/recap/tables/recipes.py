"""This module lists the tables and figures of the paper: their rows, and what these are measured by.

To add a table, add a `Recipe` to `RECIPES`; a table outside the package is named as `module:NAME`, which is a recipe
or a function that returns one. The order of its measures is the order in which the table shows them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from recap.backbones.wan.quantised import PRECISIONS
from recap.config import AUTO
from recap.errors import refuse
from recap.io.lookup import look_up
from recap.memory.recap import RecapPlusConfig
from recap.registry import ADMISSIONS, MEMORIES
from recap.tables.notes import NOTES
from recap.tables.paper_numbers import paper_value

BANK_CONTENT = "content"
"""The measure of how much of a bank lies at the border, and how much on actors."""


@dataclass(frozen=True, slots=True)
class Row:
    """Says how the memory of one table row is set up."""

    name: str
    memory: Mapping[str, Any]
    # "auto" is the usual one of the memory.
    admission: str = AUTO.name
    # The paper's name for it; "" where the paper has no such row.
    paper: str = ""
    # Set where the rows of a table differ in length.
    seconds: float | None = None
    # The setting that a sweep varies.
    value: float | None = None
    # Rows that a figure of two measures joins by a line.
    path: str = ""
    # Settings of the admission other than its defaults.
    settings: Mapping[str, Any] = field(default_factory=dict)
    # Settings of the sampler other than its defaults: antiphase, sink_noise.
    sampling: Mapping[str, float] = field(default_factory=dict)
    # Score -> what the paper prints for it, where it stands in no line of `paper_table`.
    printed: Mapping[str, float | None] = field(default_factory=dict)
    # Settings of the backbone other than its defaults.
    backbone: Mapping[str, Any] = field(default_factory=dict)
    # The format of the transformer's weights: see recap.backbones.wan.quantised.
    precision: str = "full"

    @property
    def available(self) -> bool:
        """Tell whether this version knows its parts; those outside the package are named as `module:Name`."""
        parts = ((self.memory["name"], MEMORIES), (self.admission, (AUTO.name, *ADMISSIONS)))
        return all(name in known or ":" in name for name, known in parts)

    @property
    def may_keep_bank(self) -> bool:
        """Tell whether its runs may have a bank; of a memory outside the package that is not known beforehand."""
        name = self.memory["name"]
        return ":" in name or (name in MEMORIES and MEMORIES[name].keeps_bank)


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
        if BANK_CONTENT not in self.measures and any(row.may_keep_bank for row in self.rows):
            object.__setattr__(self, "measures", (*self.measures, BANK_CONTENT))

    def compared_with(self, row: Row) -> str:
        """Return the row that this one is compared with: ours, and of the same length where lengths differ."""
        alike = (each.name for each in self.rows if each.seconds == row.seconds and each.paper == RECAP.paper)
        return self.ours if row.seconds is None else next(alike, self.ours)


NONE = Row("none", {"name": "none"}, paper="baseline")
SINK = Row("sink", {"name": "sink", "reinforcement": 1.0})
SINK_5 = Row("sink, lambda 5", {"name": "sink", "reinforcement": 5.0})
RECAP = Row("recap", {"name": "recap", "reinforcement": 5.0}, paper="ours")
# On the embedded model the sink then has 24 % of the attention, as with lambda 5 on the paper's.
MATCHED = Row("recap, lambda 2.5", {"name": "recap", "reinforcement": 2.5})
BANK = Row("bank, lambda 1", {"name": "recap", "reinforcement": 1.0})
# The window alone, the sink alone, the sink as strong as ours, and ours: what the bank adds is the last step.
ARMS = (NONE, SINK, SINK_5, RECAP)
# Those of the paper's main table.
MAIN_NONE, MAIN_RECAP = replace(NONE, paper="Self-Forcing"), replace(RECAP, paper="Self-Forcing+Ours")
RIVALS = (
    Row("deep-forcing", {"name": "deep-forcing"}, paper="Self-Forcing+DeepForcing"),
    Row("memrope", {"name": "memrope"}, paper="Self-Forcing+MemRoPE"),
    Row("rolling-sink", {"name": "rolling-sink"}, paper="Self-Forcing+RollingSink"),
    Row("relax-forcing", {"name": "relax-forcing"}),
)
# Rivals bring their own windows, of up to 21 frames: the same with as many as a bank has, or as few as they can.
SMALL_RIVALS = (
    Row(
        "deep-forcing, 7", {"name": "deep-forcing", "window_frames": 7, "budget_frames": 7, "sink_frames": 2}
    ),
    Row("memrope, 7", {"name": "memrope", "window_frames": 7, "sink_frames": 1}),
    Row("rolling-sink, 9", {"name": "rolling-sink", "window_frames": 9, "replayed_frames": 3}),
)
RULES = ("random", "recent", "diversity-keys", "flow-texture", "keys")
OTHER_RULES = tuple(Row(f"recap, {rule}", RECAP.memory, rule) for rule in RULES)
PLACES = ("layers:last-half", "heads:top-0.5", "steps:0-1", "steps:2-3,clean", "gate")
SCHEDULES = (*(f"5@{place}" for place in PLACES), "share:0.24")
# Spelled out, so that it shares its runs with a row of the same settings, and keeps no key when they change.
AS_PLUS = {**RECAP.memory, "reinforcement": RecapPlusConfig().reinforcement}
PLUS = Row("recap-plus", AS_PLUS, RecapPlusConfig.usual_admission)
# What was chosen in the tables `beyond`, next to what it must hold its own against: for --half confirm.
CONFIRMED = (SINK, SINK_5, *RIVALS, RECAP, PLUS)
# Options that the paper does not have, one or two at a time, next to every memory; lines over lambda.
AT_HALF = {**RECAP.memory, "reinforcement": "5@layers:last-half"}
HALF = Row("keys, last half", AT_HALF, "keys", path="last half")
BEYOND = (
    NONE,
    *(*RIVALS, *SMALL_RIVALS),
    *(replace(row, path="sink") for row in (SINK, SINK_5)),
    *(replace(row, path="recap") for row in (BANK, MATCHED, RECAP)),
    Row("keys, lambda 1", BANK.memory, "keys", path="keys"),
    Row("keys, lambda 2.5", MATCHED.memory, "keys", path="keys"),
    Row("keys", RECAP.memory, "keys", path="keys"),
    replace(HALF, name="keys, last half, 2.5", memory={**AT_HALF, "reinforcement": "2.5@layers:last-half"}),
    HALF,
    replace(HALF, name="keys, last half, 12", memory={**AT_HALF, "reinforcement": "12@layers:last-half"}),
    Row("flow+keys", RECAP.memory, "flow+keys"),
    Row("bank 2", {**RECAP.memory, "bank_reinforcement": 2.0}),
    Row("lambda 2.5, bank 2", {**MATCHED.memory, "bank_reinforcement": 2.0}),
    Row("keys, bank 2", {**RECAP.memory, "bank_reinforcement": 2.0}, "keys"),
    Row("keys, lambda 1, bank 2", {**BANK.memory, "bank_reinforcement": 2.0}, "keys"),
    Row("keys, top heads", {**RECAP.memory, "reinforcement": "5@heads:top-0.5"}, "keys"),
    Row("merged", {**RECAP.memory, "merge_margin": 4.0}),
    Row("shared by block", {**RECAP.memory, "share_by_block": True}),
    *(Row(f"lambda {text}", {**RECAP.memory, "reinforcement": text}) for text in SCHEDULES),
    Row("antiphase 0.5", RECAP.memory, sampling={"antiphase": 0.5}),
    Row("sink noise 0.2", RECAP.memory, sampling={"sink_noise": 0.2}),
)
OLD_RULES = {"claims": "carried", "borders": "literal"}
# Readings of what the paper leaves open, each against ours.
READINGS = (SINK_5, Row("recap, old rules", RECAP.memory, settings=OLD_RULES), RECAP)
# "Sink off" is lambda 1 with the backbone's own sink, as in the paper.
COMPONENTS = (
    Row("none", SINK.memory, paper="none"),
    Row("sink", SINK_5.memory, paper="sink"),
    Row("bank", BANK.memory, paper="bank"),
    Row("recap", RECAP.memory, paper="sink+bank"),
)
ADMISSION_RULES = (
    Row("no bank", SINK.memory, paper="no_bank"),
    Row("no bank, lambda 5", SINK_5.memory),
    Row("random", RECAP.memory, "random", "random"),
    Row("recent", RECAP.memory, "recent", "recent"),
    Row("diversity", RECAP.memory, "diversity", "dinov2_diversity"),
    # Needs no foreign weights.
    Row("diversity of keys", RECAP.memory, "diversity-keys"),
    Row("flow-texture", RECAP.memory, "flow-texture"),
    Row("keys", RECAP.memory, "keys"),
    Row("recap", RECAP.memory, "flow", "flow_novelty"),
)
FLOW_RULES = tuple(row for row in ADMISSION_RULES if row.name in ("flow-texture", "recap"))
CAPACITIES = tuple(
    Row(f"{frames:g} frames", {**RECAP.memory, "capacity_frames": frames}, value=frames)
    for frames in (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
)
SINK_MASS = {"attention_sink": paper_value("scalars", "sink_mass_lambda5")}
LAMBDAS = tuple(
    Row(f"lambda {x:g}", {**RECAP.memory, "reinforcement": x}, value=x, printed=SINK_MASS if x == 5 else {})
    for x in (1.0, 3.0, 5.0, 8.0, 10.0, 12.0)
)
TIMED = tuple(
    replace(
        row,
        name=f"{row.name}, {minutes} min",
        seconds=60.0 * minutes,
        printed={"seconds": paper_value("speed", column, length_min=str(minutes))},
    )
    for minutes in (1, 2, 5)
    for row, column in ((NONE, "baseline_s"), (RECAP, "ours_s"))
)
OVERLAP = {"bank_overlap": paper_value("scalars", "oracle_overlap")}

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
        "motion", "Camera and object motion", (NONE, SINK, RECAP), ("motion",), seeds=1, paper_table="motion"
    ),
)
TABLES = {recipe.name: replace(recipe, note=NOTES.get(recipe.name, "")) for recipe in RECIPES}


def find_recipe(name: str) -> Recipe:
    """Return the recipe of that name, or the one that `module:NAME` points at or returns."""
    found = look_up("table", name, TABLES)
    made = found() if callable(found) else found
    if not isinstance(made, Recipe):
        raise refuse("table", name, "is not a Recipe", "make one by recap.tables.recipes.Recipe(...)")
    return made
