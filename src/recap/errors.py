"""This module makes the errors of the package: one line that names the field, the value, the limit and the remedy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class RecapError(ValueError):
    """Says in one sentence why a value cannot be used, and what to do instead; its parts are there for programs."""

    field = value = limit = remedy = ""


def refuse(field: str, value: object, limit: str, remedy: str) -> RecapError:
    """Make the error to raise when a user's value cannot be used; the value None reads as missing."""
    state = "is missing" if value is None else f"is {value!r}"
    error = RecapError(f"{field} {state}: {limit}; {remedy}")
    error.field, error.limit, error.remedy = field, limit, remedy
    error.value = "" if value is None else repr(value)
    return error


def check_settings(
    config: object, names: Iterable[str], low: float, high: float, limit: str, remedy: str
) -> None:
    """Refuse settings of a config that lie outside low..high, NaN among them."""
    for name in names:
        value = getattr(config, name)
        if not low <= value <= high:
            raise refuse(name, value, limit, remedy)


def unknown_name(field: str, value: str, known: Iterable[str]) -> RecapError:
    """Make the error of an unknown name, with the nearest known one."""
    names = sorted(known)
    near = difflib.get_close_matches(value, names, n=1, cutoff=0.5)
    guess = f"did you mean {near[0]!r}? " if near else ""
    return refuse(field, value, "no such name", f"{guess}known: {', '.join(names) or 'none'}")
