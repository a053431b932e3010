"""Who judges motion: a flow by name, and what its scores are marked with."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from recap.errors import unknown_name
from recap.eval.sampling import ForwardFlow
from recap.flow import FLOWS, ClassicalFlow, RaftFlow, build_flow

USUAL = "classical"
"""Published tables were judged by it, and figures of two judges do not compare."""


class MotionJudge(NamedTuple):
    flow: ForwardFlow
    backend: str


def build_motion_judge(
    name: str = USUAL, *, device: str = "cpu", notice: Callable[[str], None] = print
) -> MotionJudge:
    """The judge of that name, one of the flows; `auto` is RAFT-small where its weights can be had."""
    if name not in FLOWS:
        raise unknown_name("--judge-flow", name, FLOWS)
    flow = build_flow(name, device=device, notice=notice)
    assert isinstance(flow, (ClassicalFlow, RaftFlow)), "every flow with a name has a forward half"
    # "dis", dense inverse search, is the mark of all earlier scores.
    return MotionJudge(flow.forward, "raft-small" if isinstance(flow, RaftFlow) else "dis")
