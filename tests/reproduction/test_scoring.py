"""What is told of a run that was never drawn, by its pictures alone."""

from __future__ import annotations

import numpy as np
import pytest

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
