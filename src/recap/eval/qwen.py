"""Uses Qwen2.5-VL as a detector: it is asked in JSON for one box of a phrase and decodes greedily.

**It has not met the real weights yet.** Its boxes are in pixels of the resized picture (multiples of 28), so they are
scaled back. It reports no confidence; the first box of an answer counts.
"""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np

from recap.eval.embedders import load_pretrained
from recap.eval.sampling import Pictures
from recap.eval.witnesses import Box
from recap.io.video import Picture

MODEL = "Qwen/Qwen2.5-VL-7B-Instruct"
ASK = (
    "Locate {subject} in the image. Answer with a JSON list holding one object with the keys bbox_2d "
    "([x1, y1, x2, y2] in pixels) and label. Answer with an empty list if it is not in the image."
)
_MOST_TOKENS = 128


class QwenDetector:
    """Asks one question per picture, which is slow, and keeps every answer, for whoever doubts a score."""

    def __init__(self, source: str = "", device: str = "cpu"):
        source = source or MODEL
        self.backend = f"qwen2.5-vl:{source}"
        self.answers: list[str] = []
        self._device = device
        self._prepare = _load("AutoProcessor", source)
        model = _load("Qwen2_5_VLForConditionalGeneration", source, dtype="auto")
        self._model = model.to(device).eval()

    def find(self, pictures: Pictures, subject: str) -> list[Box | None]:
        return [self._find(picture, subject) for picture in pictures]

    def _find(self, picture: Picture, subject: str) -> Box | None:
        content = [{"type": "image"}, {"type": "text", "text": ASK.format(subject=subject)}]
        text = self._prepare.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        inputs = self._prepare(text=[text], images=[picture], return_tensors="pt").to(self._device)
        made = self._model.generate(**inputs, max_new_tokens=_MOST_TOKENS, do_sample=False)
        answer = self._prepare.batch_decode(
            made[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
        )[0]
        self.answers.append(answer)
        patch = int(self._prepare.image_processor.patch_size)
        rows, columns = (int(n) * patch for n in inputs["image_grid_thw"][0][1:])
        return read_box(answer, seen=(rows, columns), size=(picture.shape[0], picture.shape[1]))


def read_box(answer: str, seen: tuple[int, int], size: tuple[int, int]) -> Box | None:
    """Return the first box of an answer, scaled from the picture the model saw to `size` (rows, columns)."""
    corners = _first_corners(answer)
    if corners is None:
        return None
    across, down = size[1] / seen[1], size[0] / seen[0]
    left, top, right, bottom = (v * s for v, s in zip(corners, (across, down, across, down), strict=True))
    left, right = (float(np.clip(v, 0, size[1])) for v in (left, right))
    top, bottom = (float(np.clip(v, 0, size[0])) for v in (top, bottom))
    return Box(left, top, right, bottom) if right - left >= 1 and bottom - top >= 1 else None


def _first_corners(answer: str) -> list[float] | None:
    """Return four numbers, whether the answer is clean JSON, fenced, or cut off after the box."""
    fenced = re.search(r"```(?:json)?\s*(.*?)(?:```|$)", answer, flags=re.DOTALL)
    text = fenced.group(1) if fenced else answer
    try:
        found = json.loads(text)
    except json.JSONDecodeError:
        match = re.search(r'"bbox_2d"\s*:\s*\[([^\]]*)\]', text)
        found = {"bbox_2d": match.group(1).split(",")} if match else None
    first = found[0] if isinstance(found, list) and found else found
    corners = first.get("bbox_2d") if isinstance(first, dict) else None
    try:
        numbers = [float(corner) for corner in corners or []]
    except (TypeError, ValueError):
        return None
    return numbers if len(numbers) == 4 and all(np.isfinite(numbers)) else None


def find_qwen(source: str = "") -> None:
    """Refuse a model that is not on this machine; none of its weights are read."""
    _load("AutoConfig", source or MODEL)


def _load(name: str, source: str, **options: Any) -> Any:
    return load_pretrained("detector qwen2.5-vl", source, "--detector qwen2.5-vl", name, **options)
