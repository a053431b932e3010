"""This module has the rows of tables: how the memory of each is set up, and the paper's name for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from recap.config import AUTO
from recap.errors import refuse
from recap.memory.recap import RecapPlusConfig
from recap.registry import ADMISSIONS, MEMORIES
from recap.tables.paper_numbers import paper_value

RECAP_LIKE = '{"name": "recap", "reinforcement": 5.0}'


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

    def __post_init__(self) -> None:
        if not isinstance(self.memory, Mapping) or "name" not in self.memory:
            limit = 'it has no "name"'
            raise refuse(f"the memory of row {self.name!r}", self.memory, limit, f"for example {RECAP_LIKE}")

    @property
    def unknown(self) -> str:
        """Say which of its parts this version lacks, "" for none; those outside the package are `module:Name`."""
        parts = (
            ("memory", self.memory["name"], tuple(MEMORIES)),
            ("admission rule", self.admission, (AUTO.name, *ADMISSIONS)),
        )
        lacking = [f"{kind} {name!r}" for kind, name, known in parts if name not in known and ":" not in name]
        return f"this version has no {' and no '.join(lacking)}" if lacking else ""

    @property
    def may_keep_bank(self) -> bool:
        """Tell whether its runs may have a bank; of a memory outside the package that is not known beforehand."""
        name = self.memory["name"]
        return ":" in name or (name in MEMORIES and MEMORIES[name].keeps_bank)


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
