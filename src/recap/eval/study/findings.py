"""From ballots and the key to findings: who paid attention, what they preferred, and how far they agree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from recap.eval.study.design import IDENTICAL, Key
from recap.eval.study.preference import (
    Davidson,
    Outcomes,
    Strength,
    WinRate,
    alpha_of,
    fit_davidson,
    win_rate,
)
from recap.eval.study.votes import TIE, A, Ballot

ALL = "all"
PASSED_SHARE = 0.75
"""Of the answers about two identical videos, so many must be "hard to say"."""
CONTRADICTED_SHARE = 2 / 3
"""Of the answers about repeated pairs, at most so many may name the other video."""
FEWEST_REPEATED = 6
"""Fewer answers about repeated pairs say too little: with a close choice anybody contradicts now and then."""

COUNTED, FAILED, UNCHECKED = "counted", "failed the checks", "met no check"


@dataclass(frozen=True, slots=True)
class RaterFacts:
    """Says how one rater did: answers about identical pairs that were "hard to say", and contradicted answers."""

    rater: str
    session: str
    trials: int
    passed: int
    identical: int
    contradicted: int
    repeated: int
    side_a: float
    ties: float
    median_s: float
    status: str


class Compared(NamedTuple):
    """Holds ours against one rival, or all, by one question; `everyone` is of all raters, whatever their checks."""

    rival: str
    kept: WinRate
    everyone: WinRate
    strength: Strength


@dataclass(frozen=True, slots=True)
class Answered:
    """Holds the findings of one question."""

    question: str
    rows: Sequence[Compared]
    model: Davidson
    agreement: float
    alpha: float


@dataclass(frozen=True, slots=True)
class Findings:
    """Holds what a study found."""

    questions: Sequence[Answered]
    raters: Sequence[RaterFacts]


def find(key: Key, ballots: Sequence[Ballot]) -> Findings:
    """Evaluate a study."""
    raters = [check_rater(key, ballot) for ballot in ballots]
    kept = np.array([facts.status == COUNTED for facts in raters], bool)
    return Findings([_answer(key, ballots, question, kept) for question in key.study.questions], raters)


def check_rater(key: Key, ballot: Ballot) -> RaterFacts:
    """Look at a rater's answers about identical and repeated pairs."""
    sheet = key.study.sheets[ballot.sheet]
    passed = identical = contradicted = repeated = 0
    first: dict[str, int] = {}
    counts: Counter[str] = Counter()
    for place, answers in sorted(ballot.answers.items()):
        pair, swapped = sheet[place]
        if key.pairs[pair].kind == IDENTICAL:
            identical += len(answers)
            passed += sum(answer == TIE for answer in answers.values())
            continue
        counts.update(answers.values())
        before = first.setdefault(pair, place)
        if before == place:
            continue
        turned = sheet[before][1] != swapped
        for question, answer in answers.items():
            other = ballot.answers[before][question]
            repeated += 1
            contradicted += TIE not in (answer, other) and (answer == other) == turned
    decided = counts.total() - counts[TIE]
    return RaterFacts(
        rater=ballot.rater,
        session=ballot.session,
        trials=len(ballot.answers),
        passed=passed,
        identical=identical,
        contradicted=contradicted,
        repeated=repeated,
        side_a=counts[A] / decided if decided else 0.5,
        ties=counts[TIE] / counts.total() if counts else 0.0,
        median_s=median(ballot.took_s.values()) if ballot.took_s else 0.0,
        status=_status(key, passed, identical, contradicted, repeated),
    )


def _status(key: Key, passed: int, identical: int, contradicted: int, repeated: int) -> str:
    has_checks = any(facts.kind == IDENTICAL for facts in key.pairs.values())
    if has_checks and not identical:
        return UNCHECKED
    steady = repeated < FEWEST_REPEATED or contradicted <= CONTRADICTED_SHARE * repeated
    return COUNTED if steady and passed >= PASSED_SHARE * identical else FAILED


def votes_on(key: Key, ballots: Sequence[Ballot], question: str) -> tuple[Outcomes, list[int]]:
    """Return the votes on a question, and the pair of each by number; of a repeated pair the first showing counts."""
    pairs, rivals = list(key.study.pairs), key.rivals
    prompts = {text: i for i, text in enumerate(dict.fromkeys(facts.prompt for facts in key.pairs.values()))}
    number = {pair: i for i, pair in enumerate(pairs)}
    rows = []
    for rater, ballot in enumerate(ballots):
        seen: set[str] = set()
        for place, trial in enumerate(key.study.sheets[ballot.sheet]):
            pair = trial[0]
            if key.pairs[pair].kind == IDENTICAL or place not in ballot.answers or pair in seen:
                continue
            seen.add(pair)
            answer, on_a = ballot.answers[place][question], key.ours_on_a(trial)
            won = 0.5 if answer == TIE else float((answer == A) == on_a)
            at = prompts[key.pairs[pair].prompt]
            rows.append((won, rater, at, rivals.index(key.rival_of(pair)), on_a, number[pair]))
    columns = np.array(rows, float).reshape(len(rows), 6).T
    raters, prompt, rival = (column.astype(np.int64) for column in columns[1:4])
    votes = Outcomes(columns[0], raters, prompt, rival, columns[4].astype(bool))
    return votes, columns[5].astype(int).tolist()


def _answer(key: Key, ballots: Sequence[Ballot], question: str, kept: NDArray[np.bool_]) -> Answered:
    everyone, pairs = votes_on(key, ballots, question)
    counted = kept[everyone.raters] if len(everyone.won) else np.zeros(0, bool)
    votes = everyone.where(counted)
    rivals = key.rivals
    if not len(votes.won):
        nothing = Strength(float("nan"), float("nan"), float("nan"))
        model, together = Davidson([nothing] * len(rivals), float("nan"), nothing), nothing
    else:
        model = fit_davidson(votes, len(rivals))
        together = fit_davidson(votes._replace(rivals=np.zeros_like(votes.rivals)), 1).strengths[0]
    rows = [
        Compared(
            rival,
            win_rate(votes.where(votes.rivals == index)),
            win_rate(everyone.where(everyone.rivals == index)),
            model.strengths[index],
        )
        for index, rival in enumerate(rivals)
    ]
    if len(rivals) > 1:
        rows.append(Compared(ALL, win_rate(votes), win_rate(everyone), together))
    own = [pair for pair, keep in zip(pairs, counted, strict=True) if keep]
    equal, alpha = alpha_of(votes.won.tolist(), own)
    return Answered(question, rows, model, equal, alpha)
