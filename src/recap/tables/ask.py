"""This module says how much of a table is asked for: prompts, seeds, lengths, and on what."""

from __future__ import annotations

from dataclasses import dataclass

from recap.errors import refuse, unknown_name
from recap.eval.judged import USUAL
from recap.plan import check_amount
from recap.registry import BACKBONES

MOST_SEEDS = 1000
"""Seed k of prompt n is this times n, plus k."""
HALVES = {"search": "the first prompts", "confirm": "the last prompts, fresh seeds"}
FRESH_SEEDS = 500
"""The first seed of a prompt in the half that confirms, above all that a search may ask for."""
MOST_HALVED = (MOST_SEEDS - FRESH_SEEDS) // 2


@dataclass(frozen=True)
class Ask:
    """Says how much of a recipe is wanted, and on what; None takes the recipe's own."""

    backbone: str = "embedded"
    prompts: int = 20
    seeds: int | None = None
    seconds: float | None = None
    # The flow of the bank.
    flow: str = "auto"
    device: str = "auto"
    dtype: str = "float32"
    # The flow by which motion is judged; figures of two judges do not compare.
    judge_flow: str = USUAL
    # Who judges whole frames.
    embedder: str = "auto"
    # Who finds the subject, where the backbone has no probe.
    detector: str = ""
    # A language model that is asked, next to all others, who is there and whether two are the same.
    judge: str = ""
    # A file that takes the place of our schedules.
    schedules: str = ""
    # "search" asks for the first half of the prompts, "confirm" for the other half with twice as many, fresh seeds:
    # what was chosen on one half is judged on what had no part in the choice.
    half: str = ""
    # A text file of prompts, one a line, that takes the place of our own for tables of one scene.
    prompt_file: str = ""

    def __post_init__(self) -> None:
        if self.backbone not in BACKBONES and ":" not in self.backbone:
            raise unknown_name("backbone", self.backbone, BACKBONES)
        for name, number, remedy in (
            ("--prompts", self.prompts, "every set has 20"),
            ("--seeds", self.seeds, "5 is the paper's number"),
        ):
            if number is not None and number < 1:
                raise refuse(name, number, "must be 1 or more", remedy)
        check_amount("--seeds", self.seeds or 1, MOST_SEEDS, "seeds of a prompt", "5 is the paper's number")
        if self.half and self.half not in HALVES:
            limit = f"must be {' or '.join(HALVES)}"
            raise refuse("--half", self.half, limit, "leave it out for all prompts")
        if self.half and self.prompts < 2:
            raise refuse("--half", self.half, "one prompt has no halves", "ask for more --prompts")
        if self.half and (self.seeds or 1) > MOST_HALVED:
            limit = f"with --half at most {MOST_HALVED}: more would be another prompt's, or not fresh"
            raise refuse("--seeds", self.seeds, limit, "5 is the paper's number")
        if self.seconds is not None and not self.seconds > 0:
            raise refuse("--seconds", self.seconds, "must be above 0", "60 is the paper's length")

    def numbers(self) -> range:
        """Return which prompts of a set are asked for."""
        half = self.prompts // 2
        start, end = {"": (0, self.prompts), "search": (0, half), "confirm": (half, self.prompts)}[self.half]
        return range(start, end)

    def own_seeds(self, usual: int) -> range:
        """Return which seeds of a prompt are asked for, where a recipe has `usual`."""
        count = self.seeds or usual
        return range(FRESH_SEEDS, FRESH_SEEDS + 2 * count) if self.half == "confirm" else range(count)
