"""Keep torch.compile out of the hooks, and let it into what they call.

A compiled pipeline would trace our Python too, guard on objects that are new in every block, and compile again and
again. Called when something is attached and not on import: the compiler itself takes seconds to import.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import torch

F = TypeVar("F", bound=Callable[..., object])


def untraced(function: F) -> F:
    """Run as plain Python, with everything it calls."""
    return cast(F, torch.compiler.disable(function))


def skipped(function: F) -> F:
    """Run as plain Python itself; what it calls of upstream's stays compiled."""
    return cast(F, torch.compiler.disable(function, recursive=False))
