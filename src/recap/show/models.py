"""This module loads a model by name with its flow, to look at it or to measure it: `recap probe`, `recap verify`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from recap.backbones.wan.family import WanConfig
from recap.config import DTYPES, Choice, check_place, choose, notice_place, resolve_device, resolve_dtype
from recap.contracts import BackboneConfig
from recap.errors import refuse
from recap.fast.accelerate import accelerate, accelerate_flow
from recap.fast.backbone import FastWanBackbone
from recap.fast.speed import Parts, SpeedSettings, make_parts
from recap.flow import build_flow, resolve_flow
from recap.io.report import Notice


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """Names a model, its place, and whose weights it has."""

    backbone: Choice[BackboneConfig]
    device: str
    dtype: str
    random_weights: bool = False
    # Of random weights; others have the decoder that their settings name.
    decoder: str = "full"
    eager: bool = False
    flow: str = "auto"

    @classmethod
    def of(
        cls,
        backbone: str | Mapping[str, Any],
        device: str | None,
        dtype: str | None,
        flow: str | None,
        *,
        random_weights: bool = False,
        decoder: str = "full",
        eager: bool = False,
    ) -> ModelChoice:
        """Read what a command line names; only None stands for the default."""
        chosen: Choice[BackboneConfig] = choose("backbone", backbone)
        place = resolve_device("auto" if device is None else device)
        precision = resolve_dtype("auto" if dtype is None else dtype, place, type(chosen.settings))
        check_place(place, precision)
        made = cls(
            chosen, place, precision, random_weights, decoder, eager, flow="auto" if flow is None else flow
        )
        if made.random_weights and not made.is_public:
            limit = "random weights are for the public models of the Wan family"
            raise refuse("--random-weights", chosen.name, limit, "leave it out")
        return made

    @property
    def is_public(self) -> bool:
        """Tell whether it is a public model of the Wan family."""
        return isinstance(self.backbone.settings, WanConfig)

    def speed(self, memory: str, blocks: int) -> SpeedSettings:
        """Return the settings with which a rollout of it is measured."""
        place = (self.decoder, self.device, self.dtype)
        return SpeedSettings(self.backbone.name, memory, *place, blocks=blocks, eager=self.eager)

    def load(self, prompts: Sequence[str], notice: Notice) -> Parts:
        """Load the model and its flow; with random weights nothing is read, and flow knows nothing either."""
        notice_place(self.device, notice)
        readable: Any
        if self.random_weights:
            made = make_parts(self.speed("sink", 2))
            backbone, readable, weights = made.backbone, made.readable, "random"
            if self.flow == "auto":
                return replace(made, about={**made.about, "weights": weights})
        else:
            readable = self.backbone.settings.build(
                device=self.device, dtype=DTYPES[self.dtype], prompts=prompts, notice=notice
            )
            backbone = readable if self.eager else accelerate(readable)
            weights = "published" if self.is_public else "the package's own"
        own = backbone.spec.name
        used = resolve_flow(self.flow, notice, backbone=own, device=self.device)
        found = build_flow(used, device=self.device, notice=notice, backbone=own)
        path = "fast" if isinstance(backbone, FastWanBackbone) else "readable"
        about = {"weights": weights, "flow": used, "path": path}
        return Parts(readable, backbone, found if self.eager else accelerate_flow(found), about)
