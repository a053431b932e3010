"""What a speed measurement is made on: a backbone, its decoder and flow, of real weights or of random ones.

Speed does not depend on values, so a public row at its real size needs no file: its weights are drawn on the device.
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
from recap.config import DTYPES, check_place
from recap.contracts import Admission, Backbone, Decoder, FlowEstimator, MemoryPolicy
from recap.errors import refuse, unknown_name
from recap.fast.accelerate import accelerate, accelerate_flow
from recap.fast.taehv import FastTaehv
from recap.fast.vae import FastDecoder, FastVae
from recap.flow.classical import ClassicalFlow
from recap.flow.raft import RaftFlow, RaftSmall
from recap.registry import BACKBONES, MEMORIES, look_up

MOST_BLOCKS = 10_000
VAE_WIDTH = 96  # channels of the public decoder's last stage


@dataclass(frozen=True, slots=True)
class Settings:
    """One measurement."""

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
    """Everything a rollout needs, and the words for what was chosen."""

    readable: WanBackbone
    backbone: Backbone
    open_decoder: Callable[[], Decoder]
    flow: FlowEstimator
    about: dict[str, str]

    def policy(self, memory: str) -> MemoryPolicy:
        def admission() -> Admission:
            return FlowNoveltyConfig().build(self.backbone.spec, self.flow)

        made: MemoryPolicy = look_up("memory", memory, MEMORIES)().build(self.backbone.spec, admission)
        return made


def make_parts(settings: Settings) -> Parts:
    """The parts of a measurement, random where only files would tell otherwise."""
    kind = look_up("backbone", settings.backbone, BACKBONES)
    device, dtype = torch.device(settings.device), DTYPES[settings.dtype]
    torch.manual_seed(0)
    if issubclass(kind, WanConfig):
        readable = draw_backbone(kind.row, device, dtype)
        open_decoder, weights = draw_decoder(settings, kind.row, device, dtype), "random, at real size"
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


def draw_backbone(spec: WanSpec, device: torch.device, dtype: torch.dtype) -> WanBackbone:
    """A row of the family with weights as torch draws them, on the device itself."""
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


def draw_decoder(
    settings: Settings, spec: WanSpec, device: torch.device, dtype: torch.dtype
) -> Callable[[], Decoder]:
    if settings.decoder == "tiny":
        half = torch.float16 if device.type == "cuda" else dtype
        model = Taehv().requires_grad_(False).to(device, half)
        return model.open_decoder if settings.eager else FastTaehv(model).open_decoder
    if settings.eager:
        limit = "the readable full decoder is made of files"
        raise refuse("--decoder", settings.decoder, limit, "measure --eager with --decoder tiny")
    network = FastDecoder(VAE_WIDTH, spec.in_channels).to(device).requires_grad_(False)
    for tensor in network.state_dict().values():
        tensor.copy_(torch.randn_like(tensor) * (tensor[0].numel() ** -0.5 if tensor.dim() > 1 else 0.1))
    return FastVae(network, dtype).open_decoder
