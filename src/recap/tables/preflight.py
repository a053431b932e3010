"""What a table needs is looked for before anything is generated: hundreds of runs must not find out one by one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from recap.backbones.wan.backbone import UntrainedConfig
from recap.config import RunConfig
from recap.contracts import Admission, Flow
from recap.errors import unknown_name
from recap.eval.embedders import build_embedder
from recap.eval.judged import EMBEDDED, build_motion_judge
from recap.eval.metrics import find_measures
from recap.eval.qwen import find_qwen
from recap.flow import FLOWS, build_flow, resolve_flow
from recap.run import Notice, each_once
from recap.tables.recipes import Ask, Planned, Recipe, plan_runs
from recap.types import BackboneSpec

DETECTORS = ("qwen2.5-vl",)


def settle(ask: Ask, recipes: Sequence[Recipe], begun: Mapping[str, Any], notice: Notice) -> Ask:
    """Replace every `auto` by what it means here, once: records, jobs and workers then all have the same name.

    A folder that was begun resumes with what `auto` meant then, and nothing is fetched that no row needs.
    """
    names = ("device", "flow", "judge_flow", "embedder")
    known = {name: begun[name] for name in names if getattr(ask, name) == "auto" and begun.get(name)}
    ask, once = replace(ask, **known), each_once(notice)
    if ask.judge_flow not in FLOWS:
        raise unknown_name("--judge-flow", ask.judge_flow, FLOWS)
    if ask.device == "auto":
        ask = replace(ask, device="cuda" if torch.cuda.is_available() else "cpu")
    if ask.embedder == "auto":
        ask = replace(ask, embedder=_best_embedder(once))
    if ask.flow == "auto" and any(
        looks_at_flow(each.config) for recipe in recipes for each in _firsts(recipe, ask)
    ):
        ask = replace(ask, flow=resolve_flow(ask.flow, once))
    if ask.judge_flow == "auto" and _judges_motion(recipes):
        ask = replace(ask, judge_flow=resolve_flow(ask.judge_flow, once))
    return ask


def _firsts(recipe: Recipe, ask: Ask) -> Iterable[Planned]:
    """One run of every row."""
    return plan_runs(recipe, replace(ask, prompts=1, seeds=1))


def _judges_motion(recipes: Iterable[Recipe]) -> bool:
    return any(measure.uses_flow for recipe in recipes for measure in find_measures(recipe.measures))


def _best_embedder(notice: Notice) -> str:
    for name in ("dinov2", "mobilenetv2"):
        try:
            build_embedder(name)
            return name
        except ValueError:
            continue
    notice("whole frames are judged by their colours alone, as neither DINOv2 nor MobileNetV2 is installed; "
           "`python -m recap.eval.embedders` fetches the latter, 9 MB")  # fmt: skip
    return "hsv"


def check_judges(ask: Ask, recipes: Sequence[Recipe], notice: Notice) -> None:
    """See that everybody who judges can be built here."""
    build_embedder(ask.embedder)
    name, _, folder = ask.detector.partition("=")
    if ask.detector and name not in DETECTORS:
        raise unknown_name("--detector", name, DETECTORS)
    if ask.detector:
        find_qwen(folder)
    if _judges_motion(recipes):
        build_motion_judge(ask.judge_flow, notice=notice)
    of_subject = any(each.of_subject for recipe in recipes for each in find_measures(recipe.measures))
    if not ask.detector and ask.backbone_name != EMBEDDED and of_subject:
        notice("subjects are not judged by themselves, as there is no --detector: whole frames are")
    if ask.detector and ask.backbone_name == EMBEDDED:
        notice("--detector is not used: the embedded world has its own probe")


def find_missing_weights(configs: Mapping[str, RunConfig], notice: Notice) -> dict[str, str]:
    """Rows whose own parts lack weights, and why; what all rows need and is not here is refused."""
    first = next(iter(configs.values()))
    check_files = getattr(first.backbone.settings, "check_files", None)
    if check_files is not None:
        check_files()
    if any(looks_at_flow(config) for config in configs.values()):
        build_flow(first.flow, device="cpu", notice=notice)
    lacking = {}
    for name, config in configs.items():
        if admits(config):
            try:
                config.admission.settings.build(_any_spec(), _no_flow)
            except ValueError as error:
                lacking[name] = str(error)
    return lacking


def looks_at_flow(config: RunConfig) -> bool:
    return admits(config) and config.admission.settings.needs_flow


def admits(config: RunConfig) -> bool:
    """Whether the memory asks for its admission rule when it is built."""

    class Asked(Exception):
        pass

    def admission() -> Admission:
        raise Asked

    try:
        config.memory.settings.build(_any_spec(), admission)
    except Asked:
        return True
    return False


@cache
def _any_spec() -> BackboneSpec:
    """What is asked is whether weights are there, and for that any spec will do."""
    untrained = UntrainedConfig().build(device="cpu", dtype=torch.float32, prompts=[], notice=lambda _: None)
    return untrained.spec


def _no_flow(pictures: Tensor) -> Flow:
    raise AssertionError("nothing is generated before all checks are done")
