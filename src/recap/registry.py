"""Explicit tables of what can be chosen by name. "package.module:Name" works wherever a name does."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import torch

from recap.admission.diversity_dino import DiversityConfig
from recap.admission.diversity_keys import DiversityKeysConfig
from recap.admission.flow import FlowNoveltyConfig
from recap.admission.flow_texture import FlowTextureConfig
from recap.admission.random import RandomHistoryConfig
from recap.admission.recent import RecentHistoryConfig
from recap.backbones.helios.family import HeliosBaseConfig, HeliosDistilledConfig, HeliosMidConfig
from recap.backbones.tiny.backbone import EmbeddedConfig
from recap.backbones.wan.backbone import UntrainedConfig
from recap.backbones.wan.family import InfiniteForcingConfig, LongLiveConfig, SelfForcingConfig
from recap.contracts import Admission, Backbone, FlowEstimator, Judge, MemoryPolicy
from recap.errors import refuse, unknown_name
from recap.eval.judges.subject import build_probe_judge
from recap.memory.deep_forcing import DeepForcingConfig
from recap.memory.memrope import MemRopeConfig
from recap.memory.recap import RecapConfig
from recap.memory.relax_forcing import RelaxForcingConfig
from recap.memory.rolling_sink import RollingSinkConfig
from recap.memory.sink import NoMemoryConfig, SinkConfig
from recap.types import BackboneSpec, Card


class MemoryConfig(Protocol):
    """A frozen dataclass beside its policy; `admission` makes the run's admission rule if one is wanted."""

    def build(self, spec: BackboneSpec, admission: Callable[[], Admission]) -> MemoryPolicy: ...


class ListedMemory(MemoryConfig, Protocol):
    """A memory with a name of its own also says what it is."""

    card: ClassVar[Card]

    def attended_frames(self, spec: BackboneSpec) -> Sequence[float]:
        """Frames' worth of tokens that a block sees once the window is full; several where they take turns."""


class AdmissionConfig(Protocol):
    def build(self, spec: BackboneSpec, flow: FlowEstimator) -> Admission: ...


class BackboneConfig(Protocol):
    """A frozen dataclass of what a backbone is loaded from and how it is set up."""

    def build(
        self, *, device: str, dtype: torch.dtype, prompts: Sequence[str], notice: Callable[[str], None]
    ) -> Backbone:
        """Ready to draw; `prompts` are those to come, so that a text encoder can go before the rest is read."""


BACKBONES: dict[str, type[BackboneConfig]] = {
    "embedded": EmbeddedConfig,
    "untrained": UntrainedConfig,
    "self-forcing": SelfForcingConfig,
    "infinite-forcing": InfiniteForcingConfig,
    "longlive": LongLiveConfig,
    "helios-distilled": HeliosDistilledConfig,
    "helios-mid": HeliosMidConfig,
    "helios-base": HeliosBaseConfig,
}
MEMORIES: dict[str, type[ListedMemory]] = {
    "none": NoMemoryConfig,
    "sink": SinkConfig,
    "recap": RecapConfig,
    "deep-forcing": DeepForcingConfig,
    "memrope": MemRopeConfig,
    "rolling-sink": RollingSinkConfig,
    "relax-forcing": RelaxForcingConfig,
}
ADMISSIONS: dict[str, type[AdmissionConfig]] = {
    "flow": FlowNoveltyConfig,
    "flow-texture": FlowTextureConfig,
    "random": RandomHistoryConfig,
    "recent": RecentHistoryConfig,
    "diversity": DiversityConfig,
    "diversity-keys": DiversityKeysConfig,
}
JUDGES: dict[str, Callable[[], Judge]] = {"embedded": build_probe_judge}
"""Backbone -> a judge that knows what it draws; the videos of others are judged by their colours alone."""


def look_up(field: str, name: str, table: Mapping[str, Any]) -> Any:
    """The table's entry, or the object a "package.module:Name" points at."""
    if name in table:
        return table[name]
    if ":" not in name:
        raise unknown_name(field, name, table)
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except Exception as error:  # importing a user's module runs it, so anything may come out
        why = f"cannot be imported ({type(error).__name__}: {error})"
        raise refuse(field, name, why, "write it as package.module:Name") from error


def load_backbone(name: str, *, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Backbone:
    """A backbone by name with its default settings, ready to draw."""
    kind: type[BackboneConfig] = look_up("backbone", name, BACKBONES)
    return kind().build(device=device, dtype=dtype, prompts=(), notice=print)
