"""This module writes and reads the state of a memory whose heads are spread over several processes.

The state is the same as that of one process, so that any number of processes can continue with it. The letter H in
what a memory expects of a state says along which dimension an entry is spread.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recap.contracts import MemoryPolicy, State
from recap.errors import refuse
from recap.fast.ranks.group import Ranks
from recap.memory.base import WindowMemory

LEADS = "admission."
"""What the names of entries begin with that only the leader has."""


def split_memory(policy: MemoryPolicy, ranks: Ranks) -> MemoryPolicy:
    """Let a memory keep this process's heads only; refuses one that cannot."""
    if ranks.alone:
        return policy
    if not isinstance(policy, WindowMemory):
        limit = "it does not say what of its state belongs to which heads"
        remedy = "start one process, or derive it from recap.memory.base.WindowMemory"
        raise refuse("memory", type(policy).__name__, limit, remedy)
    policy.split_heads(ranks)
    return policy


def join_state(policy: MemoryPolicy, ranks: Ranks) -> State:
    """Return the state of all heads, on the CPU; a follower returns nothing. Every process calls it."""
    own = policy.state()
    if ranks.alone:
        return own
    assert isinstance(policy, WindowMemory), "`split_memory` was not asked"
    whole: dict[str, Tensor | None] = dict(own)
    for name, dim in _spread(policy, own).items():
        whole[name] = ranks.collect(own[name].cpu(), dim)
    return {name: value for name, value in whole.items() if value is not None} if ranks.leads else {}


def load_state(
    policy: MemoryPolicy, ranks: Ranks, state: State | None, device: torch.device | str = "cpu"
) -> None:
    """Restore a state of all heads, which only the leader has; every process calls it, with its own device."""
    if ranks.alone:
        policy.load_state(state or {})
        return
    assert isinstance(policy, WindowMemory), "`split_memory` was not asked"
    spread = ranks.tell(None if state is None else _spread(policy, state))
    common = None
    if state is not None:
        common = {n: x for n, x in state.items() if n not in spread and not n.startswith(LEADS)}
    own = ranks.share(common, device)
    for name, dim in spread.items():
        own[name] = ranks.deal(None if state is None else state[name], dim, device)
    if state is not None:
        own |= {name: value for name, value in state.items() if name.startswith(LEADS)}
    policy.load_state(own)


def _spread(policy: WindowMemory, state: State) -> dict[str, int]:
    """Return the entries of a state that are spread over processes, each with the dimension of its heads."""
    expected = policy.expected(state)
    return {name: entry.shape.index("H") for name, entry in sorted(expected.items()) if "H" in entry.shape}
