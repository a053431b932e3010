"""This module runs a causal Wan model in several processes: tokens are split in the linear parts, heads in attention.

Before attention every process sends each other one its tokens' queries, keys and values of that one's heads, and
gets back what they attended to. Whatever a memory keeps is of a process's own heads, and stays where it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from recap.attention.attend import Attended, Readable, attend
from recap.attention.context import ContextKernels
from recap.backbones.wan.backbone import WanBackbone
from recap.backbones.wan.model import CausalWan, TextConditioning
from recap.contracts import Context, Decoder
from recap.fast.ranks.group import Ranks
from recap.types import Role, Segment


class RankedKernels(ContextKernels):
    """Attends with a process's own heads; shares of attention are those of all heads, bit for bit."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def read(self, query: Tensor, segments: Sequence[Readable]) -> Attended:
        return attend(query, segments, heads=self._ranks)


class RankedContext:
    """Is a block's context for a process that has some of its tokens: attention itself sees all of them."""

    def __init__(self, context: Context, ranks: Ranks, tokens: Sequence[int]) -> None:
        self._context = context
        self._ranks = ranks
        # Of each rank.
        self._tokens = tokens

    @property
    def phases(self) -> Tensor:
        return self._context.phases

    def positions(self, grid: tuple[int, int], device: torch.device) -> Tensor:
        return self._context.positions(grid, device)

    def attend(self, layer: int, query: Tensor, own: list[Segment]) -> Tensor:
        """Attend with this process's queries B n H D; `own` has their keys and values, and all positions."""
        (current,) = own
        ranks, (rows, tokens, heads, channels) = self._ranks, query.shape
        some = heads // ranks.count
        packed = torch.stack([query, current.keys, current.values])
        shapes = [(3, rows, size, some, channels) for size in self._tokens]
        query, keys, values = torch.cat(ranks.swap(packed.chunk(ranks.count, dim=3), shapes), dim=2)
        segment = Segment(Role.CURRENT, keys, values, current.positions)
        read = self._context.attend(layer, query, [segment])
        shape = (rows, tokens, some, channels)
        parts = ranks.swap(read.split(list(self._tokens), dim=1), [shape] * ranks.count)
        return torch.cat(parts, dim=2)


class RankedWan:
    """Predicts the flow as a `CausalWan` does, with its weights, together with the other processes."""

    def __init__(self, model: CausalWan, ranks: Ranks) -> None:
        self._model = model
        self._ranks = ranks

    def __call__(
        self, latents: Tensor, timestep: float, conditioning: TextConditioning, context: Context
    ) -> Tensor:
        model, ranks = self._model, self._ranks
        x, tokens = self._pass_layers(latents, timestep, conditioning, context)
        patches = model.head(x, model.embed_time(timestep)[0]).squeeze(1)
        shapes = [(patches.shape[0], size, patches.shape[2]) for size in tokens]
        joined = torch.cat(ranks.swap([patches] * ranks.count, shapes), dim=1)
        return model.unpatchify(joined.unflatten(1, (latents.shape[1], -1)))

    def settle(
        self, latents: Tensor, timestep: float, conditioning: TextConditioning, context: Context
    ) -> None:
        """Show the context what `CausalWan.settle` does."""
        self._pass_layers(latents, timestep, conditioning, context, settles=True)

    def _pass_layers(
        self,
        latents: Tensor,
        timestep: float,
        conditioning: TextConditioning,
        context: Context,
        settles: bool = False,
    ) -> tuple[Tensor, list[int]]:
        """Pass this process's tokens through all layers; also returns how many tokens each process has."""
        model, ranks = self._model, self._ranks
        model.check(latents, timestep, conditioning, context)
        _, projected = model.embed_time(timestep)
        positions = context.positions(model.spec.grid, latents.device)
        tokens = ranks.tokens(positions.shape[1])
        ranked = RankedContext(context, ranks, tokens)
        # One time holds for all frames, so that a slice of tokens passes as one frame: B 1 n M.
        whole = model.embed_patches(latents).flatten(1, 2)
        x = whole.split(tokens, dim=1)[ranks.rank].unsqueeze(1).contiguous()
        return model.pass_layers(x, projected, conditioning, positions, ranked, settles), tokens


class RankedWanBackbone(WanBackbone):
    """Generates with the weights of a readable backbone."""

    def __init__(self, plain: WanBackbone, ranks: Ranks, open_decoder: Callable[[], Decoder]) -> None:
        vars(self).update(vars(plain))
        self.open_decoder = open_decoder
        self._transformer = RankedWan(self.model, ranks)
