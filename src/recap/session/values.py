"""This module has the values of a session: prompts and edits of its timeline, states, and what a snapshot holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from torch import Tensor

from recap.config import RunConfig
from recap.contracts import MemoryPolicy, State


class Edit(NamedTuple):
    """Changes what a memory keeps, between two blocks."""

    apply: Callable[[MemoryPolicy], None]
    # By name, the words of subjects that join; None for one who leaves.
    words: Mapping[str, str | None] = MappingProxyType({})
    # Whether a state of later blocks fits only a memory that was changed so.
    reshapes: bool = False


class Slot(NamedTuple):
    """Describes a slot of the bank."""

    number: int
    source: tuple[int, ...]  # frame, row and column of its token
    score: float


@dataclass(frozen=True, slots=True)
class Cue:
    """Says under which prompt the blocks from some block on are generated, and what happens to the prior there."""

    prompt: str
    cut: bool = False
    reread: bool = False


@dataclass(frozen=True, slots=True)
class MemoryState:
    """Holds all that later blocks depend on besides latents, on the CPU."""

    policy: State
    decoder: State

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
    reinforcements: dict[int, float]
    edits: dict[int, tuple[Edit, ...]]
    memory: MemoryState
    first_latent: Tensor | None  # of the video
    latents: dict[int, Tensor]  # by block, on the CPU: those of the history
    states: dict[int, MemoryState]  # by the block that comes next
