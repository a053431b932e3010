"""What a table needs, looked for before anything is drawn: hundreds of runs must not find it out one by one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from recap.backbones.wan.backbone import UntrainedConfig
from recap.config import RunConfig
from recap.contracts import Flow
from recap.errors import unknown_name
from recap.eval.motion_judge import build_motion_judge
from recap.eval.qwen import find_qwen
from recap.flow import FLOWS, build_flow, resolve_flow
from recap.registry import ADMISSIONS
from recap.tables.recipes import Ask, Planned, Recipe
from recap.tables.scoring import OF_MOTION

DETECTORS = ("qwen2.5-vl",)
KEEPS_A_BANK = "recap"


def check_detector(detector: str) -> None:
    """A name, or NAME=FOLDER, whose weights are there."""
    name, _, folder = detector.partition("=")
    if detector and name not in DETECTORS:
        raise unknown_name("--detector", name, DETECTORS)
    if detector:
        find_qwen(folder)


def settle_flows(
    ask: Ask, recipes: Sequence[Recipe], begun: Mapping[str, Any], notice: Callable[[str], None]
) -> Ask:
    """`auto` as what it means here, found out once: records, jobs and workers then all have the same name.

    A folder that was begun goes on with the flow it began with, and nothing is fetched that no row needs.
    """
    rows = [row for recipe in recipes for row in recipe.rows if row.available]
    banks = [row for row in rows if row.memory["name"] == KEEPS_A_BANK]
    drawn = any(getattr(ADMISSIONS[row.admission], "needs_flow", True) for row in banks)
    judged = any(OF_MOTION & set(recipe.measures) for recipe in recipes)
    said: set[str] = set()

    def notice_once(line: str) -> None:
        if line not in said:
            said.add(line)
            notice(line)

    def settled(field: str, name: str, *, needed: bool) -> str:
        if name == "auto" and begun.get(field) in FLOWS:
            name = begun[field]
        return resolve_flow(name, notice_once) if needed else name

    flow = settled("flow", ask.flow, needed=drawn)
    return replace(ask, flow=flow, judge_flow=settled("judge_flow", ask.judge_flow, needed=judged))


def check_judge(ask: Ask, recipe: Recipe, notice: Callable[[str], None]) -> None:
    """The judge of motion can be built here, where there is motion to judge."""
    if ask.judge_flow not in FLOWS:
        raise unknown_name("--judge-flow", ask.judge_flow, FLOWS)
    if OF_MOTION & set(recipe.measures):
        build_motion_judge(ask.judge_flow, notice=notice)


def find_undrawable(
    planned: Sequence[Planned], notice: Callable[[str], None] = lambda _: None
) -> dict[str, str]:
    """Rows whose own parts lack weights, and why; what all rows need and is not here is refused."""
    check_files = getattr(planned[0].config.backbone.settings, "check_files", None)
    if check_files is not None:
        check_files()
    configs = {each.row.name: each.config for each in planned if each.config.memory.name == KEEPS_A_BANK}
    if any(needs_flow(config) for config in configs.values()):
        build_flow(planned[0].config.flow, device="cpu", notice=notice)
    undrawable = {}
    # Any spec will do: what is asked is whether its weights are there.
    spec = UntrainedConfig().build(device="cpu", dtype=torch.float32, prompts=[], notice=lambda _: None).spec
    for name, config in configs.items():
        try:
            config.admission.settings.build(spec, _no_flow)
        except ValueError as error:
            undrawable[name] = str(error)
    return undrawable


def needs_flow(config: RunConfig) -> bool:
    return bool(getattr(config.admission.settings, "needs_flow", True))


def _no_flow(pictures: Tensor) -> Flow:
    raise AssertionError("nothing is drawn before a sweep")
