"""RunConfig -> parts, without files or video: what a run, a benchmark and a notebook all begin with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from recap.config import DTYPES, RunConfig
from recap.contracts import Admission, Backbone, Flow, FlowEstimator, MemoryPolicy
from recap.fast.accelerate import accelerate, accelerate_flow
from recap.flow import build_flow, resolve_flow
from recap.types import BackboneSpec

Notice = Callable[[str], None]


def each_once(notice: Notice) -> Notice:
    """A notice that gives every line once: parts that are built several times have the same to say."""
    shown: set[str] = set()

    def give(line: str) -> None:
        if line not in shown:
            shown.add(line)
            notice(line)

    return give


def build_backbone(config: RunConfig, notice: Notice = print) -> Backbone:
    """The run's backbone, ready to draw."""
    prompts = list(dict.fromkeys(shot.prompt for shot in config.shots))
    made: Backbone = config.backbone.settings.build(
        device=config.device, dtype=DTYPES[config.dtype], prompts=prompts, notice=notice
    )
    return made if config.eager else accelerate(made)


def build_memory(config: RunConfig, spec: BackboneSpec, notice: Notice = print) -> MemoryPolicy:
    """The run's memory, fresh; its admission and flow are made only if it wants them."""

    def admission() -> Admission:
        rule = config.admission.settings
        flow: FlowEstimator = _no_flow
        if getattr(rule, "needs_flow", True):  # else neither weights nor OpenCV need be there
            found = build_flow(config.flow, device=config.device, notice=notice)
            flow = found if config.eager else accelerate_flow(found)
        made: Admission = rule.build(spec, flow)
        return made

    policy: MemoryPolicy = config.memory.settings.build(spec, admission)
    return policy


def settle_flow(config: RunConfig, spec: BackboneSpec, notice: Notice = print) -> RunConfig:
    """The config with `auto` as what it means here, so that records, later runs and this one mean the same.

    A memory that never looks at flow keeps `auto`: nothing is fetched, and nothing said, for its sake.
    """

    class Wanted(Exception):
        pass

    def admission() -> Admission:
        raise Wanted

    if config.flow != "auto" or not getattr(config.admission.settings, "needs_flow", True):
        return config
    try:
        config.memory.settings.build(spec, admission)
    except Wanted:
        return replace(config, flow=resolve_flow(config.flow, notice))
    return config


def _no_flow(pictures: Tensor) -> Flow:
    raise AssertionError("an admission with needs_flow = False asked for flow")
