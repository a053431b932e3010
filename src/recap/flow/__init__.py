"""flow: how pictures move. Estimators of one contract, and following the flow they find (`warp`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from recap.contracts import FlowEstimator
from recap.errors import refuse, unknown_name
from recap.flow.classical import ClassicalFlow, has_opencv
from recap.flow.exact import ExactFlow
from recap.flow.raft import RaftFlow, load_raft_small
from recap.flow.weights import find_raft_small, obtain_raft_small
from recap.io.files import OFFLINE, is_offline, weights_folder

__all__ = ["FLOWS", "ClassicalFlow", "ExactFlow", "RaftFlow", "build_flow", "resolve_flow"]

FLOWS: dict[str, str] = {
    "auto": "raft-small, the paper's; classical, with a notice, where its weights cannot be had",
    "raft-small": "RAFT-small, a network of 1 M parameters; its weights (4 MB) are fetched when first needed",
    "classical": "dense inverse search of OpenCV, on the CPU; needs no weights, and is the fast one on a CPU",
}

INSTALL = "`recap weights raft-small` installs them"

_out_of_reach: set[Path] = set()
"""Folders whose weights this process failed to fetch: its next videos do not wait for the network again."""


def resolve_flow(name: str, notice: Callable[[str], None] = print) -> str:
    """What `auto` means on this machine, for whoever needs flow: weights are fetched if they are not there.

    Any other name means itself. One notice says so where `auto` falls back to classical flow.
    """
    if name != "auto":
        return name
    home = weights_folder()
    if find_raft_small() is None:
        why = f"could not be fetched; {INSTALL}"
        if is_offline():
            why = f"are not installed and {OFFLINE} is set; without it {INSTALL}"
        elif home not in _out_of_reach:
            try:
                obtain_raft_small(notice)
            except ValueError:
                _out_of_reach.add(home)
        if find_raft_small() is None:
            if not has_opencv():
                limit = (
                    f"the weights of RAFT-small {why}, and OpenCV for the classical flow is not there either"
                )
                raise refuse("flow", name, limit, "or pip install opencv-python-headless")
            notice(f"flow: classical, as the weights of RAFT-small {why}")
            return "classical"
    return "raft-small"


def build_flow(
    name: str,
    *,
    device: torch.device | str = "cpu",
    weights: Path | None = None,
    notice: Callable[[str], None] = print,
) -> FlowEstimator:
    """The estimator of that name; `weights` is a file for RAFT-small, else installed or fetched ones are taken."""
    if name not in FLOWS:
        raise unknown_name("flow", name, FLOWS)
    if weights is None and name == "auto":
        name = resolve_flow(name, notice)
    if name == "classical":
        return ClassicalFlow()
    return RaftFlow(load_raft_small(weights or _weights_of(name, notice), device))


def _weights_of(name: str, notice: Callable[[str], None]) -> Path:
    try:
        return obtain_raft_small(notice)
    except ValueError as refusal:
        limit = f"its weights are not in {weights_folder()} and could not be fetched ({refusal})"
        raise refuse("flow", name, limit, f"{INSTALL}; --flow classical needs none") from refusal
