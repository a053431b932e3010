"""This module defines the values of a session: prompts and edits of its timeline, states, and snapshots."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from recap.config import RunConfig
from recap.contracts import Decoder, MemoryPolicy, State
from recap.errors import refuse
from recap.memory.bank import NoveltyBank
from recap.plan import Plan


class Edit(NamedTuple):
    """Changes what a memory keeps, between two blocks."""

    apply: Callable[[MemoryPolicy], None]
    # By name, the words of subjects that join; None for one that leaves.
    words: Mapping[str, str | None] = MappingProxyType({})
    # Whether states of later blocks fit only a memory with this edit.
    reshapes: bool = False


class Slot(NamedTuple):
    """Describes a slot of the bank."""

    number: int
    source: tuple[int, ...]  # frame, row and column of its token
    score: float


@dataclass(frozen=True, slots=True)
class Cue:
    """Sets the prompt of the blocks from some block on, and what happens to the prior there."""

    prompt: str
    cut: bool = False
    reread: bool = False


def cues_of(plan: Plan) -> dict[int, Cue]:
    """Return the prompts of a plan, by the block where each begins."""
    cues = {0: Cue(plan.blocks[0].prompts[0])}
    for before, block in itertools.pairwise(plan.blocks):
        if block.prompts != before.prompts or block.clears_prior or block.rereads_prior:
            cues[block.index] = Cue(block.prompts[0], block.clears_prior, block.rereads_prior)
    return cues


@dataclass(frozen=True, slots=True)
class MemoryState:
    """Holds all that later blocks depend on besides latents, on the CPU."""

    policy: State
    decoder: State

    @classmethod
    def of(cls, policy: MemoryPolicy, decoder: Decoder) -> MemoryState:
        """Copy the present state."""
        parts = (policy.state(), decoder.state())
        return cls(*({name: value.cpu().clone() for name, value in part.items()} for part in parts))

    @property
    def num_bytes(self) -> int:
        return sum(
            x.numel() * x.element_size() for part in (self.policy, self.decoder) for x in part.values()
        )


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Holds a session at a block boundary, with its history; nothing that happens to the session later changes it."""

    config: RunConfig
    block: int  # that comes next
    cues: dict[int, Cue]
    reinforcements: dict[int, float | str]
    edits: dict[int, tuple[Edit, ...]]
    memory: MemoryState
    first_latent: Tensor | None  # of the video
    latents: dict[int, Tensor]  # by block, on the CPU: those of the history
    states: dict[int, MemoryState]  # by the block that comes next
    rows: dict[int, int]  # of the forwards, by the block from which on they hold; 1 before the first


Value = TypeVar("Value")


def latest(timeline: dict[int, Value], index: int) -> Value | None:
    """Return the entry that applies at a block: the one that began last."""
    begun = [block for block in timeline if block <= index]
    return timeline[max(begun)] if begun else None


def words_at(first: Mapping[str, str], edits: dict[int, tuple[Edit, ...]], index: float) -> dict[str, str]:
    """Return the words of each subject in the prompt of a block, by name."""
    words: dict[str, str | None] = dict(first)
    for at in sorted(edits):
        for edit in edits[at] if at <= index else ():
            words |= edit.words
    return {name: spelled for name, spelled in words.items() if spelled is not None}


def check_block(block: int, first: int, last: int) -> None:
    """Refuse a block that is not in the history of a session."""
    if isinstance(block, bool) or not isinstance(block, int) or not first <= block <= last:
        limit = f"the history of this session has the blocks {first} to {last}"
        raise refuse("block", block, limit, "name one of them, or give the session a longer history_s")


def check_history(**bounds: float) -> None:
    """Refuse bounds of a history that are below 0 or no numbers."""
    for name, value in bounds.items():
        if not value >= 0:
            raise refuse(name, value, "must be 0 or more", "leave it out for ten minutes of history")


def check_later(at: int, next_block: int) -> int:
    """Return a block that is still to come; refuses others."""
    if isinstance(at, bool) or not isinstance(at, int) or at < next_block:
        limit = f"the next block is {next_block}"
        raise refuse("at", at, limit, "name a later one, or go back first with rewind")
    return at


def slots_of(policy: MemoryPolicy) -> tuple[Slot, ...]:
    """Return the slots of a memory's bank that are in use, of the first row; () for a memory without a bank."""
    bank = getattr(policy, "bank", None)
    if not isinstance(bank, NoveltyBank) or not bank.count:
        return ()
    entries = zip(bank.entries.source[0].tolist(), bank.entries.score[0].tolist(), strict=True)
    return tuple(
        Slot(number, tuple(source), score) for number, (source, score) in enumerate(entries) if score >= 0
    )


def resized(config: RunConfig, capacity_frames: float) -> RunConfig:
    """Return the config with a bank of another size."""
    memory = config.memory
    if not hasattr(memory.settings, "capacity_frames"):
        limit = f"the memory {memory.name} has no bank"
        raise refuse("capacity_frames", capacity_frames, limit, "choose recap")
    own: Any = memory.settings
    sized = replace(memory, settings=replace(own, capacity_frames=capacity_frames))
    return replace(config, memory=sized)
