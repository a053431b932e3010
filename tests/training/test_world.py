"""The ground truth of the training world matches the clips it renders."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from recap.backbones.tiny.vocabulary import ACTORS, MAX_ACTORS, TEXT_LENGTH, parse_prompt, token_ids
from recap.flow.warp import backtrace, inside, sample
from training.dice import Dice
from training.script import ActorScript, Script
from training.sprites import roll_looks
from training.staging import roll_staging
from training.world import NAMED_SHARE, World, block_of, block_pictures, named_in_blocks

SIZE = (128, 208)


@pytest.fixture(scope="module")
def clips(world):
    return world.sample(7, range(4), flow=True)


@pytest.fixture(scope="module")
def openings(world):
    return world.sample(9, range(100), span=(0, 9))


def test_shapes(clips):
    assert clips.pictures.shape == (4, 81, 3, *SIZE)
    assert clips.pictures.min() >= 0 and clips.pictures.max() <= 1
    assert clips.tokens.shape == (4, 7, TEXT_LENGTH)
    assert clips.kinds.shape == (4, MAX_ACTORS) and clips.colours.shape == (4, MAX_ACTORS, 3)
    assert clips.visibility.shape == (4, MAX_ACTORS, 81) and clips.boxes.shape == (4, MAX_ACTORS, 81, 4)
    assert clips.instances.shape == (4, 81, *SIZE) and clips.instances.dtype == torch.uint8
    assert clips.forward_flow.shape == clips.backward_flow.shape == (4, 80, 2, *SIZE)


def test_a_clip_depends_only_on_its_seed_and_index(world, clips):
    alone = world.sample(7, [3])
    torch.testing.assert_close(alone.pictures[0], clips.pictures[3], atol=1e-5, rtol=0)
    assert torch.equal(alone.tokens[0], clips.tokens[3])
    assert torch.equal(alone.kinds[0], clips.kinds[3])
    assert not torch.equal(world.sample(8, [3], span=(0, 1)).pictures, alone.pictures[:, :1])


def test_a_span_is_a_part_of_the_clip(world, clips):
    part = world.sample(7, [1, 2], span=(30, 33), flow=True)
    torch.testing.assert_close(part.pictures, clips.pictures[1:3, 30:33], atol=1e-5, rtol=0)
    torch.testing.assert_close(part.forward_flow, clips.forward_flow[1:3, 30:32], atol=1e-3, rtol=0)
    torch.testing.assert_close(part.boxes, clips.boxes[1:3, :, 30:33], atol=1e-3, rtol=0)
    with pytest.raises(ValueError, match="span"):
        world.sample(7, [1], span=(80, 82))


def test_a_longer_clip_begins_with_the_same_pictures(world, clips):
    longer = world.sample(7, [0], num_pictures=105)
    # The last picture's facing depends on the next step, so it is left out.
    torch.testing.assert_close(longer.pictures[0, :79], clips.pictures[0, :79], atol=1e-5, rtol=0)
    assert longer.tokens.shape[1] == 9


def test_blocks_are_nine_pictures_then_twelve():
    assert [block_pictures(block) for block in range(3)] == [(0, 9), (9, 21), (21, 33)]
    for block in range(7):
        first, last = block_pictures(block)
        assert block_of(torch.arange(first, last)).tolist() == [block] * (last - first)


def test_captions_name_actors_that_stay(clips):
    """The first names all visible actors; later ones those visible at the end of this block and of the next two."""
    for row in range(4):
        ends = [block_pictures(block)[1] - 1 for block in range(7)]
        for block, caption in enumerate(clips.captions(row)):
            shares = clips.visibility[row, :, ends[block : block + 3]].amin(-1)
            if block == 0:
                shares = clips.visibility[row, :, :9].amax(-1)
            visible = {
                ACTORS[int(k)] for k, v in zip(clips.kinds[row], shares, strict=True) if v > NAMED_SHARE
            }
            assert set(parse_prompt(caption).actors) == visible
            assert token_ids(caption, as_named=True) == clips.tokens[row, block].tolist()


def test_captions_name_actors_from_left_to_right(openings):
    clips = openings
    middle = clips.boxes[..., 0] + clips.boxes[..., 2]
    compared = 0
    for row in range(len(clips.kinds)):
        asked = [ACTORS.index(actor) for actor in parse_prompt(clips.captions(row)[0]).actors]
        slots = [clips.kinds[row].tolist().index(kind) for kind in asked]
        columns = middle[row, slots, 4].tolist()
        assert columns == sorted(columns)
        compared += len(slots) > 1 and asked != sorted(asked)
    assert compared >= 3, "some of them in another order than the vocabulary's"


def test_a_script_lists_actors_from_left_to_right(world):
    cast = tuple(ActorScript(kind) for kind in ("ghost", "bus", "fox"))
    clips = world.film([Script("meadow", actors=cast[:2]), Script("meadow", actors=cast)], 4, num_pictures=9)
    assert clips.captions(0) == ["a ghost and a bus in a meadow by day"]
    assert clips.captions(1) == ["a ghost, a bus and a fox in a meadow by day"]
    for row, count in ((0, 2), (1, 3)):
        columns = clips.boxes[row, :count, 0, 0]
        assert (columns.diff() > 0).all()


def test_the_cast_comes_and_goes():
    """The shares of clips by number of actors, and of actors by behaviour, are as specified."""
    staging = roll_staging(Dice(5, range(1500)), 81)
    count = (staging.kinds >= 0).sum(1)
    shares = torch.bincount(count, minlength=4) / len(count)
    torch.testing.assert_close(shares, torch.tensor([0.12, 0.40, 0.40, 0.08]), atol=0.04, rtol=0)
    cast = staging.kinds >= 0
    seen = (staging.paths.x > 0) & (staging.paths.x < SIZE[1]) & cast[..., None]
    opens, stays = seen[..., :9].any(-1), seen.all(-1)
    for share in (stays, ~opens, opens & ~stays):
        assert 0.25 < share[cast].float().mean() < 0.42
    assert 0.2 < (~opens.any(1)).float().mean() < 0.4, "clips that begin empty"


def test_nobody_stands_still():
    staging = roll_staging(Dice(6, range(300)), 81)
    x, y = staging.paths.x, staging.paths.y
    seen = (x > 0) & (x < SIZE[1]) & (staging.kinds >= 0)[..., None]
    both = seen[..., 1:] & seen[..., :-1]
    step = (x.diff() ** 2 + y.diff() ** 2).sqrt() * both
    mean = (step.sum(-1) / both.sum(-1))[both.sum(-1) > 12]
    # In pixels per picture.
    assert mean.min() > 0.4 and step.sum() / both.sum() > 2.2


@pytest.mark.slow
def test_the_object_in_front_hides_nobody_in_the_first_block(openings):
    """Nearly all first blocks show every actor that is completely inside the picture."""
    dice = Dice(9, range(100))
    roll_looks(dice, MAX_ACTORS)
    staging = roll_staging(dice, 81)
    assert 3 < staging.front.sum() < 20
    crowd = (staging.kinds >= 0).sum(1)[staging.front]
    assert ((crowd == 1) | (crowd == 2)).all()
    clips = openings
    assert torch.equal(clips.kinds, staging.kinds)
    x, half = staging.paths.x[..., :9], 0.35 * staging.paths.size[..., :9]
    inside = (x > half) & (x < SIZE[1] - half) & (staging.kinds >= 0)[..., None]
    hidden = ((clips.visibility < 0.5) & inside).any(2).any(1)
    assert hidden.sum() <= 0.03 * inside.any(2).any(1).sum()


def test_an_actor_that_walks_out_is_not_named():
    visible = torch.ones(1, 1, 81)
    # Gone at the ends of blocks 3 and 4: pictures 44 and 56.
    visible[..., 40:60] = 0
    assert named_in_blocks(visible, 0).tolist() == [[[True, False, False, False, False, True, True]]]
    visible = torch.zeros(1, 1, 81)
    visible[..., 2] = 1
    assert named_in_blocks(visible, 0).tolist() == [[[True] + [False] * 6]]
    assert not named_in_blocks(visible[..., 3:], 3).any()


def test_empty_slots_are_never_visible(clips):
    assert (clips.visibility[clips.kinds < 0] == 0).all()
    assert (clips.boxes[clips.kinds < 0] == 0).all()


def test_boxes_contain_their_actors(clips):
    y, x = torch.meshgrid(torch.arange(SIZE[0]), torch.arange(SIZE[1]), indexing="ij")
    for slot in range(MAX_ACTORS):
        own = clips.instances == slot + 1
        x0, y0, x1, y1 = clips.boxes[:, slot, :, :, None, None].unbind(2)
        within = (x >= x0 - 1.5) & (x <= x1 + 1.5) & (y >= y0 - 1.5) & (y <= y1 + 1.5)
        assert not (own & ~within).any()


def agreement(flow, source, target):
    """Return the errors of target pictures warped to the source's pixels, where both show the same object."""
    positions = backtrace(flow)
    carried = sample(target[0], positions)
    owner = source[1].float()[:, :, None]
    # Edges have mixed colours: keep pixels whose neighbourhood has one owner in both pictures.
    owners = [each.flatten(0, 1) for each in (owner, target[1].float()[:, :, None])]
    pure = [F.max_pool2d(each, 9, 1, 4) == -F.max_pool2d(-each, 9, 1, 4) for each in owners]
    in_source, in_target = (each.unflatten(0, owner.shape[:2]) for each in pure)
    same = (sample(target[1].float()[:, :, None], positions) - owner).abs() < 1e-3
    same &= in_source & (sample(in_target.float(), positions) > 0.999) & inside(positions, SIZE)[:, :, None]
    error = (carried - source[0]).abs().mean(2, keepdim=True)
    actors = same & (owner > 0)
    return error[same & (owner == 0)], error[actors]


@pytest.mark.parametrize("way", ["forward", "backward"])
def test_flow_carries_pictures_onto_each_other(clips, way):
    pairs = torch.arange(0, 80, 7)
    early = (clips.pictures[:, pairs], clips.instances[:, pairs])
    late = (clips.pictures[:, pairs + 1], clips.instances[:, pairs + 1])
    source, target = (early, late) if way == "forward" else (late, early)
    scene, actors = agreement(getattr(clips, f"{way}_flow")[:, pairs], source, target)
    assert len(actors) > 5_000
    for errors in (scene, actors):
        assert errors.mean() < 0.003
        assert errors[::4].quantile(0.99) < 0.03


def test_colours_do_not_follow_from_the_kind(world):
    scripts = [Script("meadow", actors=(ActorScript("fox"),))] * 12
    colours = world.film(scripts, seed=5, num_pictures=1).colours[:, 0]
    assert colours.std(0).min() > 0.08


def test_a_returning_actor_keeps_its_colours(world):
    script = Script("beach", "night", (ActorScript("cat", visits=((0, 30), (60, None))),))
    clips = world.film([script], seed=3, num_pictures=105)
    assert clips.visibility[0, 0, 0] > 0.9 and clips.visibility[0, 0, -1] > 0.9
    assert (clips.visibility[0, 0, 31:59] == 0).all()

    def mean(picture: int) -> torch.Tensor:
        return clips.pictures[0, picture].permute(1, 2, 0)[clips.instances[0, picture] == 1].mean(0)

    torch.testing.assert_close(mean(0), mean(104), atol=0.02, rtol=0)
    torch.testing.assert_close(mean(0), clips.colours[0, 0], atol=0.05, rtol=0)


def test_a_script_of_prompts(world):
    segments = [("a fox in a city", 33), ("an empty city", 36), ("a fox and a bus in a city", 36)]
    script = Script.from_segments(segments, camera="sway")
    assert script.actors == (ActorScript("fox", ((0, 33), (69, None))), ActorScript("bus", ((69, None),)))
    clips = world.film([script], seed=1, num_pictures=105)
    assert clips.tokens[0].tolist() == [token_ids(text) for text, _ in segments for _ in range(3)]
    assert (clips.visibility[0, :, 34:69] == 0).all()
    assert (clips.visibility[0, :2, 95] > 0.5).all()


def test_an_empty_scene_is_named_so(world):
    clips = world.film([Script("sea", "evening")], seed=2, num_pictures=21)
    assert clips.captions(0) == ["an empty sea in the evening"] * 2
    assert (clips.instances == 0).all()


def test_the_object_in_front_hides_actors(world):
    dice = Dice(9, range(100))
    roll_looks(dice, MAX_ACTORS)
    rows = roll_staging(dice, 81).front.nonzero()[:6, 0].tolist()
    clips = world.sample(9, rows, span=(20, 64))
    gone = (clips.visibility < 0.05) & (clips.boxes[..., 2] - clips.boxes[..., 0] > 30)
    # Completely inside the picture, but not visible.
    assert gone.any(2).any(1).float().mean() > 0.8


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: Script("moon"), "scene"),
        (lambda: Script("sea", actors=(ActorScript("wolf"),)), "kind"),
        (lambda: Script("sea", actors=(ActorScript("fox", ((5, 9), (8, 20))),)), "visits"),
        (lambda: Script.from_segments([("a fox in a city", 9), ("a fox on a beach", 9)]), "segments"),
        (lambda: World(torch.zeros(3, 4, 8, 8)), "atlas"),
    ],
)
def test_refusals_name_the_field(make, word):
    with pytest.raises(ValueError, match=word):
        make()


@pytest.mark.cuda
def test_the_gpu_renders_the_same_clip(world, atlas):
    on_gpu = World(atlas, "cuda").sample(7, range(2), num_pictures=21)
    on_cpu = world.sample(7, range(2), num_pictures=21)
    assert (on_gpu.pictures.cpu() - on_cpu.pictures).abs().mean() < 1e-3
    assert torch.equal(on_gpu.tokens.cpu(), on_cpu.tokens)
