"""The trace of a run records what happened in each block. This file alone knows its JSON, and replays the bank.

A trace has no times: the same run has the same bytes, resumed or not. Times are written to a file of their own.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from recap.errors import refuse
from recap.types import Candidates, GeneratedBlock, Role

Position = tuple[int, int, int]
"""Frame, row and column of a token."""

Bank = dict[Position, float]
"""Tokens of a bank, with their scores."""

Shares = dict[Role, list[float] | None]
"""Role -> its share of the attention mass, per row of the batch; None where it was attended to but not measured."""


class Offered(NamedTuple):
    """Lists all that the bank could choose from: whole frames, row-major."""

    frames: list[int]
    grid: tuple[int, int]
    scores: list[list[float]]  # per row of the batch


@dataclass(frozen=True, slots=True)
class BlockTrace:
    """Records one block. Lists have an entry per row of the batch; None is what the memory does not have."""

    block: int
    first_frame: int
    first_pictures: tuple[int, ...]  # index in the video of the first picture of each frame
    num_pictures: int
    prompts: tuple[str, ...] = ("",)
    clears_prior: bool = False
    tokens: dict[Role, int] = field(default_factory=dict)  # keys that every query could see
    shares: Shares = field(default_factory=dict)
    stage_shares: tuple[Shares, ...] = ()  # of a pyramid, the coarsest stage first
    notes: dict[str, bool | int | str] = field(default_factory=dict)
    fired: list[list[int]] | None = None  # tokens with a positive score, per frame
    # Of the bank's tokens that were new, those at the left or right border.
    edge_share: list[float] | None = None
    admitted: list[Bank] | None = None
    evicted: list[Bank] | None = None
    offered: Offered | None = None  # only where the run was asked to write it down
    video: int | None = None  # which video of an attached pipeline, counted from 0

    @classmethod
    def of(cls, made: GeneratedBlock, *, offered: bool = False, video: int | None = None) -> BlockTrace:
        """Return the trace of a finished block; reading its tensors is where the device is waited for."""
        memory = made.memory
        if memory.offered is not None and not bool(memory.offered.score.isfinite().all()):
            limit = f"block {made.block.index} holds NaN or infinity, mostly from the flow"
            raise refuse("scores", None, limit, "try --flow classical, --dtype float32 or another admission")
        return cls(
            block=made.block.index,
            first_frame=made.block.first_frame,
            first_pictures=made.first_pictures,
            num_pictures=made.pixels.shape[1],
            prompts=made.block.prompts,
            clears_prior=made.block.clears_prior,
            tokens=dict(memory.tokens),
            shares=_shares(_lists(made.shares), memory.tokens),
            stage_shares=tuple(
                _shares(_lists(made.stage_shares[stage]), memory.tokens)
                for stage in sorted(made.stage_shares)
            ),
            notes=dict(memory.notes),
            fired=None if memory.fired is None else memory.fired.tolist(),
            edge_share=None if memory.edge_share is None else memory.edge_share.tolist(),
            admitted=None if memory.admitted is None else banks_of(memory.admitted),
            evicted=None if memory.evicted is None else banks_of(memory.evicted),
            offered=_offered(memory.offered) if offered and memory.offered is not None else None,
            video=video,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the line of a trace file; what is None or empty is left out."""
        line: dict[str, Any] = {
            "block": self.block,
            "first_frame": self.first_frame,
            "first_pictures": list(self.first_pictures),
            "num_pictures": self.num_pictures,
            "prompts": list(self.prompts),
            "clears_prior": self.clears_prior,
            "attended_tokens": self.tokens,
            "attention_share": _measured(self.shares),
        }
        optional = {
            "attention_share_by_stage": [_measured(shares) for shares in self.stage_shares] or None,
            "notes": self.notes or None,
            "fired_tokens": self.fired,
            "bank_edge_share": self.edge_share,
            "admitted": _entries(self.admitted),
            "evicted": _entries(self.evicted),
            "offered": None if self.offered is None else self.offered._asdict(),
        }
        return line | {name: value for name, value in optional.items() if value is not None}

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> BlockTrace:
        """Read a line of a trace file, also of an older version where it says which pictures its frames are."""
        block, starts = f"block {line.get('block')}", line.get("first_pictures")
        if not starts:
            limit = "does not say which pictures its frames are: an older version wrote it"
            raise refuse("trace", block, limit, "generate the run again")
        try:
            tokens = {Role(role): count for role, count in line["attended_tokens"].items()}
            by_stage = line.get("attention_share_by_stage", ())
            offered = line.get("offered")
            return cls(
                block=line["block"],
                first_frame=line["first_frame"],
                first_pictures=tuple(starts),
                num_pictures=line.get("num_pictures", _older_count(starts)),
                prompts=tuple(line["prompts"]),
                clears_prior=line["clears_prior"],
                tokens=tokens,
                shares=_shares(_by_role(line["attention_share"]), tokens),
                stage_shares=tuple(_shares(_by_role(shares), tokens) for shares in by_stage),
                notes=line.get("notes", {}),
                fired=line.get("fired_tokens"),
                edge_share=line.get("bank_edge_share"),
                admitted=_banks(line.get("admitted")),
                evicted=_banks(line.get("evicted")),
                offered=offered and Offered(offered["frames"], tuple(offered["grid"]), offered["scores"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            limit = f"is not a line of a trace ({type(error).__name__}: {error})"
            raise refuse("trace", block, limit, "generate the run again") from error

    def row(self, row: int) -> BlockTrace:
        """Return one row of the batch, as if it had been generated alone."""

        def only(rows: Sequence[Any] | None) -> Any:
            return None if rows is None else [rows[row]]

        def of_row(shares: Shares) -> Shares:
            return {role: only(share) for role, share in shares.items()}

        return replace(
            self,
            prompts=(self.prompts[row],),
            shares=of_row(self.shares),
            stage_shares=tuple(of_row(shares) for shares in self.stage_shares),
            fired=only(self.fired),
            edge_share=only(self.edge_share),
            admitted=only(self.admitted),
            evicted=only(self.evicted),
            offered=self.offered and self.offered._replace(scores=only(self.offered.scores)),
        )

    def candidates(self, row: int = 0) -> Bank:
        """Return every token that the bank could choose from, with its score."""
        if self.offered is None:
            return {}
        rows, columns = self.offered.grid
        positions = itertools.product(self.offered.frames, range(rows), range(columns))
        return dict(zip(positions, self.offered.scores[row], strict=True))


def has_bank(trace: Sequence[BlockTrace]) -> bool:
    """Tell whether the run's memory has a bank."""
    return any(line.admitted is not None for line in trace)


def replay_bank(trace: Sequence[BlockTrace], row: int = 0) -> Iterator[Bank]:
    """Return the contents of one row's bank after each block."""
    bank: Bank = {}
    for line in trace:
        evicted = line.evicted[row] if line.evicted else {}
        if missing := evicted.keys() - bank.keys():
            limit = f"block {line.block} evicts a token that is not in the bank"
            raise refuse("trace", list(min(missing)), limit, "the trace is damaged: generate the run again")
        bank = {position: score for position, score in bank.items() if position not in evicted}
        bank |= line.admitted[row] if line.admitted else {}
        yield bank


def bank_before(trace: Sequence[BlockTrace], block: int) -> Bank:
    """Return the contents of the first row's bank when a block begins."""
    empty: Bank = {}
    return [empty, *replay_bank(trace[:block])][-1]


def pictures_of_frames(trace: Sequence[BlockTrace]) -> dict[int, range]:
    """Map each frame to the indices of its pictures in the video; backbones differ in how many a frame has."""
    found: dict[int, range] = {}
    for line in trace:
        ends = (*line.first_pictures[1:], line.first_pictures[0] + line.num_pictures)
        spans = map(range, line.first_pictures, ends)
        found |= {line.first_frame + index: span for index, span in enumerate(spans)}
    return found


def banks_of(candidates: Candidates) -> list[Bank]:
    """Return per row of the batch its tokens, without the slots where nothing happened."""
    return [
        {(t, h, w): score for (t, h, w), score in zip(source, scores, strict=True) if score >= 0}
        for source, scores in zip(candidates.source.tolist(), candidates.score.tolist(), strict=True)
    ]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a JSON-lines file; a last line cut short by a kill is left out."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        lines = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    except (ValueError, RecursionError) as error:
        raise refuse("file", str(path), f"is not lines of JSON ({error})", "put it back") from error
    if not all(isinstance(line, dict) for line in lines):
        raise refuse("file", str(path), "has lines that are not objects", "put it back")
    return lines


def read_trace(path: Path) -> list[BlockTrace]:
    """Return the blocks of a trace file."""
    lines = read_lines(path)
    for line, following in itertools.pairwise(lines):
        # Lines of an older version do not count their pictures.
        if "num_pictures" not in line and line.get("first_pictures") and following.get("first_pictures"):
            line["num_pictures"] = following["first_pictures"][0] - line["first_pictures"][0]
    return [BlockTrace.from_json(line) for line in lines]


def read_seconds(path: Path) -> list[float]:
    """Read how many seconds each block took, from the file of times."""
    seconds = [line.get("seconds") for line in read_lines(path)]
    for block, value in enumerate(seconds):
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise refuse("seconds", value, f"block {block} of {path} has no usable time", "put the file back")
    return [float(value) for value in seconds if value is not None]


def _older_count(starts: Sequence[int]) -> int:
    """Count the pictures of a last block whose line does not: its last frame has as many as the one before."""
    return starts[-1] - starts[0] + (starts[-1] - starts[-2] if len(starts) > 1 else 1)


def _lists(shares: Mapping[Role, Tensor]) -> dict[Role, list[float]]:
    return {role: share.tolist() for role, share in shares.items()}


def _by_role(shares: Mapping[str, list[float]]) -> dict[Role, list[float]]:
    return {Role(role): share for role, share in shares.items()}


def _shares(measured: Mapping[Role, list[float]], tokens: Mapping[Role, int]) -> Shares:
    return {**measured, **{role: None for role in tokens if role not in measured}}


def _measured(shares: Shares) -> dict[Role, list[float]]:
    return {role: share for role, share in shares.items() if share is not None}


def _banks(rows: Sequence[Sequence[Sequence[float]]] | None) -> list[Bank] | None:
    if rows is None:
        return None
    return [{(int(t), int(h), int(w)): score for t, h, w, score in row} for row in rows]


def _entries(rows: Sequence[Bank] | None) -> list[list[list[float]]] | None:
    """Return per row of the batch a list of [frame, row, column, score]."""
    if rows is None:
        return None
    return [[[*position, score] for position, score in row.items()] for row in rows]


def _offered(candidates: Candidates) -> Offered:
    # Whole frames, row-major, the same for all rows of the batch.
    source = candidates.source[0]
    rows, columns = (source[:, 1:].amax(dim=0) + 1).tolist()
    return Offered(source[:: rows * columns, 0].tolist(), (rows, columns), candidates.score.tolist())
