"""This module turns a reinforcement into the biases of a sink, block by block, and measures what that needs.

The bias of a head in a layer and a pass is the bonus, ln(lambda), where the schedule lets it act, and 0 elsewhere.
What is measured, by row of the batch, so that rows stay independent of each other:
    heads   each layer's heads are ordered by the sink's share without any bias, in the clean pass of the first block
            that sees the sink. That block itself has no bonus; the order then stays
    gate    a head prefers the sink if a token of the sink gets more than the mean of all tokens that the head sees,
            without any bias, in the clean pass. What the last block showed holds for the next one
    share   after each block the bonus moves by logit(target) - logit(share of the denoising steps). It begins with
            what would be right if all tokens got the same
All of it is tensors on the device, so that no block waits for a value.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from recap.attention.heads import ALL_HEADS, Heads
from recap.contracts import Entry, State, copies
from recap.memory.reinforcement import Reinforcement, read_reinforcement
from recap.types import BackboneSpec, Passes, Role

STRONGEST = math.log(1e4)
"""The largest bonus that a target share may lead to, in either direction."""

HEADS, PREFERRING, BONUS = (f"reinforcement.{name}" for name in ("heads", "preferring", "bonus"))


class LayerBias(NamedTuple):
    """Lists the fields of a segment that say how it is biased in a layer."""

    log_bias: float = 0.0
    head_bias: Tensor | None = None
    bias_passes: Passes | None = None
    measured: bool = False


class SinkBias:
    """Keeps the reinforcement of a sink, and what was measured for it."""

    def __init__(self, spec: BackboneSpec, sink_frames: int, reinforcement: object) -> None:
        self._spec = spec
        self._sink_frames = sink_frames
        # Which heads are measured and biased here; what is kept is about all of them.
        self.heads: Heads = ALL_HEADS
        self._setting = Reinforcement()
        self._measured: dict[int, Tensor] = {}
        # L B H: shares of the first block that was measured.
        self._by_head: Tensor | None = None
        # L B: share of the heads that preferred the sink in the last block.
        self._preferring: Tensor | None = None
        # B
        self._bonus: Tensor | None = None
        self.set(reinforcement)

    def set(self, reinforcement: object) -> None:
        """Take another setting from the next block on; what was measured stays, so that going back finds it."""
        setting = read_reinforcement(reinforcement)
        setting.check(self._spec, self._sink_frames)
        self._setting = setting

    @property
    def needs_steps(self) -> bool:
        """Tell whether the denoising steps decide the bonus."""
        return self._setting.share is not None

    def layers(self, rows: int, device: torch.device) -> list[LayerBias]:
        """Return the bias of every layer for the next block, which has `rows` rows."""
        setting, spec = self._setting, self._spec
        log_bias = 0.0 if setting.factor is None else math.log(setting.factor)
        if setting.is_number:
            return [LayerBias(log_bias)] * spec.layers
        acts = [setting.acts_in(layer, spec.layers) for layer in range(spec.layers)]
        passes = setting.passes(spec.num_steps)
        by_head = setting.share is not None or setting.heads is not None or setting.gate is not None
        if not by_head:
            return [LayerBias(log_bias if on else 0.0, None, passes, True) for on in acts]
        table = self.heads.own(self._table(log_bias, rows, device), -1)
        return [LayerBias(0.0, table[layer] if on else None, passes, True) for layer, on in enumerate(acts)]

    def _table(self, log_bias: float, rows: int, device: torch.device) -> Tensor:
        """Return the bias L B H of each head."""
        setting, shape = self._setting, (self._spec.layers, rows, self._spec.heads)
        if setting.share is not None:
            bonus = self._bonus if self._bonus is not None else self._first_bonus(setting.share, rows, device)
            table = bonus[None, :, None].expand(shape)
        else:
            table = torch.full(shape, log_bias, device=device)
        if setting.heads is not None:
            if self._by_head is None:
                return torch.zeros(shape, device=device)
            count = max(1, round(abs(setting.heads) * self._spec.heads))
            order = self._by_head.argsort(dim=-1, descending=setting.heads > 0, stable=True)
            table = torch.where(order.argsort(dim=-1) < count, table, 0.0)
        if setting.gate is not None and self._preferring is not None:
            table = torch.where(self._preferring[..., None] > setting.gate, 0.0, table)
        return table

    def _first_bonus(self, share: float, rows: int, device: torch.device) -> Tensor:
        even = self._sink_frames / self._spec.window_frames
        return torch.full((rows,), _logit(share) - _logit(even), device=device)

    def measure(self, layer: int, share: Tensor) -> None:
        """Take the sink's share B H of a layer, without any bias."""
        if self._setting.heads is not None or self._setting.gate is not None:
            self._measured[layer] = share

    def take_share(self, share: Tensor) -> None:
        """Take the sink's share B of a block's denoising steps: the bonus moves towards its target."""
        target = self._setting.share
        if target is None:
            return
        before = self._bonus
        if before is None:
            before = self._first_bonus(target, share.shape[0], share.device)
        seen = share.float().logit(eps=1e-6)
        self._bonus = (before + _logit(target) - seen).clamp(-STRONGEST, STRONGEST)

    def commit(self, tokens: dict[Role, int]) -> None:
        """Use what was measured in the clean pass of a block that saw these numbers of tokens by role."""
        measured, self._measured = self._measured, {}
        if len(measured) < self._spec.layers:
            return
        shares = self.heads.join(torch.stack([measured[layer] for layer in range(self._spec.layers)]), -1)
        if self._setting.heads is not None and self._by_head is None:
            self._by_head = shares
        if self._setting.gate is not None:
            even = tokens[Role.SINK] / sum(tokens.values())
            self._preferring = (shares > even).float().mean(dim=-1)

    def drop(self) -> None:
        """Forget what was measured of a block that is only read again."""
        self._measured = {}

    def state(self) -> State:
        return copies({HEADS: self._by_head, PREFERRING: self._preferring, BONUS: self._bonus})

    def expected(self, state: State) -> dict[str, Entry]:
        """Return what a state may have of a schedule: each part only where it was measured."""
        spec = self._spec
        entries = {
            HEADS: Entry((spec.layers, "B", spec.heads), torch.float32, 0, 1),
            PREFERRING: Entry((spec.layers, "B"), torch.float32, 0, 1),
            BONUS: Entry(("B",), torch.float32, -STRONGEST - 1, STRONGEST + 1),
        }
        return {name: entry for name, entry in entries.items() if name in state}

    def load_state(self, state: State) -> None:
        found = [state[name].clone() if name in state else None for name in (HEADS, PREFERRING, BONUS)]
        self._by_head, self._preferring, self._bonus = found
        self._measured = {}


def _logit(share: float) -> float:
    return math.log(share / (1 - share))
