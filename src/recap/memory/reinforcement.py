"""This module reads the setting `reinforcement` of a sink: lambda as a number, or a schedule of where it acts.

    5                          lambda 5 everywhere, as the paper has it
    5@layers:last-half         only in the last half of the layers; also layers:0-2 or layers:1,4-
    5@steps:0-1                only in the first two denoising steps; steps:2-,clean also in the clean pass
    5@heads:top-0.5            in the half of each layer's heads that look most at the sink; bottom-0.5 in the others
    5@gate                     not in a layer where more than half of the heads prefer the sink anyway; gate:0.8
    share:0.24                 by as much as gives the sink 24 % of attention

Parts may be combined: lambda acts where all of them let it, and is 1 elsewhere. `recap.memory.sink_bias` does it.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import NamedTuple

from recap.errors import refuse
from recap.types import BackboneSpec, Passes

FIELD = "reinforcement"
EXAMPLES = (
    "write a number, or for example 5@layers:last-half, 5@steps:0-1, 5@heads:top-0.5, 5@gate, share:0.24"
)
FIRST_HALF, LAST_HALF, CLEAN = "first-half", "last-half", "clean"
LONGEST = 200
"""Characters that a schedule may have."""

MOST = 10**18
MOSTLY = 0.5
"""The share of a layer's heads above which the gate closes, unless the setting names another."""

_SPAN = re.compile(r"(\d{1,4})(-(\d{1,4})?)?")


class NumberSpan(NamedTuple):
    """Names layers or steps from one number to another, both included; None is the last one there is."""

    first: int
    last: int | None

    def __str__(self) -> str:
        if self.first == self.last:
            return str(self.first)
        return f"{self.first}-" if self.last is None else f"{self.first}-{self.last}"


Selection = tuple[NumberSpan | str, ...]
"""Layers or steps: spans, and the words for halves and for the clean pass."""


@dataclass(frozen=True, slots=True)
class Reinforcement:
    """Says how much more the sink weighs, and where; made by `read_reinforcement`."""

    # Lambda; None if `share` decides.
    factor: float | None = 1.0
    # The share of attention that the sink should get, the mean over steps, layers, heads and queries.
    share: float | None = None
    # None stands for all.
    layers: Selection | None = None
    steps: Selection | None = None
    # The share of each layer's heads, those that look most at the sink; a negative one, those that look least.
    heads: float | None = None
    # The share of a layer's heads that must prefer the sink for its bonus to be dropped.
    gate: float | None = None

    @property
    def is_number(self) -> bool:
        """Tell whether it is one factor everywhere."""
        return self == Reinforcement(self.factor) and self.factor is not None

    @property
    def plain(self) -> float | str:
        """Return it as files have it: a number, or a text that reads back as the same."""
        if self.is_number and self.factor is not None:
            return self.factor
        parts = [_number(self.factor) if self.factor is not None else f"share:{_number(self.share)}"]
        for name, selection in (("layers", self.layers), ("steps", self.steps)):
            if selection is not None:
                parts.append(f"{name}:{','.join(map(str, selection))}")
        if self.heads is not None:
            parts.append(f"heads:{'top' if self.heads > 0 else 'bottom'}-{_number(abs(self.heads))}")
        if self.gate is not None:
            parts.append("gate" if self.gate == MOSTLY else f"gate:{_number(self.gate)}")
        return "@".join(parts)

    def describe(self) -> str:
        """Say it in words, for a page."""
        if self.factor is not None:
            words = [f"lambda {self.factor:g}"]
        else:
            words = [f"the sink gets {self.share:.0%} of attention, by a lambda"]
        if self.layers is not None:
            words.append(f"in {_in_words('layers', self.layers)}")
        if self.steps is not None:
            words.append(f"in {_in_words('denoising steps', self.steps)}")
        if self.heads is not None:
            most = "most" if self.heads > 0 else "least"
            words.append(f"in the {abs(self.heads):.0%} of each layer's heads that look {most} at the sink")
        if self.gate is not None:
            words.append(
                f"except in layers where more than {self.gate:.0%} of the heads prefer the sink anyway"
            )
        return " ".join(words)

    def check(self, spec: BackboneSpec, sink_frames: int) -> None:
        """Refuse a schedule that this backbone cannot follow."""
        if self.is_number:
            return
        if not sink_frames:
            raise refuse(
                FIELD, self.plain, "there is no sink (sink_frames 0)", "set sink_frames to 1 or more"
            )
        if spec.carries_history:
            if self.steps is not None:
                limit = f"{spec.name} denoises by stages of a pyramid, not by steps alone"
                raise refuse(FIELD, self.plain, limit, "set stage_reinforcement, one lambda for each stage")
            if self.heads is not None or self.gate is not None:
                limit = f"{spec.name} reads no sink in its clean pass, where heads are measured"
                raise refuse(FIELD, self.plain, limit, "choose layers or share")
        if self.layers is not None:
            _check_selection("layers", self.layers, spec.layers, spec.name, self.plain)
        if self.steps is not None:
            _check_selection("steps", self.steps, spec.num_steps, spec.name, self.plain)

    def acts_in(self, layer: int, num_layers: int) -> bool:
        """Tell whether it acts in a layer at all."""
        return self.layers is None or _holds(self.layers, layer, num_layers)

    def passes(self, num_steps: int) -> Passes | None:
        """Return the passes in which it acts, None for all; `num_steps` is 0 where it is unknown."""
        if self.steps is None:
            return None
        spans = [part for part in self.steps if isinstance(part, NumberSpan)]
        ends = [max(span.first, span.last or 0) for span in spans]
        # The entry behind the highest number stands for all later steps.
        count = num_steps or max(ends, default=0) + 2
        steps = tuple(_holds(self.steps, step, num_steps) for step in range(count))
        return Passes(steps, CLEAN in self.steps)


def read_reinforcement(value: object) -> Reinforcement:
    """Read the setting from a number, a text or itself; refuses nonsense."""
    if isinstance(value, Reinforcement):
        # Read again, since it may be made by hand.
        value = value.plain
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if isinstance(value, int) and abs(value) > MOST:
            raise refuse(FIELD, f"{str(value)[:12]}...", "is too large", "check its digits")
        if not (value > 0 and math.isfinite(value)):
            raise refuse(FIELD, value, "must be above 0 and finite", "1 leaves the sink as it is")
        return Reinforcement(float(value))
    if not isinstance(value, str):
        raise refuse(FIELD, value, "must be a number or a schedule", EXAMPLES)
    if len(value) > LONGEST:
        raise refuse(FIELD, f"{value[:12]}...", f"is longer than {LONGEST} characters", EXAMPLES)
    base, *clauses = value.replace(" ", "").split("@")
    found: dict[str, Selection | float | None] = {}
    for clause in clauses:
        name, _, text = clause.partition(":")
        if name not in ("layers", "steps", "heads", "gate"):
            limit = f"{clause!r} is none of layers:, steps:, heads: and gate"
            raise refuse(FIELD, value, limit, EXAMPLES)
        if name in found:
            raise refuse(FIELD, value, f"{name} is there twice", f"join them by a comma: {name}:0,2-3")
        found[name] = _read_clause(name, text, value)
    made = Reinforcement(**_read_base(base, value), **found)  # type: ignore[arg-type]
    if made.share is not None and made.steps == (CLEAN,):
        limit = "a share is that of the denoising steps, and none of them is named"
        raise refuse(FIELD, value, limit, "leave the steps out")
    return made


def _read_base(text: str, whole: str) -> dict[str, float | None]:
    """Read a factor, or the share that it is to reach."""
    name, colon, share = text.partition(":")
    if colon and name == "share":
        target = _read_number(share, whole, "share")
        if not 0 < target < 1:
            raise refuse(FIELD, whole, "a share must be above 0 and below 1", "share:0.24 stands for 24 %")
        return {"factor": None, "share": target}
    return {"factor": read_reinforcement(_read_number(text, whole, "lambda")).factor}


def _read_clause(name: str, text: str, whole: str) -> Selection | float | None:
    if name == "gate":
        gate = _read_number(text, whole, "gate") if text else MOSTLY
        if not 0 <= gate < 1:
            limit = "a gate is a share of the heads, 0 or more and below 1"
            raise refuse(FIELD, whole, limit, "gate stands for gate:0.5")
        return gate
    if name == "heads":
        side, _, share = text.partition("-")
        if side not in ("top", "bottom"):
            raise refuse(FIELD, whole, "heads are top or bottom ones", "for example heads:top-0.5")
        heads = _read_number(share, whole, "heads")
        if not 0 < heads <= 1:
            raise refuse(FIELD, whole, "a share of heads is above 0 and at most 1", "heads:top-0.5 is half")
        return None if heads == 1 else heads if side == "top" else -heads
    return _read_selection(name, text, whole)


def _read_selection(name: str, text: str, whole: str) -> Selection | None:
    """Read layers or steps; None where they are all."""
    words = (FIRST_HALF, LAST_HALF, *((CLEAN,) if name == "steps" else ()))
    selection: list[NumberSpan | str] = []
    for item in text.split(","):
        match = _SPAN.fullmatch(item)
        if match is None and item not in words:
            limit = f"{item!r} is neither a number, nor numbers such as 2-3 and 2-, nor {', '.join(words)}"
            raise refuse(FIELD, whole, limit, f"for example {name}:0-2 or {name}:{LAST_HALF}")
        if match is None:
            selection.append(item)
            continue
        first = int(match[1])
        last = first if match[2] is None else None if match[3] is None else int(match[3])
        if last is not None and last < first:
            raise refuse(FIELD, whole, f"{item!r} ends before it begins", f"write {name}:{last}-{first}")
        selection.append(NumberSpan(first, last))
    every = NumberSpan(0, None) in selection or {FIRST_HALF, LAST_HALF} <= set(selection)
    return None if every and (name == "layers" or CLEAN in selection) else tuple(dict.fromkeys(selection))


def _read_number(text: str, whole: str, what: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise refuse(FIELD, whole, f"{what} is {text!r}, which is no number", EXAMPLES) from None


def _check_selection(name: str, selection: Selection, count: int, backbone: str, whole: float | str) -> None:
    """Refuse layers or steps that are not there; a count of 0 is unknown."""
    if not count and {FIRST_HALF, LAST_HALF} & set(selection):
        limit = f"how many {name} {backbone} takes is not known beforehand"
        raise refuse(FIELD, whole, limit, f"name them by number, for example {name}:0-1")
    highest = max([max(p.first, p.last or 0) for p in selection if isinstance(p, NumberSpan)], default=0)
    if count and highest >= count:
        limit = f"{backbone} has the {name} 0 to {count - 1}"
        raise refuse(FIELD, whole, limit, f"name some of them, or write {name}:{LAST_HALF}")


def _holds(selection: Selection, index: int, count: int) -> bool:
    """Tell whether a layer or step is named; of an odd number the first half is the smaller one."""
    return any(
        index >= part.first and (part.last is None or index <= part.last)
        if isinstance(part, NumberSpan)
        else (part == FIRST_HALF and index < count // 2) or (part == LAST_HALF and index >= count // 2)
        for part in selection
    )


def _in_words(what: str, selection: Selection) -> str:
    """Name layers or steps for a page."""
    spelled = {FIRST_HALF: f"the first half of the {what}", LAST_HALF: f"the last half of the {what}"}
    spelled[CLEAN] = "the clean pass"
    return ", ".join(spelled[p] if isinstance(p, str) else f"{what} {p.first}" + _until(p) for p in selection)


def _until(span: NumberSpan) -> str:
    return "" if span.last == span.first else " and later" if span.last is None else f" to {span.last}"


def _number(value: float | None) -> str:
    return repr(value).removesuffix(".0")
