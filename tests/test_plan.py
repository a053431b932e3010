"""Shots to blocks."""

from __future__ import annotations

import pytest

from recap.plan import Shot, check_amount, make_plan


def lengths(shots, spec):
    """Blocks that each shot gets."""
    plan = make_plan([shots], spec)
    return [sum(block.prompts == (shot.prompt,) for block in plan.blocks) for shot in shots]


@pytest.mark.parametrize(
    ("seconds", "blocks"), [(60, 80), (5, 7), (300, 400), (0.01, 1), (7.5, 10), (1.125, 2), (1.875, 3)]
)
def test_seconds_to_blocks(spec, seconds, blocks):
    plan = make_plan([[Shot("a", seconds)]], spec)
    assert len(plan.blocks) == blocks
    assert [b.index for b in plan.blocks] == list(range(blocks))
    assert [b.first_frame for b in plan.blocks] == [3 * i for i in range(blocks)]
    assert not any(b.clears_prior for b in plan.blocks)


def test_the_reappearance_script_has_the_papers_blocks(spec):
    """Segments of 3, 6, 7.5 and 7.5 s: 4, 8, 10 and 10 blocks."""
    shots = [Shot("A", 3), Shot("B", 6), Shot("C", 7.5), Shot("D", 7.5)]
    assert lengths(shots, spec) == [4, 8, 10, 10]
    plan = make_plan([shots], spec)
    assert [b.index for b in plan.blocks if b.clears_prior] == [4, 12, 22]


def test_rounding_does_not_add_up_over_shots(spec):
    assert sum(lengths([Shot(str(i), 1.0) for i in range(30)], spec)) == 40


def test_a_short_shot_gets_its_block_and_no_later_one_pays_for_it(spec):
    shots = [*(Shot(str(i), 0.1) for i in range(5)), Shot("long", 3.0)]
    assert lengths(shots, spec) == [1, 1, 1, 1, 1, 4]


def test_a_shot_without_cut_keeps_the_prior(spec):
    plan = make_plan([[Shot("a", 3), Shot("b", 3, cut=False), Shot("c", 3)]], spec)
    assert [b.index for b in plan.blocks if b.clears_prior] == [8]


def test_rows_may_differ_in_prompts_and_when_they_change_but_not_in_cuts(spec):
    plan = make_plan([[Shot("a", 3)], [Shot("b", 3)]], spec)
    assert plan.num_rows == 2 and plan.blocks[0].prompts == ("a", "b")
    one = [Shot("a", 3), Shot("b", 4.5, cut=False), Shot("c", 3)]
    two = [Shot("d", 6), Shot("e", 1.5, cut=False), Shot("f", 3)]
    plan, alone = make_plan([one, two], spec), [make_plan([row], spec) for row in (one, two)]
    assert len(plan.blocks) == 14 and [b.index for b in plan.blocks if b.clears_prior] == [10]
    for row, own in enumerate(alone):
        assert [b.prompts[row] for b in plan.blocks] == [b.prompts[0] for b in own.blocks]
        assert [b.clears_prior for b in plan.blocks] == [b.clears_prior for b in own.blocks]
    for other in ([Shot("b", 4)], [Shot("b", 1), Shot("b", 2)], []):
        with pytest.raises(ValueError, match="share their length, their cuts"):
            make_plan([[Shot("a", 3)], other], spec)
    rereads = [Shot("b", 1), Shot("b", 2, cut=False, reread=True)]
    with pytest.raises(ValueError, match="share their length"):
        make_plan([[Shot("a", 1), Shot("a", 2, cut=False)], rereads], spec)
    with pytest.raises(ValueError, match="at least 1 row"):
        make_plan([[]], spec)


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf"), 1e18])
def test_lengths_out_of_range_are_refused(seconds):
    with pytest.raises(ValueError, match="seconds is"):
        Shot("a", seconds)


def test_pictures_of_frames(spec):
    assert [spec.num_pictures(frames) for frames in (0, 1, 3, 21, 240)] == [0, 1, 9, 81, 957]


def test_a_script_is_bounded_in_all_before_any_block_is_made(spec):
    """A script of 10,000 shots of a day was planned until the memory ran out."""
    with pytest.raises(ValueError, match=r"seconds of all shots is 864000000.*86,400"):
        make_plan([[Shot("a", 86_400)] * 10_000], spec)
    with pytest.raises(ValueError, match=r"number of shots is 10001.*10,000"):
        make_plan([[Shot("a", 0.001)] * 10_001], spec)
    with pytest.raises(ValueError, match=r"--seeds is 99999999999999.*1,000 videos"):
        check_amount("--seeds", 99999999999999, 1000, "videos", "take fewer")
    with pytest.raises(ValueError, match="nan"):
        check_amount("--seconds", float("nan"), 1000, "seconds", "take fewer")
