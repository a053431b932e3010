"""This module lists what can be chosen by name; "package.module:Name" works too, see docs/extending.md."""

from __future__ import annotations

from collections.abc import Callable

import torch

from recap.admission.diversity import DiversityConfig, DiversityKeysConfig
from recap.admission.flow import FlowNoveltyConfig
from recap.admission.flow_keys import FlowKeysConfig
from recap.admission.flow_texture import FlowTextureConfig
from recap.admission.history import RandomHistoryConfig, RecentHistoryConfig
from recap.admission.keys import KeyNoveltyConfig
from recap.backbones.helios.family import HeliosBaseConfig, HeliosDistilledConfig, HeliosMidConfig
from recap.backbones.tiny.backbone import EmbeddedConfig
from recap.backbones.wan.backbone import UntrainedConfig
from recap.backbones.wan.family import (
    CausalForcing1StepConfig,
    CausalForcing2StepConfig,
    CausalForcingConfig,
    InfiniteForcingConfig,
    LongLiveConfig,
    SelfForcingConfig,
)
from recap.contracts import AdmissionConfig, Backbone, BackboneConfig, Judge, MemoryConfig
from recap.eval.judges.subject import ProbeJudge
from recap.io.lookup import look_up
from recap.memory.deep_forcing import DeepForcingConfig
from recap.memory.memrope import MemRopeConfig
from recap.memory.recap import RecapConfig, RecapPlusConfig
from recap.memory.relax_forcing import RelaxForcingConfig
from recap.memory.rolling_sink import RollingSinkConfig
from recap.memory.sink import NoMemoryConfig, SinkConfig

BACKBONES: dict[str, type[BackboneConfig]] = {
    "embedded": EmbeddedConfig,
    "untrained": UntrainedConfig,
    "self-forcing": SelfForcingConfig,
    "infinite-forcing": InfiniteForcingConfig,
    "longlive": LongLiveConfig,
    "causal-forcing": CausalForcingConfig,
    "causal-forcing-2step": CausalForcing2StepConfig,
    "causal-forcing-1step": CausalForcing1StepConfig,
    "helios-distilled": HeliosDistilledConfig,
    "helios-mid": HeliosMidConfig,
    "helios-base": HeliosBaseConfig,
}
MEMORIES: dict[str, type[MemoryConfig]] = {
    "none": NoMemoryConfig,
    "sink": SinkConfig,
    "recap": RecapConfig,
    "deep-forcing": DeepForcingConfig,
    "memrope": MemRopeConfig,
    "rolling-sink": RollingSinkConfig,
    "relax-forcing": RelaxForcingConfig,
    # Last, so that all others keep the colours they have had on every page.
    "recap-plus": RecapPlusConfig,
}
ADMISSIONS: dict[str, type[AdmissionConfig]] = {
    "flow": FlowNoveltyConfig,
    "flow-texture": FlowTextureConfig,
    "random": RandomHistoryConfig,
    "recent": RecentHistoryConfig,
    "diversity": DiversityConfig,
    "diversity-keys": DiversityKeysConfig,
    "keys": KeyNoveltyConfig,
    "flow+keys": FlowKeysConfig,
}
JUDGES: dict[str, Callable[[], Judge]] = {"embedded": ProbeJudge}
"""Backbone -> a judge that knows what it generates; videos of other backbones are judged by their colours alone."""


def load_backbone(name: str, *, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Backbone:
    """Load a backbone by name, with its default settings, ready to use."""
    kind: type[BackboneConfig] = look_up("backbone", name, BACKBONES)
    return kind().build(device=device, dtype=dtype, prompts=(), notice=print)
