"""Studies without videos, and raters whose preferences are known."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field

import pytest
import torch

from recap.eval.study.design import IDENTICAL, PAIR, Key, PairFacts, Study, lay_out
from recap.eval.study.votes import TIE, A, B, seal
from recap.io.video import ClipWriter

QUESTIONS = {"consistency": "Which keeps?", "motion": "Which moves?", "overall": "Which is better?"}


def paper_key(rivals=("none", "memrope"), per_rival=12, identical=3, repeats=3, questions=QUESTIONS, seed=0):
    """The key of a study that exists on paper: every pair has a prompt of its own."""
    chance = random.Random(seed)
    files = iter(f"{number:020x}.mp4" for number in range(10_000))
    facts, pairs, groups, ours_first = {}, {}, [], {}
    for rival in rivals:
        groups.append([f"{rival}{number}" for number in range(per_rival)])
        for name in groups[-1]:
            ours_first[name] = chance.random() < 0.5
            methods = ("recap", rival) if ours_first[name] else (rival, "recap")
            facts[name] = PairFacts(PAIR, f"prompt of {name}", 0, methods)
    same = [f"same{number}" for number in range(identical)]
    facts |= {name: PairFacts(IDENTICAL, f"prompt of {name}", 0, ("recap", "recap")) for name in same}
    pairs = {name: (next(files), next(files)) for name in facts}
    sheets = lay_out(groups, ours_first, same, repeats, chance)
    return Key(
        Study("Which?", dict(questions), pairs, sheets), "recap", facts, {"methods": ["recap", *rivals]}
    )


@pytest.fixture(scope="session")
def key():
    return paper_key()


@dataclass
class Writer:
    """Writes the lines that the page of one rater would write."""

    study: Study
    session: str
    rater: str
    sheet: int = 0
    lines: list[bytes] = field(default_factory=list)
    before: str = ""

    def __post_init__(self):
        self.before = self.study.digest
        self.write(rater=self.rater, sheet=self.sheet, at="2026-11-17T12:00:00.000Z")

    def write(self, **fields):
        head = {"v": 1, "study": self.study.digest, "session": self.session, "n": len(self.lines)}
        self.lines.append(seal({**head, **fields}, self.before))
        self.before = self.lines[-1][-10:-2].decode()

    def vote(self, trial, answers, took_s=5.0):
        self.write(trial=trial, answers=answers, took_s=took_s)

    @property
    def data(self):
        return b"".join(line + b"\n" for line in self.lines)


def careful(chance, key, likes):
    """Answer by preference: `likes(pair, question)` is the chance to choose ours where one decides; 15 % are ties.

    On two identical videos one in 25 answers claims a difference.
    """

    def answer(trial, question):
        pair = trial[0]
        if key.pairs[pair].kind == IDENTICAL:
            return TIE if chance.random() < 0.96 else chance.choice([A, B])
        if chance.random() < 0.15:
            return TIE
        return A if (chance.random() < likes(pair, question)) == key.ours_on_a(trial) else B

    return answer


def careless(chance):
    """Answer without looking."""
    return lambda trial, question: chance.choice([A, TIE, B])


def fill(writer, key, answer):
    """Answer all trials of a sheet."""
    for place, trial in enumerate(key.study.sheets[writer.sheet]):
        writer.vote(place, {question: answer(trial, question) for question in key.study.questions})
    return writer


def session_of(number):
    return f"{number:032x}"


COLOURS = {"recap": (20, 200, 60), "none": (210, 40, 40), "sink": (40, 60, 220)}
"""Red, green and blue by memory: a rater who sees the picture can tell whose it is."""


def write_table(folder, prompts, memories=tuple(COLOURS), pictures=3, fps=10):
    """The folder of a table as `recap reproduce` leaves it, with a video of one colour for every run."""
    (folder / "rivals").mkdir(parents=True)
    lines = []
    for memory in memories:
        for number in range(prompts):
            run = f"{memory}{number}"
            (folder / "shown" / run).mkdir(parents=True)
            with ClipWriter(folder / "shown" / run / "video.mp4", (36, 64), fps) as writer:
                writer.write(
                    torch.tensor(COLOURS[memory], dtype=torch.uint8)[None, :, None, None].expand(
                        pictures, 3, 36, 64
                    )
                )
            lines.append(
                {"row": memory, "prompt": f"prompt {number}", "seed": 1000 * number, "key": run, "scores": {}}
            )
    (folder / "rivals" / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "rivals" / "table.json").write_text(json.dumps({"table": "rivals"}))
    return folder / "rivals"
