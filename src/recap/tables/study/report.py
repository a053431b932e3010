"""This module writes the report of a study: a page, all numbers as JSON, and the table of win rates as CSV."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from recap.errors import refuse
from recap.eval.study.design import IDENTICAL, Key
from recap.eval.study.findings import (
    ALL,
    CONTRADICTED_SHARE,
    COUNTED,
    FEWEST_REPEATED,
    PASSED_SHARE,
    Answered,
    Compared,
    Findings,
    find,
)
from recap.eval.study.preference import WinRate
from recap.eval.study.votes import Ballot, read_ballots
from recap.io.files import read_json, staged_folder
from recap.show.chart import Bar, interval_chart
from recap.show.page import Measured, Section, build_results_page
from recap.tables.findings import listed
from recap.tables.paper_numbers import paper_table
from recap.tables.study.folder import OURS

PAGE, NUMBERS, TABLE = "index.html", "report.json", "report.csv"
PAPER_RIVALS = {
    "none": "Self-Forcing",
    "deep-forcing": "Deep Forcing",
    "memrope": "MemRoPE",
    "rolling-sink": "Rolling Sink",
    ALL: "All",
}
"""Whom the paper calls what; its rivals ran on Self-Forcing."""
METHOD = (
    'The win rate is (W + T/2) / N, T being the answers "hard to say". Intervals are 95 %; raters and prompts both '
    'count as drawn at random, and there is none with fewer than 5 of either. "Among those who decide" is the chance '
    "by the Davidson model, which has ties and a side effect of its own."
)
COLUMNS = (
    *("question", "rival", "raters", "wins", "ties", "losses", "n", "clusters", "rate", "low", "high"),
    *("davidson", "davidson_low", "davidson_high"),
    *("paper", "paper_low", "paper_high", "paper_ties", "paper_n"),
)


class PaperCell(NamedTuple):
    """Holds the paper's number next to ours, as shares; its interval is computed from the counts that it prints."""

    rate: float
    low: float
    high: float
    ties: int
    n: int


def paper_cell(ours: str, rival: str, question: str) -> PaperCell | None:
    """Return what the paper found for the same comparison, where it has one."""
    name = PAPER_RIVALS.get(rival.partition(",")[0])
    if ours.partition(",")[0] != OURS:
        return None
    for row in paper_table("human"):
        if (row["competitor"], row["question"]) == (name, question):
            rate, low, high = (float(row[column]) / 100 for column in ("rate", "ci_lo", "ci_hi"))
            return PaperCell(rate, low, high, int(row["tie"]), int(row["n"]))
    return None


def write_report(
    votes: Sequence[Path], key_path: Path, out: Path
) -> tuple[Path, Key, list[Ballot], Findings]:
    """Read votes and write the report; an earlier report in `out` is replaced, anything else is not."""
    key = Key.from_dict(read_json(key_path), str(key_path))
    ballots = read_ballots(votes, key.study)
    if not any(ballot.answers for ballot in ballots):
        limit = "nobody has answered anything yet"
        raise refuse("votes", ", ".join(map(str, votes)), limit, "wait for votes")
    found = find(key, ballots)
    with staged_folder(out, (PAGE, NUMBERS, TABLE)) as staged:
        (staged / PAGE).write_text(_page(key, found), encoding="utf-8")
        (staged / TABLE).write_text(_csv(key, found), encoding="utf-8")
        numbers = json.dumps(_plain(_numbers(key, found)), indent=1, ensure_ascii=False, allow_nan=False)
        (staged / NUMBERS).write_text(numbers, encoding="utf-8")
    return out / PAGE, key, ballots, found


def _page(key: Key, found: Findings) -> str:
    counted = sum(facts.status == COUNTED for facts in found.raters)
    left_out = len(found.raters) - counted
    subtitle = f"{counted} raters" + (f", {left_out} more left out" if left_out else "")
    findings = [f"{answered.question}: {sentence(key, answered)}" for answered in found.questions]
    sections = [Section("Findings", [*findings, METHOD], [], [])]
    sections += [_question_section(key, answered, counted) for answered in found.questions]
    sections.append(_raters_section(key, found))
    about = {
        "study": key.study.digest,
        "made": key.made.get("at", ""),
        "pairs": sum(facts.kind != IDENTICAL for facts in key.pairs.values()),
        "prompts": len({facts.prompt for facts in key.pairs.values() if facts.kind != IDENTICAL}),
        "identical pairs": sum(facts.kind == IDENTICAL for facts in key.pairs.values()),
        "repeated pairs": key.made.get("repeats", 0),
        "recap": key.made.get("recap", ""),
    }
    return build_results_page(f"Study: {key.ours} against {', '.join(key.rivals)}", subtitle, sections, about)


def sentence(key: Key, answered: Answered) -> str:
    """Say in words what a question's votes show."""
    better: list[str] = []
    worse: list[str] = []
    open_: list[str] = []
    for row in answered.rows:
        rate = row.kept.rate
        if row.rival == ALL and len(answered.rows) > 1:
            continue
        if math.isnan(rate.low) or rate.low <= 0.5 <= rate.high:
            open_.append(row.rival)
        else:
            (better if rate.low > 0.5 else worse).append(row.rival)
    parts = [
        f"{key.ours} is preferred to {listed(better)}" if better else "",
        f"{listed(worse)} {'is' if len(worse) == 1 else 'are'} preferred to {key.ours}" if worse else "",
        f"no difference is shown between {key.ours} and {listed(open_)}" if open_ else "",
    ]
    return "; ".join(part for part in parts if part) + "."


def _question_section(key: Key, answered: Answered, raters: int) -> Section:
    papers = [paper_cell(key.ours, row.rival, answered.question) for row in answered.rows]
    bars = [
        Bar(row.rival, *row.kept.rate[:3], paper.rate if paper else None)
        for row, paper in zip(answered.rows, papers, strict=True)
    ]
    head = ["against", "win rate", "W / T / L", "n", "among those who decide", "all raters", "paper"]
    rows = [_texts(row, paper) for row, paper in zip(answered.rows, papers, strict=True)]
    side = answered.model.side_a
    remarks = [
        f"Agreement: two raters give the same answer to a pair in {_percent(answered.agreement)} of the cases; "
        f"Krippendorff's alpha is {_number(answered.alpha)}. Between equal videos {_percent(answered.model.tie)} of "
        f'the answers would be "hard to say", and {_span(side.chance, side.low, side.high)} of the others side A.',
    ]
    title = f"{answered.question}: {key.study.questions[answered.question]}"
    people = "1 person" if raters == 1 else f"{raters} people"
    table = Measured(f"Win rate of {key.ours}", people, head, rows, ALL)
    return Section(
        title, remarks, [table], [interval_chart(f"win rate of {key.ours}: {answered.question}", bars)]
    )


def _texts(row: Compared, paper: PaperCell | None) -> list[str]:
    kept, strength = row.kept, row.strength
    return [
        row.rival,
        _rate(kept),
        f"{kept.wins} / {kept.ties} / {kept.losses}",
        str(kept.rate.n),
        _span(strength.chance, strength.low, strength.high),
        "the same" if row.everyone == row.kept else f"{_rate(row.everyone)}, n {row.everyone.rate.n}",
        f"{_span(paper.rate, paper.low, paper.high)}, {paper.ties} T, n {paper.n}" if paper else "",
    ]


def _raters_section(key: Key, found: Findings) -> Section:
    out = [facts for facts in found.raters if facts.status != COUNTED]
    rule = (
        f'A rater is left out who says "hard to say" in fewer than {PASSED_SHARE:.0%} of the answers about two '
        f"identical videos, names the other video in more than {CONTRADICTED_SHARE:.0%} of {FEWEST_REPEATED} or more "
        "answers about repeated pairs, or stopped before the first check."
    )
    who = ", ".join(f"{facts.rater} ({facts.status})" for facts in out)
    names = f"Left out: {who}." if out else "Nobody was left out."
    head = ["rater", "answered", "identical seen", "contradicted", "side A", "hard to say", "median time", ""]
    rows = [
        [
            facts.rater,
            f"{facts.trials} of {key.study.trials}",
            f"{facts.passed} of {facts.identical}",
            f"{facts.contradicted} of {facts.repeated}",
            _percent(facts.side_a),
            _percent(facts.ties),
            f"{facts.median_s:.0f} s",
            facts.status,
        ]
        for facts in sorted(found.raters, key=lambda facts: facts.status == COUNTED)
    ]
    table = Measured("Raters", "identical and repeated pairs", head, rows, "")
    return Section("Who answered", [names, rule], [table], [])


def _csv(key: Key, found: Findings) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for answered in found.questions:
        for row in answered.rows:
            paper = paper_cell(key.ours, row.rival, answered.question)
            for raters, own in ((COUNTED, row.kept), ("everyone", row.everyone)):
                strength = row.strength if raters == COUNTED else (None, None, None)
                rate = own.rate
                counts = (own.wins, own.ties, own.losses, rate.n, rate.clusters)
                numbers = (rate.mean, rate.low, rate.high, *strength, *(paper or [None] * 5))
                texts = ["" if v is None or v != v else f"{v:.6g}" for v in numbers]
                writer.writerow([answered.question, row.rival, raters, *counts, *texts])
    return out.getvalue()


def _numbers(key: Key, found: Findings) -> dict[str, Any]:
    """Return everything that the page shows, as plain data."""
    questions = []
    for answered in found.questions:
        rows = [
            {
                "rival": row.rival,
                **{
                    name: {"wins": own.wins, "ties": own.ties, "losses": own.losses, **own.rate._asdict()}
                    for name, own in (("counted", row.kept), ("everyone", row.everyone))
                },
                "davidson": row.strength._asdict(),
                "paper": (cell := paper_cell(key.ours, row.rival, answered.question)) and cell._asdict(),
            }
            for row in answered.rows
        ]
        model = {"tie_between_equals": answered.model.tie, "side_a": answered.model.side_a._asdict()}
        agreement = {"same_answer": answered.agreement, "krippendorff_alpha": answered.alpha}
        words = {"question": answered.question, "text": key.study.questions[answered.question]}
        questions.append({**words, "finding": sentence(key, answered), "rows": rows, **model, **agreement})
    raters = [asdict(facts) for facts in found.raters]
    return {"v": 1, "study": key.study.digest, "ours": key.ours, "questions": questions, "raters": raters}


def _plain(value: Any) -> Any:
    """Return a structure without nan, which JSON does not have."""
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _rate(own: WinRate) -> str:
    return _span(*own.rate[:3])


def _span(value: float, low: float, high: float) -> str:
    if math.isnan(value):
        return "–"
    return f"{100 * value:.1f} %" + ("" if math.isnan(low) else f" [{100 * low:.1f}, {100 * high:.1f}]")


def _percent(value: float) -> str:
    return "–" if math.isnan(value) else f"{100 * value:.0f} %"


def _number(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.2f}"
