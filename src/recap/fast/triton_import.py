"""Imports Triton, or stand-ins that let the kernel modules be imported where it is not installed.

Triton comes only with CUDA builds of torch. Without it a kernel is a plain function that nobody calls.
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

try:
    triton: Any = importlib.import_module("triton")
    tl: Any = importlib.import_module("triton.language")
except ImportError:
    triton, tl = SimpleNamespace(jit=lambda kernel: kernel), SimpleNamespace(constexpr=int)
