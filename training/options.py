"""The command line of a training script, read from its dataclass of options."""

from __future__ import annotations

import argparse
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import torch

Options = TypeVar("Options")
READERS: tuple[type, ...] = (int, float, str, Path)


def read_options(kind: type[Options], description: str | None, words: list[str] | None = None) -> Options:
    """Options from the command line: a field without a default is required, a flag toggles its default.

    Fields of other types (tuples, tables) are settings of the code and are no options.
    """
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    hints = get_type_hints(kind)
    for field in fields(kind):  # type: ignore[arg-type]
        name, hint = field.name.replace("_", "-"), hints[field.name]
        required = field.default is MISSING and field.default_factory is MISSING
        reader = next((each for each in READERS if hint in (each, each | None)), None)
        if hint is bool:
            text = f"--no-{name}" if field.default else f"--{name}"
            parser.add_argument(text, dest=field.name, action="store_const", const=not field.default)
        elif reader is not None:
            parser.add_argument(f"--{name}", type=reader, required=required)
    parsed: dict[str, Any] = vars(parser.parse_args(words))
    return kind(**{name: value for name, value in parsed.items() if value is not None})


def choose_device() -> str:
    """The GPU if there is one, set up for training: TF32 products and kernels chosen by trial."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    return "cuda" if torch.cuda.is_available() else "cpu"
