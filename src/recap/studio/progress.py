"""This module tracks each branch of a session: blocks on their way to disk, blocks there, and blocks that were seen.

Three rules keep a record true, whatever commands arrive while blocks are still being encoded:

- What is not on disk has not been seen. A change is made at the first unseen block, so all that comes before
  it can be built again after a kill, a switch of branches or a restart.
- Dropping a block drops what is on its way of that block and of later ones, and nothing earlier: a gap would end the
  branch there, and the changes that were recorded behind it would be made at other blocks.
- After a block that could not be written, none of its branch is written until the branch is built again.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any


class BranchProgress:
    """Counts the blocks of every branch; callers hold the session's lock."""

    def __init__(self, tracks: Collection[str]) -> None:
        self._tracks = tracks
        # By branch, block and track.
        self._on_way: dict[tuple[int, int, str], dict[str, Any]] = {}
        # How many blocks are on disk, by branch and track.
        self._written: dict[tuple[int, str], int] = {}
        # By branch, the last block that was on a screen.
        self._seen: dict[int, int] = {}

    def begin(self, branch: int, blocks: int) -> None:
        """Note that a branch has so many blocks on disk and is built from them; all count as seen the first time."""
        self.drop(branch, 0)
        self._written |= {(branch, track): blocks for track in self._tracks}
        self._seen[branch] = min(self._seen.get(branch, blocks - 1), blocks - 1)

    def send(self, branch: int, info: dict[str, Any]) -> None:
        """Note that a block is on its way to disk."""
        self._on_way[branch, info["index"], info["track"]] = info

    def is_wanted(self, branch: int, info: dict[str, Any]) -> bool:
        """Tell whether a block on its way was not dropped since it was sent."""
        return self._on_way.get((branch, info["index"], info["track"])) is info

    def arrive(self, branch: int, info: dict[str, Any]) -> None:
        """Note that a block is on disk."""
        index, track = info["index"], info["track"]
        del self._on_way[branch, index, track]
        self._written[branch, track] = index + 1

    def drop(self, branch: int, first: int) -> None:
        """Note that the blocks of a branch from `first` on are no longer wanted."""
        self._on_way = {key: info for key, info in self._on_way.items() if key[0] != branch or key[1] < first}
        self._written |= {
            (at, track): min(count, first) for (at, track), count in self._written.items() if at == branch
        }

    def see(self, branch: int, block: int) -> None:
        """Note that a block was on the screen, or the last one on disk if it cannot have been."""
        # Of a branch that was not built yet all blocks will count as seen.
        if branch in self._seen:
            written = min(self._written[branch, track] for track in self._tracks)
            self._seen[branch] = max(min(block, written - 1), self._seen[branch])

    def first_unseen(self, branch: int) -> int:
        return self._seen.get(branch, -1) + 1
