"""This module lets the leader alone decide what enters the bank; the other processes do as it decided."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from recap.contracts import Admission, Entry, State
from recap.fast.ranks.group import Ranks
from recap.types import Block, Candidates


class LedAdmission(Admission):
    """Asks the leader's rule, and tells every process what it answered; followers have no rule and no pictures."""

    # Whatever the rule reads, it is asked after the clean pass: an earlier decision would have to be shared earlier.
    reads_keys = True

    def __init__(self, ranks: Ranks, build: Callable[[], Admission]) -> None:
        self._ranks = ranks
        self._rule = build() if ranks.leads else None
        rule = self._rule
        about = None if rule is None else [rule.reads_keys, rule.needs_pixels, rule.takes_leaving]
        # A rule by keys needs those of all heads.
        self._wants_keys, self.needs_pixels, self.takes_leaving = ranks.tell(about)  # type: ignore[misc]
        self._proposed: Candidates | None = None
        # Where decisions are needed.
        self._device = torch.device("cpu")

    def look(self, block: Block, pixels: Tensor) -> None:
        if self._rule is None:
            return
        if self._rule.reads_keys:
            self._rule.look(block, pixels)
        else:
            self._proposed = self._rule.propose(block, pixels)

    def read_keys(self, keys: Tensor) -> None:
        self._device = keys.device
        if not self._wants_keys:
            return
        whole = self._ranks.collect(keys, 3)
        if self._rule is not None and whole is not None:
            self._rule.read_keys(whole)

    def propose(self, block: Block, pixels: Tensor) -> Candidates:
        proposed = None
        if self._rule is not None:
            proposed = self._proposed if self._proposed is not None else self._rule.propose(block, pixels)
            self._proposed = None
        return self._shared(proposed)

    def retain(self, pool: Candidates, capacity: int) -> Tensor:
        stays = None if self._rule is None else {"stays": self._rule.retain(pool, capacity)}
        return self._ranks.share(stays, self._device)["stays"].to(self._device)

    def score_leaving(self, source: Tensor) -> Candidates:
        return self._shared(None if self._rule is None else self._rule.score_leaving(source))

    def _shared(self, found: Candidates | None) -> Candidates:
        """Return what the leader found, on every process."""
        parts = None if found is None else {"source": found.source, "score": found.score}
        shared = self._ranks.share(parts, self._device)
        return Candidates(shared["source"], shared["score"]).to(self._device)

    def state(self) -> State:
        return {} if self._rule is None else self._rule.state()

    def expected(self, state: State) -> dict[str, Entry]:
        return {} if self._rule is None else self._rule.expected(state)

    def load_state(self, state: State) -> None:
        self._proposed = None
        if self._rule is not None:
            self._rule.load_state(state)
