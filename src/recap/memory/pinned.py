"""Pinned tokens have slots of their own, next to the bank, and are never evicted: a cast, or what a user pins.

They are read as the bank is, at temporal phase 0 with their own row and column. They are kept by name, so that a
block can be shown some of them and not the others.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from recap.contracts import LAST_FRAME, Entry, MemoryPolicy, State, copies
from recap.errors import refuse
from recap.io.cast import Subject
from recap.memory.window import Window, timeless_positions
from recap.types import BackboneSpec, Candidates, Role

MOST_TOKENS_FRAMES = 64
"""How many frames' worth of tokens may be pinned in all: more would be a window, not a memory."""

LONGEST_NAMES = 1 << 16
"""Bytes that the names may take in a state."""


class PinnedGroup(NamedTuple):
    """Keeps the tokens of one name in every layer."""

    keys: Tensor  # L B N H D, unrotated
    values: Tensor  # L B N H D
    entries: Candidates  # B N: where each came from, and its score


class PinnedTokens:
    """Keeps groups of tokens by name, in the order in which they were pinned."""

    def __init__(self, spec: BackboneSpec) -> None:
        self._spec = spec
        self.groups: dict[str, PinnedGroup] = {}

    def add(self, name: str, group: PinnedGroup) -> None:
        """Pin tokens under a name; more of a name that is there already join it."""
        total = sum(each.entries.count for each in (*self.groups.values(), group))
        most = MOST_TOKENS_FRAMES * self._spec.frame_tokens
        if total > most:
            raise refuse("pinned tokens", total, f"at most {most} fit next to the bank", "drop some first")
        if (before := self.groups.get(name)) is not None:
            group = PinnedGroup(
                torch.cat([before.keys, group.keys], dim=2),
                torch.cat([before.values, group.values], dim=2),
                Candidates.join([before.entries, group.entries]),
            )
        self.groups[name] = group

    def drop(self, name: str) -> None:
        """Forget all tokens of a name."""
        if name not in self.groups:
            known = ", ".join(self.groups) or "none"
            raise refuse("name", name, f"nothing is pinned under it; names: {known}", "name one of these")
        del self.groups[name]

    def show(self, window: Window, names: Collection[str] | None, log_bias: float = 0.0) -> None:
        """Let the block see the tokens of these names, or all of them, with this bias."""
        for name, group in self.groups.items():
            if names is None or name in names:
                positions = timeless_positions(group.entries.source)
                window.add(Role.CAST, group.keys, group.values, positions, log_bias=log_bias, in_front=True)

    def state(self) -> State:
        if not self.groups:
            return {}
        names = torch.tensor(list(json.dumps(list(self.groups)).encode()), dtype=torch.uint8)
        parts = {
            f"pinned.{index}.{part}": value
            for index, group in enumerate(self.groups.values())
            for part, value in _parts(group).items()
        }
        return {"pinned.names": names, **copies(parts)}

    def expected(self, state: State) -> dict[str, Entry]:
        """Return what a state must have of pinned tokens: names, and the tokens of each."""
        if not any(name.startswith("pinned.") for name in state):
            return {}
        rows, columns = self._spec.grid
        most = range(1, MOST_TOKENS_FRAMES * self._spec.frame_tokens + 1)
        entries = {"pinned.names": Entry((range(1, LONGEST_NAMES),), torch.uint8)}
        for index in range(len(_names(state))):
            tokens = Entry((self._spec.layers, "B", most, "H", "D"), "tokens")
            entries |= {
                f"pinned.{index}.keys": tokens,
                f"pinned.{index}.values": tokens,
                f"pinned.{index}.source": Entry(
                    ("B", most, 3), torch.int64, 0, (LAST_FRAME, rows - 1, columns - 1)
                ),
                f"pinned.{index}.score": Entry(("B", most), "scores"),
            }
        return entries

    def load_state(self, state: State) -> None:
        """Restore the groups; the memory has checked the state."""
        self.groups = {}
        for index, name in enumerate(_names(state) if "pinned.names" in state else ()):
            keys, values, source, score = (
                state[f"pinned.{index}.{part}"].clone() for part in ("keys", "values", "source", "score")
            )
            if not keys.shape[2] == values.shape[2] == source.shape[1] == score.shape[1]:
                limit = f"the parts of {name!r} differ in their number of tokens"
                raise refuse("state pinned", index, limit, "load what `state` returned")
            self.groups[name] = PinnedGroup(keys, values, Candidates(source, score))


def _parts(group: PinnedGroup) -> dict[str, Tensor]:
    keys, values, entries = group
    return {"keys": keys, "values": values, "source": entries.source, "score": entries.score}


def _names(state: State) -> list[str]:
    """Return the names in a state; refuses anything but a list of different texts."""
    stored = state.get("pinned.names")
    try:
        names = json.loads(bytes(stored.flatten().tolist())) if stored is not None else None
    except (ValueError, TypeError, RecursionError):
        names = None
    if not isinstance(names, list) or len({n for n in names if isinstance(n, str)}) != len(names):
        raise refuse("state pinned.names", None, "is not a list of names", "load what `state` returned")
    return names


ReadAlone = Callable[[Tensor, tuple[str, ...]], tuple[Tensor, Tensor]]
"""Returns the clean keys and values, L B N H D, of one block of latents under these prompts."""


def join_cast(
    policy: MemoryPolicy,
    subjects: Sequence[Subject],
    prompts: tuple[str, ...],
    read: ReadAlone,
) -> None:
    """Pin every subject in all rows of the batch; `prompts`, one per row, are those of the video it joins."""
    for subject in subjects:
        rows = len(prompts)
        keys, values = read(subject.latents[None].expand(rows, -1, -1, -1, -1).contiguous(), prompts)
        chosen = subject.mask.flatten().nonzero()[:, 0].to(keys.device)
        source = subject.mask.nonzero().to(keys.device).expand(rows, -1, -1).contiguous()
        score = subject.scores[subject.mask].to(keys.device).expand(rows, -1).contiguous()
        policy.take_cast(subject.name, keys[:, :, chosen], values[:, :, chosen], Candidates(source, score))
