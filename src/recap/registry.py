"""Tables of what can be chosen by name; "package.module:Name" works wherever a name does. See docs/extending.md."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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
from recap.contracts import AdmissionConfig, Backbone, BackboneConfig, Judge, MemoryConfig
from recap.errors import refuse, unknown_name
from recap.eval.judges.subject import build_probe_judge
from recap.memory.deep_forcing import DeepForcingConfig
from recap.memory.memrope import MemRopeConfig
from recap.memory.recap import RecapConfig
from recap.memory.relax_forcing import RelaxForcingConfig
from recap.memory.rolling_sink import RollingSinkConfig
from recap.memory.sink import NoMemoryConfig, SinkConfig

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
MEMORIES: dict[str, type[MemoryConfig]] = {
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
"""Backbone -> a judge that knows what it generates; videos of other backbones are judged by their colours alone."""


def look_up(field: str, name: str, table: Mapping[str, Any]) -> Any:
    """The table's entry, or the object a "package.module:Name" points at; the module may be in the current folder."""
    if name in table:
        return table[name]
    if ":" not in name:
        raise unknown_name(field, name, table)
    module, _, attribute = name.partition(":")
    try:
        with _current_folder():
            return getattr(importlib.import_module(module), attribute)
    # Importing a user's module runs it, so any error is possible.
    except Exception as error:
        why = f"cannot be imported ({type(error).__name__}: {error})"
        raise refuse(field, name, why, "write it as package.module:Name") from error


@contextmanager
def _current_folder() -> Iterator[None]:
    """Let modules be imported from the current folder; last on the path, so that it cannot hide an installed one."""
    folder = str(Path.cwd())
    added = folder not in sys.path
    if added:
        sys.path.append(folder)
    try:
        yield
    finally:
        if added and folder in sys.path:
            sys.path.remove(folder)


def load_backbone(name: str, *, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Backbone:
    """A backbone by name with its default settings, ready to use."""
    kind: type[BackboneConfig] = look_up("backbone", name, BACKBONES)
    return kind().build(device=device, dtype=dtype, prompts=(), notice=print)
