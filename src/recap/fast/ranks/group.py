"""This module connects the processes of one run, which `torchrun` starts: what travels between them passes here.

The first process, rank 0, leads: it alone has files, decoder, flow and admission rule. The others follow its orders.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from recap.attention.heads import Heads
from recap.contracts import State
from recap.errors import RecapError, refuse

TOKENS_TOGETHER = 4
"""Tokens that stay together when a block is split: matrix products round rows alike only in such groups."""


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_DTYPES = {
    _name(dtype): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.bfloat16, torch.float16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}


class RankLost(RecapError):
    """Says that another process of the run has ended, so that this one cannot continue."""


class Ranks(Heads):
    """Is one of several processes that generate a video together; without a group it is the only one."""

    def __init__(self, rank: int = 0, count: int = 1, *, on_device: bool = False) -> None:
        self.rank = rank
        self.count = count
        # Whether tensors of a GPU travel directly; else they take the way through the CPU's memory.
        self._on_device = on_device
        # How to continue after the run has ended early; `begin` names the folder.
        self.remedy = "give the command again"
        # Whether the followers wait for an order.
        self._waiting = False

    @property
    def alone(self) -> bool:
        return self.count == 1

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def tokens(self, total: int) -> list[int]:
        """Return how many of a block's tokens each rank has in the linear parts."""
        whole = TOKENS_TOGETHER if total >= TOKENS_TOGETHER * self.count else 1
        groups, rest = divmod(total, whole)
        sizes = [(groups // self.count + (rank < groups % self.count)) * whole for rank in range(self.count)]
        sizes[-1] += rest
        return sizes

    def own(self, x: Tensor, dim: int) -> Tensor:
        return x.chunk(self.count, dim=dim)[self.rank]

    def join(self, x: Tensor, dim: int) -> Tensor:
        if self.alone:
            return x
        return torch.cat(self.swap([x] * self.count, [x.shape] * self.count), dim=dim)

    def agree(self, x: Tensor) -> Tensor:
        return x if self.alone else self._broadcast(x)

    def swap(self, sent: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        """Send each rank a tensor of one type and device, and return what each rank sent, of these shapes."""
        like = sent[0]
        outgoing = [part.contiguous().flatten().view(torch.uint8) for part in sent]
        sizes = [torch.Size(shape).numel() * like.element_size() for shape in shapes]
        buffer, received = torch.cat(outgoing), like.new_empty(sum(sizes), dtype=torch.uint8)
        if not self._travels(like):
            buffer, received = buffer.cpu(), received.cpu()
        self._guarded(
            partial(dist.all_to_all_single, received, buffer, sizes, [part.numel() for part in outgoing])
        )
        parts = received.to(like.device).split(sizes)
        return [part.view(like.dtype).view(*shape) for part, shape in zip(parts, shapes, strict=True)]

    def collect(self, x: Tensor, dim: int) -> Tensor | None:
        """Return the parts of all ranks, joined along a dimension, on the leader, and None elsewhere."""
        if self.alone:
            return x
        nothing = (0, *x.shape[1:])
        sent = [x if rank == 0 else x[:0] for rank in range(self.count)]
        parts = self.swap(sent, [x.shape if self.leads else nothing] * self.count)
        return torch.cat(parts, dim=dim) if self.leads else None

    def deal(self, x: Tensor | None, dim: int, device: torch.device | str) -> Tensor:
        """Return this rank's part of a tensor that only the leader has, split along a dimension."""
        parts = None if x is None else [part.contiguous() for part in x.chunk(self.count, dim=dim)]
        about = None if parts is None else [_name(parts[0].dtype), list(parts[0].shape)]
        dtype, shape = self.tell(about)
        sent = parts or [torch.empty((0, *shape[1:]), dtype=_DTYPES[dtype], device=device)] * self.count
        nothing = (0, *shape[1:])
        return self.swap(sent, [shape if rank == 0 else nothing for rank in range(self.count)])[0]

    def share(self, tensors: Mapping[str, Tensor] | None, device: torch.device | str = "cpu") -> State:
        """Return the leader's named tensors on every rank; only the leader passes any."""
        if self.alone:
            return dict(tensors or {})
        about = None
        if tensors is not None:
            about = [[name, _name(x.dtype), list(x.shape)] for name, x in tensors.items()]
        made = {}
        for name, dtype, shape in self.tell(about):
            here = tensors[name] if tensors is not None else None
            empty = torch.empty(shape, dtype=_DTYPES[dtype], device=device) if here is None else here
            made[name] = self._broadcast(empty)
        return made

    def tell(self, value: Any = None) -> Any:
        """Return the leader's plain value, as JSON has it, on every rank; only the leader passes one."""
        if self.alone:
            return value
        data = json.dumps(value).encode() if self.leads else b""
        size = self._broadcast(torch.tensor([len(data)]))
        text = torch.zeros(int(size), dtype=torch.uint8)
        if self.leads:
            text = torch.tensor(list(data), dtype=torch.uint8)
        return json.loads(bytes(self._broadcast(text).tolist()))

    def begin(self, config: Mapping[str, Any], folder: Path, fresh: bool) -> None:
        """Order the followers to build a run's parts, as the leader does now; `done` when they are built."""
        if not self.alone:
            if str(config["device"]).startswith("cuda:"):
                limit = "each process takes the GPU of its own number"
                raise refuse("device", config["device"], limit, "name cuda")
            self.remedy = f"whole blocks are safe, continue with --resume {shlex.quote(str(folder))}"
            self.order("build", config=config, folder=str(folder), fresh=fresh)

    def order(self, what: str, **details: Any) -> None:
        """Tell the followers what comes next; they are busy until the next `done`."""
        if not self.alone and self.leads:
            self._waiting = False
            self.tell({"do": what, **details})

    def done(self) -> None:
        """Say that the followers wait for an order, at the beginning and whenever they have done the last one."""
        self._waiting = not self.alone

    def dismiss(self) -> None:
        """Let the followers go, if they wait for an order; busy ones see that the leader is gone."""
        if self._waiting and self.leads:
            self.order("end")

    def _broadcast(self, x: Tensor) -> Tensor:
        if not x.numel():
            return x
        flat = x.contiguous().flatten().view(torch.uint8)
        # Received in a copy: what was passed may be stored elsewhere too.
        flat = flat.clone() if self._travels(x) else flat.cpu().clone()
        self._guarded(partial(dist.broadcast, flat, src=0))
        return flat.to(x.device).view(x.dtype).view(x.shape)

    def _travels(self, x: Tensor) -> bool:
        return self._on_device or not x.is_cuda

    def _guarded(self, call: Callable[[], object]) -> None:
        """Run a collective; the loss of a process becomes one line."""
        try:
            call()
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError) as error:
            raise self.lost() from error

    def lost(self) -> RankLost:
        """Make the error of a process whose others are gone."""
        limit = f"another of the {self.count} processes has ended or cannot be reached"
        return RankLost(f"{refuse('rank', self.rank, limit, self.remedy)}")


LONE = Ranks()
"""Is the only process of its run."""


@contextmanager
def join_ranks() -> Iterator[Ranks]:
    """Join the other processes that `torchrun` started with this one, for one run; without it there are none."""
    count, rank = (int(os.environ.get(name, default)) for name, default in (("WORLD_SIZE", 1), ("RANK", 0)))
    if count == 1:
        yield LONE
        return
    local = int(os.environ.get("LOCAL_RANK", rank))
    gpus = torch.cuda.device_count()
    if gpus:
        torch.cuda.set_device(local % gpus)
    # NCCL wants a GPU for each process; several on one GPU talk through the CPU's memory.
    own_gpu = gpus >= int(os.environ.get("LOCAL_WORLD_SIZE", count))
    ranks = Ranks(rank, count, on_device=own_gpu)
    try:
        dist.init_process_group("cpu:gloo,cuda:nccl" if own_gpu else "gloo")
    except (RuntimeError, ValueError) as error:
        raise ranks.lost() from error
    try:
        yield ranks
        ranks.dismiss()
    except RankLost:
        raise
    except BaseException:
        ranks.dismiss()
        raise
    finally:
        dist.destroy_process_group()
