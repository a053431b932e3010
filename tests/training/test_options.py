"""Options of a training script come from its dataclass: required, optional, and flags that toggle their default."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from training.options import read_options


@dataclass(frozen=True)
class Options:
    minutes: float
    out: Path
    resume: Path | None = None
    num_clips: int = 4
    compile: bool = True
    bank_rows: bool = False
    sizes: tuple[int, ...] = (1, 2)


def test_words_become_typed_fields():
    words = [
        "--minutes",
        "2",
        "--out",
        "a",
        "--resume",
        "b",
        "--num-clips",
        "9",
        "--no-compile",
        "--bank-rows",
    ]
    assert read_options(Options, "x", words) == Options(2.0, Path("a"), Path("b"), 9, False, True)


def test_what_is_left_out_keeps_its_default():
    assert read_options(Options, "x", ["--minutes", "2", "--out", "a"]) == Options(2.0, Path("a"))


@pytest.mark.parametrize("words", [["--minutes", "2"], ["--minutes", "x", "--out", "a"]])
def test_missing_or_wrong_words_are_refused(words, capsys):
    with pytest.raises(SystemExit):
        read_options(Options, "x", words)
    assert "--out" in capsys.readouterr().err


def test_settings_of_the_code_are_no_options(capsys):
    with pytest.raises(SystemExit):
        read_options(Options, "x", ["--minutes", "2", "--out", "a", "--sizes", "3"])
    assert "--sizes" in capsys.readouterr().err
