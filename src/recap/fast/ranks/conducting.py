"""This module has the leader's side of a run: each step of it that the other processes take part in is an order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from recap.contracts import MemoryPolicy, State, check_state
from recap.fast.ranks.group import Ranks
from recap.fast.ranks.states import join_state, load_state
from recap.memory.base import WindowMemory
from recap.rollout import Resume
from recap.types import GeneratedBlock

Start = Callable[[Resume], Iterator[GeneratedBlock]]
"""Starts a rollout of a run's own parts."""


def conduct(ranks: Ranks, resume: Resume, start: Start) -> Iterator[GeneratedBlock]:
    """Yield the blocks of a rollout that all processes generate together; the leader calls it."""
    if ranks.alone:
        return start(resume)
    recent = {f"{index}": latents for index, latents in enumerate(resume.recent_latents)}
    first = {} if resume.first_latent is None else {"first": resume.first_latent}
    known = resume.latents_of
    ranks.order("begin", block=resume.block, recent=len(recent), known=known is not None)
    ranks.share({**recent, **first})
    ranks.done()
    if known is not None:
        resume = replace(resume, latents_of=lambda block: ranks.share({"latents": known(block)})["latents"])
    return _each(ranks, start(resume))


def _each(ranks: Ranks, blocks: Iterator[GeneratedBlock]) -> Iterator[GeneratedBlock]:
    while True:
        ranks.order("block")
        made = next(blocks, None)
        ranks.done()
        if made is None:
            return
        yield made


def collect_state(ranks: Ranks, policy: MemoryPolicy) -> State:
    """Return the state of a memory, with all heads; the leader calls it."""
    ranks.order("state")
    state = join_state(policy, ranks)
    ranks.done()
    return state


def restore_state(ranks: Ranks, policy: MemoryPolicy, state: State) -> None:
    """Restore such a state in all processes; the leader calls it. The leader refuses a bad one by itself, first."""
    if isinstance(policy, WindowMemory):
        check_state(state, policy.expected(state))
    ranks.order("load")
    load_state(policy, ranks, state)
    ranks.done()
