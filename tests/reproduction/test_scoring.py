"""What is told of a run that was never drawn, by its pictures alone."""

from __future__ import annotations

import numpy as np
import pytest

from recap.backbones.tiny.witness import ProbeWitness
from recap.eval.sampling import Drawn
from recap.recipes.tables import Ask, find_recipe, plan_runs
from recap.reproduction.job import job_of
from recap.reproduction.scoring import LENGTHS_S, Seen, score

FPS = 16
SIZE = (48, 64)


def run_of(num_pictures: int) -> Seen:
    """Still for the first half, then another picture every time."""
    recipe = find_recipe("length")
    planned = next(plan_runs(recipe, Ask(backbone="untrained", prompts=1, seeds=1)))
    dice = np.random.default_rng(0)
    pictures = np.zeros((num_pictures, *SIZE, 3), np.uint8)
    pictures[num_pictures // 2 :] = dice.integers(0, 256, pictures[num_pictures // 2 :].shape)
    return Seen(job_of(planned, recipe, "hsv").data, Drawn(pictures, FPS), [])


def pictures_of(blocks: int) -> int:
    """Three latents a block, four pictures a latent, but one of the first."""
    return 4 * (3 * blocks - 1) + 1


@pytest.mark.parametrize(
    ("blocks", "lengths"), [(3, []), (7, [5]), (11, [5]), (13, [5, 10]), (27, [5, 10, 20])]
)
def test_only_lengths_that_a_video_has_are_told(blocks, lengths):
    """As asked for by --seconds 2, 5, 8, 10 and 20; whole blocks leave a video up to 0.6 s short."""
    told = score(run_of(pictures_of(blocks)), ["length"])["length"]
    assert [each.name for each in told] == [f"dynamic_degree_{s}s" for s in lengths]


def test_a_minute_is_told_at_every_length():
    seen = run_of(pictures_of(80))
    told = score(seen, ["length"])["length"]
    clips = seen.dynamic_degree.details["clips"]
    assert len(clips) == 30 and not any(clips[:14]) and all(clips[16:])
    assert [each.name for each in told] == [f"dynamic_degree_{s}s" for s in LENGTHS_S]
    assert [each.n for each in told] == [2, 5, 10, 15, 22, 30]
    assert [each.value for each in told] == [np.mean(clips[: each.n]) for each in told]


class LeftColumn(ProbeWitness):
    """Sees an actor in the first column of cells of every picture that is white, and nowhere else."""

    def __init__(self):
        """Needs no probe."""

    def covered(self, pictures):
        cells = np.zeros((len(pictures), 8, 13), bool)
        cells[:, :, 0] = (pictures.mean(axis=(1, 2, 3)) > 127)[:, None]
        return cells


def trace_line(block, admitted, *, evicted=(), edge=0.5, cut=False):
    first = [max(0, 4 * frame - 3) for frame in range(3 * block, 3 * block + 3)]
    return {
        "block": block, "first_frame": 3 * block, "first_pictures": first, "clears_prior": cut,
        "admitted": [[[*entry] for entry in admitted]], "evicted": [[[*entry] for entry in evicted]],
        "bank_edge_share": [edge],
    }  # fmt: skip


@pytest.mark.parametrize(("cut", "edge", "share", "filled"), [(False, 0.75, 2 / 4, 4), (True, 0.5, 1 / 3, 3)])
def test_what_a_bank_is_made_of_at_the_last_cut_or_at_the_end(monkeypatch, cut, edge, share, filled):
    """Frame 2 is white in its last picture alone, frame 4 in none, frame 7 in all."""
    pictures = np.zeros((33, 128, 208, 3), np.uint8)
    pictures[8] = pictures[25:29] = 255
    trace = [
        trace_line(0, [(1, 0, 3, 0.0), (2, 4, 0, 1.0), (2, 5, 6, 1.5)], edge=0.25),
        trace_line(1, [(4, 1, 0, 2.0)], edge=0.5),
        trace_line(2, [(7, 2, 0, 1.0)], evicted=[(1, 0, 3, 0.0)], edge=0.75, cut=cut),
    ]
    recipe = find_recipe("rules")
    data = job_of(next(plan_runs(recipe, Ask(prompts=1, seeds=1))), recipe, "hsv").data
    monkeypatch.setattr("recap.reproduction.scoring._probe", LeftColumn)
    told = score(Seen(data, Drawn(pictures, FPS), trace), ["content"])["content"]
    assert {each.name: each.value for each in told} == {
        "bank_edge_share": edge, "bank_actor_share": pytest.approx(share)
    }  # fmt: skip
    assert all(each.n == filled for each in told)
