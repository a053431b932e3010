"""`flow-texture` keeps late subjects through rain and ripples, and is `flow` where there is no texture."""

from __future__ import annotations

import pytest
import torch

from benchmarks.scenes import half, make_scene, render
from benchmarks.texture import CALM, SPEC, agreement, watch
from recap.admission.flow import FlowNovelty, FlowNoveltyConfig
from recap.admission.flow_texture import (
    FlowTexture,
    FlowTextureConfig,
    colour_slots,
    count_colours,
    familiar_colours,
    settled,
    vanishing,
)
from recap.contracts import Flow
from recap.flow.classical import ClassicalFlow
from recap.flow.exact import ExactFlow

SIZE = SPEC.picture_size


def seconds(length):
    return SPEC.num_pictures(round(length / 0.75) * SPEC.frames_per_block)


# --- what it is for ------------------------------------------------------------------------------------------
# The same scenes at 60 s, with more seeds, are measured by `python -m benchmarks.texture`; see docs/admissions.md.


@pytest.mark.slow
@pytest.mark.parametrize("flow", ["exact", "classical"])
@pytest.mark.parametrize("name", ["rain", "ripples"])
def test_late_subjects_are_kept_and_texture_has_few_slots(name, flow):
    plain, picky = watch(make_scene(name, SIZE, seconds(21)), flow)
    assert plain.on_texture > 0.85
    assert picky.kept >= 0.9 and picky.on_texture <= 0.3
    assert picky.kept >= plain.kept


@pytest.mark.parametrize("flow", ["exact", "classical"])
@pytest.mark.parametrize("name", CALM)
def test_without_texture_it_agrees_with_flow(name, flow):
    assert agreement(*watch(make_scene(name, SIZE, seconds(9)), flow)) >= 0.95


# --- its parts -----------------------------------------------------------------------------------------------


def test_what_is_gone_in_the_next_picture_vanishes_and_what_stays_does_not():
    stream = torch.zeros(1, 5, 3, 6, 6)
    stream[:, 1, :, 2, 2] = 1.0  # for one picture
    stream[:, 1:, :, 4, 4] = 1.0  # for good
    stream[:, 4, :, 0, 0] = 1.0  # in the last picture: nobody knows yet
    still = Flow(*torch.zeros(2, 1, 4, 2, 6, 6))
    lost = vanishing(stream, still, horizon=2, cycle_threshold_px=2.0, photometric_threshold=0.2)
    assert lost.nonzero().tolist() == [[0, 0, 2, 2], [0, 1, 0, 0], [0, 2, 0, 0]]
    # The place of the late pixel was black before: that look is lost, which is as true.


def test_what_moves_or_leaves_with_the_flow_does_not_vanish():
    stream = torch.zeros(1, 4, 3, 4, 8)
    for picture in range(4):
        stream[:, picture, :, 1, 2 * picture : 2 * picture + 1] = 1.0
    flow = torch.zeros(1, 3, 2, 4, 8)
    flow[:, :, 0] = 2.0
    lost = vanishing(stream, Flow(flow, -flow), horizon=3, cycle_threshold_px=0.5, photometric_threshold=0.2)
    assert not lost.any()


def test_a_drop_of_one_picture_is_not_in_the_settled_ones():
    stream = torch.full((1, 5, 3, 4, 4), 0.25)
    stream[:, 2, :, 1, 1] = 1.0
    assert torch.allclose(settled(stream), stream[:, :1].expand(-1, 4, -1, -1, -1))
    assert torch.equal(settled(stream[:, :2]), stream[:, 1:2])


def test_colours_are_familiar_where_they_were_shown_and_next_door():
    pictures = torch.full((1, 2, 3, 4, 16), 0.1)
    pictures[..., 12:] = 0.9  # the last of four places
    slots = colour_slots(pictures, 4, 4)
    counts = count_colours(slots, (1, 4), 4)
    assert counts.sum() == 2 * 4 * 16 and counts[0, 3, 63] == 32 and counts[0, 0, 0] == 32
    known = familiar_colours(counts, (1, 4), 4, 0.1).view(4, 64)
    assert known[:, 0].all() or not known[3, 0]
    assert known[2, 63] and known[3, 63] and not known[0, 63] and not known[1, 63]


def test_a_calm_place_is_flow_bit_for_bit():
    seen = render(make_scene("returning", (96, 160), 69))
    flows = [half(f)[None] for f in (seen.forward, seen.backward)]
    rules = [
        FlowNovelty(FlowNoveltyConfig(), ExactFlow(*flows), (6, 10), 16, 4),
        FlowTexture(FlowTextureConfig(), ExactFlow(*flows), (6, 10), 16, 4),
    ]
    for part in (slice(0, 9), slice(9, 21), slice(21, 33), slice(33, 45), slice(45, 57), slice(57, 69)):
        plain, picky = (rule.notice(seen.pictures[None, part]) for rule in rules)
        assert torch.equal(plain.fired, picky.fired) and torch.equal(plain.score, picky.score)


def test_state_continues_bit_for_bit_and_scores_are_returned_once():
    scene = render(make_scene("rain", (96, 160), 93))
    parts = [scene.pictures[None, a:b] for a, b in ((0, 9), *((s, s + 12) for s in range(9, 93, 12)))]

    def fresh():
        return FlowTexture(FlowTextureConfig(), ClassicalFlow(), (6, 10), 16, 4)

    straight = fresh()
    whole = [straight.notice(part).score for part in parts]
    for stop in (1, 2, 4):
        first, second = fresh(), fresh()
        head = [first.notice(part).score for part in parts[:stop]]
        state = first.state()
        copy = {name: value.clone() for name, value in state.items()}
        first.notice(parts[stop])
        assert all(torch.equal(state[name], value) for name, value in copy.items()), (
            "a state handed out stays"
        )
        second.load_state(copy)
        tail = [second.notice(part).score for part in parts[stop:]]
        assert all(torch.equal(a, b) for a, b in zip(whole, head + tail, strict=True))
        assert all(torch.equal(straight.state()[name], value) for name, value in second.state().items())


def test_blocks_of_one_frame_are_taken():
    rule = FlowTexture(FlowTextureConfig(), ClassicalFlow(), (4, 4), 16, 1)
    for _ in range(4):
        assert torch.isfinite(rule.notice(torch.rand(1, 1, 3, 64, 64)).score).all()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"restless_long": 1.5}, r"restless_long is 1.5: must lie in 0\.\.1"),
        ({"familiar_share": -0.1}, "familiar_share is -0.1"),
        ({"fading": float("nan")}, "fading is nan"),
        ({"horizon_pictures": 0}, "horizon_pictures is 0: must be 1 to 64"),
        ({"colour_levels": 40}, "colour_levels is 40: must be 2 to 16"),
        ({"percentile": 101.0}, "percentile is 101.0"),
    ],
)
def test_bad_settings_are_refused_with_numbers(settings, message):
    with pytest.raises(ValueError, match=message):
        FlowTextureConfig(**settings)
