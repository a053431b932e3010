"""Answers that a language model may give for a box. The model itself is not run here."""

from __future__ import annotations

import pytest

from recap.eval.qwen import QwenModel, read_box

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
