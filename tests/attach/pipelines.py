"""Pipelines of every code base over one set of weights, which our own CausalWan takes too."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import upstream_if
import upstream_ll1
import upstream_ll1_infinity
import upstream_sf
import upstream_wan as wan
from upstream_peft import get_peft_model

from recap.backbones.wan.backbone import draw_weights
from recap.backbones.wan.model import CausalWan
from recap.backbones.wan.spec import UNTRAINED

SPEC = replace(
    UNTRAINED, name="stand-in", dim=wan.DIM, ffn_dim=wan.FFN, heads=wan.HEADS, layers=wan.LAYERS, freq_dim=wan.FREQ,
    text_dim=wan.TEXT_DIM, text_len=wan.TEXT_LEN, latent_size=wan.LATENT_SIZE,
)  # fmt: skip

KINDS = {
    # module, wrapper, pipeline, window, sink: as released (a window for Self-Forcing, whose own is one whole clip)
    "self-forcing": (upstream_sf, wan.WanDiffusionWrapper, wan.CausalInferencePipeline, 6, 0),
    "infinite-forcing": (upstream_if, wan.WanDiffusionWrapper, wan.CausalInferencePipeline, 6, 1),
    "longlive-1.0": (upstream_ll1, upstream_ll1.LongLiveWrapper, upstream_ll1.LongLivePipeline, 12, 3),
    "longlive-1.0-infinity": (
        upstream_ll1_infinity,
        upstream_ll1.LongLiveWrapper,
        upstream_ll1.LongLivePipeline,
        12,
        3,
    ),
}

# What each code base does by itself, in our words.
AS_RELEASED = {
    "self-forcing": "none",
    "infinite-forcing": {"name": "sink", "sink_frames": 1},
    "longlive-1.0": {"name": "sink", "sink_frames": 3},
    "longlive-1.0-infinity": {"name": "sink", "sink_frames": 3},
}


def causal_wan() -> CausalWan:
    """Random weights under which the past counts: gates wide open and logits far apart, as in a trained model."""
    model = CausalWan(SPEC).requires_grad_(False)
    draw_weights(model, seed=1)
    generator = torch.Generator().manual_seed(2)
    for name, parameter in sorted(model.named_parameters()):
        if name.endswith("modulation"):
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
        elif "self_attn.norm" in name:
            parameter.copy_(1.5 + 0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def make(kind, *, lora=False, window=None, sink=None, pipeline=None, **options):
    module, wrapper, released, default_window, default_sink = KINDS[kind]
    window = default_window if window is None else window
    model = wan.CausalWanModel(
        module.CausalWanSelfAttention, window, default_sink if sink is None else sink
    ).requires_grad_(False)
    model.load_state_dict(causal_wan().state_dict())
    if lora:
        model = get_peft_model(model).requires_grad_(False)
    return (pipeline or released)(wrapper(model), local_attn_size=window, **options)


def noise_of(blocks, rows=1, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 3 * blocks, wan.CHANNELS, *wan.LATENT_SIZE, generator=generator, device="cpu")


def generate(pipeline, blocks=6, seed=0, **options):
    """Video and latents of one upstream call, from the same noise each time."""
    torch.manual_seed(
        seed
    )  # the fresh noise of each step comes from the global generator, as upstream's does
    return pipeline.inference(noise_of(blocks), ["a red boat"], return_latents=True, **options)


def switch(pipeline, blocks, at, seed=0):
    torch.manual_seed(seed)
    prompts = [["a red boat"], ["the sea at night"], ["a house"]][: len(at) + 1]
    return pipeline.inference(noise_of(blocks), prompts, at, return_latents=True)


def layers_of(pipeline):
    model = pipeline.generator.model
    model = model.base_model.model if hasattr(model, "base_model") else model
    return [block.self_attn for block in model.blocks]


def generate_interrupted(pipeline, at):
    randn_like, calls = torch.randn_like, []

    def drawn(x):
        calls.append(1)
        if len(calls) == at:
            raise KeyboardInterrupt
        return randn_like(x)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "randn_like", drawn)
        generate(pipeline, seed=2)
