"""This module turns prompts and shots into blocks: what is generated when, and where the prior is cleared."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from recap.errors import refuse
from recap.types import BackboneSpec, Block

LONGEST_S = 86_400
"""The longest shot and the longest video: a day."""
MOST_SHOTS = 10_000


@dataclass(frozen=True, slots=True)
class Shot:
    """Gives a prompt its span. `cut` drops the prior where the shot begins; sink and bank stay.

    Without a cut the prior was generated under the old prompt; `reread` makes it again under the new one.
    """

    prompt: str
    seconds: float
    cut: bool = True
    reread: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.prompt, str):
            raise refuse("prompt", self.prompt, "must be text", "put it in quotes")
        if not 0 < self.seconds <= LONGEST_S:
            limit = f"must be above 0 and at most {LONGEST_S}, a day"
            raise refuse("seconds", self.seconds, limit, "5 gives 81 pictures at 16 per second")
        if self.cut and self.reread:
            limit = "a cut drops the prior, so there is none to read again"
            raise refuse("reread", self.reread, limit, 'add "cut": false, or leave reread out')


def check_amount(field: str, amount: float, most: float, unit: str, remedy: str) -> None:
    """Refuse more than `most` of something, before any of it is made."""
    if not amount <= most:
        raise refuse(field, amount, f"at most {most:,} {unit} are possible", remedy)


def check_shots(shots: Sequence[Shot]) -> None:
    """Refuse a script of too many shots, or of more than a day in all."""
    check_amount("number of shots", len(shots), MOST_SHOTS, "shots", "split the script")
    total = sum(shot.seconds for shot in shots)
    check_amount("seconds of all shots", total, LONGEST_S, "seconds in all, a day,", "shorten the script")


@dataclass(frozen=True, slots=True)
class Plan:
    """Lists blocks in order. Rows of a batch may differ in their prompts and when these change, not in their cuts."""

    blocks: tuple[Block, ...]

    @property
    def num_rows(self) -> int:
        return len(self.blocks[0].prompts)


def make_plan(rows: Sequence[Sequence[Shot]], spec: BackboneSpec, given_frames: int = 0) -> Plan:
    """Make the blocks for one list of shots per row of the batch, after `given_frames` that are not generated."""
    first = rows[0] if rows else ()
    if not first:
        raise refuse("shots", rows, "at least 1 row of 1 shot is needed", "give a prompt and its seconds")
    for row in rows:
        check_shots(row)
    planned = [_spread(row, spec) for row in rows]
    if len({tuple((cut, reread) for _, cut, reread in row) for row in planned}) > 1:
        limit = "all rows of a batch must share their length, their cuts and where they read again"
        raise refuse("shots", [len(r) for r in rows], limit, "run differing scripts one by one")
    blocks = _given_blocks(given_frames, spec, tuple(row[0].prompt for row in rows))
    start = len(blocks)
    for index, at_once in enumerate(zip(*planned, strict=True)):
        _, cut, reread = at_once[0]
        blocks.append(
            Block(
                index=start + index,
                first_frame=given_frames + index * spec.frames_per_block,
                num_frames=spec.frames_per_block,
                prompts=tuple(prompt for prompt, _, _ in at_once),
                clears_prior=cut,
                rereads_prior=reread,
            )
        )
    return Plan(tuple(blocks))


def _spread(shots: Sequence[Shot], spec: BackboneSpec) -> list[tuple[str, bool, bool]]:
    """Return, for every block of a row, its prompt, and whether the prior is dropped or read again first."""
    blocks: list[tuple[str, bool, bool]] = []
    for number, (shot, end) in enumerate(zip(shots, _block_ends(shots, spec), strict=True)):
        start = len(blocks)
        blocks += [(shot.prompt, False, False)] * (end - start)
        if number > 0:
            blocks[start] = (shot.prompt, shot.cut, shot.reread)
    return blocks


def _given_blocks(frames: int, spec: BackboneSpec, prompts: tuple[str, ...]) -> list[Block]:
    """Return blocks of given frames; what does not fill one comes first, as a short block."""
    short = frames % spec.frames_per_block
    sizes = [short] * bool(short) + [spec.frames_per_block] * (frames // spec.frames_per_block)
    return [Block(index, sum(sizes[:index]), size, prompts) for index, size in enumerate(sizes)]


def _block_ends(shots: Sequence[Shot], spec: BackboneSpec) -> list[int]:
    """Return where each shot ends, in blocks: rounded from the running total, so that errors do not add up.

    A shot shorter than half a block still gets one: a prompt that is never used would be a silent loss. What
    follows then starts where that block ends, so that no later shot pays for it.
    """
    blocks_per_second = spec.pictures_per_second / spec.block_pictures
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
