"""Answers that a language model may give, how they are asked for, and a small random model that gives some."""

from __future__ import annotations

import numpy as np
import pytest

from recap.eval.judged import JudgedRun, Measure
from recap.eval.metrics.identity import identity
from recap.eval.qwen import (
    MOST_PAIRS,
    QwenDetector,
    QwenModel,
    QwenWitness,
    read_box,
    read_presence,
    read_rating,
)
from recap.eval.sampling import InMemoryClip, Sampled

SEEN, SIZE = (476, 840), (480, 832)


@pytest.mark.parametrize(
    "answer",
    [
        '[{"bbox_2d": [84, 47.6, 420, 238], "label": "fox"}]',
        '```json\n[\n\t{"bbox_2d": [84, 47.6, 420, 238], "label": "fox"}\n]\n```',
        'Here it is: ```json\n{"bbox_2d": [84, 47.6, 420, 238]}```',
        '[{"bbox_2d": [84, 47.6, 420, 238], "label": "a red f',
        '[{"bbox_2d": [84, 47.6, 420, 238]}, {"bbox_2d": [0, 0, 9, 9]}]',
    ],
)
def test_boxes_are_read_and_scaled_back(answer):
    assert read_box(answer, SEEN, SIZE) == pytest.approx((83.2, 48, 416, 240))


@pytest.mark.parametrize(
    "answer",
    ["[]", "", "There is no fox.", '[{"bbox_2d": [1, 2, 3]}]', '[{"bbox_2d": ["a", 0, 1, 1]}]', '{"bbox_2d": 7}',
     '[{"bbox_2d": [50, 50, 50, 90]}]', '[{"bbox_2d": [9000, 10, 9100, 20]}]', "[[1, 2, 3, 4]]",
     '[{"bbox_2d": [NaN, 0, 10, 10]}]'],
)  # fmt: skip
def test_no_box_is_no_sighting(answer):
    assert read_box(answer, SEEN, SIZE) is None


def test_boxes_end_at_the_picture():
    assert read_box('{"bbox_2d": [-20, -5, 2000, 300]}', SIZE, SIZE) == (0, 0, 832, 300)


def test_missing_weights_are_named(tmp_path):
    pytest.importorskip("transformers")
    with pytest.raises(ValueError, match=r"qwen2\.5-vl.*hf download"):
        QwenModel(str(tmp_path / "none"))


@pytest.mark.parametrize(
    ("answer", "rating"),
    [("5", 5), (" 4.", 4), ("Answer: 2", 2), ("**1**", 1), ("3 (hard to say)", 3), ("4 or 5", None), ("", None),
     ("0", None), ("6", None), ("10", None), ("2.5", None), ("certainly", None), ("5, I am sure: 5", 5)],
)  # fmt: skip
def test_ratings_are_read(answer, rating):
    assert read_rating(answer) == rating


@pytest.mark.parametrize(
    ("answer", "there"),
    [("Yes", True), (" yes, it is", True), ('"YES"', True), ("No", False), ("Yesterday", False), ("", False)],
)
def test_presence_is_read(answer, there):
    assert read_presence(answer) is there


class Knowing:
    """A model that knows: a picture shows the subject if it is not black, and two are the same if they are equal."""

    backend = "knowing"

    def __init__(self):
        self.answers = []

    def ask(self, pictures, question):
        if len(pictures) == 1:
            answer = "Yes." if pictures[0].any() else "No."
        else:
            answer = "5" if np.array_equal(*pictures) else "1"
        self.answers.append({"question": question, "answer": answer})
        return answer, pictures[0].shape[:2]


def shown(*levels):
    return np.stack([np.full((28, 28, 3), level, np.uint8) for level in levels])


def test_a_witness_asks_once_and_about_a_few_pairs_of_many():
    model = Knowing()
    witness = QwenWitness(model)
    found, seen = witness.look(shown(0, 9, 200), "a fox")
    assert found.tolist() == [False, True, True] and len(model.answers) == 3
    assert witness.likeness(seen[1:2], seen[1:]).tolist() == [[1, 0]]
    witness.look(shown(0, 9, 200), "a fox")
    witness.likeness(seen[1:2], seen[1:])
    assert len(model.answers) == 5 and "a fox" in model.answers[-1]["question"]
    _, many = witness.look(shown(*range(1, 31)), "a fox")
    before = len(model.answers)
    likeness = witness.likeness(many[:10], many[10:])
    assert likeness.shape == (10, 20) and len(model.answers) - before == MOST_PAIRS


def test_identity_by_a_witness_that_answers_in_words():
    witness, times = QwenWitness(Knowing()), np.arange(120) / 2
    kept, lost = (Sampled(times, shown(*[9] * 60, *[level] * 60), 60.0) for level in (9, 200))
    assert identity(kept, witness, "a fox").value == 1 and identity(lost, witness, "a fox").value == 0


def test_an_answer_that_cannot_be_read_counts_for_nothing():
    class Mumbling(Knowing):
        def ask(self, pictures, question):
            said = super().ask(pictures, question)
            return ("well", said[1]) if len(pictures) == 2 and len(self.answers) % 2 else said

    times = np.arange(120) / 2
    kept = Sampled(times, shown(*[9 + k % 2 for k in range(120)]), 60.0)
    assert 0 < identity(kept, QwenWitness(Mumbling()), "a fox").value < 1


def test_raw_answers_are_kept_with_the_first_score_of_a_measure(monkeypatch):
    model = Knowing()
    monkeypatch.setattr("recap.eval.judged.qwen_model", lambda source, device: model)
    data = {"subject": "a fox", "embedder": "hsv", "detector": "", "judge": "qwen2.5-vl"}
    data["config"] = {"backbone": {"name": "self-forcing"}, "device": "cpu"}
    run = JudgedRun(data, InMemoryClip(shown(*[9] * 160), 16), [])
    assert [name for name, _ in run.witnesses] == ["vlm", "frame"] and run.finder is run.seeing_witness

    def measure(judged):
        return [identity(judged.sampled, who, judged.subject, name) for name, who in judged.witnesses]

    scores = Measure("some", measure).scores(run)
    assert [score.backend for score in scores] == ["knowing", "standin:hsv-8x4x4"]
    assert scores[0].details["answers"] == model.answers != [] and "answers" not in scores[1].details


@pytest.mark.slow
def test_a_model_as_transformers_saves_it_answers(tmp_path):
    pytest.importorskip("transformers")
    from small_qwen import save_small_qwen

    model = QwenModel(str(save_small_qwen(tmp_path)))
    pictures = np.random.default_rng(0).integers(0, 256, (2, 64, 96, 3), dtype=np.uint8)
    answer, seen = model.ask(list(pictures), "Which?")
    assert answer == model.ask(list(pictures), "Which?")[0] == model.answers[1]["answer"]
    # Sides are multiples of 28.
    assert seen == (56, 84) and len(model.answers) == 2
    assert len(QwenDetector(model).find(pictures, "a fox")) == 2
    found, features = QwenWitness(model).look(pictures, "a fox")
    assert found.shape == (2,) and features.shape == (2, 1) and len(model.answers) == 6
