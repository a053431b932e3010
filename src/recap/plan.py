"""Prompts and shots to blocks: what is drawn when, and where the prior is cleared."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from recap.errors import refuse
from recap.types import BackboneSpec, Block

LONGEST_SHOT_S = 86_400


@dataclass(frozen=True, slots=True)
class Shot:
    """A prompt's span. `cut` drops the prior where the shot begins; sink and bank go on."""

    prompt: str
    seconds: float
    cut: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.prompt, str):
            raise refuse("prompt", self.prompt, "must be text", "put it in quotes")
        if not 0 < self.seconds <= LONGEST_SHOT_S:
            limit = f"must be above 0 and at most {LONGEST_SHOT_S}, a day"
            raise refuse("seconds", self.seconds, limit, "5 gives 81 pictures at 16 per second")


@dataclass(frozen=True, slots=True)
class Plan:
    """Blocks in order. Rows of a batch may differ in their prompts, not in their shots' lengths and cuts."""

    blocks: tuple[Block, ...]

    @property
    def num_rows(self) -> int:
        return len(self.blocks[0].prompts)


def make_plan(rows: Sequence[Sequence[Shot]], spec: BackboneSpec) -> Plan:
    """One list of shots per row of the batch."""
    first = rows[0] if rows else ()
    if not first:
        raise refuse("shots", rows, "at least 1 row of 1 shot is needed", "give a prompt and its seconds")
    for row in rows:
        if [(s.seconds, s.cut) for s in row] != [(s.seconds, s.cut) for s in first]:
            limit = "all rows of a batch must share the lengths and cuts of their shots"
            raise refuse("shots", [len(r) for r in rows], limit, "run differing scripts one by one")
    blocks: list[Block] = []
    for number, end in enumerate(_block_ends(first, spec)):
        start = len(blocks)
        blocks.extend(
            Block(
                index=index,
                first_frame=index * spec.frames_per_block,
                num_frames=spec.frames_per_block,
                prompts=tuple(row[number].prompt for row in rows),
                clears_prior=index == start and number > 0 and first[number].cut,
            )
            for index in range(start, end)
        )
    return Plan(tuple(blocks))


def _block_ends(shots: Sequence[Shot], spec: BackboneSpec) -> list[int]:
    """Where each shot ends, in blocks: rounded from the running total, so that errors do not add up.

    A shot shorter than half a block still gets one: a prompt that is never drawn would be a silent loss. What
    follows then starts where that block ends, so that no later shot pays for it.
    """
    blocks_per_second = spec.pictures_per_second / (spec.pictures_per_frame * spec.frames_per_block)
    ends: list[int] = []
    elapsed = 0.0
    for shot in shots:
        elapsed += shot.seconds * blocks_per_second
        start = ends[-1] if ends else 0
        end = math.floor(elapsed + 0.5)
        if end <= start:
            end = start + 1
            elapsed = float(end)
        ends.append(end)
    return ends
