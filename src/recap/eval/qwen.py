"""Uses Qwen2.5-VL, a language model that sees, in two ways: as a detector, and as a witness.

The detector asks in JSON for one box of a phrase; embedding that box is the paper's protocol. The witness asks who is
there, and of two pictures whether they show the same one. All answers are decoded greedily and kept as they are.

**It has not met the real weights yet**; tests run it with a small random model. Boxes are in pixels of the resized
picture (multiples of 28), so they are scaled back; there is no confidence, and the first box of an answer counts.
"""

from __future__ import annotations

import inspect
import json
import math
import re
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from recap.eval.embedders import load_pretrained, picture_key
from recap.eval.sampling import Pictures
from recap.eval.witnesses import Box
from recap.io.video import Picture

MODEL = "Qwen/Qwen2.5-VL-7B-Instruct"
NAME = "qwen2.5-vl"
ASK_BOX = (
    "Locate {subject} in the image. Answer with a JSON list holding one object with the keys bbox_2d "
    "([x1, y1, x2, y2] in pixels) and label. Answer with an empty list if it is not in the image."
)
ASK_PRESENCE = "Is {subject} visible in the image? Answer with one word, yes or no."
ASK_SAME = (
    "Both images show {subject}. Is it the same individual in both, by its colours, markings, clothes and shape? "
    "Pose, size and surroundings may differ. Answer with one number: 1 certainly another, 2 probably another, 3 "
    "hard to say, 4 probably the same, 5 certainly the same."
)
LOWEST, HIGHEST = 1, 5
_IMAGE = "<|image_pad|>"
_CHAT = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    "<|im_start|>user\n{shown}{question}<|im_end|>\n<|im_start|>assistant\n"
)
_MOST_TOKENS = 128
MOST_PAIRS, MOST_OF_ONE_SIDE = 16, 4
"""A comparison of two visits asks about so many pairs of their pictures at most, evenly spread."""


class QwenModel:
    """Answers a question about pictures, one at a time, which is slow, and keeps every answer with its question."""

    def __init__(self, source: str = "", device: str = "cpu"):
        self.source = source or MODEL
        self.backend = f"{NAME}:{self.source}"
        self.answers: list[dict[str, str]] = []
        self._device = device
        # Not its AutoProcessor, which wants torchvision, for videos.
        self._tokenizer = _load("AutoTokenizer", self.source)
        self._prepare = _load("AutoImageProcessor", self.source)
        model = _load("Qwen2_5_VLForConditionalGeneration", self.source, dtype="auto")
        self._model = model.to(device).eval()

    def ask(self, pictures: Sequence[Picture], question: str) -> tuple[str, tuple[int, int]]:
        """Return the answer, and the size (rows, columns) in which the model saw the first picture."""
        seen = self._prepare(images=list(pictures), return_tensors="pt")
        grids = seen["image_grid_thw"].tolist()
        # As many tokens stand for a picture as it has patches after merging.
        counts = [math.prod(grid) // int(self._prepare.merge_size) ** 2 for grid in grids]
        shown = "".join(f"<|vision_start|>{_IMAGE * count}<|vision_end|>" for count in counts)
        words = self._tokenizer(_CHAT.format(shown=shown, question=question), return_tensors="pt")
        inputs = {name: value.to(self._device) for name, value in {**seen, **words}.items()}
        if "mm_token_type_ids" in inspect.signature(self._model.forward).parameters:
            # The kind of every token, 1 of a picture, by which newer versions count positions.
            inputs["mm_token_type_ids"] = (inputs["input_ids"] == self._model.config.image_token_id).int()
        with torch.no_grad():
            made = self._model.generate(**inputs, max_new_tokens=_MOST_TOKENS, do_sample=False)
        own = made[0, inputs["input_ids"].shape[1] :]
        answer: str = self._tokenizer.decode(own, skip_special_tokens=True)
        self.answers.append({"question": question, "answer": answer})
        patch = int(self._prepare.patch_size)
        rows, columns = (int(n) * patch for n in grids[0][1:])
        return answer, (rows, columns)


class QwenDetector:
    """Finds a subject by its box; a picture is asked about once."""

    def __init__(self, model: QwenModel):
        self.backend, self._model = model.backend, model
        self._known: dict[tuple[bytes, str], Box | None] = {}

    def find(self, pictures: Pictures, subject: str) -> list[Box | None]:
        return [self._find(picture, subject) for picture in pictures]

    def _find(self, picture: Picture, subject: str) -> Box | None:
        key = picture_key(picture), subject
        if key not in self._known:
            answer, seen = self._model.ask([picture], ASK_BOX.format(subject=subject))
            self._known[key] = read_box(answer, seen=seen, size=(picture.shape[0], picture.shape[1]))
        return self._known[key]


class QwenWitness:
    """Says in words who is there and whether two sightings are of the same one; its features number its sightings.

    Of two sets of sightings it compares a few of each, evenly spread; all others have the answer of the nearest.
    """

    # More likely the same than not.
    same_from: float | None = 0.75

    def __init__(self, model: QwenModel):
        self.backend, self._model = model.backend, model
        self._sightings: list[tuple[Picture, str]] = []
        self._found: dict[tuple[bytes, str], tuple[bool, int]] = {}
        self._compared: dict[tuple[int, int], float] = {}

    def look(self, pictures: Pictures, subject: str) -> tuple[NDArray[np.bool_], NDArray[np.float32]]:
        looks = [self._look(picture, subject) for picture in pictures]
        found, numbers = zip(*looks, strict=True) if looks else ((), ())
        return np.array(found, bool), np.array(numbers, np.float32).reshape(-1, 1)

    def _look(self, picture: Picture, subject: str) -> tuple[bool, int]:
        key = picture_key(picture), subject
        if key not in self._found:
            answer, _ = self._model.ask([picture], ASK_PRESENCE.format(subject=subject))
            self._found[key] = read_presence(answer), len(self._sightings)
            self._sightings.append((np.array(picture), subject))
        return self._found[key]

    def likeness(self, one: NDArray[np.float32], other: NDArray[np.float32]) -> NDArray[np.float64]:
        """Return 0 for certainly another to 1 for certainly the same; nan where the answer could not be read."""
        few = min(len(one), MOST_OF_ONE_SIDE if len(other) > 1 else MOST_PAIRS)
        rows, columns = _spread(len(one), few), _spread(len(other), MOST_PAIRS // max(1, few))
        numbers = [part[:, 0].astype(int).tolist() for part in (one, other)]
        asked = {(r, c) for r in rows.tolist() for c in columns.tolist()}
        known = {(r, c): self._compare(numbers[0][r], numbers[1][c]) for r, c in sorted(asked)}
        return np.array([[known[r, c] for c in columns.tolist()] for r in rows.tolist()], np.float64)

    def _compare(self, one: int, other: int) -> float:
        if (one, other) not in self._compared:
            (before, subject), (after, _) = self._sightings[one], self._sightings[other]
            answer, _ = self._model.ask([before, after], ASK_SAME.format(subject=subject))
            rating = read_rating(answer)
            likeness = float("nan") if rating is None else (rating - LOWEST) / (HIGHEST - LOWEST)
            self._compared[one, other] = likeness
        return self._compared[one, other]


def _spread(count: int, few: int) -> NDArray[np.int64]:
    """Return for each of `count` places the nearest of `few` that are evenly spread."""
    few = min(few, count)
    chosen = np.unique(((np.arange(few) + 0.5) * count / max(1, few)).astype(np.int64))
    places = np.arange(count)
    nearest: NDArray[np.int64] = chosen[np.abs(places[:, None] - chosen[None]).argmin(axis=1)]
    return nearest


def read_presence(answer: str) -> bool:
    """Return whether an answer begins with yes; what is neither yes nor no proves no presence."""
    return re.match(r"\W*yes\b", answer, flags=re.IGNORECASE) is not None


def read_rating(answer: str) -> int | None:
    """Return the only number from 1 to 5 of an answer; None where there is none, or more than one."""
    found = {int(number) for number in re.findall(r"(?<![\d.])\d+(?![\d.]*\d)", answer)}
    (rating,) = found if len(found) == 1 else (0,)
    return rating if LOWEST <= rating <= HIGHEST else None


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
    except (json.JSONDecodeError, RecursionError, ValueError):
        match = re.search(r'"bbox_2d"\s*:\s*\[([^\]]*)\]', text)
        found = {"bbox_2d": match.group(1).split(",")} if match else None
    first = found[0] if isinstance(found, list) and found else found
    corners = first.get("bbox_2d") if isinstance(first, dict) else None
    try:
        numbers = [float(corner) for corner in corners or []]
    except (TypeError, ValueError):
        return None
    return numbers if len(numbers) == 4 and all(np.isfinite(numbers)) else None


# The model is read once per process.
qwen_model = cache(QwenModel)


def find_qwen(source: str = "") -> None:
    """Refuse a model that is not on this machine; none of its weights are read."""
    _load("AutoConfig", source or MODEL)


def _load(name: str, source: str, **options: Any) -> Any:
    return load_pretrained(NAME, source, f"--detector {NAME}", name, **options)
