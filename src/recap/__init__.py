"""RECAP gives long video generation a memory of appearances.

`recap.generate("a fox on a beach by day")` makes a video; `recap.rollout` is the loop under it, block by block;
`recap.Session` lets you direct a video while it is generated; `recap.attach` puts a memory into another project's
pipeline.
"""

import os as _os
import sys as _sys

if _sys.platform == "darwin":
    # Read when torch is loaded: what an Apple GPU cannot compute runs on the CPU, instead of stopping the run.
    _os.environ.setdefault("PYTORCH_ENABLE_MPS_FALLBACK", "1")

from recap.attach import attach
from recap.config import RunConfig
from recap.contracts import Admission, Backbone, MemoryPolicy
from recap.errors import RecapError
from recap.io.record import VERSION as __version__
from recap.plan import Shot, make_plan
from recap.registry import load_backbone
from recap.rollout import rollout
from recap.run import build_backbone, build_memory
from recap.session import Session
from recap.show.result import Run, generate, resume
from recap.types import Role, Segment

__all__ = [
    "Admission",
    "Backbone",
    "MemoryPolicy",
    "RecapError",
    "Role",
    "Run",
    "RunConfig",
    "Segment",
    "Session",
    "Shot",
    "__version__",
    "attach",
    "build_backbone",
    "build_memory",
    "generate",
    "load_backbone",
    "make_plan",
    "resume",
    "rollout",
]
