"""States the smallest differences that a viewer could see, by which tables decide whether a p value says anything.

Reasons are next to the numbers; docs/evaluation.md lists them for readers. Scores that are not of pictures (the bank,
attention, time) have none.
"""

from __future__ import annotations

from collections.abc import Mapping

LIKENESS: Mapping[str, float] = {
    # Likeness by colour is 1 - Delta E / 50, and a Delta E (CIE 1976) of 2.3 is just noticeable.
    "probe": 2.3 / 50,
    # What a shift of all colours by that Delta E costs on average (`just_noticeable` of training.crops).
    "crops in probe": 0.006,
    # The last digit that the paper prints of its retention.
    "": 0.01,
}
"""Of likenesses, by judge; "" stands for all others."""

MOMENTS = 0.05
"""Of the share of moments that show somebody: half a second in ten."""

VIDEOS = 0.05
"""Of the share of videos: one of twenty, which is one per prompt."""

CLIPS = 1 / 30
"""Of dynamic degree: one of the thirty clips of a minute."""

FLICKERING = 1 / 255
"""Of flickering: one level of a screen with 8 bits."""

PATH = 0.005
"""Of the subject's path in picture widths a second: a pixel a second of 208, a thirtieth of its usual speed."""

CELL_OF_SUBJECT = 1 / 12
"""Of the change of an outline: one cell of a subject of twelve."""

PIXELS = 1 / 16
"""Of flow in pixels per picture: a pixel a second, at 16 pictures a second."""

OF_MOTION = 0.05
"""Of the share of motion that is the objects': one part in twenty."""
