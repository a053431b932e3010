"""This module watches attention: where in the picture each role is read, and how much each slot of the bank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from recap.attention.attend import Attended, Readable
from recap.attention.context import ContextKernels
from recap.types import Role

EVERY = 7
"""Of how many reads one is watched: a sample over layers and steps that costs a few milliseconds a block."""


class WatchingKernels(ContextKernels):
    """Computes attention as ever, and keeps a sample of the weights of the batch's first row.

    A model that reads the memory by kernels of its own, as the fast ones do, is not watched.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Forget what was watched: another block begins."""
        self._reads = 0
        # Role -> N, the weight that each query gives it; and of the bank's keys, each one's weight.
        self._maps: dict[Role, _Mean] = {}
        self._slots = _Mean()

    def read(self, query: Tensor, segments: Sequence[Readable]) -> Attended:
        self._reads += 1
        if self._reads % EVERY == 0:
            self._watch(query, [segment for segment in segments if segment.keys.shape[1]])
        return super().read(query, segments)

    def _watch(self, query: Tensor, segments: Sequence[Readable]) -> None:
        weights = torch.cat([_logits(query, segment) for segment in segments], dim=-1).softmax(dim=-1)
        sizes = [segment.keys.shape[1] for segment in segments]
        for segment, part in zip(segments, weights.mean(dim=0).split(sizes, dim=-1), strict=True):
            if segment.role is None:
                continue
            self._maps.setdefault(segment.role, _Mean()).add(part.sum(dim=-1))
            if segment.role is Role.BANK:
                self._slots.add(part.mean(dim=0))

    def maps(self, grid: tuple[int, int]) -> dict[str, list[float]]:
        """Return by role how much each place of the picture reads it, 0..1, row-major; mean over frames."""
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


def _logits(query: Tensor, segment: Readable) -> Tensor:
    """Return the logits H N K of the first row."""
    q, k = query[0].transpose(0, 1).float(), segment.keys[0].transpose(0, 1).float()
    logits: Tensor = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 + segment.log_bias
    logits = logits if segment.head_bias is None else logits + segment.head_bias[0, :, None, None]
    return logits if segment.token_bias is None else logits + segment.token_bias[0]
