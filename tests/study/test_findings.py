"""500 scripted raters, 10 % of them careless: the careless are found, and the estimate is the known preference."""

from __future__ import annotations

import csv
import json
import math
import random

import numpy as np
import pytest

from recap.eval.study.findings import COUNTED, FAILED, UNCHECKED, check_rater, find
from recap.eval.study.votes import TIE, A, B, join_lines, read_ballots, read_line
from recap.tables.study.report import paper_cell, sentence, write_report
from tests.study.conftest import Writer, careful, careless, fill, paper_key, session_of

LIKES = {"none": 0.85, "memrope": 0.6}


def many(key, raters, careless_share, seed):
    """Raters by known preference: by rival, shifted by the prompt; returns their writers, and who is careless."""
    chance = random.Random(seed)
    shift = {pair: chance.gauss(0, 0.4) for pair in key.pairs}

    def likes_of(own):
        def likes(pair, question):
            level = LIKES[key.rival_of(pair)]
            logit = math.log(level / (1 - level)) + shift[pair] + own
            return 1 / (1 + math.exp(-logit))

        return likes

    writers, bad = [], set()
    for number in range(raters):
        made = Writer(key.study, session_of(number), f"r{number}", chance.randrange(len(key.study.sheets)))
        if number < careless_share * raters:
            bad.add(made.rater)
            fill(made, key, careless(chance))
        else:
            fill(made, key, careful(chance, key, likes_of(chance.gauss(0, 0.4))))
        writers.append(made)
    chance.shuffle(writers)
    return writers, bad


def true_rate(level):
    normal = np.random.default_rng(0).normal(0, math.hypot(0.4, 0.4), 200_000)
    logit = math.log(level / (1 - level)) + normal
    return 0.85 * float((1 / (1 + np.exp(-logit))).mean()) + 0.15 / 2


def test_500_raters_of_whom_50_are_careless(tmp_path, key):
    writers, bad = many(key, 500, 0.1, seed=5)
    votes = tmp_path / "votes.jsonl"
    votes.write_bytes(b"".join(writer.data for writer in writers))
    (tmp_path / "key.json").write_text(json.dumps(key.as_dict()))
    page, _, _, found = write_report([votes], tmp_path / "key.json", tmp_path / "report")
    failed = {facts.rater for facts in found.raters if facts.status == FAILED}
    assert len(bad) == 50 and len(failed & bad) >= 46, "the careless are found"
    assert len(failed - bad) <= 9, "at most 2 % of the careful are taken for careless"
    for answered in found.questions:
        for row in answered.rows[:2]:
            truth = true_rate(LIKES[row.rival])
            # The mean over 12 prompts is itself uncertain; the careless pull everyone's rate towards 1/2.
            assert row.kept.rate.low < truth < row.kept.rate.high and row.kept.rate.clusters == 12
            assert row.kept.rate.high - row.kept.rate.low < 0.16
            assert row.everyone.rate.mean < row.kept.rate.mean and row.everyone.rate.n == 500 * 12
    assert f"{len(failed)} more left out" in page.read_text() and all(
        f"{name} (failed" in page.read_text() for name in failed
    )
    assert sentence(key, found.questions[0]) == "recap is preferred to none and memrope."


@pytest.mark.slow
def test_over_many_studies_of_500_raters_the_truth_is_covered():
    """From lines of votes on, with the careless left out by their checks."""
    covered = total = missed = wrong = 0
    for seed in range(60):
        key = paper_key(questions={"overall": "?"}, identical=6, seed=seed)
        writers, bad = many(key, 500, 0.1, seed)
        ballots = [
            join_lines({n: read_line(line, "", key.study) for n, line in enumerate(writer.lines)}, key.study)
            for writer in writers
        ]
        found = find(key, ballots)
        failed = {facts.rater for facts in found.raters if facts.status == FAILED}
        missed, wrong = missed + len(bad - failed), wrong + len(failed - bad)
        for row in found.questions[0].rows[:2]:
            total += 1
            covered += row.kept.rate.low <= true_rate(LIKES[row.rival]) <= row.kept.rate.high
    print(
        f"covered {covered} of {total}; of 3000 careless {missed} were missed, of 27000 careful {wrong} were left out"
    )
    assert 0.89 <= covered / total <= 0.99


def ballot_of(key, answer, trials=None, sheet=0):
    made = Writer(key.study, session_of(1), "r", sheet)
    for place, trial in enumerate(key.study.sheets[sheet][:trials]):
        made.vote(place, {question: answer(trial, question) for question in key.study.questions})
    return made


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        (lambda trial, question: A, FAILED),
        (lambda trial, question: B, FAILED),
        (lambda trial, question: TIE, COUNTED),
    ],
)
def test_who_always_presses_one_button(tmp_path, key, answer, status):
    (tmp_path / "v").write_bytes(ballot_of(key, answer).data)
    (ballot,) = read_ballots([tmp_path / "v"], key.study)
    facts = check_rater(key, ballot)
    assert facts.status == status and facts.identical == facts.repeated == 9
    # The sides of a repeated pair change, so one button is a contradiction.
    assert facts.contradicted == (0 if status == COUNTED else 9)


def test_who_stops_before_a_check_is_not_counted_and_named(tmp_path, key):
    (tmp_path / "v").write_bytes(ballot_of(key, lambda trial, question: A, trials=1).data)
    (ballot,) = read_ballots([tmp_path / "v"], key.study)
    assert check_rater(key, ballot).status == UNCHECKED


def test_a_report_by_hand(tmp_path):
    """Six raters, five pairs of one rival, one question: every number can be counted."""
    key = paper_key(["none"], 5, identical=1, repeats=0, questions={"overall": "?"})
    # Rater k prefers ours in the first k pairs by name, finds the next hard to say, and rejects the others.
    order = sorted(name for name in key.pairs if name.startswith("none"))
    for number in range(6):

        def answer(trial, question, number=number):
            if trial[0] not in order:
                return TIE
            place = order.index(trial[0])
            return TIE if place == number else A if (place < number) == key.ours_on_a(trial) else B

        made = fill(Writer(key.study, session_of(number), f"<b>r{number}", number), key, answer)
        (tmp_path / f"votes{number}").write_bytes(made.data)
    (tmp_path / "key.json").write_text(json.dumps(key.as_dict()))
    paths = sorted(tmp_path.glob("votes*"))
    page, *_ = write_report(paths, tmp_path / "key.json", tmp_path / "report")
    numbers = json.loads((tmp_path / "report" / "report.json").read_text())
    (row,) = numbers["questions"][0]["rows"]
    # Wins 0 + 1 + 2 + 3 + 4 + 5, a tie of each but the last, 30 votes.
    assert {name: row["counted"][name] for name in ("wins", "ties", "losses", "n", "clusters", "mean")} == {
        "wins": 15, "ties": 5, "losses": 10, "n": 30, "clusters": 5, "mean": (15 + 2.5) / 30,
    }  # fmt: skip
    assert row["paper"] == pytest.approx({"rate": 0.843, "low": 0.751, "high": 0.935, "ties": 3, "n": 54})
    (first, everyone) = csv.DictReader((tmp_path / "report" / "report.csv").read_text().splitlines())
    assert first["raters"] == COUNTED and float(first["rate"]) == pytest.approx(17.5 / 30, abs=1e-5)
    assert {**first, "raters": 0, "davidson": 0, "davidson_low": 0, "davidson_high": 0} == {
        **everyone, "raters": 0, "davidson": 0, "davidson_low": 0, "davidson_high": 0
    }  # fmt: skip
    text = page.read_text()
    assert "<b>r" not in text and "&lt;b&gt;r0" in text
    assert "58.3 %" in text and "84.3 % [75.1, 93.5], 3 T, n 54" in text and "15 / 5 / 10" in text
    # Again into the same folder, but never into one that holds something else.
    write_report(paths, tmp_path / "key.json", tmp_path / "report")
    (tmp_path / "report" / "mine.txt").write_text("x")
    with pytest.raises(ValueError, match=r"mine\.txt"):
        write_report(paths, tmp_path / "key.json", tmp_path / "report")


def test_a_report_on_nobody_who_counts_says_so(tmp_path, key):
    (tmp_path / "v").write_bytes(ballot_of(key, lambda trial, question: A).data)
    (tmp_path / "k").write_text(json.dumps(key.as_dict()))
    page, *_, found = write_report([tmp_path / "v"], tmp_path / "k", tmp_path / "report")
    assert "0 raters, 1 more left out" in page.read_text()
    assert found.questions[0].rows[0].kept.rate.n == 0 and found.questions[0].rows[0].everyone.rate.n == 12
    assert sentence(key, found.questions[0]) == "no difference is shown between recap and none and memrope."
    (tmp_path / "v").write_bytes(Writer(key.study, session_of(1), "r").data)
    with pytest.raises(ValueError, match="nobody has answered"):
        write_report([tmp_path / "v"], tmp_path / "k", tmp_path / "report")


def test_the_papers_table_stands_next_to_what_it_is_about():
    assert paper_cell("recap", "rolling-sink", "motion").rate == 0.769
    assert paper_cell("recap", "all", "overall").n == 216
    assert paper_cell("recap, reinforcement=1", "memrope, x=2", "overall").rate == 0.75
    assert paper_cell("sink", "none", "overall") is None and paper_cell("recap", "sink", "overall") is None
    assert paper_cell("recap", "none", "likeness") is None
