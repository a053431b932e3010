"""Identity, retention and reappearance on clips in which the subject changes at a known second."""

from __future__ import annotations

import numpy as np
import pytest
from made_clips import still, swap

from recap.eval.embedders import HsvEmbedder
from recap.eval.metrics.identity import identity, retention
from recap.eval.metrics.reappearance import reappearance, segment_spans, slots_from, starts_from_trace
from recap.eval.sampling import Sampled
from recap.eval.witnesses import Box, CropWitness, FrameWitness, crop
from recap.io.trace import BlockTrace

SUBJECT = Box(60, 30, 100, 70)


class BoxByColour:
    """This detector finds the square of `swap` by its uniform colour."""

    backend = "plain colour"

    def find(self, pictures, subject):
        return [SUBJECT if p[30:70, 60:100].reshape(-1, 3).std(axis=0).max() < 1 else None for p in pictures]


frame = FrameWitness(HsvEmbedder())
subject = CropWitness(BoxByColour(), HsvEmbedder())


def test_identity_is_one_without_a_swap_and_falls_with_one():
    for witness in (frame, subject):
        kept = identity(swap(60, at=99), witness, "a square")
        lost = identity(swap(60, at=30), witness, "a square")
        assert kept.value == pytest.approx(1) and lost.value < 0.96
        assert kept.details["found"] == [12, 20] and kept.n == 240
    assert "hsv" in frame.backend and subject.backend == "standin:hsv-8x4x4 in plain colour"


def test_the_crop_sees_a_swap_better_than_the_frame():
    gap = {w: identity(swap(60, at=30), w, "").value for w in (frame, subject)}
    assert gap[subject] < 0.5 < gap[frame]


def test_a_swap_between_the_windows_is_all_or_nothing():
    """A swap between seconds 8 and 50 shows in full; one inside the late window shows in part."""
    late = identity(swap(60, at=55), subject, "").value
    assert identity(swap(60, at=30), subject, "").value < late < 1


def test_windows_scale_with_short_clips_and_too_few_sightings_give_none():
    short = identity(swap(12, at=99), subject, "")
    assert short.details["windows_s"] == [[0.4, 1.6], [10.0, 12]]
    assert short.value == pytest.approx(1) and short.details["found"] == [3, 4]
    assert identity(swap(6, at=99), subject, "").value is None
    hidden = Sampled(np.arange(120) / 2, still(120), 60)
    assert identity(hidden, subject, "").value is None


def test_retention_drops_at_the_second_of_the_swap():
    score = retention(swap(60, at=20, per_second=1), subject, "")
    curve = score.details["curve"]
    assert curve[:20] == pytest.approx([1] * 20) and max(curve[20:]) < 0.5
    assert score.details["start"] == pytest.approx(1) and score.details["mid"] < 0.5 and score.value < 0.5


@pytest.mark.parametrize(("seconds", "mid"), [(60, 29.5), (120, 59.5), (300, 60)])
def test_the_middle_is_half_a_video_but_one_minute_of_five(seconds, mid):
    """A swap just after the middle window does not show in it, a swap just before does."""
    for swapped_at, kept in ((mid + 1.5, True), (mid - 1.5, False)):
        middle = retention(swap(seconds, at=swapped_at, per_second=1), subject, "").details["mid"]
        assert middle == pytest.approx(1) if kept else middle < 0.5


def test_retention_without_a_subject_in_the_first_seconds_is_none():
    score = retention(Sampled(np.arange(30.0), still(30), 30), subject, "")
    assert score.value is None and set(score.details["curve"]) == {None}


def returning(again: tuple[int, int, int], seen_in_c: bool = False) -> Sampled:
    times = np.arange(48) / 2
    frames = still(48).copy()
    for picture, second in zip(frames, times, strict=True):
        if 3 <= second < 9 or (seen_in_c and 9 <= second < 16.5):
            picture[30:70, 60:100] = (220, 40, 30)
        if second >= 16.5:
            picture[30:70, 60:100] = again
    return Sampled(times, frames, 24)


STARTS = [0, 3, 9, 16.5]


def test_reappearance_of_the_same_and_of_another():
    same = reappearance(returning((220, 40, 30)), subject, "", STARTS)
    other = reappearance(returning((30, 60, 220)), subject, "", STARTS)
    assert same.value == pytest.approx(1) and other.value < 0.5
    assert same.details["verified"] and same.details["found_share"] == {"A": 0, "B": 1, "C": 0, "D": 1}
    assert same.details["windows_s"] == [[4, 9], [17.5, 24]]


def test_presence_is_checked():
    never_gone = reappearance(returning((220, 40, 30), seen_in_c=True), subject, "", STARTS)
    assert never_gone.value == pytest.approx(1) and not never_gone.details["verified"]
    never_there = reappearance(Sampled(np.arange(48) / 2, still(48), 24), subject, "", STARTS)
    assert never_there.value is None and not never_there.details["verified"]
    by_frame = reappearance(returning((220, 40, 30)), frame, "", STARTS, presence=subject)
    assert by_frame.details["verified"]


def test_segments_from_a_trace():
    """Blocks have 3 frames, frames 4 pictures except the first; the protocol has 4, 8, 10 and 10 blocks."""
    cuts = {4, 12, 22}
    trace = [
        BlockTrace(
            block=b,
            first_frame=3 * b,
            first_pictures=tuple(max(0, 4 * frame - 3) for frame in range(3 * b, 3 * b + 3)),
            num_pictures=12 - 3 * (b == 0),
            clears_prior=b in cuts,
        )
        for b in range(32)
    ]
    starts = starts_from_trace(trace, 16)
    assert starts == pytest.approx([0, 45 / 16, 141 / 16, 261 / 16])
    spans = segment_spans(STARTS, 24)
    assert spans["B"] == (4, 9) and spans["D"].start == 17.5
    # Half as long, so half a second of settling.
    assert segment_spans([0, 1.5, 4.5, 8.25], 12)["B"] == (2, 4.5)
    with pytest.raises(ValueError, match="4 segments"):
        segment_spans([0, 3, 9], 24)


def test_slots_from_a_segment():
    assert slots_from({(12, 0, 0): 1.0, (35, 1, 1): 0.5, (36, 0, 0): 2.0, (11, 0, 0): 2.0}, 12, 36) == 2


def test_a_crop_has_its_margin_and_is_square():
    picture = np.zeros((100, 200, 3), np.uint8)
    picture[40:60, 80:120] = 255
    cut = crop(picture, Box(80, 40, 120, 60))
    # 40 and a margin of 6 on each side.
    assert cut.shape == (52, 52, 3)
    assert (cut == 255).all(axis=-1).sum() == 20 * 40
    edge = crop(picture, Box(-5, -5, 30, 300))
    assert edge.shape == (100, 100, 3)
