"""flow: how pictures move. Estimators of one contract, and following the flow they find (`warp`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from recap.contracts import FlowEstimator
from recap.errors import refuse, unknown_name
from recap.files import weights_folder
from recap.flow.classical import ClassicalFlow
from recap.flow.exact import ExactFlow
from recap.flow.raft import RaftFlow, load_raft_small
from recap.flow.weights import find_raft_small

__all__ = ["FLOWS", "ClassicalFlow", "ExactFlow", "RaftFlow", "build_flow", "resolve_flow"]

FLOWS: dict[str, str] = {
    "auto": "RAFT-small where its weights are installed, classical flow elsewhere",
    "raft-small": "RAFT-small, a network of 1 M parameters; `recap weights raft-small` installs its weights",
    "classical": "dense inverse search of OpenCV, on the CPU; needs no weights",
}

INSTALL = "`recap weights raft-small` installs them"


def resolve_flow(name: str) -> str:
    """What `auto` means on this machine; any other name means itself."""
    if name != "auto":
        return name
    return "classical" if find_raft_small() is None else "raft-small"


def build_flow(
    name: str,
    *,
    device: torch.device | str = "cpu",
    weights: Path | None = None,
    notice: Callable[[str], None] = print,
) -> FlowEstimator:
    """The estimator of that name; `weights` is a file for RAFT-small, else the installed ones are taken."""
    if name not in FLOWS:
        raise unknown_name("flow", name, FLOWS)
    if name != "classical":
        path = weights or find_raft_small()
        if path is not None:
            return RaftFlow(load_raft_small(path, device))
        if name == "raft-small":
            raise refuse("flow", name, f"its weights are not in {weights_folder()}", INSTALL)
        notice(f"flow: classical, as the weights of RAFT-small are not installed; {INSTALL}")
    return ClassicalFlow()
