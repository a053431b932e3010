"""The judge of the embedded backbone, under a probe with scripted answers."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from recap.backbones.tiny.vocabulary import ACTORS
from recap.contracts import Sample
from recap.eval.judges.colours import colour_distance
from recap.eval.judges.probe import NOBODY, Judged, Probe
from recap.eval.judges.subject import FARTHEST, ProbeJudge

RED, GREEN, PINK = (0.8, 0.2, 0.2), (0.1, 0.7, 0.2), (0.85, 0.3, 0.3)
FOX, BOTH, BUS = "a fox on a beach", "a bus and a fox on a beach", "a bus on a beach"


class Scripted(Probe):
    """Sees in picture number n what `sightings[n]` says: actor -> (presence, colour, cells that show it)."""

    def __init__(self, sightings):
        super().__init__((8, 8, 8, 8))
        self.sightings, self.calls = sightings, 0

    def judge(self, pictures, at_once=256):
        self.calls += 1
        numbers = (pictures[0, :, 0, 0, 0] * 255).round().int().tolist()
        presence = torch.zeros(1, len(numbers), NOBODY)
        cells = torch.full((1, len(numbers), 8, 13), NOBODY)
        colours = torch.zeros(1, len(numbers), 8, 13, 3)
        for place, number in enumerate(numbers):
            for row, (actor, (sure, colour, count)) in enumerate(self.sightings[number].items()):
                presence[0, place, ACTORS.index(actor)] = sure
                cells[0, place, row, :count] = ACTORS.index(actor)
                colours[0, place, row, :count] = torch.tensor(colour)
        shares = functional.one_hot(cells, NOBODY + 1).movedim(-1, 2).float()
        return Judged(presence, cells, shares, colours)


def samples(prompts):
    pictures = (torch.full((32, 48, 3), number, dtype=torch.uint8) for number in range(len(prompts)))
    return [Sample(n / 2, prompt, p) for n, (prompt, p) in enumerate(zip(prompts, pictures, strict=True))]


def judged(prompts, sightings):
    return {curve.subject: curve.values for curve in ProbeJudge(Scripted(sightings)).curves(samples(prompts))}


def like(one, other):
    return max(0.0, 1 - float(colour_distance(torch.tensor(one), torch.tensor(other))) / FARTHEST)


def test_one_curve_per_actor_in_the_order_of_first_mention():
    seen = {"fox": (1.0, RED, 2), "bus": (1.0, GREEN, 3)}
    assert list(judged([FOX, BOTH, BUS], [seen] * 3)) == ["the fox", "the bus"]
    assert list(judged([BOTH, FOX], [seen] * 2)) == ["the bus", "the fox"]
    assert judged(["an empty beach"], [seen]) == {}


def test_it_looks_for_what_was_generated_instead_of_what_was_written():
    seen = {"cat": (1.0, RED, 2)}
    assert judged(["a cute lion", "a beach with no cat"], [seen] * 2) == {"the cat": [1.0, None]}


def test_gaps_zeros_and_likeness():
    fox = {"fox": (0.9, RED, 4)}
    found = judged(
        [FOX, FOX, FOX, BUS, FOX, FOX, FOX],
        [fox, fox, {"fox": (0.9, GREEN, 4)}, fox, {"fox": (0.4, RED, 4)}, {"fox": (0.9, RED, 0)},
         {"fox": (0.51, PINK, 1)}],
    )["the fox"]  # fmt: skip
    assert like(RED, GREEN) == 0 and 0.6 < like(RED, PINK) < 0.95
    assert found[:2] == pytest.approx([1, 1], abs=1e-5)
    assert found[2:6] == [0, None, 0, None]  # another one; not named; not found; no cell to read
    assert found[6] == pytest.approx(like(RED, PINK), abs=1e-5)


def test_the_reference_is_the_first_second_that_shows_it_weighted_by_cells():
    sightings = [{}, {"fox": (1.0, RED, 1)}, {"fox": (1.0, PINK, 3)}, {"fox": (1.0, GREEN, 9)}]
    found = judged([FOX] * 4, sightings)["the fox"]
    reference = [(r + 3 * p) / 4 for r, p in zip(RED, PINK, strict=True)]
    assert found[0] == 0
    assert found[1:] == pytest.approx([like(c, reference) for c in (RED, PINK, GREEN)], abs=1e-5)


def test_what_is_taken_for_an_actor_before_it_is_named_is_no_reference():
    sightings = [{"bus": (1.0, GREEN, 5)}, {"bus": (1.0, RED, 5)}, {"bus": (1.0, RED, 5)}]
    found = judged([FOX, BUS, BUS], sightings)["the bus"]
    assert found[0] is None and found[1:] == pytest.approx([1, 1], abs=1e-5)


def test_an_actor_that_is_never_seen_is_absent_throughout():
    assert judged([FOX, BUS, FOX], [{}] * 3)["the fox"] == [0, None, 0]
    assert judged([FOX, FOX], [{"fox": (1.0, RED, 0)}] * 2)["the fox"] == [None, None]


def test_long_videos_are_judged_in_batches_and_read_once():
    sightings = [{"fox": (1.0, RED, 1 + n % 3)} if n % 2 else {} for n in range(70)]
    judge = ProbeJudge(Scripted(sightings))
    (curve,) = judge.curves(iter(samples([FOX] * 70)))
    assert judge._probe.calls == 3
    assert curve.values == pytest.approx([float(n % 2) for n in range(70)], abs=1e-5)
