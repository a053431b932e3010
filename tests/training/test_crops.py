"""The crop embedding learns, and its pool shows each instance in several views."""

from __future__ import annotations

import math

import pytest
import torch

from recap.backbones.tiny.reading import read_prompt
from recap.backbones.tiny.vocabulary import ACTORS, parse_prompt
from recap.eval.judges.crops import SIDE, CropNet
from training import strangers
from training.crops import (
    VIEWS,
    Drawer,
    Pool,
    auc,
    check,
    contrast_loss,
    equal_error,
    reddened,
    script_of,
    train,
    vary,
)


def test_views_show_the_same_instances_elsewhere(world):
    """The renderer draws their colours before anything that a view changes."""
    scripts = [script_of(3, 7, view) for view in range(VIEWS)]
    assert len({tuple((a.kind, a.hue) for a in script.actors) for script in scripts}) == 1
    assert len({script.scene for script in scripts}) > 1
    colours = [world.film([script], 3, 2, first_index=7).colours for script in scripts]
    for each in colours[1:]:
        torch.testing.assert_close(each, colours[0])
    other = world.film([script_of(3, 8, 0)], 3, 2, first_index=8)
    assert not torch.allclose(other.colours, colours[0], atol=0.05)


def made_pool(num: int = 24, views: int = 4) -> Pool:
    """Squares on noise; an instance is a colour, its kind the size of the square."""
    generator = torch.Generator().manual_seed(0)
    colours = torch.rand(num, 3, generator=generator)
    crops = 0.4 + 0.2 * torch.rand(num * views, 3, SIDE, SIDE, generator=generator)
    for row in range(num * views):
        edge = 6 + 4 * (row // views % 3)
        crops[row, :, edge:-edge, edge:-edge] = colours[row // views][:, None, None]
    instance = torch.arange(num).repeat_interleave(views)
    return Pool((crops * 255).byte(), instance, instance % 3, colours[instance])


def test_batches_pair_views_of_one_instance():
    pool = made_pool()
    one, other = Drawer(pool, 1).draw()
    assert torch.equal(pool.instance[one], pool.instance[other]) and all(
        a != b for a, b in zip(one, other, strict=True)
    )
    assert len(set(pool.instance[one].tolist())) == len(one) == 18
    assert len(set(pool.kind[one].tolist())) == 3


def test_the_net_learns_to_tell_a_few_instances_apart():
    torch.manual_seed(0)
    pool, net = made_pool(), CropNet((16, 16, 16))
    before = check(net, pool)
    train(pool, net, 5, "cpu", max_steps=40)
    after = check(net.eval(), pool)
    assert after["auc_same_kind"] > 0.97 > before["auc_same_kind"]
    assert after["equal_error"] < 0.1 and 0 < after["just_noticeable"] < 0.5
    assert after["likeness_same"] > after["same_from"] > after["likeness_same_kind"]


def test_the_loss_asks_for_the_partner():
    vectors = torch.eye(4)
    assert contrast_loss(vectors, vectors) < 0.01
    assert contrast_loss(vectors, vectors.roll(1, 0)) > 5


def test_covered_and_moved_crops_keep_their_range():
    torch.manual_seed(0)
    crops = torch.rand(16, 3, SIDE, SIDE)
    varied = vary(crops)
    assert varied.shape == crops.shape and varied.min() >= 0 and varied.max() <= 1
    assert not torch.allclose(varied, crops)
    assert 0 < (reddened(crops) - crops).abs().mean() < 0.05


def test_errors_of_known_likenesses():
    same, others = torch.tensor([0.9, 0.8, 0.7, 0.4]), torch.tensor([0.5, 0.3, 0.2, 0.1])
    assert auc(same, others) == 15 / 16
    assert auc(others, others) == 0.5 and math.isnan(auc(same, others[:0]))
    mark, error = equal_error(same, others)
    assert 0.4 < mark <= 0.5 and error == 0.25


def test_the_prompts_of_strangers_are_read_and_not_those_of_training():
    assert len(set(strangers.PROMPTS)) == 12
    casts = [read_prompt(prompt).prompt.actors for prompt in strangers.PROMPTS]
    assert {len(cast) for cast in casts} == {0, 1, 2} and all(set(cast) <= set(ACTORS) for cast in casts)
    with pytest.raises(ValueError, match="lion"):
        parse_prompt(strangers.PROMPTS[0])
