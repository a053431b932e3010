"""Replaces the parts of a run by their fast versions. Every run does this unless `--eager` is set."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec

import torch

from recap.admission.flow import FlowNovelty
from recap.admission.flow_keys import FlowKeys
from recap.backbones.wan.backbone import WanBackbone
from recap.backbones.wan.taehv import Taehv
from recap.backbones.wan.vae import WanVae
from recap.contracts import Admission, Aside, Backbone, Decoder, FlowEstimator
from recap.fast.backbone import FastWanBackbone
from recap.fast.graphs import SideStream
from recap.fast.raft import FastRaftFlow
from recap.fast.taehv import FastTaehv
from recap.fast.vae import FastVae
from recap.flow.raft import RaftFlow
from recap.rollout import at_once


def accelerate(backbone: Backbone, *, on_cpu: bool = False) -> Backbone:
    """Return the fast version of a backbone where there is one that pays, else the backbone itself.

    On a CPU matrix products take most of the time and are the same in both: 585 ms a block instead of 618 (EPYC,
    2 cores, embedded backbone). So only benchmarks ask for it there.
    """
    if not isinstance(backbone, WanBackbone):
        return backbone
    if backbone.model.device.type == "cuda":
        return FastWanBackbone(backbone, fast_decoder(backbone))
    return FastWanBackbone(backbone) if on_cpu else backbone


def fast_decoder(backbone: WanBackbone) -> Callable[[], Decoder]:
    """Return what opens the backbone's decoding streams, with the fast version of a public autoencoder."""
    autoencoder = backbone.autoencoder
    if isinstance(autoencoder, WanVae):
        return FastVae.of(autoencoder).open_decoder
    if isinstance(autoencoder, Taehv):
        return FastTaehv(autoencoder, torch.float16).open_decoder
    return backbone.open_decoder


def choose_aside(device: str) -> Aside:
    """Choose how a memory looks at a block's pixels while the clean pass runs."""
    return SideStream(device) if device.startswith("cuda") else at_once


def accelerate_flow(flow: FlowEstimator) -> FlowEstimator:
    """Return RAFT in half precision as one CUDA graph; any other estimator is returned as it is."""
    if isinstance(flow, RaftFlow) and next(flow.model.parameters()).is_cuda:
        return FastRaftFlow(flow, dtype=torch.float16, captured=True)
    return flow


def accelerate_admission(rule: Admission, device: str) -> Admission:
    """Let a rule that finds novelty by flow use kernels on a GPU; any other rule stays as it is.

    The device is the run's. Pictures may be elsewhere, as a backbone or a decoder that was handed in: these get the
    plain steps.
    """
    novelty = rule.by_flow if isinstance(rule, FlowKeys) else rule
    if isinstance(novelty, FlowNovelty) and device.startswith("cuda") and find_spec("triton") is not None:
        # Imported here because importing Triton takes time.
        novelty.faster["cuda"] = import_module("recap.fast.novelty_kernels")
    return rule
