"""This module makes a Helios model of any size with random weights, to measure and to try what needs no picture."""

from __future__ import annotations

from typing import Any

import torch

from recap.backbones.helios.backbone import HeliosBackbone
from recap.backbones.helios.spec import DISTILLED, HeliosSpec
from recap.io.extras import import_extra

KEPT_IN_FP32 = ("time_embedder", "scale_shift_table", "norm1", "norm2", "norm3")


def random_transformer(spec: HeliosSpec, device: torch.device, dtype: torch.dtype) -> Any:
    """Make a transformer of the family with torch's random weights, directly on the device."""
    kind = import_extra("diffusers", "Helios", "helios").HeliosTransformer3DModel
    width = spec.heads * spec.head_dim
    # The released split: a third for rows, a third for columns, the rest for time.
    side = spec.head_dim // 6 * 2
    small = {} if spec.head_dim == DISTILLED.head_dim else {"ffn_dim": 2 * width, "freq_dim": 16}
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        with device:
            model = kind(
                num_attention_heads=spec.heads,
                attention_head_dim=spec.head_dim,
                in_channels=spec.latent_channels,
                out_channels=spec.latent_channels,
                text_dim=spec.text_dim,
                num_layers=spec.layers,
                rope_dim=(spec.head_dim - 2 * side, side, side),
                **small,
            )
    finally:
        torch.set_default_dtype(before)
    for name, parameter in model.named_parameters():
        if any(part in name for part in KEPT_IN_FP32):
            parameter.data = parameter.data.float()
    return model


def make_scheduler(spec: HeliosSpec) -> Any:
    """Make the scheduler of a released model, without its file."""
    diffusers = import_extra("diffusers", "Helios", "helios")
    if spec.distilled:
        return diffusers.HeliosDMDScheduler(use_dynamic_shifting=True, time_shift_type="linear")
    stages = {} if len(spec.steps) > 1 else {"stages": 1, "stage_range": [0, 1]}
    return diffusers.HeliosScheduler(use_dynamic_shifting=True, **stages)


def random_backbone(spec: HeliosSpec, device: torch.device, dtype: torch.dtype) -> HeliosBackbone:
    """Make a whole model; every prompt means the same to it."""
    diffusers = import_extra("diffusers", "Helios", "helios")
    released = spec.head_dim == DISTILLED.head_dim
    small = {} if released else {"base_dim": 4, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1}
    with device:
        vae = diffusers.AutoencoderKLWan(**small).eval().requires_grad_(False)
    text = torch.randn(1, spec.text_len, spec.text_dim)
    transformer = random_transformer(spec, device, dtype)
    return HeliosBackbone(spec, transformer, make_scheduler(spec), lambda prompt: text, vae, device=device)
