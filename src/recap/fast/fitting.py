"""Fits a run to its card before anything is loaded: `--low-memory`. See `recap.fast.card` for the sizes."""

from __future__ import annotations

from dataclasses import replace

import torch

from recap.backbones.wan.family import WanConfig
from recap.backbones.wan.published import TEXT_ENCODER
from recap.config import DTYPES, Choice, RunConfig
from recap.fast.card import CardSetting, Demand, choose, describe_plan
from recap.fast.vae import can_fuse
from recap.io.devices import free_on, has_room
from recap.io.report import Notice


def fit_card(config: RunConfig, notice: Notice, *, random_weights: bool = False) -> RunConfig:
    """Return the config with whatever its `low_memory` means on this card: the path, and where text is encoded.

    A model that is not installed is refused first, unless its weights are random.
    """
    demand, free = _demand(config, random_weights), free_on(config.device)
    if demand is None or free is None or config.low_memory == "off":
        return config
    asked = _setting(config)
    path = choose(demand, asked, config.low_memory, free).setting.path
    if path != asked.path:
        needs = f"{demand.plan(asked).total / 1e9:.1f} GB, and {free / 1e9:.1f} are free"
        notice(f"memory: the {path} path is used: the {asked.path} one takes {needs}")
        config = replace(config, eager=True)
    settings = config.backbone.settings
    if config.low_memory == "on" and isinstance(settings, WanConfig) and not settings.text_device:
        config = replace(config, backbone=Choice(config.backbone.name, replace(settings, text_device="cpu")))
    return config


def describe_fit(config: RunConfig, *, random_weights: bool = False) -> list[str]:
    """Return lines about the memory that a run needs, with what to add where its card is too small."""
    demand = _demand(config, random_weights)
    if demand is None:
        return []
    lines = describe_plan(demand, _setting(config), config.low_memory, free_on(config.device))
    settings = config.backbone.settings
    if random_weights or not isinstance(settings, WanConfig) or settings.prompt_embeds:
        return lines
    return [*lines, _describe_text(settings.text_device or config.device)]


def _describe_text(device: str) -> str:
    """Return a line about the text encoder, which has come and gone before the model is read."""
    where, free = device, free_on(device)
    if free is not None and not has_room(TEXT_ENCODER.size, free):
        where = f"the CPU, since it does not fit into the {free / 1e9:.1f} GB that are free on {device}"
    needs = f"about {TEXT_ENCODER.size / 1e9:.1f} GB"
    return f"memory: before that, for prompts not encoded before, the text encoder alone: {needs} on {where}"


def _demand(config: RunConfig, random_weights: bool) -> Demand | None:
    """Return what the run's model takes; None where it is not planned: other families, or two devices."""
    settings = config.backbone.settings
    if not isinstance(settings, WanConfig) or config.decoder_device:
        return None
    if not random_weights:
        settings.check_files()
    spec = settings.spec
    frames = max(config.memory.settings.attended_frames(spec.backbone_spec()))
    dtype = DTYPES[config.dtype]
    fused = can_fuse(torch.device(config.device), dtype)
    return Demand(spec, frames, len(config.seeds), dtype.itemsize, fused=fused)


def _setting(config: RunConfig) -> CardSetting:
    settings = config.backbone.settings
    assert isinstance(settings, WanConfig)
    fast = config.device.startswith("cuda") and not config.eager
    return CardSetting("fast" if fast else "readable", settings.decoder, config.precision)
