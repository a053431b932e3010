"""RECAP: appearance memory for long video generation.

The public names, loaded when first used: `import recap.attention` on a machine without video libraries must not
ask for them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# At once, because their modules bear the same names and would take their place; they need nothing but torch.
from recap.attach import attach
from recap.rollout import rollout

if TYPE_CHECKING:
    from recap.config import RunConfig as RunConfig
    from recap.contracts import Admission as Admission
    from recap.contracts import Backbone as Backbone
    from recap.contracts import MemoryPolicy as MemoryPolicy
    from recap.plan import Shot as Shot
    from recap.plan import make_plan as make_plan
    from recap.registry import load_backbone as load_backbone
    from recap.run import build_backbone as build_backbone
    from recap.run import build_memory as build_memory
    from recap.run import generate as generate
    from recap.run import resume as resume
    from recap.types import Role as Role
    from recap.types import Segment as Segment

__version__ = "0.1.0"
__all__ = ["attach", "rollout"]

_HOMES = {
    "RunConfig": "config",
    "Admission": "contracts",
    "Backbone": "contracts",
    "MemoryPolicy": "contracts",
    "Shot": "plan",
    "make_plan": "plan",
    "load_backbone": "registry",
    "build_backbone": "run",
    "build_memory": "run",
    "generate": "run",
    "resume": "run",
    "Role": "types",
    "Segment": "types",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'recap' has no attribute {name!r}")
    return getattr(importlib.import_module(f"recap.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
