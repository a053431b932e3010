"""Builds what a speed measurement runs: a backbone, its decoder and its flow, with real or random weights.

Speed does not depend on values, so a public model at its real size needs no file: its weights are random.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from recap.admission.flow import FlowNoveltyConfig
from recap.backbones.wan.backbone import WanBackbone
from recap.backbones.wan.family import DECODERS, WanConfig
from recap.backbones.wan.model import CausalWan
from recap.backbones.wan.spec import WanSpec
from recap.backbones.wan.taehv import Taehv
from recap.config import DTYPES, check_place, choose
from recap.contracts import Admission, Backbone, Decoder, FlowEstimator, MemoryPolicy
from recap.errors import refuse, unknown_name
from recap.fast.accelerate import accelerate, accelerate_flow
from recap.fast.taehv import FastTaehv
from recap.fast.vae import FastDecoder, FastVae
from recap.flow.classical import ClassicalFlow
from recap.flow.raft import RaftFlow, RaftSmall

MOST_BLOCKS = 10_000
# Channels of the public decoder's last stage.
VAE_WIDTH = 96


@dataclass(frozen=True, slots=True)
class SpeedSettings:
    """The settings of one measurement."""

    backbone: str
    memory: str
    decoder: str
    device: str
    dtype: str
    blocks: int
    eager: bool = False

    def __post_init__(self) -> None:
        if not 2 <= self.blocks <= MOST_BLOCKS:
            raise refuse("--blocks", self.blocks, f"must be 2 to {MOST_BLOCKS}", "30 are enough for medians")
        check_place(self.device, self.dtype)
        if self.decoder not in DECODERS:
            raise unknown_name("--decoder", self.decoder, DECODERS)


@dataclass(frozen=True, slots=True)
class Parts:
    """Everything a rollout needs, and a description of what was chosen."""

    readable: WanBackbone
    backbone: Backbone
    open_decoder: Callable[[], Decoder]
    flow: FlowEstimator
    about: dict[str, str]

    def policy(self, memory: str) -> MemoryPolicy:
        def admission() -> Admission:
            return FlowNoveltyConfig().build(self.backbone.spec, self.flow)

        made: MemoryPolicy = choose("memory", memory).settings.build(self.backbone.spec, admission)
        return made


def make_parts(settings: SpeedSettings) -> Parts:
    """Build the parts of a measurement, with random weights where real ones would need files."""
    kind = type(choose("backbone", settings.backbone).settings)
    device, dtype = torch.device(settings.device), DTYPES[settings.dtype]
    torch.manual_seed(0)
    if issubclass(kind, WanConfig):
        readable = random_backbone(kind.row, device, dtype)
        open_decoder, weights = random_decoder(settings, kind.row, device, dtype), "random, at real size"
    else:
        if settings.decoder != "full":
            limit = f"{settings.backbone} has one decoder, its own"
            raise refuse("--decoder", settings.decoder, limit, "leave it out")
        readable = kind().build(device=settings.device, dtype=dtype, prompts=[], notice=print)
        open_decoder, weights = readable.decoder, "the package's own"
    flow: FlowEstimator = ClassicalFlow()
    if device.type == "cuda":
        flow = RaftFlow(RaftSmall().to(device))
    path = "readable" if settings.eager else "fast"
    about = {"weights": weights, "flow": type(flow).__name__, "path": path}
    if settings.eager:
        return Parts(readable, readable, open_decoder, flow, about)
    return Parts(readable, accelerate(readable, on_cpu=True), open_decoder, accelerate_flow(flow), about)


def random_backbone(spec: WanSpec, device: torch.device, dtype: torch.dtype) -> WanBackbone:
    """Build a model of the family with torch's own random weights, directly on the device."""
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        with device:
            model = CausalWan(spec)
    finally:
        torch.set_default_dtype(before)
    text = torch.randn(1, spec.text_len, spec.text_dim)

    def no_decoder() -> Decoder:
        raise AssertionError("a measurement opens its decoder itself")

    return WanBackbone(model, lambda prompt: text, no_decoder)


def random_decoder(
    settings: SpeedSettings, spec: WanSpec, device: torch.device, dtype: torch.dtype
) -> Callable[[], Decoder]:
    """Return what opens streams of the chosen decoder with random weights."""
    if settings.decoder == "tiny":
        half = torch.float16 if device.type == "cuda" else dtype
        model = Taehv().requires_grad_(False).to(device, half)
        return model.open_decoder if settings.eager else FastTaehv(model).open_decoder
    if settings.eager:
        limit = "the readable full decoder needs its weight files"
        raise refuse("--decoder", settings.decoder, limit, "measure --eager with --decoder tiny")
    network = FastDecoder(VAE_WIDTH, spec.in_channels).to(device).requires_grad_(False)
    for tensor in network.state_dict().values():
        tensor.copy_(torch.randn_like(tensor) * (tensor[0].numel() ** -0.5 if tensor.dim() > 1 else 0.1))
    return FastVae(network, dtype).open_decoder
