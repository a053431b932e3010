"""The verdict on a video in which a subject comes back, from made-up measurements."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from recap.eval.judged import MotionJudge
from recap.eval.judges.probe import Probe
from recap.eval.judges.subject import ProbeWitness
from recap.eval.returns import ANOTHER, MISSING, NEVER, SAME, STAYED, Return, headline, judge_return
from recap.eval.sampling import InMemoryClip
from recap.io.trace import BlockTrace
from recap.types import Role

BACK = Return(likeness=0.9, found_first=1.0, found_gone=0.0, found_again=1.0, path=0.05)
OTHER = replace(BACK, likeness=0.2)


@pytest.mark.parametrize(
    ("changed", "verdict"),
    [
        ({}, SAME),
        ({"likeness": 0.71}, SAME),  # 14.5 Delta E
        ({"likeness": 0.70}, ANOTHER),  # 15 is not below 15
        ({"likeness": None}, MISSING),
        ({"found_again": 0.4}, MISSING),
        ({"found_gone": 0.2}, STAYED),  # it cannot come back, as it never left
        ({"found_first": 0.4}, NEVER),
        ({"found_first": math.nan}, NEVER),
        ({"found_gone": math.nan}, STAYED),
        ({"found_again": math.nan}, MISSING),
    ],
)
def test_a_subject_came_back_only_if_it_was_there_was_gone_and_is_the_same(changed, verdict):
    assert replace(BACK, **changed).verdict == verdict


@pytest.mark.parametrize(
    ("none", "sink", "recap", "words"),
    [
        ([0, 0, 1], [0, 0, 0], [1, 1, 1], "in 3 of 3 with recap, in 1 of 3 with none, in 0 of 3 with sink"),
        ([1, 1, 1], [0, 1, 0], [0, 0, 0], "in 3 of 3 with none, in 1 of 3 with sink, in 0 of 3 with recap"),
        ([0, 0, 1], [1, 1, 0], [0, 1, 1], "in 2 of 3 with sink and recap, in 1 of 3 with none"),
        ([0], [0], [0], "in 0 of 1 with none, sink and recap"),
    ],
)
def test_the_headline_counts_and_the_best_comes_first_whoever_it_is(none, sink, recap, words):
    runs = {
        name: [BACK if back else OTHER for back in row]
        for name, row in (("none", none), ("sink", sink), ("recap", recap))
    }
    assert headline("fox", runs) == f"The same fox came back {words}"


class ScriptedWitness(ProbeWitness):
    """Knows what it sees by the pixel in the corner: 0 nobody, 1 a dark one, 2 a bright one."""

    def __init__(self) -> None:
        super().__init__(Probe())

    def look(self, pictures, subject):
        mark = pictures[:, 0, 0, 0]
        return mark > 0, np.repeat(mark[:, None] / 2 - 0.25, 3, axis=1).astype(np.float32)

    def where(self, pictures, subject):
        cells = np.zeros((len(pictures), 4, 4), np.float32)
        for index, mark in enumerate(pictures[:, 0, 0, 0]):
            cells[index, 0, index % 4] = mark > 0
        return cells


def still(pictures):
    return pictures.new_zeros(1, pictures.shape[1] - 1, 2, *pictures.shape[-2:])


def story(marks: list[int], cuts: bool) -> tuple[InMemoryClip, list[BlockTrace]]:
    """Four shots of 6 s at 2 pictures a second; `marks` has a value per picture."""
    pictures = np.zeros((48, 8, 8, 3), np.uint8)
    pictures[:, 0, 0, 0] = marks
    trace = [
        BlockTrace(
            block, block, (12 * block,), 12, (("sea", "fox")[block % 2],), cuts and block > 0, {Role.BANK: 1}
        )
        for block in range(4)
    ]
    return InMemoryClip(pictures, 2.0), trace


@pytest.mark.parametrize(("again", "verdict"), [(2, SAME), (1, ANOTHER), (0, MISSING)])
def test_a_video_is_judged_by_its_visits(again, verdict):
    clip, trace = story([0] * 12 + [2] * 12 + [0] * 12 + [again] * 12, cuts=True)
    found, parts = judge_return(clip, trace, "fox", ScriptedWitness(), MotionJudge(still, "still"))
    assert found.verdict == verdict and [part.span.start for part in parts] == [0, 6, 12, 18]
    assert found.found_first == 1 and found.found_gone == 0 and found.found_again == (again > 0)
    # A quarter of the width every half second, and three quarters back every fourth time.
    assert found.path is None if again == 0 else 0.5 < found.path < 0.8


def test_without_a_cut_a_subject_may_take_a_while_to_leave():
    marks = [0] * 12 + [2] * 12 + [2] * 4 + [0] * 8 + [2] * 12
    told, judge = ScriptedWitness(), MotionJudge(still, "still")
    assert judge_return(*story(marks, cuts=False), "fox", told, judge)[0].verdict == SAME
    assert judge_return(*story(marks, cuts=True), "fox", told, judge)[0].verdict == STAYED
