"""What measures say of a run that was never generated, by its pictures alone."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial
from typing import ClassVar

import numpy as np
import pytest
from tables_help import data_of

from recap.eval.judged import JudgedRun
from recap.eval.judges.crops import same_from
from recap.eval.judges.subject import ProbeWitness
from recap.eval.metrics import find_measure
from recap.eval.metrics.consistency import consistency
from recap.eval.metrics.dynamics import LENGTHS_S
from recap.eval.metrics.reappearance import same_again
from recap.eval.sampling import CLIP_S, InMemoryClip
from recap.eval.scores import Score
from recap.io.trace import BlockTrace
from recap.tables.recipes import find_recipe
from recap.tables.table import ScoredRun, build_cells

FPS = 16
SIZE = (48, 64)


def run_of(num_pictures: int) -> JudgedRun:
    """Still for the first half, then another picture every time."""
    dice = np.random.default_rng(0)
    pictures = np.zeros((num_pictures, *SIZE, 3), np.uint8)
    pictures[num_pictures // 2 :] = dice.integers(0, 256, pictures[num_pictures // 2 :].shape)
    return JudgedRun(data_of("length", backbone="untrained"), InMemoryClip(pictures, FPS), [])


def pictures_of(blocks: int) -> int:
    """Three latents a block, four pictures a latent, but one of the first."""
    return 4 * (3 * blocks - 1) + 1


@pytest.mark.parametrize(
    ("blocks", "lengths"), [(3, []), (7, [5]), (11, [5]), (13, [5, 10]), (27, [5, 10, 20])]
)
def test_only_lengths_that_a_video_has_are_scored(blocks, lengths):
    """As asked for by --seconds 2, 5, 8, 10 and 20; whole blocks leave a video up to 0.6 s short."""
    scores = find_measure("length").score(run_of(pictures_of(blocks)))
    assert [each.name for each in scores] == [f"dynamic_degree_{s}s" for s in lengths]


def test_a_minute_is_scored_at_every_length():
    run = run_of(pictures_of(80))
    scores = find_measure("length").score(run)
    clips = find_measure("dynamics").score(run)[1].details["clips"]
    assert len(clips) == 30 and not any(clips[:14]) and all(clips[16:])
    assert [each.name for each in scores] == [f"dynamic_degree_{s}s" for s in LENGTHS_S]
    assert [each.n for each in scores] == [2, 5, 10, 15, 22, 30]
    assert [each.value for each in scores] == [np.mean(clips[: each.n]) for each in scores]


def test_consistency_of_a_length_is_that_of_the_video_cut_there():
    run = run_of(pictures_of(80))
    scores = find_measure("length_consistency").score(run)
    assert [each.name for each in scores] == [f"subject_consistency_{s}s" for s in LENGTHS_S]
    pictures = np.stack(list(run.clip.pictures()))
    for each in scores[:-1]:
        cut = InMemoryClip(pictures[: each.n * CLIP_S * FPS], FPS)
        assert each.value == pytest.approx(consistency(cut, "subject", run.embedder).value)
    whole = consistency(run.clip, "subject", run.embedder)
    assert (scores[-1].value, scores[-1].backend) == (pytest.approx(whole.value), whole.backend)
    assert scores[0].value > scores[-1].value


class LeftColumn(ProbeWitness):
    """Sees an actor in the first column of cells of every picture that is white, and nowhere else."""

    def covered(self, pictures):
        cells = np.zeros((len(pictures), 8, 13), bool)
        cells[:, :, 0] = (pictures.mean(axis=(1, 2, 3)) > 127)[:, None]
        return cells


def trace_line(block, admitted, *, evicted=(), edge=0.5, cut=False):
    first = [max(0, 4 * frame - 3) for frame in range(3 * block, 3 * block + 3)]
    rows = [[{entry[:3]: entry[3] for entry in entries}] for entries in (admitted, evicted)]
    return BlockTrace(
        block, 3 * block, tuple(first), 12 - 3 * (block == 0), clears_prior=cut,
        edge_share=[edge], admitted=rows[0], evicted=rows[1],
    )  # fmt: skip


@pytest.mark.parametrize(("cut", "edge", "share", "filled"), [(False, 0.75, 2 / 4, 4), (True, 0.5, 1 / 3, 3)])
def test_what_a_bank_is_made_of_at_the_last_cut_or_at_the_end(monkeypatch, cut, edge, share, filled):
    """Frame 2 is white in its last picture alone, frame 4 in none, frame 7 in all."""
    pictures = np.zeros((33, 128, 208, 3), np.uint8)
    pictures[8] = pictures[25:29] = 255
    trace = [
        trace_line(0, [(1, 0, 3, 0.0), (2, 4, 0, 1.0), (2, 5, 6, 1.5)], edge=0.25),
        trace_line(1, [(4, 1, 0, 2.0)], edge=0.5),
        trace_line(2, [(7, 2, 0, 1.0)], evicted=[(1, 0, 3, 0.0)], edge=0.75, cut=cut),
    ]
    monkeypatch.setattr("recap.eval.judged.ProbeWitness", LeftColumn)
    scores = find_measure("content").score(JudgedRun(data_of("rules"), InMemoryClip(pictures, FPS), trace))
    assert {each.name: each.value for each in scores} == {
        "bank_edge_share": edge, "bank_actor_share": pytest.approx(share)
    }  # fmt: skip
    assert all(each.n == filled for each in scores)


class Squares(ProbeWitness):
    """Finds a fox in the cells that are wholly red and a balloon in those wholly blue; its colours are theirs."""

    COLOURS: ClassVar = {"fox": (255, 0, 0), "balloon": (0, 0, 255)}

    def where(self, pictures, subject):
        alike = (pictures == np.array(self.COLOURS[subject], np.uint8)).all(axis=-1)
        return alike.reshape(len(pictures), 8, 16, 13, 16).all(axis=(2, 4)).astype(np.float32)

    def look(self, pictures, subject):
        found = self.where(pictures, subject).any(axis=(1, 2))
        return found, np.repeat(np.array([self.COLOURS[subject]], np.float32) / 255, len(pictures), axis=0)

    def covered(self, pictures):
        return (self.where(pictures, "fox") + self.where(pictures, "balloon")) > 0


def judged(monkeypatch, table, shots, show, measure, *, admit=None):
    """Scores by name of a table's first run, as if its shots were these (prompt, blocks, cut).

    `show` lists what is seen at a second, as (actor, row, column); `admit` what enters the bank in which block.
    """
    prompts = [(text, cut and not number) for text, blocks, cut in shots for number in range(blocks)]
    trace = []
    for block, (text, cut) in enumerate(prompts):
        line = trace_line(block, (admit or {}).get(block, ()), cut=cut and block > 0)
        bank = {} if admit is not None else {"admitted": None, "evicted": None, "edge_share": None}
        trace.append(replace(line, prompts=(text,), **bank))
    pictures = np.repeat(ground()[None], pictures_of(len(prompts)), axis=0)
    for index, picture in enumerate(pictures):
        for actor, row, column in show(index / FPS):
            picture[16 * row : 16 * row + 32, 16 * column : 16 * column + 32] = Squares.COLOURS[actor]
    monkeypatch.setattr("recap.eval.judged.ProbeWitness", Squares)
    run = JudgedRun(data_of(table), InMemoryClip(pictures, FPS), trace)
    return {each.name: each for each in find_measure(measure).score(run)}


def ground():
    """Grey levels with detail, so that flow is well defined; never a plain red or blue."""
    levels = np.random.default_rng(1).integers(60, 200, (16, 26), dtype=np.uint8)
    return np.repeat(np.repeat(levels, 8, axis=0), 8, axis=1)[..., None].repeat(3, axis=-1)


EMPTY, FOX = "an empty beach by day", "a fox on a beach by day"
APPEARING = ((EMPTY, 4, False), (FOX, 8, True), (EMPTY, 10, True), (FOX, 10, True))


@pytest.mark.parametrize(("until", "share"), [(9.0, 0.0), (13.0, 6 / 17), (99.0, 13 / 17)])
def test_haunting_is_the_share_of_moments_that_name_nobody_and_show_it(monkeypatch, until, share):
    """The fox is there from its segment B on; C lasts from 8.8 to 16.3 s, of which the first second is left out."""
    scores = judged(
        monkeypatch, "reappearance", APPEARING, lambda s: [("fox", 3, 4)] * (2.8 < s < until), "haunting"
    )
    assert scores["haunting"].value == pytest.approx(share) and scores["haunting"].n == 17
    assert scores["haunting"].details["found_share"] == pytest.approx([0, share * 17 / 13])


def test_nobody_haunts_where_every_prompt_names_it(monkeypatch):
    assert not judged(monkeypatch, "identity", ((FOX, 8, False),), lambda _: [("fox", 3, 4)], "haunting")


def test_a_subject_that_walks_moves_and_one_that_stands_does_not(monkeypatch):
    """A cell a second: of 13, six in B and seven in D, over 25 pairs. Those across a cut are left out."""

    def show(second, pace):
        since = second - (16 if second > 16 else 2.5)
        return [("fox", 3, 2 + int(pace * since))] * (2.8 < second < 8.8 or second > 16.3)

    for pace, path in ((0, 0), (1, 13 / 13 / 12.5)):
        scores = judged(monkeypatch, "reappearance", APPEARING, partial(show, pace=pace), "subject_motion")
        assert scores["subject_path"].n == scores["subject_shape_change"].n == 25
        assert scores["subject_path"].value == pytest.approx(path, abs=0.002)
        assert scores["subject_shape_change"].value == 0


ENTERING = tuple(
    (f"a fox{who} on a beach by day", blocks, False)
    for who, blocks in (("", 20), (" and a balloon", 11), ("", 16), (" and a balloon", 33))
)
"""Seconds 0, 14.8, 23.1, 35.1 and 59.8."""


def test_who_enters_leaves_and_returns(monkeypatch):
    """It stays 2 s longer than asked, haunts 4 s later on, and is back 5 s late; the fox leaves at 45 s."""

    def show(second):
        late = 15.5 < second < 25 or 30 < second < 34 or second > 40
        return [("balloon", 3, 8)] * late + [("fox", 3, 2)] * (second < 45)

    bank = {
        5: [(16, 0, 0, 1.0), (17, 3, 2, 1.0)],  # the second on the fox
        25: [(75, 3, 8, 1.0), (76, 0, 0, 1.0), (77, 4, 9, 0.0)],  # of the visit; the first on the balloon
        50: [(150, 3, 8, 1.0)],  # after the return: too late to count
    }
    scores = judged(monkeypatch, "entering", ENTERING, show, "entering", admit=bank)
    values = {name: each.value for name, each in scores.items()}
    assert values["return_subject"] == pytest.approx(1)
    assert scores["return_subject"].details["found"] == [15, 39]
    assert values["late_found_on_visit"] == 1
    assert values["late_haunting"] == pytest.approx(7 / 18)
    assert values["late_found_on_return"] == pytest.approx(39 / 47)
    assert values["opening_found"] == pytest.approx(90 / 120)
    assert values["bank_slots_from_visit"] == 3 and scores["bank_slots_from_visit"].n == 5
    assert values["bank_actor_share_at_return"] == 2 / 4 and values["bank_edge_share_at_return"] == 0.5
    assert values["return_frame"] is not None


@pytest.mark.parametrize(
    ("found", "likeness", "same"),
    [((9, 9), 0.1, 1), ((9, 9), -0.1, 0), ((9, 2), None, 0), ((2, 9), None, None)],
)
def test_the_same_again_is_alike_and_there(found, likeness, same):
    """Who does not come back is not the same again; who never was there cannot be."""
    value = None if likeness is None else same_from() + likeness
    by_crops = Score("reappearance_crop", value, "crops in probe", 1, {"found": list(found)})
    assert same_again(by_crops, "same_again").value == same


def test_who_never_entered_counts_as_not_kept():
    """Else a memory that lets nobody in would be judged by the few whom it did."""
    measure = find_measure("entering")
    stored = {name: asdict(Score(name, None, "crops in probe", 0)) for name in ("return_same", "return_crop")}
    found = measure.count_all(stored)
    assert found["return_kept"]["value"] == 0.0 and found["return_same"]["value"] is None
    stored["return_same"]["value"] = 1.0
    assert measure.count_all(stored)["return_kept"] == {**stored["return_same"], "name": "return_kept"}
    assert measure.count_all({}) == {}
    # A table of the suite has it, next to the share of those that can be compared.
    runs = []
    for prompt, value in enumerate((1.0, 0.0, None, None)):
        scores = measure.count_all({"return_same": asdict(Score("return_same", value, "x", 1))})
        runs += [ScoredRun(row, f"p{prompt}", 0, scores) for row in ("sink", "recap")]
    cells = {cell.measure: cell.value for cell in build_cells(find_recipe("entering"), runs)}
    assert (cells["return_same"].mean, cells["return_same"].n) == (0.5, 2)
    assert (cells["return_kept"].mean, cells["return_kept"].n) == (0.25, 4)


def test_a_memory_without_a_bank_is_asked_for_the_subject_alone(monkeypatch):
    scores = judged(monkeypatch, "entering", ENTERING, lambda _: [("fox", 3, 2)], "entering")
    assert set(scores) == {
        "return_subject", "return_crop", "return_same", "return_frame", "late_found_on_visit", "late_haunting",
        "late_found_on_return", "opening_found",
    }  # fmt: skip
    assert scores["return_subject"].value is None and scores["late_found_on_return"].value == 0
    assert scores["opening_found"].value == 1


def test_who_never_enters_is_not_looked_for(monkeypatch):
    assert not judged(monkeypatch, "identity", ((FOX, 8, False),), lambda _: [("fox", 3, 4)], "entering")
