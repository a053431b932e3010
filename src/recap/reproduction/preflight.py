"""What a table needs, looked for before anything is drawn: hundreds of runs must not find it out one by one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from recap.backbones.wan.backbone import UntrainedConfig
from recap.config import RunConfig
from recap.contracts import Flow
from recap.errors import unknown_name
from recap.eval.qwen import find_qwen
from recap.flow import build_flow
from recap.recipes.tables import Planned

DETECTORS = ("qwen2.5-vl",)
KEEPS_A_BANK = "recap"


def check_detector(detector: str) -> None:
    """A name, or NAME=FOLDER, whose weights are there."""
    name, _, folder = detector.partition("=")
    if detector and name not in DETECTORS:
        raise unknown_name("--detector", name, DETECTORS)
    if detector:
        find_qwen(folder)


def find_undrawable(planned: Sequence[Planned]) -> dict[str, str]:
    """Rows whose own parts lack weights, and why; what all rows need and is not here is refused."""
    check_files = getattr(planned[0].config.backbone.settings, "check_files", None)
    if check_files is not None:
        check_files()
    configs = {each.row.name: each.config for each in planned if each.config.memory.name == KEEPS_A_BANK}
    if any(_needs_flow(config) for config in configs.values()):
        build_flow(planned[0].config.flow, device="cpu", notice=lambda _: None)
    undrawable = {}
    # Any spec will do: what is asked is whether its weights are there.
    spec = UntrainedConfig().build(device="cpu", dtype=torch.float32, prompts=[], notice=lambda _: None).spec
    for name, config in configs.items():
        try:
            config.admission.settings.build(spec, _no_flow)
        except ValueError as error:
            undrawable[name] = str(error)
    return undrawable


def _needs_flow(config: RunConfig) -> bool:
    return bool(getattr(config.admission.settings, "needs_flow", True))


def _no_flow(pictures: Tensor) -> Flow:
    raise AssertionError("nothing is drawn before a sweep")
