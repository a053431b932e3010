"""This module is the novelty bank: K fixed slots of keys and values, kept by frozen score.

After every block the bank has the top-K of all candidates ever seen. Scores never change and a newcomer
must beat what is inside, so what is evicted could never return and no history needs keeping. Attention
ignores order, so a newcomer simply overwrites the slot of the token it replaces, in every layer.

`shared_scores` shares a bank out among blocks, so that a late subject cannot evict an early one. What enters
together belongs together, so a block's new tokens are a group. Every group in turn keeps its best token, then its
second, until the bank is full: a group is as large as all others allow, and small ones stay whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from recap.contracts import LAST_FRAME, Entry, State, copies, copy_of, together
from recap.errors import refuse
from recap.memory.merging import Duplicates
from recap.memory.store import Store
from recap.types import NO_TOKEN, Candidates, sort_key

Retain = Callable[[Candidates, int], Tensor]

EMPTY = -1.0
"""The score of a slot that was emptied: below every token's, so that any newcomer takes it."""


class NoveltyBank:
    """Keeps `capacity` tokens in every layer; `zero_scores_fill`: tokens that showed nothing new fill empty slots."""

    def __init__(
        self,
        capacity: int,
        num_layers: int,
        *,
        zero_scores_fill: bool = True,
        duplicates: Duplicates | None = None,
    ):
        if capacity < 0:
            raise refuse("capacity", capacity, "must be 0 or more tokens", "0 switches the bank off")
        self.capacity = capacity
        # Slots in use; equal in all rows, since every block offers all rows equally many tokens.
        self.count = 0
        self._zero_scores_fill = zero_scores_fill
        self._store = Store(num_layers, capacity)
        # Of all K slots, in use or not.
        self._slots: Candidates | None = None
        # With `duplicates`, near-duplicates share a slot: B K, how many tokens each slot stands for.
        self.duplicates = duplicates
        self._copies: Tensor | None = None
        # What was in the slots that were emptied since the last admission; the next trace says so.
        self._released: Candidates | None = None
        # Whether a slot in use may be empty; host knowledge, so that no block waits for the device to tell.
        self._holes = False

    @property
    def keys(self) -> Tensor:
        """Return the keys, L B count H D, unrotated."""
        return self._store.keys[:, :, : self.count]

    @property
    def values(self) -> Tensor:
        """Return the values, L B count H D."""
        return self._store.values[:, :, : self.count]

    @property
    def entries(self) -> Candidates:
        """Return the source and frozen score of every slot in use."""
        assert self._slots is not None, "read before the first admission"
        return self._slots.part(slice(self.count))

    @property
    def token_bias(self) -> Tensor | None:
        """Return NO_TOKEN for empty slots and ln(n) for one that stands for n, B count, or None if all are 0.

        Rows fill at their own pace but share one shape, so an empty slot is stored and hidden from attention.
        """
        if self._zero_scores_fill and not self._holes and self.duplicates is None:
            return None
        score = self.entries.score
        weight = 0.0 if self._copies is None else self._copies[:, : self.count].log()
        return torch.where(score >= 0 if self._zero_scores_fill else score > 0, weight, NO_TOKEN)

    def take(self, slots: Sequence[int]) -> tuple[Tensor, Tensor, Candidates]:
        """Return the keys and values, L B N H D, and the entries of these slots, as copies."""
        index = self._check_slots(slots)
        return self.keys[:, :, index], self.values[:, :, index], self.entries.part(index)

    def release(self, slots: Sequence[int]) -> None:
        """Empty these slots in every row: nothing attends to them, and the next newcomers take them."""
        index = self._check_slots(slots)
        assert self._slots is not None
        self._note_released(self._slots.part(index))
        self._slots = Candidates(self._slots.source, self._slots.score.index_fill(1, index, EMPTY))
        self._holes = True

    def _note_released(self, gone: Candidates) -> None:
        """Keep what left other than by an admission, for the next trace."""
        self._released = gone if self._released is None else Candidates.join([self._released, gone])

    def take_over(self, other: NoveltyBank) -> None:
        """Take the tokens of another bank, the highest scores first; the next trace says what did not fit."""
        self._released = other._released
        if self.duplicates is not None and other.duplicates is not None:
            self.duplicates.load_state(other.duplicates.state())
        filled = (other.entries.score >= 0).all(dim=0).nonzero()[:, 0].tolist() if other.count else []
        if not filled:
            return
        keys, values, entries = other.take(filled)
        copies = None if other._copies is None else other._copies[:, filled]
        order = entries.score.argsort(dim=1, descending=True, stable=True)
        if self.capacity:
            self._take_in(entries, keys, values, lambda pool, capacity: order[:, :capacity], copies)
        self._note_released(entries.at(order[:, self.capacity :]))

    def _check_slots(self, slots: Sequence[int]) -> Tensor:
        """Return the slots as an index; refuses what is not a slot in use, and an empty one."""
        whole = all(isinstance(slot, int) and not isinstance(slot, bool) for slot in slots)
        if not slots or not whole or len(set(slots)) < len(slots):
            raise refuse("slots", list(slots), "must be different whole numbers", "see the bank's list")
        if not all(0 <= slot < self.count for slot in slots):
            limit = f"the bank has the slots 0 to {self.count - 1}" if self.count else "the bank is empty"
            raise refuse("slots", list(slots), limit, "name some of them")
        index = torch.tensor(list(slots), device=self.entries.score.device)
        if bool((self.entries.score[:, index] < 0).any()):
            raise refuse("slots", list(slots), "one of them was emptied already", "leave it out")
        return index

    def admit(
        self, offered: Candidates, keys: Tensor, values: Tensor, retain: Retain
    ) -> tuple[Candidates, Candidates]:
        """Offer a block's tokens (keys and values L B M H D); returns what entered and what left, slot by slot.

        Both results have one entry per slot, B K; score -1 marks a slot where nothing happened. What was emptied
        by `release` follows. All shapes are known beforehand, so nothing here waits for the device.
        """
        copies = None
        if self.duplicates is not None:
            self._allocate(offered, keys)
            offered, copies = self._merge(self.duplicates, offered, keys)
        entered, left = self._take_in(offered, keys, values, retain, copies)
        if self._released is not None:
            left, self._released = Candidates.join([left, self._released]), None
        return entered, left

    def _merge(self, duplicates: Duplicates, offered: Candidates, keys: Tensor) -> tuple[Candidates, Tensor]:
        """Count near-duplicates where they are kept; returns what is left to offer, and how many each stands for.

        What is counted elsewhere is offered as an empty slot is. A slot has the highest score of what it stands for.
        """
        assert self._slots is not None and self._copies is not None
        used = slice(0, self.count)
        merged = duplicates.merge(self.keys, self._slots.score[:, used], keys, offered)
        self._copies, score = self._copies.clone(), self._slots.score.clone()
        self._copies[:, used] += merged.gained
        score[:, used] = score[:, used].maximum(merged.best)
        self._slots = Candidates(self._slots.source, score)
        return Candidates(offered.source, offered.score.masked_fill(merged.gone, EMPTY)), merged.copies

    def _allocate(self, offered: Candidates, keys: Tensor) -> None:
        """Make room at the first offer, when all sizes are known."""
        if self._slots is None:
            batch = offered.score.shape[0]
            self._store.allocate(keys)
            score = offered.score.new_zeros((batch, self.capacity))
            self._slots = Candidates(offered.source.new_zeros((batch, self.capacity, 3)), score)
            self._copies = None if self.duplicates is None else torch.ones_like(score)

    def _take_in(
        self, offered: Candidates, keys: Tensor, values: Tensor, retain: Retain, copies: Tensor | None
    ) -> tuple[Candidates, Candidates]:
        """Let the rule choose; `copies` B M has how many each newcomer stands for, where duplicates are merged."""
        self._allocate(offered, keys)
        assert self._slots is not None
        pool = Candidates.join([self.entries, offered])
        stays = torch.zeros_like(pool.score, dtype=torch.bool).scatter_(1, retain(pool, self.capacity), True)
        slots = min(self.capacity, pool.count)
        # A slot takes a newcomer if it was empty or its token does not stay; there are exactly as many such
        # slots as newcomers that stay, so the i-th free slot takes the i-th newcomer.
        free = torch.zeros_like(self._slots.score, dtype=torch.bool)
        free[:, :slots] = True
        free[:, : self.count] = ~stays[:, : self.count]
        order = (~stays[:, self.count :]).to(torch.int8).argsort(dim=1, stable=True)
        newcomer = order.gather(1, (free.cumsum(dim=1) - 1).clamp_(0, order.shape[1] - 1))
        entering = offered.at(newcomer)
        occupied = torch.arange(self.capacity, device=free.device) < self.count
        left, entered = free & occupied, free
        if not self._zero_scores_fill:
            left, entered = left & (self._slots.score > 0), entered & (entering.score > 0)
        leaving = _marked(self._slots, left)
        self._overwrite(free, newcomer, keys, values)
        self._slots = Candidates(
            torch.where(free[..., None], entering.source, self._slots.source),
            torch.where(free, entering.score, self._slots.score),
        )
        if self._copies is not None and copies is not None:
            self._copies = torch.where(free, copies.gather(1, newcomer), self._copies)
        self.count = slots
        return _marked(entering, entered), leaving

    def _overwrite(self, free: Tensor, newcomer: Tensor, keys: Tensor, values: Tensor) -> None:
        """Copy newcomers over the free slots of all layers, leaving the others' bits alone."""
        mask = free[None, :, :, None]
        for kept, offered in ((self._store.keys, keys), (self._store.values, values)):
            store, fresh = _words(kept, offered)
            index = newcomer[None, :, :, None].expand(*fresh.shape[:2], -1, fresh.shape[3])
            torch.where(mask, fresh.gather(2, index), store, out=store)

    def state(self) -> State:
        limit = {} if self.duplicates is None else self.duplicates.state()
        if self._slots is None:
            return limit
        entries: dict[str, Tensor | None] = {
            "bank.source": self._slots.source,
            "bank.score": self._slots.score,
            "bank.copies": self._copies,
        }
        if self._released is not None:
            entries["bank.released.source"] = self._released.source
            entries["bank.released.score"] = self._released.score
        # A bank that once had holes is read with a mask from then on, which rounds differently from without one.
        holes = {"bank.holes": torch.tensor(1)} if self._holes else {}
        return {
            **self._store.state("bank"),
            **copies(entries),
            "bank.count": torch.tensor(self.count),
            **holes,
            **limit,
        }

    def expected(self, state: State, grid: tuple[int, int]) -> dict[str, Entry]:
        """Return what a state must have of this bank, whose tokens come from a grid of (rows, columns)."""
        last = (LAST_FRAME, grid[0] - 1, grid[1] - 1)
        own = {
            "bank.source": Entry(("B", self.capacity, 3), torch.int64, 0, last),
            "bank.score": Entry(("B", self.capacity), "scores"),
            "bank.count": Entry((), torch.int64, 0, self.capacity),
        }
        if self.duplicates is not None:
            own["bank.copies"] = Entry(("B", self.capacity), "scores", 1)
        released = {
            "bank.released.source": Entry(("B", "released", 3), torch.int64, 0, last),
            "bank.released.score": Entry(("B", "released"), "scores"),
        }
        holes = {"bank.holes": Entry((), torch.int64, 1, 1)}
        whole = {**self._store.expected("bank"), **own, **together(state, released), **together(state, holes)}
        if not self.capacity:
            return {}
        admitted = together(state, whole)
        merging = {} if self.duplicates is None else self.duplicates.expected(state, bool(admitted))
        return {**admitted, **merging}

    def load_state(self, state: State) -> None:
        self._store.load_state("bank", state)
        self._slots, self._copies = None, copy_of(state.get("bank.copies"))
        self.count, self._holes = 0, False
        if self.duplicates is not None:
            self.duplicates.load_state(state)
        if "bank.score" in state:
            self._slots = Candidates(state["bank.source"].clone(), state["bank.score"].clone())
            self.count = int(state["bank.count"])
            # Where duplicates are merged, all slots have a bias anyway.
            empty = self.duplicates is None and bool((self.entries.score < 0).any())
            self._holes = "bank.holes" in state or empty
        self._released = None
        if "bank.released.score" in state:
            self._released = Candidates(state["bank.released.source"], state["bank.released.score"])


def _words(kept: Tensor, offered: Tensor) -> list[Tensor]:
    """View the bits of tokens L B N H D as words of 8 bytes, if their sizes allow it: larger words copy faster."""
    flat = [tokens.flatten(3) for tokens in (kept, offered)]
    whole = all(
        x.element_size() * x.shape[-1] % 8 == x.element_size() * x.storage_offset() % 8 == 0 for x in flat
    )
    return [x.view(torch.int64) for x in flat] if whole and kept.dtype == offered.dtype else flat


def _marked(entries: Candidates, happened: Tensor) -> Candidates:
    """Return the entries where something happened, -1 elsewhere."""
    return Candidates(
        torch.where(happened[..., None], entries.source, -1), torch.where(happened, entries.score, -1.0)
    )


def shared_scores(pool: Candidates, first_frame: int, num_frames: int) -> Candidates:
    """Return the pool with scores whose order is the turn in which tokens are kept; those of 0 or less stay.

    Blocks have `num_frames` frames, and one of them begins at `first_frame`. A block's tokens are offered all at once
    and the better ones of it stay longer, so that a token's rank in its block never changes: the highest of these
    scores are the highest of all that were ever offered.
    """
    source, score = pool.source, pool.score
    group = torch.div(source[..., 0] - first_frame % num_frames, num_frames, rounding_mode="floor")
    # Older tokens first among equals, as everywhere.
    order = sort_key(source).argsort(dim=1)
    order = order.gather(1, score.gather(1, order).argsort(dim=1, descending=True, stable=True))
    grouped = order.gather(1, group.gather(1, order).argsort(dim=1, stable=True))
    groups = group.gather(1, grouped).contiguous()
    rank = torch.arange(pool.count, device=score.device) - torch.searchsorted(groups, groups)
    ranks = torch.empty_like(rank).scatter_(1, grouped, rank)
    turns = order.gather(1, ranks.gather(1, order).argsort(dim=1, stable=True))
    return Candidates(
        source, torch.where(score > 0, (pool.count - turns.argsort(dim=1)).to(score.dtype), score)
    )
