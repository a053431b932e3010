"""Colours whose distance is known."""

from __future__ import annotations

import math

import pytest
import torch

from recap.eval.judges.colours import colour_distance, mean_colour, to_lab

NAN = float("nan")


def test_lab_of_known_colours():
    rgb = torch.tensor([[1.0, 1, 1], [0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1], [0.5, 0.5, 0.5]])
    known = [[100.0, 0, 0], [0, 0, 0], [53.24, 80.09, 67.20], [87.73, -86.18, 83.18], [32.30, 79.19, -107.86],
             [53.39, 0, 0]]  # fmt: skip
    torch.testing.assert_close(to_lab(rgb), torch.tensor(known, dtype=torch.float64), atol=0.02, rtol=0)
    assert float(colour_distance(rgb[0], rgb[1])) == pytest.approx(100, abs=0.01)
    assert math.isnan(float(colour_distance(rgb[0], torch.full((3,), NAN))))


def test_colours_are_weighted_by_the_cells_that_show_them():
    colour = torch.tensor([[[1.0, 0, 0], [0, 1, 0], [NAN] * 3]])
    cells, found = torch.tensor([[1.0, 3.0, 0.0]]), torch.tensor([[1.0, 1.0, 1.0]])
    torch.testing.assert_close(mean_colour(found, colour, cells), torch.tensor([[0.25, 0.75, 0]]))
    assert mean_colour(torch.zeros(1, 3), colour, cells).isnan().all()
