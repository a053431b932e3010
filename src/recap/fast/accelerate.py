"""Finished parts in, fast ones out: what a run does unless it is told `--eager`."""

from __future__ import annotations

from collections.abc import Callable

import torch

from recap.backbones.wan.backbone import WanBackbone
from recap.backbones.wan.taehv import Taehv
from recap.backbones.wan.vae import WanVae
from recap.contracts import Aside, Backbone, Decoder, FlowEstimator
from recap.fast.backbone import FastWanBackbone
from recap.fast.lanes import SideStream
from recap.fast.raft import FastRaftFlow
from recap.fast.taehv import FastTaehv
from recap.fast.vae import FastVae
from recap.flow.raft import RaftFlow
from recap.rollout import at_once


def accelerate(backbone: Backbone, *, on_cpu: bool = False) -> Backbone:
    """The same model by the fast path, if it has one that pays.

    On a CPU products take most of the time and are the same in both: 585 ms a block for 618 (EPYC, 2 cores,
    embedded row). So there only benchmarks ask for it.
    """
    if not isinstance(backbone, WanBackbone):
        return backbone
    if backbone.model.device.type == "cuda":
        return FastWanBackbone(backbone, fast_decoder(backbone.open_decoder))
    return FastWanBackbone(backbone) if on_cpu else backbone


def fast_decoder(open_decoder: Callable[[], Decoder]) -> Callable[[], Decoder]:
    """The same, of a public autoencoder on its fast path; streams of others are opened as they are."""
    owner = getattr(open_decoder, "__self__", None)  # streams are opened by a method of their model
    if isinstance(owner, WanVae):
        return FastVae.of(owner).open_decoder
    if isinstance(owner, Taehv):
        return FastTaehv(owner, torch.float16).open_decoder
    return open_decoder


def choose_aside(device: str) -> Aside:
    """Where a memory may look at a block's pixels while the clean pass runs."""
    return SideStream(device) if device.startswith("cuda") else at_once


def accelerate_flow(flow: FlowEstimator) -> FlowEstimator:
    """RAFT in half precision as one recording; anything else as it is."""
    if isinstance(flow, RaftFlow) and next(flow.model.parameters()).is_cuda:
        return FastRaftFlow(flow, dtype=torch.float16, captured=True)
    return flow
