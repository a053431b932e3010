"""This module samples attention: where in the picture each role is read, and how much each slot of the bank."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from recap.attention.attend import Readable
from recap.attention.context import ContextKernels
from recap.types import Role

EVERY = 7
"""One of so many reads is sampled, over layers and steps; it costs a few milliseconds a block."""

QUERIES = 1024
"""How many queries are looked at together: all of a large model's would take gigabytes."""


class WatchingKernels(ContextKernels):
    """Computes attention unchanged, and keeps a sample of the weights of the batch's first row.

    A model with kernels of its own, as the fast ones have, is sampled in the clean pass, if the model shows it: the
    tokens of that pass are kept, those of the steps are not.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Forget what was watched: another block begins."""
        self._reads = 0
        self.clean_only = False
        # Role -> N, the weight that each query gives it; and of the bank's keys, each one's weight.
        self._maps: dict[Role, _Mean] = {}
        self._slots = _Mean()

    def see(self, read: Callable[[], tuple[Tensor, Sequence[Readable]]]) -> None:
        self._reads += 1
        if self._reads % EVERY == 0:
            self._watch(*read())

    def watch(self, layer: int, read: Callable[[], tuple[Tensor, Sequence[Readable]]]) -> None:
        self.clean_only = True
        if layer % EVERY == EVERY // 2:
            self._watch(*read())

    def _watch(self, query: Tensor, segments: Sequence[Readable]) -> None:
        segments = [segment for segment in segments if segment.keys.shape[1]]
        sizes = [segment.keys.shape[1] for segment in segments]
        # Several segments may have one role: every subject of a cast is one.
        read_by: dict[Role, list[Tensor]] = {}
        slots = []
        for queries in query[0].split(QUERIES):
            here: dict[Role, Tensor] = {}
            for segment, weights in zip(segments, _weights(queries, segments).split(sizes, -1), strict=True):
                if segment.role is not None:
                    read = weights.sum(dim=-1)
                    here[segment.role] = here[segment.role] + read if segment.role in here else read
                if segment.role is Role.BANK:
                    slots.append(weights.sum(dim=0))
            for role, part in here.items():
                read_by.setdefault(role, []).append(part)
        for role, parts in read_by.items():
            self._maps.setdefault(role, _Mean()).add(torch.cat(parts))
        if slots:
            self._slots.add(torch.stack(slots).sum(dim=0) / query.shape[1])

    def shares(self) -> dict[str, float]:
        """Return the share of attention that each role got."""
        return {str(role): round(float(kept.value().mean()), 6) for role, kept in self._maps.items()}

    def maps(self, grid: tuple[int, int]) -> dict[str, list[float]]:
        """Return by role how much each token of the picture reads it, 0..1, row-major; mean over frames."""
        found = {}
        for role, kept in self._maps.items():
            mean = kept.value().unflatten(0, (-1, *grid)).mean(dim=0)
            found[str(role)] = [round(value, 4) for value in mean.flatten().tolist()]
        return found

    def slots(self) -> list[float]:
        """Return the share of attention that each slot of the bank got; [] where there is no bank yet."""
        found: list[float] = self._slots.value().tolist()
        return found


class _Mean:
    """Averages tensors of one size; one of another size begins again.

    Blocks that are read again before this one may have a smaller bank, and a pyramid has steps of several sizes.
    """

    def __init__(self) -> None:
        self._total, self._count = torch.zeros(0), 0

    def add(self, value: Tensor) -> None:
        if value.shape != self._total.shape:
            self._total, self._count = torch.zeros_like(value), 0
        self._total, self._count = self._total + value, self._count + 1

    def value(self) -> Tensor:
        return self._total / max(1, self._count)


def _weights(query: Tensor, segments: Sequence[Readable]) -> Tensor:
    """Return the weight N K that queries N H D give each key of the first row; the mean over heads."""
    heads = range(query.shape[1])
    summed = query.new_zeros((), dtype=torch.float32)
    for head in heads:
        logits = [_logits(query[:, head].float(), segment, head) for segment in segments]
        summed = summed + torch.cat(logits, dim=-1).softmax(dim=-1)
    return summed / len(heads)


def _logits(query: Tensor, segment: Readable, head: int) -> Tensor:
    """Return the logits N K of queries N D and one head's keys of the first row."""
    logits: Tensor = query @ segment.keys[0, :, head].float().T * query.shape[-1] ** -0.5 + segment.log_bias
    logits = logits if segment.head_bias is None else logits + segment.head_bias[0, head]
    return logits if segment.token_bias is None else logits + segment.token_bias[0]
