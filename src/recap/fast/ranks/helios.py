"""This module runs Helios in several processes: tokens are split in the linear parts, heads in attention.

Every process has its share of the history's tokens and of the chunk's, so that all of them have as much to do with
the text, which only the chunk reads. diffusers' transformer stays as it is: a hook before every block gives it the
process's tokens, one behind the last block joins those of all, and the processors exchange tokens for heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from recap.backbones.helios.backbone import HeliosBackbone
from recap.backbones.helios.processor import MemoryProcessor
from recap.contracts import Decoder
from recap.fast.ranks.group import Ranks


class TokenSplit:
    """Says which tokens of a sequence, history before chunk, each process has."""

    def __init__(self, ranks: Ranks, history: int, chunk: int) -> None:
        self._ranks = ranks
        self._history, self._chunk = ranks.tokens(history), ranks.tokens(chunk)
        self.sizes = [past + own for past, own in zip(self._history, self._chunk, strict=True)]

    @property
    def chunk(self) -> int:
        """Return how many tokens of the chunk are here."""
        return self._chunk[self._ranks.rank]

    def parts(self, x: Tensor) -> list[Tensor]:
        """Return each process's tokens of a whole sequence B N ..."""
        pieces = x.split([*self._history, *self._chunk], dim=1)
        count = self._ranks.count
        return [torch.cat([pieces[rank], pieces[count + rank]], dim=1) for rank in range(count)]

    def whole(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the sequence from each process's tokens."""
        pasts = [part[:, :size] for part, size in zip(parts, self._history, strict=True)]
        chunks = [part[:, size:] for part, size in zip(parts, self._history, strict=True)]
        return torch.cat([*pasts, *chunks], dim=1)


class BlockHooks:
    """Gives the blocks of a transformer a process's tokens instead of all; `split` is that of the present forward."""

    split: TokenSplit

    def __init__(self, transformer: Any, ranks: Ranks) -> None:
        self._ranks = ranks
        self._first = transformer.blocks[0]
        self._times: Tensor | None = None
        for block in transformer.blocks:
            block.register_forward_pre_hook(self._before)
        transformer.blocks[-1].register_forward_hook(self._behind)

    def _before(self, block: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden, text, times, rotary, chunk = inputs
        rank = self._ranks.rank
        if block is self._first:
            self.split = TokenSplit(self._ranks, hidden.shape[1] - chunk, chunk)
            hidden = self.split.parts(hidden)[rank]
            # The same for all blocks: the modulation of each token by its time, B N 6 M.
            self._times = self.split.parts(times)[rank]
        return hidden, text, self._times, rotary, self.split.chunk

    def _behind(self, block: Any, inputs: tuple[Any, ...], hidden: Tensor) -> Tensor:
        self._times = None
        shapes = [(hidden.shape[0], size, hidden.shape[2]) for size in self.split.sizes]
        return self.split.whole(self._ranks.swap([hidden] * self._ranks.count, shapes))


class RankedProcessor(MemoryProcessor):
    """Attends to all tokens with a process's own heads."""

    heads: Ranks

    def __init__(self, plain: MemoryProcessor, ranks: Ranks, hooks: BlockHooks) -> None:
        vars(self).update(vars(plain))
        self.heads = ranks
        self._hooks = hooks

    def _gather(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ranks, split = self.heads, self._hooks.split
        rows, _, heads, channels = query.shape
        # Rows of queries, then of keys and values, so that tokens stay the second dimension.
        packed = torch.cat([query, key, value])
        shapes = [(3 * rows, size, heads // ranks.count, channels) for size in split.sizes]
        whole = split.whole(ranks.swap(packed.chunk(ranks.count, dim=2), shapes))
        query, key, value = whole.chunk(3)
        return query, key, value

    def _give_back(self, output: Tensor) -> Tensor:
        ranks, split = self.heads, self._hooks.split
        parts = split.parts(output)
        return torch.cat(ranks.swap(parts, [parts[ranks.rank].shape] * ranks.count), dim=2)


class RankedHeliosBackbone(HeliosBackbone):
    """Generates with the weights of a backbone, together with the other processes."""

    def __init__(self, plain: HeliosBackbone, ranks: Ranks, open_decoder: Callable[[], Decoder]) -> None:
        vars(self).update(vars(plain))
        self._open_decoder = open_decoder
        hooks = BlockHooks(self.transformer, ranks)
        for block in self.transformer.blocks:
            block.attn1.set_processor(RankedProcessor(block.attn1.processor, ranks, hooks))

    def decoder(self) -> Decoder:
        return self._open_decoder()
