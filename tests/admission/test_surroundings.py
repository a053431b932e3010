"""What the camera has shown and brings back is not new; what comes in before it is."""

from __future__ import annotations

import torch

from benchmarks.scenes import make_scene, render
from benchmarks.scenes.scene import make_actor, make_scene_of
from recap.admission.flow import FlowNovelty, FlowNoveltyConfig
from recap.flow.exact import ExactFlow
from tests.admission.test_flow_novelty import LENGTH, SIZE, blocks_of, watch

SWAY = 28.0  # pixels to either side
PERIOD = 24  # pictures


def swaying(*actors, length=LENGTH):
    """A camera that goes from the middle to the right and back and so on, as a triangle wave."""
    clock = torch.arange(length) / PERIOD
    across = SWAY * (2 * (2 * (clock % 1) - 1).abs() - 1).neg() + SWAY
    return make_scene_of(SIZE, torch.stack((across, torch.zeros(length)), dim=1), actors)


def fired_per_picture(scene, **settings):
    seen, fired, _, _ = watch(scene, **settings)
    return seen, (fired > 0).flatten(1).sum(dim=1)


def test_a_swaying_camera_fires_each_strip_once():
    _, fired = fired_per_picture(swaying())
    _, literal = fired_per_picture(swaying(), borders="literal")
    first = fired[: PERIOD // 2 + 2].sum()
    strip = 2 * SWAY * SIZE[0]
    assert first > 0.9 * strip, "what the first half of a sway uncovers is new"
    assert fired[PERIOD // 2 + 2 :].sum() < 0.02 * strip, "and nothing is after it"
    assert literal[PERIOD // 2 + 2 :].sum() > 3 * strip, "by the equation alone every sway is"


def test_a_pan_fires_as_by_the_equation_alone():
    for downscale in (1, 2):
        _, fired, _, score = watch(make_scene("pan", size=SIZE, num_pictures=LENGTH), downscale)
        _, plain, _, plain_score = watch(
            make_scene("pan", size=SIZE, num_pictures=LENGTH), downscale, borders="literal"
        )
        assert torch.equal(fired, plain) and torch.equal(score, plain_score)


def test_an_actor_that_comes_in_over_known_ground_fires():
    """While the camera comes back from the right, an actor enters from the left, where all has been seen."""
    clock = torch.arange(LENGTH)
    camera = SWAY * 2 * (1 - (clock / 34 - 1).abs()).clamp(min=0)
    place = -26.0 + 2.2 * (clock - 30).clamp(
        min=0
    )  # on the ground; in the picture from where the camera ends
    path = torch.stack([place, torch.full((LENGTH,), 48.0)], dim=1)
    scene = make_scene_of(
        SIZE, torch.stack((camera, torch.zeros(LENGTH)), dim=1), (make_actor("disc", 22.0, path, hue=0.02),)
    )
    seen, fired, _, _ = watch(scene)
    where = seen.actor == 1
    area = int(where.flatten(1).sum(dim=1).max())
    assert area > 1200
    assert ((fired > 0) & where).sum() > 0.7 * area


def test_a_cut_forgets_what_was_beyond_the_border():
    """After a cut the camera pans over a place of the same colours: it is another place, and new."""
    size, count = (32, 48), 33
    pictures = torch.full((1, count, 3, *size), 0.5)
    forward, backward = torch.zeros(2, 1, count - 1, 2, *size)
    step = torch.zeros(count - 1)
    step[:10], step[20:30] = -2.0, 2.0  # to the right for ten pictures; then back, after the cut at pair 14
    backward[0, :, 0], forward[0, :, 0] = -step[:, None, None], step[:, None, None]

    def strips(broken):
        there = forward.clone()
        if broken:
            there[0, 14, 1] = 30.0
        novelty = FlowNovelty(FlowNoveltyConfig(flow_downscale=1), ExactFlow(there, backward), (2, 3), 16, 4)
        fired = torch.cat([novelty.notice(part[None]).fired[0] for part in blocks_of(pictures[0])])
        return (fired[21:] > 0).sum()

    assert strips(broken=False) == 0
    assert strips(broken=True) > 0.9 * 2 * 10 * size[0]


def test_sways_by_fractions_of_a_pixel_do_not_smear_what_is_beyond():
    """0.7 pixels a picture, there and back for long: whole-pixel steps leave the colours as they were."""
    length, reach = 9 + 12 * 14, 21
    across = reach * (1 - ((torch.arange(length) % 60) / 30 - 1).abs())
    scene = make_scene_of(SIZE, torch.stack((across, torch.zeros(length)), dim=1))
    _, fired = fired_per_picture(scene)
    assert fired[:32].sum() > 0.9 * reach * SIZE[0]
    assert fired[32:].sum() < 0.1 * reach * SIZE[0], "in two and a half more sways"


def test_somebody_who_walks_in_slowly_before_a_camera_at_rest_fires_as_by_the_equation_alone():
    scene = make_scene("entering", size=SIZE, num_pictures=LENGTH)
    _, fired, _, score = watch(scene)
    _, plain, _, plain_score = watch(scene, borders="literal")
    assert (plain > 0).any() and torch.equal(fired, plain) and torch.equal(score, plain_score)


def test_its_state_continues_bit_for_bit():
    seen = render(swaying())

    def fresh(start=0):
        flow = ExactFlow(seen.forward[None, start:], seen.backward[None, start:])
        return FlowNovelty(FlowNoveltyConfig(flow_downscale=1), flow, (SIZE[0] // 16, SIZE[1] // 16), 16, 4)

    parts = list(blocks_of(seen.pictures))
    straight = fresh()
    whole = [straight.notice(part[None]).score for part in parts]
    first, second = fresh(), fresh(start=8 + 12)
    head = [first.notice(part[None]).score for part in parts[:2]]
    second.load_state(first.state())
    tail = [second.notice(part[None]).score for part in parts[2:]]
    assert all(torch.equal(a, b) for a, b in zip(whole, head + tail, strict=True))
    second_again = fresh(start=8 + 12)
    state = {name: value for name, value in first.state().items() if not name.startswith("surroundings")}
    second_again.load_state(state)
    assert not torch.equal(second_again.notice(parts[2][None]).score, whole[2]), "it does depend on it"
