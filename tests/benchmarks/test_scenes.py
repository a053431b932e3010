"""The content of synthetic scenes moves exactly by their flow."""

from __future__ import annotations

import pytest
import torch

from benchmarks.scenes import FLEETING, SCENES, Rendered, half, make_scene, piece, render
from recap.flow.warp import backtrace, inside, sample

SIZE, COUNT = (96, 160), 41


@pytest.fixture(scope="module")
def drawn() -> dict[str, Rendered]:
    return {name: render(make_scene(name, SIZE, COUNT)) for name in SCENES}


@pytest.mark.parametrize("name", SCENES)
def test_shapes_and_range(drawn: dict[str, Rendered], name: str) -> None:
    clip = drawn[name]
    assert clip.pictures.shape == (COUNT, 3, *SIZE) and clip.actor.shape == (COUNT, *SIZE)
    assert clip.forward.shape == clip.backward.shape == (COUNT - 1, 2, *SIZE)
    assert float(clip.pictures.min()) >= 0 and float(clip.pictures.max()) <= 1
    assert int(clip.actor.max()) <= len(make_scene(name, SIZE, COUNT).actors)


@pytest.mark.parametrize("name", [name for name in SCENES if name != "demo"])
def test_the_previous_picture_explains_what_was_visible(drawn: dict[str, Rendered], name: str) -> None:
    clip = drawn[name]
    predicted = sample(clip.pictures[:-1], backtrace(clip.backward))
    error = (predicted - clip.pictures[1:]).abs().amax(dim=1)[clip.traceable]
    assert float(error.max()) < 0.12 and float(error.mean()) < 0.002


def test_soft_edges_cost_little(drawn: dict[str, Rendered]) -> None:
    clip = drawn["demo"]
    predicted = sample(clip.pictures[:-1], backtrace(clip.backward))
    error = (predicted - clip.pictures[1:]).abs().amax(dim=1)[clip.traceable]
    assert float(error.mean()) < 0.005 and float((error > 0.12).float().mean()) < 0.01


@pytest.mark.parametrize("name", SCENES)
def test_flow_there_and_back_is_zero_for_visible_content(drawn: dict[str, Rendered], name: str) -> None:
    clip = drawn[name]
    forward = sample(clip.forward, backtrace(clip.backward))
    cycle = torch.linalg.vector_norm(clip.backward + forward, dim=1)
    assert float(cycle[clip.traceable].max()) < 1e-3


def test_nothing_moves_in_static(drawn: dict[str, Rendered]) -> None:
    clip = drawn["static"]
    assert float(clip.forward.abs().max()) == 0 and bool(clip.traceable.all())
    assert torch.equal(clip.pictures[0], clip.pictures[-1])


def test_pan_moves_the_background_against_the_camera(drawn: dict[str, Rendered]) -> None:
    clip = drawn["pan"]
    assert torch.allclose(clip.forward[:, 0], torch.tensor(-SIZE[1] / 72), atol=1e-4)
    assert float(clip.forward[:, 1].abs().max()) == 0
    fresh = ~inside(backtrace(clip.backward), SIZE)
    assert bool(fresh[:, :, -2:].all()) and not bool(fresh[:, :, :-4].any())


def test_pan_return_ends_where_it_began(drawn: dict[str, Rendered]) -> None:
    clip = drawn["pan-return"]
    assert torch.allclose(clip.pictures[0], clip.pictures[-1], atol=1e-5)


def area(clip: Rendered, number: int) -> list[int]:
    counts: list[int] = (clip.actor == number).sum(dim=(1, 2)).tolist()
    return counts


def test_stories(drawn: dict[str, Rendered]) -> None:
    entering = area(drawn["entering"], 1)
    assert entering[0] == 0 and entering[-1] > 0
    hiding = area(drawn["hiding"], 1)
    assert min(hiding[0], hiding[COUNT // 2], hiding[-1]) > 0 and hiding.count(0) >= 2
    returning = area(drawn["returning"], 1)
    assert min(returning[0], returning[-1]) > 0 and returning[COUNT // 2] == 0


def test_burst_is_ten_times_as_fast(drawn: dict[str, Rendered]) -> None:
    speed = torch.linalg.vector_norm(drawn["burst"].forward, dim=1).amax(dim=(1, 2))
    calm, wild = speed[: COUNT // 2 - 1].max(), speed[COUNT // 2 + 1 :].min()
    assert float(wild / calm) == pytest.approx(10, rel=1e-3)


def test_flow_of_the_background_is_its_own(drawn: dict[str, Rendered]) -> None:
    """The background under an actor's path stays; no pixel gets the motion of what covers it later."""
    clip = drawn["entering"]
    background = clip.actor[:-1] == 0
    assert float(clip.forward.permute(0, 2, 3, 1)[background].abs().max()) == 0


def test_half_keeps_motion_in_its_own_pixels(drawn: dict[str, Rendered]) -> None:
    flow = drawn["returning"].forward
    small = half(flow[None])
    assert small.shape == (1, COUNT - 1, 2, SIZE[0] // 2, SIZE[1] // 2)
    # Every motion is that of some object.
    motions = torch.cat([flow.flatten() / 2, torch.zeros(1)]).unique()
    assert bool(torch.isin(small.flatten(), motions).all())


def test_seeds_change_the_paint_and_nothing_else() -> None:
    first, again, other = (render(make_scene("entering", SIZE, 9, seed)) for seed in (0, 0, 1))
    assert torch.equal(first.pictures, again.pictures) and not torch.equal(first.pictures, other.pictures)
    assert torch.equal(first.actor, other.actor)


def test_unknown_scenes_and_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="did you mean 'entering'"):
        make_scene("enterin")
    with pytest.raises(ValueError, match="at least 32"):
        make_scene("pan", (16, 160))
    with pytest.raises(ValueError, match="at least 2"):
        make_scene("pan", SIZE, 1)


@pytest.mark.parametrize("name", ["demo", "rain", "ripples"])
def test_a_piece_is_drawn_as_in_the_whole(drawn: dict[str, Rendered], name: str) -> None:
    whole, part = drawn[name], render(piece(make_scene(name, SIZE, COUNT), 11, 20))
    assert torch.equal(part.pictures, whole.pictures[11:20]) and torch.equal(part.actor, whole.actor[11:20])
    assert torch.equal(part.backward, whole.backward[11:19])
    assert torch.equal(part.forward, whole.forward[11:19])


@pytest.mark.parametrize(("name", "share", "actors"), [("rain", 0.045, 2), ("ripples", 0.58, 1)])
def test_texture_is_everywhere_at_all_times_and_subjects_come_late(
    drawn: dict[str, Rendered], name: str, share: float, actors: int
) -> None:
    """Texture has no counterpart in the previous picture, and none of it counts as a subject."""
    clip = drawn[name]
    fleeting = clip.actor == FLEETING
    assert float(fleeting.float().mean()) == pytest.approx(share, rel=0.15)
    assert not bool((clip.traceable & fleeting[1:]).any())
    masks = [(clip.actor == number).flatten(1) for number in range(1, actors + 1)]
    first = [int(mask.any(dim=1).nonzero()[0]) for mask in masks]
    assert min(first) > 0.3 * COUNT and sorted(set(first)) == first
