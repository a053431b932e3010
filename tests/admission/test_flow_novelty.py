"""Eq. (novelty) and what follows it, against a pixel-by-pixel twin and on scenes whose motion is known."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from benchmarks.scenes import half, make_scene, render
from benchmarks.scenes.scene import make_actor, make_scene_of
from recap.admission.base import retain_top
from recap.admission.flow import FlowNovelty, FlowNoveltyConfig
from recap.flow.exact import ExactFlow
from recap.memory.bank import NoveltyBank
from recap.types import Block, Candidates


def watch(scene, downscale=1, **settings):
    """Stream a rendered scene through novelty with its exact flow; fired pixels and token scores of the clip.

    At full resolution every pixel has one owner, so that the laws below can be stated pixel by pixel.
    """
    seen = render(scene)
    rows, columns = seen.pictures.shape[-2:]
    flows = [seen.forward, seen.backward] if downscale == 1 else [half(seen.forward), half(seen.backward)]
    config = FlowNoveltyConfig(flow_downscale=downscale, **settings)
    novelty = FlowNovelty(config, ExactFlow(*(f[None] for f in flows)), (rows // 16, columns // 16), 16, 4)
    fired, raw, score = [], [], []
    for block in blocks_of(seen.pictures):
        noticed = novelty.notice(block[None])
        fired.append(noticed.fired[0])
        raw.append(noticed.raw[0])
        score.append(noticed.score[0])
    return seen, torch.cat(fired), torch.cat(raw), torch.cat(score)


def blocks_of(pictures):
    start = 0
    while start < len(pictures):
        end = start + (9 if start == 0 else 12)
        yield pictures[start:end]
        start = end


# --- the definition, one pixel at a time ---------------------------------------------------------------------


def naive_novelty(pictures, forward, backward, config):
    """The module's docstring in plain loops; pictures T 3 y x at the flow's size. Returns fired T y x."""
    count, _, height, width = pictures.shape
    fired = np.zeros((count, height, width))
    claimed = np.zeros((height, width))

    def bilinear(image, x, y):
        x, y = min(max(x, 0), width - 1), min(max(y, 0), height - 1)
        x0, y0 = math.floor(x), math.floor(y)
        x1, y1 = min(x0 + 1, width - 1), min(y0 + 1, height - 1)
        a, b = x - x0, y - y0
        top = image[..., y0, x0] * (1 - a) + image[..., y0, x1] * a
        bottom = image[..., y1, x0] * (1 - a) + image[..., y1, x1] * a
        return top * (1 - b) + bottom * b

    for t in range(1, count):
        after = np.zeros_like(claimed)
        for y in range(height):
            for x in range(width):
                dx, dy = backward[t - 1, :, y, x]
                u, v = x + dx, y + dy
                within = -0.5 <= u <= width - 0.5 and -0.5 <= v <= height - 0.5
                there = bilinear(forward[t - 1], u, v) if within else np.zeros(2)
                colour = bilinear(pictures[t - 1], u, v) if within else np.zeros(3)
                cycle = math.hypot(dx + there[0], dy + there[1])
                photometric = np.abs(pictures[t, :, y, x] - colour).mean()
                flagged = (
                    cycle > config.cycle_threshold_px
                    or photometric > config.photometric_threshold
                    or not within
                )
                holds = cycle <= config.cycle_threshold_px or config.claims == "carried"
                ground = bilinear(claimed, u, v) if within and holds else 0.0
                if flagged and ground < 0.5:
                    fired[t, y, x] = cycle + config.photometric_weight * photometric
                    ground = 1.0
                after[y, x] = ground
        claimed = after
    return fired


@pytest.mark.parametrize("claims", ["traced", "carried"])
@pytest.mark.parametrize("seed", range(3))
def test_batched_equals_the_definition_pixel_by_pixel(seed, claims):
    torch.manual_seed(seed)
    config = FlowNoveltyConfig(flow_downscale=1, photometric_threshold=0.45, claims=claims, borders="literal")
    rows, columns, count = 1, 2, 21
    pictures = torch.rand(2, count, 3, 16 * rows, 16 * columns)
    forward, backward = torch.randn(2, 2, count - 1, 2, 16 * rows, 16 * columns) * 1.5
    novelty = FlowNovelty(config, ExactFlow(forward, backward), (rows, columns), 16, 4)
    got = [novelty.notice(pictures[:, part]) for part in (slice(0, 9), slice(9, 21))]
    fired = torch.cat([n.fired for n in got], dim=1)
    score = torch.cat([n.score for n in got], dim=1)
    for row in range(2):
        arrays = (t[row].double().numpy() for t in (pictures, forward, backward))
        want = naive_novelty(*arrays, config)
        assert (want > 0).any() and (want[1:] == 0).any()
        np.testing.assert_allclose(fired[row].numpy(), want, rtol=0, atol=2e-4)
        np.testing.assert_allclose(
            score[row].numpy(), naive_scores(want, rows, columns), rtol=1e-4, atol=1e-5
        )


def naive_scores(fired, rows, columns):
    """Frames 0 = picture 0, j = pictures 4j-3..4j; maximum over 16 x 16 pixels; the block's 90th percentile."""
    raw = []
    for frame in range(1 + (len(fired) - 1) // 4):
        pictures = fired[:1] if frame == 0 else fired[4 * frame - 3 : 4 * frame + 1]
        patches = pictures.reshape(len(pictures), rows, 16, columns, 16)
        raw.append(patches.max(axis=(0, 2, 4)))
    scores = []
    for block in range(len(raw) // 3):
        part = np.stack(raw[3 * block : 3 * block + 3])
        positive = part[part > 0]
        scale = max(np.percentile(positive, 90), 1) if len(positive) else 1
        scores.append(part / scale)
    return np.concatenate(scores)


# --- what it means, on scenes --------------------------------------------------------------------------------

SIZE, LENGTH = (96, 160), 69


def scene(name, **changes):
    return make_scene(name, size=SIZE, num_pictures=LENGTH, **changes)


def shown(seen, number):
    """T Y X: where actor `number` is seen."""
    return seen.actor == number


@pytest.mark.parametrize("downscale", [1, 2])
def test_a_static_scene_fires_nothing(downscale):
    _, fired, raw, score = watch(scene("static"), downscale)
    assert fired.max() == 0 and raw.max() == 0 and score.max() == 0


@pytest.mark.parametrize("downscale", [1, 2])
def test_a_pan_fires_only_the_strip_that_enters(downscale):
    seen, fired, _, score = watch(scene("pan"), downscale)
    steps = half(seen.backward) if downscale == 2 else seen.backward
    ahead = torch.arange(fired.shape[-1]) + steps[:, 0]  # where each pixel was one picture before
    entered = (ahead < -0.5) | (ahead > fired.shape[-1] - 0.5)
    assert entered.any(dim=-1).any(dim=-1).sum() > LENGTH // 2
    assert ((fired[1:] > 0) == entered).float().mean() > 0.999
    assert (fired[1:][entered] > 0).float().mean() > 0.99
    assert score.max() > 0


def crossing(start, speed):
    """A disc of 48 pixels on its way across a resting background, at `speed` pixels a picture."""
    across = (start + speed * torch.arange(LENGTH)).clamp(max=SIZE[1] - 40.0)
    path = torch.stack([across, torch.full((LENGTH,), 48.0)], dim=1)
    return make_scene_of(SIZE, torch.zeros(LENGTH, 2), (make_actor("disc", 24.0, path, hue=0.02),))


@pytest.mark.parametrize(("speed", "share", "edge"), [(1.3, 0.7, 0.01), (3.0, 0.95, 0.0), (5.0, 0.95, 0.0)])
def test_an_entering_actor_fires_when_it_enters_and_not_while_it_moves_on(speed, share, edge):
    """At 1.3 pixels a picture the border column reads its own neighbour every third time, and is claimed so;
    and pixels on the hard edge of the actor, which mix it with the background, fire in under 1 % of its area.
    """
    seen, fired, _, _ = watch(crossing(-24.0, speed))
    where = shown(seen, 1)
    area = where.flatten(1).sum(dim=1)
    first_whole = math.ceil(48 / speed) + 1
    hits = ((fired > 0) & where).flatten(1).sum(dim=1)
    assert hits[:first_whole].sum() > share * area[first_whole]
    assert hits[first_whole:].float().mean() <= edge * area[first_whole]


def test_a_disoccluded_strip_fires_behind_the_actor():
    """The actor is there from the start, so nothing has claimed the ground it leaves."""
    seen, fired, _, _ = watch(crossing(30.0, 5.0))
    uncovered = shown(seen, 0)[1:] & shown(seen, 1)[:-1]
    assert uncovered.sum() > 500
    assert ((fired[1:] > 0) & uncovered).sum() > 0.9 * uncovered.sum()
    assert ((fired[1:] > 0) & ~uncovered).sum() < 0.1 * uncovered.sum()


@pytest.mark.parametrize("name", ["returning", "hiding"])
def test_what_comes_back_fires_again(name):
    """Actor 1 is in sight at first, then gone (out of the picture, or behind a screen), then back."""
    seen, fired, _, _ = watch(scene(name))
    where = shown(seen, 1)
    area = where.flatten(1).sum(dim=1)
    absent = (area <= 0.02 * area.max()).nonzero().flatten()
    assert area[0] > 0.5 * area.max() and len(absent) and area[int(absent[-1]) :].max() > 0.9 * area.max()
    hits = ((fired > 0) & where).flatten(1).sum(dim=1)
    # On its hard edge, which mixes it with the background, a correspondence may break at any time.
    assert hits[: int(absent[0])].max() < 0.03 * area.max()
    assert hits[int(absent[-1]) :].sum() > 0.9 * area.max()


# --- where a claim ends --------------------------------------------------------------------------------------


def stills(*changes, size=(32, 48), each=12):
    """Pictures T 3 Y X of resting shots, one grey after the other, and the pair of pictures at each change.

    `changes` are (grey, mask): what a shot shows where the mask is True; elsewhere it continues with the last.
    """
    shown, pictures = torch.zeros(3, *size), []
    for grey, mask in changes:
        shown = torch.where(mask, grey, shown)
        pictures += [shown] * each
    return torch.stack(pictures), [each * number - 1 for number in range(1, len(changes))]


def flows_broken_at(pairs, count, size, where=slice(None)):
    """Flow of resting pictures whose cycle is off by ten pixels at some pairs, in some columns."""
    forward, backward = torch.zeros(2, 1, count - 1, 2, *size)
    for pair in pairs:
        forward[0, pair, 0, :, where] = 10.0
    return ExactFlow(forward, backward)


def fired_by(pictures, flow, claims):
    rows, columns = pictures.shape[-2] // 16, pictures.shape[-1] // 16
    novelty = FlowNovelty(FlowNoveltyConfig(flow_downscale=1, claims=claims), flow, (rows, columns), 16, 4)
    return torch.cat([novelty.notice(part[None]).fired[0] for part in blocks_of(pictures)]) > 0


@pytest.mark.parametrize(("claims", "share"), [("traced", 1.0), ("carried", 0.0)])
def test_every_change_of_scene_fires_also_the_second_the_third_and_the_way_back(claims, share):
    """The paper: a correspondence that is broken lets what follows register as a new appearance event."""
    size, everywhere = (32, 48), torch.ones(32, 48, dtype=torch.bool)
    pictures, cuts = stills(*((grey, everywhere) for grey in (0.2, 0.6, 0.9, 0.4, 0.2)))
    fired = fired_by(pictures[:57], flows_broken_at(cuts, len(pictures), size), claims)
    assert fired[cuts[0] + 1].all(), "the first cut always fires"
    for cut in cuts[1:]:
        assert fired[cut + 1].float().mean() == share
    between = [t for t in range(57) if t - 1 not in cuts]
    assert not fired[between].any()


@pytest.mark.parametrize(("claims", "share"), [("traced", 1.0), ("carried", 0.0)])
def test_a_late_subject_that_turns_shows_a_new_side(claims, share):
    """It comes in at picture 12 and shows another side at picture 24, where nothing corresponds."""
    size, subject = (32, 48), torch.zeros(32, 48, dtype=torch.bool)
    subject[:, 16:32] = True
    pictures, turns = stills((0.2, ~subject), (0.6, subject), (0.9, subject))
    flow = flows_broken_at(turns, len(pictures), size, slice(16, 32))
    fired = fired_by(pictures[:33], flow, claims)
    assert fired[12][subject].all(), "its entrance"
    assert fired[24][subject].float().mean() == share, "its other side"
    assert not fired[:, ~subject].any()


def test_a_flicker_of_traceable_content_fires_once():
    """The cycle holds and only the colour jumps, twice: the second time the content is claimed."""
    subject = torch.zeros(32, 48, dtype=torch.bool)
    subject[:, 16:32] = True
    pictures, _ = stills((0.2, ~subject), (0.6, subject), (0.9, subject))
    fired = fired_by(pictures[:33], flows_broken_at((), len(pictures), (32, 48)), "traced")
    assert fired[12][subject].all() and not fired[24].any()


def test_who_entered_and_hid_behind_a_screen_fires_on_its_return():
    """Unlike `hiding`, where the disc is there from the start: this one was claimed when it came in."""
    columns = torch.cat([torch.linspace(-24, 80, 34), torch.full((12,), 80.0), torch.linspace(80, 20, 23)])
    path = torch.stack([columns, torch.full((LENGTH,), 48.0)], dim=1)
    rest = torch.tensor([80.0, 48.0]).expand(LENGTH, 2)
    actors = (make_actor("disc", 18.0, path, hue=0.02, depth=2), make_actor("square", 26.0, rest, hue=0.5))
    seen, fired, _, _ = watch(make_scene_of(SIZE, torch.zeros(LENGTH, 2), actors))
    where = shown(seen, 1)
    area = where.flatten(1).sum(dim=1)
    assert area[34:46].max() == 0 and area[-1] > 900
    hits = ((fired > 0) & where).flatten(1).sum(dim=1)
    assert hits[:30].sum() > 0.7 * area.max(), "its entrance"
    assert hits[46:].sum() > 0.9 * area[-1], "its return"


def fill_bank(scores, capacity):
    """Sources of positive score that a bank of the clip's scores, F rows columns, holds after every block."""
    frames, rows, columns = scores.shape
    bank = NoveltyBank(capacity, 1)
    kept = []
    for first in range(0, frames, 3):
        axes = (torch.arange(first, first + 3), torch.arange(rows), torch.arange(columns))
        offered = Candidates(torch.cartesian_prod(*axes)[None], scores[first : first + 3].reshape(1, -1))
        keys = torch.zeros(1, 1, offered.count, 1, 1)
        bank.admit(offered, keys, keys, retain_top)
        pairs = zip(bank.entries.source[0].tolist(), bank.entries.score[0].tolist(), strict=True)
        kept.append({tuple(source) for source, score in pairs if score > 0})
    return kept


def test_ten_times_the_motion_leaves_the_bank_as_it_was():
    """Residuals of two blocks grow tenfold; the blocks' own percentile takes it back, so the bank is the same."""
    rows, columns, blocks, burst = 4, 6, 10, (6, 7)
    count = 12 * blocks - 3
    pictures = torch.zeros(1, count, 3, 16 * rows, 16 * columns)
    still = torch.zeros(1, count - 1, 2, 16 * rows, 16 * columns)
    # Broken cycles of 3 to 8 pixels here and there, never twice in a place, where they would be claimed.
    when = torch.randint(0, 20 * count, still.shape[-2:])
    residual = torch.where(
        when[None] == torch.arange(count - 1)[:, None, None], 3 + 5 * torch.rand(when.shape), 0.0
    )
    of_block = (torch.arange(1, count) + 3) // 12
    factor = torch.where(torch.isin(of_block, torch.tensor(burst)), 10.0, 1.0)

    def scores(residual):
        forward = still.clone()
        forward[0, :, 0] = residual
        config = FlowNoveltyConfig(flow_downscale=1)
        novelty = FlowNovelty(config, ExactFlow(forward, still), (rows, columns), 16, 4)
        noticed = [novelty.notice(part[None]) for part in blocks_of(pictures[0])]
        return [torch.cat([getattr(n, kind)[0] for n in noticed]) for kind in ("score", "raw")]

    calm, _ = scores(residual)
    wild, wild_raw = scores(residual * factor[:, None, None])
    assert (calm > 0).sum() > 100
    torch.testing.assert_close(wild, calm, rtol=1e-4, atol=1e-5)
    capacity = 30
    before, after = fill_bank(wild, capacity)[5], fill_bank(wild, capacity)[-1]
    flushed = fill_bank(wild_raw, capacity)[-1]
    assert fill_bank(calm, capacity)[-1] == after
    assert len(before & after) >= 0.5 * len(before)
    assert len(before & flushed) <= 0.2 * len(before), "without the percentile the burst takes the bank"


def test_a_burst_in_a_scene_costs_the_calm_entrances_less_with_the_percentile():
    _, _, raw, score = watch(scene("burst"))
    calm = fill_bank(score, 1000)[2]
    assert raw[9:].max() / raw[:9].max() > 0 and raw[9:].max() > 5 * raw[:9].max()
    kept = {
        name: len(calm & fill_bank(values, len(calm))[-1])
        for name, values in (("raw", raw), ("score", score))
    }
    assert kept["score"] > kept["raw"]


def test_content_that_moves_by_fractions_of_a_pixel_stays_claimed():
    """A claimed map moved by whole pixels would lag behind a slow actor and let it fire again."""
    rows, columns, count = 2, 6, 57
    size = (16 * rows, 16 * columns)
    start = torch.zeros(1, count, *size)
    place = torch.arange(size[1])[None] - (10 + 0.4 * torch.arange(count))[:, None]
    start[0] = ((place >= 0) & (place < 20))[:, None, :].expand(-1, size[0], -1)
    flow = torch.zeros(1, count - 1, 2, *size)
    flow[:, :, 0] = 0.4
    noise = FlowNoveltyConfig(flow_downscale=1, cycle_threshold_px=1e9, photometric_threshold=0.5)
    novelty = FlowNovelty(noise, ExactFlow(flow, -flow), (rows, columns), 16, 4)
    pictures = torch.zeros(1, count, 3, *size)
    pictures[:, 1:] = start[:, 1:, None]  # pops up in picture 1, then drifts
    fired = torch.cat([novelty.notice(part[None]).fired[0] for part in blocks_of(pictures[0])])
    body = start[0, :, :, :] > 0
    assert (fired[1] > 0)[body[1]].all()
    assert ((fired[2:] > 0) & body[2:]).sum() == 0


# --- its promises --------------------------------------------------------------------------------------------


def test_state_continues_bit_for_bit():
    seen = render(scene("demo"))
    flows = [half(f)[None] for f in (seen.forward, seen.backward)]

    def fresh(start=0):
        return FlowNovelty(FlowNoveltyConfig(), ExactFlow(*(f[:, start:] for f in flows)), (6, 10), 16, 4)

    parts = list(blocks_of(seen.pictures))
    straight = fresh()
    whole = [straight.notice(part[None]).score for part in parts]
    first, second = fresh(), fresh(start=8 + 12)
    head = [first.notice(part[None]).score for part in parts[:2]]
    second.load_state(first.state())
    tail = [second.notice(part[None]).score for part in parts[2:]]
    assert all(torch.equal(a, b) for a, b in zip(whole, head + tail, strict=True))


def test_propose_names_every_token_frame_by_frame_row_major():
    pictures = torch.rand(2, 9, 3, 32, 48)
    flow = torch.zeros(2, 8, 2, 16, 24)
    novelty = FlowNovelty(FlowNoveltyConfig(), ExactFlow(flow, flow), (2, 3), 16, 4)
    offered = novelty.propose(Block(0, 0, 3, ("", "")), pictures)
    assert offered.source[0].tolist() == torch.cartesian_prod(*map(torch.arange, (3, 2, 3))).tolist()
    assert offered.score.shape == (2, 18)
    assert (offered.score[:, :6] == 0).all() and offered.score[:, 6:].max() > 0


def test_first_block_alone_may_be_one_picture():
    novelty = FlowNovelty(FlowNoveltyConfig(), ExactFlow(*torch.zeros(2, 1, 4, 2, 8, 8)), (1, 1), 16, 4)
    assert novelty.notice(torch.rand(1, 1, 3, 16, 16)).score.shape == (1, 1, 1, 1)
    assert novelty.notice(torch.rand(1, 4, 3, 16, 16)).score.shape == (1, 1, 1, 1)


@pytest.mark.parametrize(
    ("shape", "message"), [((1, 9, 3, 16, 16), "resize or crop"), ((1, 8, 3, 32, 48), "whole frames of 4")]
)
def test_pictures_that_do_not_fit_are_refused(shape, message):
    novelty = FlowNovelty(FlowNoveltyConfig(), ExactFlow(*torch.zeros(2, 1, 9, 2, 16, 24)), (2, 3), 16, 4)
    with pytest.raises(ValueError, match=message):
        novelty.notice(torch.rand(shape))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_pictures_with_nan_or_infinity_are_refused_and_change_nothing(value):
    flow = torch.zeros(1, 20, 2, 16, 24)
    novelty = FlowNovelty(FlowNoveltyConfig(), ExactFlow(flow, flow), (2, 3), 16, 4)
    novelty.notice(torch.rand(1, 9, 3, 32, 48))
    before = novelty.state()
    bad = torch.rand(1, 12, 3, 32, 48)
    bad[0, 7, 1, 3, 4] = value
    with pytest.raises(ValueError, match="NaN or infinity"):
        novelty.notice(bad)
    assert all(torch.equal(novelty.state()[name], kept) for name, kept in before.items())


@pytest.mark.parametrize(
    "change",
    [
        {"cycle_threshold_px": -1.0},
        {"photometric_threshold": float("nan")},
        {"photometric_weight": float("inf")},
        {"scale_floor": 0.0},
        {"percentile": 101.0},
        {"flow_downscale": 3},
        {"claims": "lost"},
        {"borders": ""},
    ],
)
def test_settings_out_of_range_are_refused(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        dataclasses.replace(FlowNoveltyConfig(), **change)
