"""One function per table or figure of the paper: its rows, and what they are measured by.

To add a table, write such a function and list it in `TABLES`; a table outside the package is named as
`module:function`. The order of its measures is the order in which the table shows them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from recap.config import RunConfig
from recap.errors import refuse, unknown_name
from recap.eval.judged import USUAL
from recap.eval.metrics import find_measures
from recap.io.lookup import look_up
from recap.registry import ADMISSIONS, BACKBONES, MEMORIES
from recap.tables.paper_numbers import paper_value
from recap.tables.scripts import Script, scripts

ALIASES = {"tiny": "embedded"}
DEFAULT_SEEDS = 5
DEFAULT_PROMPTS = 20


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table: how the memory is set up."""

    name: str
    memory: Mapping[str, Any]
    admission: str = "flow"
    paper: str = ""  # the paper's name for it; "" where the paper has no such row
    seconds: float | None = None  # where the rows differ in length
    value: float | None = None  # the setting that a sweep varies
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the admission, other than its defaults
    printed: Mapping[str, float | None] = field(default_factory=dict)
    """Score -> what the paper prints for it, where it stands in no line of `paper_table`."""

    @property
    def available(self) -> bool:
        """Whether this version knows its parts; those outside the package are named as `module:Name`."""
        parts = ((self.memory["name"], MEMORIES), (self.admission, ADMISSIONS))
        return all(name in known or ":" in name for name, known in parts)


@dataclass(frozen=True, slots=True)
class Recipe:
    """A table or figure."""

    name: str
    title: str
    rows: tuple[Row, ...]
    measures: tuple[str, ...]
    script: str = "identity"
    seconds: float = 60.0
    seeds: int = DEFAULT_SEEDS
    ours: str = "recap"  # the row that the others are compared with, pair by pair
    paper_table: str = ""  # of recap.tables.paper_numbers
    paper_key: Mapping[str, str] = field(default_factory=dict)  # what else picks the paper's line
    note: str = ""
    alone: bool = False  # its runs are timed, so nothing may run next to them

    def compared_with(self, row: Row) -> str:
        """The row that this one is compared with: ours, and of the same length where lengths differ."""
        alike = (each.name for each in self.rows if each.seconds == row.seconds and each.paper == RECAP.paper)
        return self.ours if row.seconds is None else next(alike, self.ours)


class Planned(NamedTuple):
    """One run of a recipe; its config names the CPU, as the device of a job need not be here."""

    row: Row
    script: Script
    seed: int
    config: RunConfig


@dataclass(frozen=True)
class Ask:
    """How much of a recipe, and on what; None takes the recipe's own."""

    backbone: str = "embedded"
    prompts: int = DEFAULT_PROMPTS
    seeds: int | None = None
    seconds: float | None = None
    flow: str = "auto"  # of the bank
    device: str = "auto"
    dtype: str = "float32"
    judge_flow: str = USUAL  # of whoever judges motion; figures of two judges do not compare
    embedder: str = "auto"  # judges whole frames
    detector: str = ""  # finds the subject, where the backbone has no probe

    def __post_init__(self) -> None:
        if self.backbone not in BACKBONES and self.backbone not in ALIASES and ":" not in self.backbone:
            raise unknown_name("backbone", self.backbone, BACKBONES)
        if self.prompts < 1:
            raise refuse("--prompts", self.prompts, "must be 1 or more", "every set has 20")
        if self.seeds is not None and self.seeds < 1:
            raise refuse("--seeds", self.seeds, "must be 1 or more", "5 is the paper's number")
        if self.seconds is not None and not self.seconds > 0:
            raise refuse("--seconds", self.seconds, "must be above 0", "60 is the paper's length")

    @property
    def backbone_name(self) -> str:
        return ALIASES.get(self.backbone, self.backbone)


NONE = Row("none", {"name": "none"}, paper="baseline")
SINK = Row("sink", {"name": "sink", "reinforcement": 1.0})
SINK_5 = Row("sink, lambda 5", {"name": "sink", "reinforcement": 5.0})
RECAP = Row("recap", {"name": "recap", "reinforcement": 5.0}, paper="ours")
ARMS = (NONE, SINK, SINK_5, RECAP)
"""The window alone, the sink alone, the sink as strong as ours, and ours: what the bank adds is the last step."""

DYNAMICS = ("dynamics",)


def main() -> Recipe:
    rows = (
        Row("none", {"name": "none"}, paper="Self-Forcing"),
        Row("sink", SINK.memory, paper="Self-Forcing+Sink(l=1)"),
        Row("recap", RECAP.memory, paper="Self-Forcing+Ours"),
    )
    note = ("Of VBench's sixteen dimensions, the four that need no foreign weights; no Q, Sem or Total from them. "
            "`recap vbench draw` and `run` give all, of VBench's own prompts.")  # fmt: skip
    return Recipe("main", "VBench-Long, main table", rows, DYNAMICS, paper_table="main", note=note)


RIVALS = (
    Row("deep-forcing", {"name": "deep-forcing"}, paper="Self-Forcing+DeepForcing"),
    Row("memrope", {"name": "memrope"}, paper="Self-Forcing+MemRoPE"),
    Row("rolling-sink", {"name": "rolling-sink"}, paper="Self-Forcing+RollingSink"),
    Row("relax-forcing", {"name": "relax-forcing"}),
)


def rivals() -> Recipe:
    rows = (
        Row("none", {"name": "none"}, paper="Self-Forcing"),
        *RIVALS,
        Row("recap", RECAP.memory, paper="Self-Forcing+Ours"),
    )
    return Recipe("rivals", "Training-free rivals", rows, ("identity", "dynamics"), paper_table="main")


def components() -> Recipe:
    """ "Sink off" is lambda 1 with the backbone's own sink, as in the paper."""
    rows = (
        Row("none", SINK.memory, paper="none"),
        Row("sink", SINK_5.memory, paper="sink"),
        Row("bank", {"name": "recap", "reinforcement": 1.0}, paper="bank"),
        Row("recap", RECAP.memory, paper="sink+bank"),
    )
    return Recipe("components", "Sink and bank, one by one", rows,
                  ("identity", "dynamics", "content", "subject_motion"), paper_table="ablation",
                  paper_key={"table": "components"})  # fmt: skip


def admission() -> Recipe:
    def bank(name: str, rule: str, paper: str = "") -> Row:
        return Row(name, RECAP.memory, rule, paper)

    rows = (
        Row("no bank", SINK.memory, paper="no_bank"),
        Row("no bank, lambda 5", SINK_5.memory),
        bank("random", "random", "random"),
        bank("recent", "recent", "recent"),
        bank("diversity", "diversity", "dinov2_diversity"),
        bank("diversity of keys", "diversity-keys"),  # which needs no foreign weights
        bank("flow-texture", "flow-texture"),
        bank("recap", "flow", "flow_novelty"),
    )
    note = "The paper's row without a bank has lambda 1; the fair control has lambda 5, as all others."
    return Recipe("admission", "What is admitted to the bank", rows, ("identity", "dynamics", "content"),
                  paper_table="ablation", paper_key={"table": "admission"}, note=note)  # fmt: skip


def capacity() -> Recipe:
    rows = tuple(
        Row(f"{frames:g} frames", {**RECAP.memory, "capacity_frames": frames}, value=frames)
        for frames in (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
    )
    note = (
        "The paper sweeps VBench's Q, Sem and Total alone (Total: 79.3 to 79.8), which need VBench's weights."
    )
    return Recipe("capacity", "Capacity of the bank", rows, ("identity", "dynamics", "bank", "content", "time"),
                  ours="1 frames", note=note)  # fmt: skip


def reinforcement() -> Recipe:
    rows = tuple(
        Row(f"lambda {value:g}", {"name": "recap", "reinforcement": value}, value=value,
            printed={"attention_sink": paper_value("scalars", "sink_mass_lambda5")} if value == 5 else {})
        for value in (1.0, 3.0, 5.0, 8.0, 10.0, 12.0)
    )  # fmt: skip
    note = "The paper sweeps VBench's Q, Sem and Total (Total: 78.6 to 79.7, best at 5), which need VBench's weights."
    return Recipe("lambda", "Reinforcement of the sink", rows, ("identity", "dynamics", "attention", "content"),
                  ours="lambda 5", note=note)  # fmt: skip


def length() -> Recipe:
    note = ("All lengths are cut from one rollout: a prefix of a causal video is a valid video. They are counted in "
            "whole clips of 2 s, so 5 s are 4. In the paper ours is higher by 0.101 at 60 s.")  # fmt: skip
    return Recipe("length", "Dynamic degree over length", (NONE, SINK, RECAP), ("length",), note=note)


def identity() -> Recipe:
    note = "In the paper ours wins 76 % of the pairs by whole frames and 64 % by crops of the subject."
    return Recipe("identity", "Long-horizon identity", ARMS, ("identity", "subject_motion"),
                  paper_table="identity", paper_key={"table": "identity_long"}, note=note)  # fmt: skip


def retention() -> Recipe:
    return Recipe("retention", "Identity retention over 60 s", ARMS, ("retention",), paper_table="retention",
                  paper_key={"horizon": "60s"})  # fmt: skip


def retention_5min() -> Recipe:
    return Recipe("retention-5min", "Identity retention over 5 minutes", ARMS, ("retention",), seconds=300.0,
                  paper_table="retention", paper_key={"horizon": "5min"})  # fmt: skip


def reappearance() -> Recipe:
    note = ("The prior is cleared at every cut and the sink holds an empty scene: only a bank can carry the subject. "
            "In the paper ours wins 73 % of the pairs by whole frames and 66 % by crops of the subject.")  # fmt: skip
    return Recipe("reappearance", "Controlled reappearance", ARMS,
                  ("reappearance", "content", "subject_motion", "haunting"), script="reappearance", seconds=24.0,
                  paper_table="identity", paper_key={"table": "reappear_ctrl"}, note=note)  # fmt: skip


BANK = Row("bank, lambda 1", {"name": "recap", "reinforcement": 1.0})
OTHER_RULES = tuple(
    Row(f"recap, {rule}", RECAP.memory, rule)
    for rule in ("random", "recent", "diversity-keys", "flow-texture")
)


def reappearance_all() -> Recipe:
    """Not in the paper: the one task that asks for a memory of more than the opening, put to all of them."""
    rows = (*RIVALS, BANK, *OTHER_RULES, RECAP)
    note = "The prior is cleared at every cut and the opening is an empty scene: what else a memory kept must do it."
    return replace(reappearance(), name="reappearance-all", rows=rows, note=note,
                   title="Controlled reappearance, every memory and rule")  # fmt: skip


OLD_RULES = {"claims": "carried", "borders": "literal"}
RULES = (
    SINK_5,
    Row("recap, old rules", RECAP.memory, settings=OLD_RULES),
    RECAP,
)
"""Readings of what the paper leaves open, each against ours."""


def rules() -> Recipe:
    """Not in the paper."""
    rows = (
        *RULES,
        Row("recap, literal borders", RECAP.memory, settings={"borders": "literal"}),
        Row("recap, no zero scores", {**RECAP.memory, "zero_scores_fill": False}),
    )
    return replace(reappearance(), name="rules", rows=rows, note="",
                   title="Readings of the novelty rule: controlled reappearance")  # fmt: skip


def rules_60s() -> Recipe:
    """Not in the paper."""
    rows = (
        SINK,
        Row("bank, lambda 1, old rules", BANK.memory, settings=OLD_RULES),
        BANK,
        *RULES,
    )
    return Recipe("rules-60s", "Readings of the novelty rule: one scene of a minute", rows,
                  ("identity", "dynamics", "content", "subject_motion"))  # fmt: skip


def entering() -> Recipe:
    """Not in the paper: who comes late and leaves again is in no opening, and no cut tells a memory to keep it."""
    rows = (NONE, SINK, SINK_5, *RIVALS, BANK, *OTHER_RULES, RECAP)
    note = (
        "One shot of a minute: a second subject enters after 15 to 25 s, leaves after 8 to 12 more, and returns "
        "after 10 to 15. return_subject is of videos that show it both times: read it with late_found_on_return."
    )
    return Recipe("entering", "A second subject enters, leaves and returns", rows,
                  ("entering", "identity", "subject_motion"), script="entering", note=note)  # fmt: skip


def bank() -> Recipe:
    row = replace(RECAP, printed={"bank_overlap": paper_value("scalars", "oracle_overlap")})
    return Recipe("bank", "What the bank retains", (row,), ("bank", "content"))


def time() -> Recipe:
    rows = tuple(
        Row(f"{row.name}, {minutes} min", row.memory, paper=row.paper, seconds=60.0 * minutes,
            printed={"seconds": paper_value("speed", column, length_min=str(minutes))})
        for minutes in (1, 2, 5)
        for row, column in ((NONE, "baseline_s"), (RECAP, "ours_s"))
    )  # fmt: skip
    note = (
        "Nothing runs next to these, or the times mean nothing. `recap bench` tells parts and memory apart."
    )
    return Recipe(
        "time", "Generation time", rows, ("time",), seeds=1, ours="recap, 1 min", note=note, alone=True
    )


def motion() -> Recipe:
    note = ("drift_tail: the share of videos with more than twice the median flow of their own row, of_baseline: of "
            "that row. The paper counts 37 and 24 videos; shares are of 128, which is inferred.")  # fmt: skip
    return Recipe("motion", "Camera and object motion", (NONE, SINK, RECAP), ("motion",), seeds=1,
                  paper_table="motion", note=note)  # fmt: skip


TABLES: dict[str, Callable[[], Recipe]] = {
    "main": main, "rivals": rivals, "components": components, "admission": admission, "capacity": capacity,
    "lambda": reinforcement, "length": length, "identity": identity, "retention": retention,
    "retention-5min": retention_5min, "reappearance": reappearance, "reappearance-all": reappearance_all,
    "rules": rules, "rules-60s": rules_60s, "entering": entering, "bank": bank, "time": time, "motion": motion,
}  # fmt: skip


def find_recipe(name: str) -> Recipe:
    """The recipe of that name, or what the function that `module:function` points at returns."""
    made = look_up("table", name, TABLES)()
    if not isinstance(made, Recipe):
        raise refuse("table", name, "does not return a Recipe", "return recap.tables.recipes.Recipe(...)")
    return made


def plan_runs(recipe: Recipe, ask: Ask) -> Iterator[Planned]:
    """Every run of a recipe, prompt by prompt, seed by seed, row by row; unknown rows are left out.

    Seed k of a prompt is the same for all rows, and a block's noise depends on seed and block alone: arms are paired.
    """
    for number in range(ask.prompts):
        for seed in range(ask.seeds or recipe.seeds):
            for row in recipe.rows:
                if not row.available:
                    continue
                seconds = row.seconds or recipe.seconds
                if ask.seconds is not None:
                    seconds *= ask.seconds / recipe.seconds
                script = scripts(recipe.script, ask.backbone_name, seconds, ask.prompts)[number]
                own_seed = 1000 * number + seed
                yield Planned(row, script, own_seed, _config(recipe, row, script, ask, own_seed))


def _config(recipe: Recipe, row: Row, script: Script, ask: Ask, seed: int) -> RunConfig:
    return RunConfig.from_dict(
        {
            "shots": [
                {"prompt": shot.prompt, "seconds": shot.seconds, "cut": shot.cut} for shot in script.shots
            ],
            "backbone": ask.backbone_name,
            "memory": dict(row.memory),
            "admission": {"name": row.admission, **row.settings},
            "flow": ask.flow,
            "seeds": [seed],
            "dtype": ask.dtype,
            "trace_offered": any(each.reads_offered for each in find_measures(recipe.measures)),
        }
    )
