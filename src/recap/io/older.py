"""This module alone provides what Python 3.10 and torch 2.5, the oldest that we support, do not have.

Others import these names from here; `make test-oldest` runs the tests of the core and of `attach` on both.
"""

from __future__ import annotations

import sys

if sys.version_info >= (3, 11):
    from enum import StrEnum
    from typing import Self

    import tomllib
else:
    from enum import Enum
    from typing import Any

    import tomli as tomllib
    from typing_extensions import Self

    class StrEnum(str, Enum):
        """Makes members that are strings, as in newer Pythons; `auto()` is the name in lower case."""

        @staticmethod
        def _generate_next_value_(name: str, start: int, count: int, last_values: list[Any]) -> str:
            return name.lower()

        __str__ = str.__str__
        __format__ = str.__format__


__all__ = ["Self", "StrEnum", "tomllib"]
