"""Small letters drawn as dots, so that pictures can be labelled without an image library or a font file."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from recap.io.video import Picture

# Five rows of three dots for every sign; a word of fifteen letters, read line by line.
_FONT = {
    "0": "###" "#.#" "#.#" "#.#" "###",
    "1": ".#." "##." ".#." ".#." "###",
    "2": "###" "..#" "###" "#.." "###",
    "3": "###" "..#" ".##" "..#" "###",
    "4": "#.#" "#.#" "###" "..#" "..#",
    "5": "###" "#.." "###" "..#" "###",
    "6": "###" "#.." "###" "#.#" "###",
    "7": "###" "..#" ".#." ".#." ".#.",
    "8": "###" "#.#" "###" "#.#" "###",
    "9": "###" "#.#" "###" "..#" "###",
    ".": "..." "..." "..." "..." ".#.",
    "s": "..." ".##" ".#." "..#" "##.",
    "A": ".#." "#.#" "###" "#.#" "#.#",
    "B": "##." "#.#" "##." "#.#" "##.",
    "C": ".##" "#.." "#.." "#.." ".##",
    "D": "##." "#.#" "#.#" "#.#" "##.",
    "E": "###" "#.." "##." "#.." "###",
    "F": "###" "#.." "##." "#.." "#..",
    "G": ".##" "#.." "#.#" "#.#" ".##",
    "H": "#.#" "#.#" "###" "#.#" "#.#",
    "I": "###" ".#." ".#." ".#." "###",
    "J": "..#" "..#" "..#" "#.#" ".#.",
    "K": "#.#" "#.#" "##." "#.#" "#.#",
    "L": "#.." "#.." "#.." "#.." "###",
    "M": "#.#" "###" "###" "#.#" "#.#",
    "N": "##." "#.#" "#.#" "#.#" "#.#",
    "O": ".#." "#.#" "#.#" "#.#" ".#.",
    "P": "##." "#.#" "##." "#.." "#..",
    "Q": ".#." "#.#" "#.#" "###" ".##",
    "R": "##." "#.#" "##." "#.#" "#.#",
    "S": ".##" "#.." ".#." "..#" "##.",
    "T": "###" ".#." ".#." ".#." ".#.",
    "U": "#.#" "#.#" "#.#" "#.#" "###",
    "V": "#.#" "#.#" "#.#" "#.#" ".#.",
    "W": "#.#" "#.#" "###" "###" "#.#",
    "X": "#.#" "#.#" ".#." "#.#" "#.#",
    "Y": "#.#" "#.#" ".#." ".#." ".#.",
    "Z": "###" "..#" ".#." "#.." "###",
    "-": "..." "..." "###" "..." "...",
    "_": "..." "..." "..." "..." "###",
    "=": "..." "###" "..." "###" "...",
    " ": "..." "..." "..." "..." "...",
}  # fmt: skip


def write_text(
    picture: Picture, text: str, *, top: int, left: int, width: int, dot: int, ink: tuple[int, int, int]
) -> None:
    """Write a line with dots of that size into the picture, dropping the signs that would pass the width.

    A sign without a drawing of its own is written as a capital letter, and as a blank where there is none.
    """
    for position, sign in enumerate(text[: (width + dot) // (4 * dot)]):
        dots = _FONT.get(sign) or _FONT.get(sign.upper()) or _FONT[" "]
        marks: NDArray[Any] = np.array([mark == "#" for mark in dots]).reshape(5, 3)
        large = marks.repeat(dot, axis=0).repeat(dot, axis=1)
        start = left + 4 * dot * position
        picture[top : top + 5 * dot, start : start + 3 * dot][large] = ink
