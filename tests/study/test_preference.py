"""What votes mean: numbers by hand, the Davidson model against a search, and intervals that cover the truth."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from recap.eval.study.preference import Outcomes, alpha_of, fit_davidson, student_95, two_way, win_rate
from recap.tables.paper_numbers import paper_table


def outcomes(won, raters=None, prompts=None, rivals=None, on_a=None):
    n = len(won)
    given = [np.arange(n) if each is None else np.asarray(each, np.int64) for each in (raters, prompts)]
    rivals = np.zeros(n, np.int64) if rivals is None else np.asarray(rivals, np.int64)
    on_a = np.arange(n) % 2 == 0 if on_a is None else np.asarray(on_a, bool)
    return Outcomes(np.asarray(won, float), *given, rivals, on_a)


@pytest.mark.parametrize(
    "row", paper_table("human"), ids=lambda row: f"{row['competitor']} {row['question']}"
)
def test_the_papers_rates_follow_from_its_counts(row):
    won = [1.0] * int(row["win"]) + [0.5] * int(row["tie"]) + [0.0] * int(row["loss"])
    found = win_rate(outcomes(won))
    assert (found.wins, found.ties, found.losses) == tuple(int(row[name]) for name in ("win", "tie", "loss"))
    assert found.rate.n == int(row["n"]) and abs(100 * found.rate.mean - float(row["rate"])) < 0.051


def test_the_variance_of_two_ways_by_hand():
    # Two raters by two prompts; deviations from the mean 0.5 are .5 -.5 / .5 -.5: prompts differ, raters do not.
    scores = np.array([0.5, -0.5, 0.5, -0.5])[:, None] / 4
    raters, prompts = np.array([0, 0, 1, 1]), np.array([0, 1, 0, 1])
    # Sums of raters are 0; of prompts 1/4 and -1/4, times 2 / (2 - 1); of single votes 4 / 64 times 4 / 3.
    assert two_way(scores, raters, prompts)[0] == pytest.approx(
        max(0 + 2 * 2 / 16 - 4 / 64 * 4 / 3, 2 * 2 / 16)
    )
    # With nothing in common and many votes it is the plain variance of a mean.
    won = np.random.default_rng(0).integers(0, 2, 2000) * 1.0
    alone = np.arange(2000)
    plain = won.var() / 2000
    assert two_way((won - won.mean())[:, None] / 2000, alone, alone)[0] == pytest.approx(plain, rel=0.01)


def test_an_interval_needs_five_of_both_and_stays_between_0_and_1():
    few = win_rate(outcomes([1.0, 0.0, 1.0, 0.5] * 5, raters=[0, 1, 2, 3] * 5))
    assert few.rate.mean == 0.625 and math.isnan(few.rate.low) and few.rate.clusters == 4
    sure = win_rate(outcomes([1.0] * 24)).rate
    assert sure.mean == sure.high == 1 and 0.6 < sure.low < 0.9
    assert win_rate(outcomes([0.0] * 24)).rate.low == 0
    none = win_rate(outcomes([]))
    assert none.rate.n == 0 and math.isnan(none.rate.mean)


def test_quantiles_of_student():
    table = {4: 2.776, 5: 2.571, 8: 2.306, 11: 2.201, 23: 2.069, 499: 1.965}
    assert all(student_95(freedom) == pytest.approx(value, rel=0.001) for freedom, value in table.items())


def log_likelihood(votes, strength, side, tie):
    x = np.where(votes.on_a, 1, -1) * strength / 2 + side / 2
    chosen = np.where(votes.on_a, 1, -1) * (2 * votes.won - 1)
    weights = {1: np.exp(x), 0: np.full_like(x, np.exp(tie)), -1: np.exp(-x)}
    total = sum(weights.values())
    return sum(np.log(weights[way] / total)[chosen == way].sum() for way in weights)


def test_the_davidson_model_is_the_most_likely_one():
    won = np.array([1.0] * 40 + [0.5] * 12 + [0.0] * 20)
    votes = outcomes(won, on_a=np.random.default_rng(1).integers(0, 2, len(won)))
    found = fit_davidson(votes, 1)
    strength, side = (math.log(p / (1 - p)) for p in (found.strengths[0].chance, found.side_a.chance))
    tie = math.log(2 * found.tie / (1 - found.tie))
    best = log_likelihood(votes, strength, side, tie)
    for steps in itertools.product((-0.1, 0, 0.1), repeat=3):
        if any(steps):
            assert log_likelihood(votes, *np.add((strength, side, tie), steps)) < best + 1e-3
    # Without a side effect it is plain arithmetic: 40 wins to 20, and a tie for T / sqrt(W L) = 12 / sqrt(800).
    even = outcomes(np.repeat(won, 2), on_a=[0, 1] * len(won))
    fitted = fit_davidson(even, 1)
    assert fitted.strengths[0].chance == pytest.approx(2 / 3, abs=0.002)
    assert fitted.side_a.chance == pytest.approx(0.5, abs=1e-6)
    ratio = 12 / math.sqrt(800)
    assert fitted.tie == pytest.approx(ratio / (ratio + 2), abs=0.002)


def test_the_side_is_taken_out_of_the_strength():
    """Raters who lean to side A, on a study that is not balanced: the plain rate is wrong, the model is not."""
    chance = np.random.default_rng(2)
    n, strength, side = 40_000, 0.8, 1.0
    on_a = chance.random(n) < 0.9
    x = np.where(on_a, 1, -1) * strength / 2 + side / 2
    weights = np.stack([np.exp(x), np.full(n, 0.5), np.exp(-x)])
    way = (chance.random(n) > np.cumsum(weights / weights.sum(axis=0), axis=0)).sum(axis=0)
    won = np.where(way == 1, 0.5, (way == 0) == on_a)
    votes = outcomes(won, chance.integers(0, 50, n), chance.integers(0, 30, n), on_a=on_a)
    found = fit_davidson(votes, 1)
    truth = 1 / (1 + math.exp(-strength))
    assert found.strengths[0].chance == pytest.approx(truth, abs=0.02)
    assert found.side_a.chance == pytest.approx(1 / (1 + math.exp(-side)), abs=0.02)
    assert found.tie == pytest.approx(0.5 / 2.5, abs=0.02)
    assert win_rate(votes).rate.mean > truth


def test_a_side_that_always_wins_has_finite_strength_and_a_wide_interval():
    found = fit_davidson(outcomes([1.0] * 30), 1)
    assert 0.99 < found.strengths[0].chance < 1 and found.strengths[0].low < 0.97


def test_agreement_by_hand():
    # Pair 0: 1, 1, 0; pair 1: 1/2, 1/2; pair 2: one rater, which says nothing about agreement.
    won, pairs = [1, 1, 0, 0.5, 0.5, 1], [0, 0, 0, 1, 1, 2]
    equal, alpha = alpha_of(won, pairs)
    assert equal == pytest.approx((2 + 2) / (6 + 2))
    # Observed: pair 0 has 4 ordered pairs that differ by 1, over 2; expected: all ordered pairs of 1 1 0 .5 .5.
    observed = 4 / 2 / 5
    expected = (2 * (2 * 1 * 1) + 2 * (2 * 2 * 0.25) + 2 * (1 * 2 * 0.25)) / (5 * 4)
    assert alpha == pytest.approx(1 - observed / expected)
    assert alpha_of([1, 1, 0, 0], [0, 0, 1, 1]) == (1.0, 1.0)
    assert math.isnan(alpha_of([], [])[0]) and math.isnan(alpha_of([1, 0], [0, 1])[1])


def drawn(chance, raters, prompts, level, spread):
    """Votes of raters and prompts that are drawn at random, each with leanings of its own."""
    leaning = level + chance.normal(0, spread, raters)[:, None] + chance.normal(0, spread, prompts)
    decided = chance.random(leaning.shape) < 1 / (1 + np.exp(-leaning))
    won = np.where(chance.random(leaning.shape) < 0.15, 0.5, decided)
    rater, prompt = np.indices(leaning.shape)
    return outcomes(won.ravel(), rater.ravel(), prompt.ravel())


def share_covered(raters, prompts, spread, studies, seed=3):
    normal = np.random.default_rng(0).normal(0, math.hypot(spread, spread), 400_000)
    truth = 0.85 * float((1 / (1 + np.exp(-(1 + normal)))).mean()) + 0.15 / 2
    chance = np.random.default_rng(seed)
    found = [win_rate(drawn(chance, raters, prompts, 1.0, spread)).rate for _ in range(studies)]
    return sum(each.low <= truth <= each.high for each in found) / studies


@pytest.mark.parametrize(("raters", "prompts"), [(50, 24), (12, 24), (500, 8)])
def test_intervals_cover_the_truth_at_their_nominal_rate(raters, prompts):
    """The standard error of a share of 300 is 1.3 %; few clusters make intervals somewhat wide, never narrow."""
    assert 0.92 <= share_covered(raters, prompts, 0.5, 300) <= 0.99


def test_intervals_that_forget_prompts_would_not():
    """The same votes taken as if every one were its own rater and prompt: the test above can fail."""
    normal = np.random.default_rng(0).normal(0, math.hypot(0.5, 0.5), 400_000)
    truth = 0.85 * float((1 / (1 + np.exp(-(1 + normal)))).mean()) + 0.15 / 2
    chance = np.random.default_rng(3)
    found = [win_rate(outcomes(drawn(chance, 50, 24, 1.0, 0.5).won)).rate for _ in range(150)]
    assert sum(each.low <= truth <= each.high for each in found) / 150 < 0.8


def test_intervals_of_the_davidson_model_cover_it():
    chance, truth, covered = np.random.default_rng(5), np.array([0.5, 1.5, -0.4]), np.zeros(3)
    rater, pair = (index.ravel() for index in np.indices((40, 24)))
    for _ in range(100):
        on_a = chance.random(len(pair)) < 0.5
        x = np.where(on_a, 1, -1) * truth[pair % 3] / 2 + 0.15
        weights = np.stack([np.exp(x), np.full_like(x, 0.6), np.exp(-x)])
        way = (chance.random(len(pair)) > np.cumsum(weights / weights.sum(axis=0), axis=0)).sum(axis=0)
        won = np.where(way == 1, 0.5, (way == 0) == on_a)
        found = fit_davidson(outcomes(won, rater, pair, pair % 3, on_a), 3)
        chances = 1 / (1 + np.exp(-truth))
        covered += [s.low <= p <= s.high for s, p in zip(found.strengths, chances, strict=True)]
    assert (covered >= 90).all(), covered


@pytest.mark.slow
def test_intervals_of_500_raters_over_many_studies():
    for prompts in (6, 24):
        assert 0.925 <= share_covered(500, prompts, 0.5, 1000) <= 0.975
