"""The flow estimator that motion is measured with, chosen by name, and the name its scores carry."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from recap.errors import unknown_name
from recap.eval.sampling import ForwardFlow
from recap.flow import FLOWS, ClassicalFlow, RaftFlow, build_flow

USUAL = "classical"
"""Published tables were measured with it, and numbers of two estimators do not compare."""


class MotionJudge(NamedTuple):
    """A flow estimator and its name on scores."""

    flow: ForwardFlow
    backend: str


def build_motion_judge(
    name: str = USUAL, *, device: str = "cpu", notice: Callable[[str], None] = print
) -> MotionJudge:
    """Build the judge with the flow of that name; `auto` is RAFT-small if its weights are available."""
    if name not in FLOWS:
        raise unknown_name("--judge-flow", name, FLOWS)
    flow = build_flow(name, device=device, notice=notice)
    assert isinstance(flow, (ClassicalFlow, RaftFlow)), "every registered flow has a `forward`"
    # All earlier scores carry the name "dis", for dense inverse search.
    return MotionJudge(flow.forward, "raft-small" if isinstance(flow, RaftFlow) else "dis")
