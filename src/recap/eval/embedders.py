"""Embedders by name. Each states in `backend` what it really is, so that no column mixes them unnoticed."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from recap.errors import refuse, unknown_name
from recap.eval.mobilenet import MOBILENET, MobileNetV2, find_mobilenet, load_mobilenet
from recap.eval.witnesses import Embedder, Vectors
from recap.io.extras import import_extra
from recap.io.report import Reporter
from recap.io.video import Picture

# The statistics of ImageNet.
_MEAN, _SPREAD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_BATCH = 16


class HsvEmbedder:
    """The square root of a histogram of hue, saturation and value, 8 x 4 x 4: it compares colours, not objects."""

    backend = "standin:hsv-8x4x4"

    def embed(self, pictures: Sequence[Picture]) -> Vectors:
        return _units(np.stack([np.sqrt(_hsv_histogram(picture)) for picture in pictures]))


class MobileNetEmbedder:
    """MobileNetV2 trained on ImageNet, with 1280 features: a stand-in if DINOv2 is not installed."""

    backend = "standin:mobilenetv2"

    def __init__(self, model: MobileNetV2, device: str = "cpu"):
        self._model, self._device = model.to(device), device
        # A GPU would be idle between small batches.
        self._batch = _BATCH if device == "cpu" else 16 * _BATCH

    @torch.no_grad()
    def embed(self, pictures: Sequence[Picture]) -> Vectors:
        features = []
        for start in range(0, len(pictures), self._batch):
            some = pictures[start : start + self._batch]
            by_size = [list(same) for _, same in itertools.groupby(some, key=lambda picture: picture.shape)]
            batch = torch.cat([_resized(np.stack(same), self._device) for same in by_size])
            features.append(self._model(batch).float().cpu().numpy())
        return _units(np.concatenate(features))


class TransformersEmbedder:
    """DINOv2's normalised class token or CLIP's image vector, with weights from a folder or the hub's cache."""

    def __init__(self, name: str, source: str, read: Callable[[Any, Tensor], Tensor], device: str = "cpu"):
        self.backend = f"{name}:{source}"
        self._read, self._device = read, device
        self._prepare, self._model = _from_transformers(name, source)
        self._model = self._model.to(device).eval()

    @torch.no_grad()
    def embed(self, pictures: Sequence[Picture]) -> Vectors:
        made = []
        for start in range(0, len(pictures), _BATCH):
            batch = list(pictures[start : start + _BATCH])
            pixels = self._prepare(images=batch, return_tensors="pt")["pixel_values"].to(self._device)
            made.append(self._read(self._model, pixels).float().cpu().numpy())
        return _units(np.concatenate(made))


class Remembering:
    """An embedder that caches its vectors, so that several measures of one run embed a picture once."""

    def __init__(self, embedder: Embedder):
        self._embedder, self.backend = embedder, embedder.backend
        self._cache: dict[bytes, NDArray[np.float32]] = {}

    def embed(self, pictures: Sequence[Picture]) -> Vectors:
        keys = [picture_key(picture) for picture in pictures]
        new = {key: picture for key, picture in zip(keys, pictures, strict=True) if key not in self._cache}
        if new:
            self._cache |= zip(new, self._embedder.embed(list(new.values())), strict=True)
        return np.stack([self._cache[key] for key in keys])


class Looked:
    """Vectors of pictures that were embedded before, wherever that was: a GPU does it while it generates."""

    def __init__(self, backend: str, pictures: Iterable[Picture], vectors: Vectors):
        self.backend = backend
        self._vectors = dict(zip(map(picture_key, pictures), vectors, strict=True))

    def embed(self, pictures: Sequence[Picture]) -> Vectors:
        return np.stack([self._vectors[picture_key(picture)] for picture in pictures])


def picture_key(picture: Picture) -> bytes:
    """Return a key that is equal only for equal pictures."""
    return hashlib.blake2b(np.ascontiguousarray(picture).data, digest_size=16).digest()


def _dinov2(path: str, device: str) -> Embedder:
    source = path or "facebook/dinov2-base"
    return TransformersEmbedder("dinov2", source, lambda model, x: model(x).pooler_output, device)


def _clip(path: str, device: str) -> Embedder:
    return TransformersEmbedder("clip", path or "openai/clip-vit-base-patch32", _clip_features, device)


def _clip_features(model: Any, pixels: Tensor) -> Tensor:
    features: Tensor = model.visual_projection(model.vision_model(pixels).pooler_output)
    return features


def _mobilenet(path: str, device: str) -> Embedder:
    return MobileNetEmbedder(load_mobilenet(Path(path) if path else find_mobilenet()), device)


EMBEDDERS: dict[str, Callable[[str, str], Embedder]] = {
    "dinov2": _dinov2,
    "clip": _clip,
    "mobilenetv2": _mobilenet,
    "hsv": lambda path, device: HsvEmbedder(),
}


def build_embedder(name: str, path: str = "", device: str = "cpu") -> Embedder:
    """Build an embedder; its weights are at `path`, or at PATH of NAME=PATH, or where they are installed."""
    kind, _, named = name.partition("=")
    if kind not in EMBEDDERS:
        raise unknown_name("embedder", kind, EMBEDDERS)
    return EMBEDDERS[kind](path or named, device)


def _from_transformers(name: str, source: str) -> tuple[Any, Any]:
    hub = import_extra("transformers", f"the embedder {name}")
    try:
        # Never from the network in the middle of a measurement: what is missing is refused at once.
        return (
            hub.AutoImageProcessor.from_pretrained(source, local_files_only=True),
            hub.AutoModel.from_pretrained(source, local_files_only=True),
        )
    except (OSError, ValueError) as error:
        limit = "its weights are neither a folder nor in the hub's cache"
        remedy = f"`hf download {source}` puts them there, or name a folder: {name}=FOLDER"
        raise refuse(f"embedder {name}", source, limit, remedy) from error


def _resized(pictures: NDArray[np.uint8], device: str) -> Tensor:
    """Resize whole pictures N Y X 3 to 224 x 224, as the weights' own embedder does, and normalise them."""
    x = torch.from_numpy(pictures).to(device).permute(0, 3, 1, 2).float() / 255
    x = functional.interpolate(x, size=(224, 224), mode="bilinear", antialias=True, align_corners=False)
    mean, spread = (torch.tensor(each, device=device)[:, None, None] for each in (_MEAN, _SPREAD))
    return (x - mean) / spread


def _units(vectors: NDArray[Any]) -> Vectors:
    length = np.linalg.norm(vectors, axis=1, keepdims=True)
    units: Vectors = (vectors / np.maximum(length, 1e-12)).astype(np.float32)
    return units


def _hsv_histogram(picture: Picture) -> NDArray[np.float64]:
    # Channel by channel: reductions over an axis of three, and the remainder of floats, took most of the time.
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
    MOBILENET.fetch(Reporter())
