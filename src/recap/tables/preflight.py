"""This module looks for what a table needs before anything is generated: hundreds of runs must not find out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from recap.backbones.wan.spec import UNTRAINED
from recap.config import RunConfig
from recap.contracts import Flow
from recap.errors import unknown_name
from recap.eval.embedders import build_embedder
from recap.eval.judged import BOTH, EMBEDDED, JUDGING_FLOWS, SECOND, USUAL, Measure, build_motion_judge
from recap.eval.metrics import find_measures
from recap.eval.qwen import NAME as QWEN
from recap.eval.qwen import find_qwen
from recap.flow import build_flow, resolve_flow
from recap.io.report import Notice, each_once
from recap.tables.ask import Ask
from recap.tables.recipes import Recipe
from recap.tables.runs import plan_runs

DETECTORS = (QWEN,)


def settle(ask: Ask, recipes: Sequence[Recipe], begun: Mapping[str, Any], notice: Notice) -> Ask:
    """Replace every `auto` by what it means here, once: records, jobs and workers then all have the same name.

    A folder that was begun resumes with what `auto` meant then, and nothing is fetched that no row needs.
    """
    names = ("device", "flow", "judge_flow", "embedder")
    known = {name: begun[name] for name in names if getattr(ask, name) == "auto" and begun.get(name)}
    ask, once = replace(ask, **known), each_once(notice)
    if ask.judge_flow not in (*JUDGING_FLOWS, BOTH):
        raise unknown_name("--judge-flow", ask.judge_flow, (*JUDGING_FLOWS, BOTH))
    if ask.device == "auto":
        ask = replace(ask, device="cuda" if torch.cuda.is_available() else "cpu")
    if ask.embedder == "auto":
        ask = replace(ask, embedder=_best_embedder(once))
    # One prompt has no halves.
    one_each = replace(ask, prompts=1, seeds=1, half="")
    configs = (run.config for recipe in recipes for run in plan_runs(recipe, one_each))
    if ask.flow == "auto" and any(map(looks_at_flow, configs)):
        ask = replace(ask, flow=resolve_flow(ask.flow, once))
    if ask.judge_flow == "auto" and any(measure.uses_flow for measure in _measures(recipes)):
        ask = replace(ask, judge_flow=resolve_flow(ask.judge_flow, once))
    return ask


def _measures(recipes: Sequence[Recipe]) -> list[Measure]:
    return [measure for recipe in recipes for measure in find_measures(recipe.measures)]


def _best_embedder(notice: Notice) -> str:
    for name in ("dinov2", "mobilenetv2"):
        try:
            build_embedder(name)
            return name
        except ValueError:
            continue
    notice(
        "whole frames are judged by their colours alone, as neither DINOv2 nor MobileNetV2 is installed; "
        "`python -m recap.eval.embedders` fetches the latter, 9 MB"
    )
    return "hsv"


def check_judges(ask: Ask, recipes: Sequence[Recipe], notice: Notice) -> None:
    """Refuse what cannot judge here, and say who does not judge."""
    build_embedder(ask.embedder)
    for option, asked in (("--detector", ask.detector), ("--judge", ask.judge)):
        name, _, folder = asked.partition("=")
        if asked and name not in DETECTORS:
            raise unknown_name(option, name, DETECTORS)
        if asked:
            find_qwen(folder)
    measures = _measures(recipes)
    if any(measure.uses_flow for measure in measures):
        for judge in (USUAL, SECOND) if ask.judge_flow == BOTH else (ask.judge_flow,):
            build_motion_judge(judge, notice=notice)
    if ask.detector and ask.backbone == EMBEDDED:
        notice("--detector is not used: the embedded world has its own probe")
    elif not ask.detector and ask.backbone != EMBEDDED and any(measure.of_subject for measure in measures):
        notice("subjects are not judged by themselves, as there is no --detector: whole frames are")


def find_missing_weights(configs: Mapping[str, RunConfig], notice: Notice) -> dict[str, str]:
    """Return the rows whose own parts lack weights, and why; refuse if what all rows need is not here."""
    first = next(iter(configs.values()))
    check_files = getattr(first.backbone.settings, "check_files", None)
    if check_files is not None:
        check_files()
    if any(map(looks_at_flow, configs.values())):
        build_flow(first.flow, device="cpu", notice=notice, backbone=first.backbone.name)
    lacking = {}
    for name, config in configs.items():
        if config.memory.settings.keeps_bank:
            try:
                # Any spec will do, as the question is whether weights are there.
                config.admission.settings.build(UNTRAINED.backbone_spec(), _no_flow)
            except ValueError as error:
                lacking[name] = str(error)
    return lacking


def looks_at_flow(config: RunConfig) -> bool:
    """Tell whether a run estimates flow for its bank."""
    return bool(config.memory.settings.keeps_bank and config.admission.settings.needs_flow)


def _no_flow(pictures: Tensor) -> Flow:
    raise AssertionError("nothing is generated before all checks are done")
