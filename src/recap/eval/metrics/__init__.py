"""Every file here is a metric, or some that belong together: functions, and their entries for tables."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable
from functools import cache

from recap.errors import refuse
from recap.eval.judged import Measure
from recap.io.lookup import look_up


@cache
def all_measures() -> dict[str, Measure]:
    """Return every measure of this folder, by name."""
    modules = [importlib.import_module(f"{__name__}.{info.name}") for info in pkgutil.iter_modules(__path__)]
    return {each.name: each for module in modules for each in getattr(module, "MEASURES", ())}


def find_measure(name: str) -> Measure:
    """Return the measure of that name, or the one that `module:NAME` points at."""
    found = look_up("measure", name, all_measures())
    if not isinstance(found, Measure):
        raise refuse("measure", name, "is not a Measure", "make one by recap.eval.judged.Measure")
    return found


def find_measures(names: Iterable[str]) -> list[Measure]:
    """Return the measures of these names."""
    return [find_measure(name) for name in names]
