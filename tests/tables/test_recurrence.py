"""Recurrence, drift and disagreement on videos that were never generated, whose truth is known."""

from __future__ import annotations

import numpy as np
import pytest
from tables_help import data_of

from recap.eval.judged import JudgedRun
from recap.eval.judges.subject import ProbeWitness
from recap.eval.metrics import find_measure
from recap.eval.metrics.drift import anchor_pairs, quality_drift
from recap.eval.metrics.presence import Stretch
from recap.eval.metrics.recurrence import gap_bin
from recap.eval.sampling import InMemoryClip, Span
from recap.io.trace import BlockTrace
from recap.tables.agreement import describe_disagreements, find_disagreements
from recap.tables.page import figures_of
from recap.tables.recipes import find_recipe
from recap.tables.table import ScoredRun, build_cells

FPS, BLOCKS = 16, 8
RED, ORANGE, BLUE = (255, 0, 0), (255, 160, 0), (0, 0, 255)


class ByChannel(ProbeWitness):
    """Finds a fox where the red channel is full and a balloon where the blue one is; colours are those pixels'."""

    CHANNELS = {"fox": 0, "balloon": 2}  # noqa: RUF012

    def look(self, pictures, subject):
        there = pictures[..., self.CHANNELS[subject]] == 255
        sums = (pictures * there[..., None]).sum(axis=(1, 2)) / np.maximum(1, there.sum(axis=(1, 2)))[:, None]
        return there.any(axis=(1, 2)), (sums / 255).astype(np.float32)


def trace_of(prompts, cuts=True, admitted=()):
    """Every prompt for eight blocks of 0.75 s; `admitted` are positions that enter the bank in their own block."""
    trace = []
    for block in range(BLOCKS * len(prompts)):
        frames = range(3 * block, 3 * block + 3)
        first = tuple(max(0, 4 * frame - 3) for frame in frames)
        new = {place: 1.0 for place in admitted if place[0] in frames}
        starts = block % BLOCKS == 0
        trace.append(
            BlockTrace(
                block,
                3 * block,
                first,
                12 - 3 * (block == 0),
                prompts=(prompts[block // BLOCKS],),
                clears_prior=cuts and starts and block > 0,
                admitted=[new] if admitted else None,
                evicted=[{}] if admitted else None,
                edge_share=[0.0] if admitted else None,
            )
        )
    return trace


def recurrence(monkeypatch, stage, shown, **options):
    """Scores by name of a schedule of shots of 6 s; `shown` are the colours seen in every shot."""
    monkeypatch.setattr("recap.eval.judged.ProbeWitness", ByChannel)
    monkeypatch.setattr("recap.eval.judged.build_crop_witness", lambda witness: None)
    pictures = np.full((12 * BLOCKS * len(stage) - 3, 32, 48, 3), 90, np.uint8)
    for shot, colours in enumerate(shown):
        part = pictures[max(0, 12 * BLOCKS * shot - 3) : 12 * BLOCKS * (shot + 1) - 3]
        for number, colour in enumerate(colours):
            part[:, 8:24, 16 * number : 16 * number + 12] = colour
    prompts = [f"{' and '.join(cast) or 'nobody'}" for cast in stage]
    data = {**data_of("recurrence"), "stage": [list(cast) for cast in stage]}
    run = JudgedRun(data, InMemoryClip(pictures, FPS), trace_of(prompts, **options))
    return {each.name: each for each in find_measure("recurrence").scores(run)}


STAGE = (["fox"], ["balloon"], ["fox"], [], ["balloon"], ["fox"])


def test_likeness_is_of_returns_that_pass_the_gate_by_their_gap(monkeypatch):
    """The fox is the same after 6 s and another one after 12 s; the balloon never returns."""
    scores = recurrence(monkeypatch, STAGE, ([RED], [BLUE], [RED], [], [], [ORANGE]))
    value = {name: score.value for name, score in scores.items()}
    assert value["recurrence_gate"] == pytest.approx(2 / 3)
    assert value["gate_by_gap_5"] == 1 and value["gate_by_gap_10"] == 0.5
    assert value["subject_by_gap_5"] == 1 and value["subject_by_gap_10"] == 0
    assert scores["subject_by_gap_10"].n == 1 and scores["subject_by_gap_10"].backend == "probe"
    assert value["recurrence_subject"] == 0.5 and value["recurrence_kept"] == pytest.approx(1 / 3)
    assert value["kept_by_gap_5"] == 1 and value["kept_by_gap_10"] == 0
    assert value["recurrence_kept_opening"] == 0.5 and value["recurrence_kept_late"] == 0
    assert value["recurrence_haunting"] == 0 and "bank_age_at_return" not in value
    returns = scores["recurrence_gate"].details["returns"]
    assert [each["gap_s"] for each in returns] == pytest.approx([6, 12, 12])


def test_who_is_there_while_away_does_not_return(monkeypatch):
    scores = recurrence(monkeypatch, STAGE, ([RED], [RED, BLUE], [RED], [], [BLUE], [RED]))
    assert scores["gate_by_gap_5"].value == 0 and scores["subject_by_gap_10"].value == 1
    assert "subject_by_gap_5" not in scores and scores["recurrence_haunting"].value == pytest.approx(1 / 3)


def test_a_cut_alone_is_a_gap_of_nothing_and_without_one_nobody_returns(monkeypatch):
    stage, shown = (["fox"], ["fox", "balloon"]), ([RED], [RED, BLUE])
    assert recurrence(monkeypatch, stage, shown)["subject_by_gap_0"].value == 1
    assert recurrence(monkeypatch, stage, shown, cuts=False) == {}


def test_slots_of_a_bank_are_as_old_as_the_picture_they_came_from(monkeypatch):
    """Three slots of the fox's first shot and one of the balloon's, as the fox returns after 6 s."""
    places = [(0, 0, 0), (0, 0, 1), (12, 0, 0), (25, 0, 0)]
    scores = recurrence(monkeypatch, STAGE[:3], ([RED], [BLUE], [RED]), admitted=places)
    returned = 12 * BLOCKS * 2 - 3
    ages = [(returned - first) / FPS for first in (0, 0, 45, 97)]
    assert scores["bank_age_at_return"].value == pytest.approx(np.mean(ages))
    assert (
        scores["bank_age_at_return"].details["ages"][0] == 1
        and scores["bank_from_visit_by_gap_5"].value == 0.75
    )


def test_gaps_go_to_the_nearest_and_only_none_is_none():
    assert [gap_bin(gap) for gap in (0, 0.1, 4, 29.9, 52, 53, 89.8, 1000)] == [0, 1, 5, 30, 45, 60, 90, 300]


def test_a_picture_that_fades_has_lost_contrast_and_a_still_one_nothing():
    dice = np.random.default_rng(0)
    picture = dice.integers(60, 200, (1, 32, 48, 3)).astype(np.uint8)
    still = np.repeat(picture, 40, axis=0)
    assert [score.value for score in quality_drift(still)] == [0, 0, 0]
    faded = still.astype(float)
    faded[30:] = 130 + (faded[30:] - 130) / 2
    contrast, sharpness, saturation = (score.value for score in quality_drift(faded.astype(np.uint8)))
    assert contrast == pytest.approx(-0.5, abs=0.01) and sharpness == pytest.approx(-0.75, abs=0.02)
    assert saturation < -0.3


def test_pictures_are_compared_within_a_stretch_alone():
    parts = [Stretch("a", 0, Span(0, 4)), Stretch("b", 6, Span(4, 6))]
    pairs = anchor_pairs(parts, FPS, 96)
    assert pairs[2] == [(0, 2), (32, 34), (64, 66)] and pairs[50] == [(0, 50)]


def test_coherence_falls_with_distance_where_colours_drift(monkeypatch):
    levels = np.linspace(0, 1, 200)[:, None, None, None]
    pictures = (np.array([250, 20, 20]) * (1 - levels) + np.array([20, 20, 250]) * levels).astype(np.uint8)
    pictures = np.broadcast_to(pictures, (200, 32, 48, 3))
    run = JudgedRun(
        data_of("recurrence", backbone="untrained"), InMemoryClip(pictures, FPS), trace_of(["a"] * 3)
    )
    values = {each.name: each.value for each in find_measure("drift").scores(run)}
    drift = [values[f"coherence_frame_by_distance_{d}"] for d in (2, 5, 10, 20, 50)]
    assert drift == sorted(drift, reverse=True) and drift[0] > drift[-1]
    assert not any("crop" in name for name in values)


def scored(row, number, **values):
    scores = {
        n: {"name": n, "value": v, "backend": "probe", "n": 1, "details": {}} for n, v in values.items()
    }
    return ScoredRun(row, f"prompt {number}", number, scores)


def test_judges_who_prefer_different_rows_are_told():
    """Of four pairs they agree on two, disagree on one, and of the last one judge sees no difference."""
    pairs = [
        ((0.9, 0.5), (0.8, 0.4)),
        ((0.2, 0.6), (0.3, 0.9)),
        ((0.9, 0.5), (0.1, 0.7)),
        ((0.9, 0.1), (0.5, 0.51)),
    ]
    runs = []
    for number, (crop, subject) in enumerate(pairs):
        for row, side in (("recap", 0), ("sink", 1)):
            runs.append(scored(row, number, recurrence_crop=crop[side], recurrence_subject=subject[side]))
    (found,) = find_disagreements(find_recipe("recurrence"), runs)
    assert (found.what, found.judges, found.pairs) == ("recurrence", ("crop", "subject"), 3)
    assert found.share == pytest.approx(1 / 3)
    assert "recurrence by crop and by subject in 33% of 3" in describe_disagreements([found])
    assert describe_disagreements([]) == ""


def test_a_page_shows_likeness_over_the_gap_and_the_ages_of_banks_below(monkeypatch):
    recipe = find_recipe("recurrence")
    runs = []
    for row, colour in (("sink", ORANGE), ("recap", RED)):
        bank = {"admitted": [(0, 0, 0)]} if row == "recap" else {}
        scores = recurrence(monkeypatch, STAGE, ([RED], [BLUE], [RED], [], [BLUE], [colour]), **bank)
        runs.append(ScoredRun(row, "p", 0, {name: score.as_dict() for name, score in scores.items()}))
    figures = figures_of(recipe, build_cells(recipe, runs), runs)
    assert (
        ">likeness by colours over gap<" in figures[0] and "● sink" in figures[0] and "● recap" in figures[0]
    )
    assert "ages of the bank" in figures[1] and "● sink" not in figures[1]
    assert any(">share of returns that are the same over gap<" in figure for figure in figures[2:])
    assert not any(">subject by gap 5<" in figure for figure in figures)


def test_a_likeness_that_nobody_could_compare_is_not_kept(monkeypatch):
    """Shots so short that fewer than three pictures are looked at."""
    scores = recurrence(monkeypatch, STAGE[:3], ([RED], [BLUE], [RED]))
    assert scores["recurrence_kept"].value == 1
    monkeypatch.setattr("recap.eval.metrics.identity.FEWEST", 1000)
    scores = recurrence(monkeypatch, STAGE[:3], ([RED], [BLUE], [RED]))
    assert scores["recurrence_kept"].value == 0 and scores["recurrence_gate"].value == 1
    assert scores["recurrence_subject"].value is None
