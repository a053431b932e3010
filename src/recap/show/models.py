"""This module loads a model by name with its flow, to look at it or to measure it: `recap probe`, `recap verify`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from recap.backbones.helios.family import HeliosConfig
from recap.backbones.helios.random import random_backbone
from recap.backbones.wan.family import WanConfig
from recap.config import DTYPES, Choice, RunConfig, notice_device
from recap.errors import refuse
from recap.fast.accelerate import accelerate_flow
from recap.fast.backbone import FastWanBackbone
from recap.fast.fitting import describe_fit, fit_card
from recap.fast.speed import Parts, SpeedSettings, make_parts, random_flow
from recap.flow import build_flow, resolve_flow
from recap.io.report import Notice
from recap.plan import Shot
from recap.run import build_backbone


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """Names a model, its device and precision by a config without prompts, and whether its weights are random."""

    config: RunConfig
    random_weights: bool = False

    @classmethod
    def of(
        cls,
        backbone: str | Mapping[str, Any],
        *,
        random_weights: bool = False,
        decoder: str = "full",
        **options: str | bool | None,
    ) -> ModelChoice:
        """Read what a command line names; of the options, which a config has too, only None is the default.

        `decoder` is that of random weights; others have the one that their settings name.
        """
        used = {name: value for name, value in options.items() if value is not None}
        config = RunConfig.from_dict(
            {"shots": [{"prompt": "", "seconds": 1.0}], "backbone": backbone, **used}
        )
        chosen = config.backbone
        if random_weights and isinstance(chosen.settings, WanConfig):
            own = replace(chosen.settings, decoder=decoder)
            config = replace(config, backbone=Choice(chosen.name, own))
        elif random_weights and not isinstance(chosen.settings, HeliosConfig):
            limit = "random weights are for the public models"
            raise refuse("--random-weights", chosen.name, limit, "leave it out")
        return cls(config, random_weights)

    def fit(self, notice: Notice) -> ModelChoice:
        """Return the choice with what `--low-memory` means on its card, before anything is loaded."""
        config = fit_card(self.config, notice, random_weights=self.random_weights)
        if self.random_weights:
            for line in describe_fit(config, random_weights=True):
                notice(line)
        return replace(self, config=config)

    def speed(self, memory: str, blocks: int) -> SpeedSettings:
        """Return the settings with which a rollout of it is measured."""
        config, settings = self.config, self.config.backbone.settings
        return SpeedSettings(
            config.backbone.name,
            memory,
            settings.decoder if isinstance(settings, WanConfig) else "full",
            config.device,
            config.dtype,
            blocks,
            eager=config.eager,
            precision=config.precision,
        )

    def load(self, prompts: Sequence[str], notice: Notice) -> Parts:
        """Load the model and its flow; with random weights no file is read, except for a flow that was chosen."""
        config, about = self.config, {"precision": self.config.precision}
        backbone: Any
        if self.random_weights:
            notice_device(config.device, notice)
            about["weights"] = "random"
            made = self._make_random()
            backbone = made.backbone
            if config.flow == "auto":
                return replace(made, about={**made.about, **about})
        else:
            shots = tuple(Shot(prompt, 1.0) for prompt in prompts)
            backbone = build_backbone(replace(config, shots=shots), notice)
            public = isinstance(config.backbone.settings, WanConfig)
            about["weights"] = "published" if public else "the package's own"
        own = backbone.spec.name
        used = resolve_flow(config.flow, notice, backbone=own, device=config.device)
        found = build_flow(used, device=config.device, notice=notice, backbone=own)
        about |= {"flow": used, "path": "fast" if isinstance(backbone, FastWanBackbone) else "readable"}
        return Parts(backbone, backbone, found if config.eager else accelerate_flow(found), about)

    def _make_random(self) -> Parts:
        """Make the model and a flow with random weights."""
        config, settings = self.config, self.config.backbone.settings
        if not isinstance(settings, HeliosConfig):
            return make_parts(self.speed("sink", 2))
        torch.manual_seed(0)
        backbone: Any = random_backbone(settings.spec, torch.device(config.device), DTYPES[config.dtype])
        flow = random_flow(config.device)
        about = {"flow": type(flow).__name__, "path": "readable"}
        return Parts(backbone, backbone, flow if config.eager else accelerate_flow(flow), about)
