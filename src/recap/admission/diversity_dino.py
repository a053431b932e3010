"""`diversity`: k-means on DINOv2 patch features.

A picture is resized so that one patch of DINOv2 is one token; so its features need no resampling. A frame is
described by its last picture. The weights are taken from a folder or from the cache of the hub, never fetched.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from recap.admission.diversity import ClusterConfig, Diversity
from recap.contracts import FlowEstimator
from recap.errors import refuse
from recap.types import BackboneSpec, Block

_MEAN, _DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, as DINOv2 was trained


@dataclass(frozen=True, slots=True)
class DiversityConfig(ClusterConfig):
    """Tokens as different as can be, by DINOv2 features and k-means; the ablation's DINOv2 Diversity."""

    needs: ClassVar[str] = "DINOv2 weights (`model`: a folder, or a name in the hub's cache) and transformers"

    model: str = "facebook/dinov2-base"

    def build(self, spec: BackboneSpec, flow: FlowEstimator) -> DinoDiversity:
        return DinoDiversity(self, load_dino(self.model), spec)


def load_dino(model: str) -> Any:
    """DINOv2 for inference, from a folder or the hub's cache."""
    remedy = "`hf download facebook/dinov2-base` fetches them; `diversity-keys` needs none"
    try:
        from transformers import AutoConfig, AutoModel
    except ImportError as missing:
        limit = "transformers is not installed"
        raise refuse("admission.model", model, limit, "pip install 'recap-forcing[wan]'") from missing
    try:
        # The config comes first: with peft installed, AutoModel would look for a missing model on the network.
        kind = str(AutoConfig.from_pretrained(model, local_files_only=True).model_type)
        right = kind.startswith("dinov2")
        loaded = AutoModel.from_pretrained(model, local_files_only=True) if right else None
    except (OSError, ValueError) as problem:
        limit = "no DINOv2 weights there, nor in the hub's cache"
        raise refuse("admission.model", model, limit, remedy) from problem
    if loaded is None:
        raise refuse("admission.model", model, f"it holds a model of type {kind}, not DINOv2", remedy)
    return loaded.eval().requires_grad_(False)


class DinoDiversity(Diversity):
    def __init__(self, config: DiversityConfig, model: Any, spec: BackboneSpec):
        super().__init__(config, spec.grid)
        self._model = model
        self._pictures_per_frame = spec.pictures_per_frame

    def describe(self, block: Block, pixels: Tensor) -> Tensor:
        self._model = self._model.to(pixels.device)
        last = pixels.flip(1)[:, :: self._pictures_per_frame].flip(1).float()  # one picture for each frame
        rows, columns = self._grid
        side = self._model.config.patch_size
        size = (rows * side, columns * side)
        small = functional.interpolate(last.flatten(0, 1), size, mode="bilinear", antialias=True)
        mean, deviation = (small.new_tensor(each)[:, None, None] for each in (_MEAN, _DEVIATION))
        features: Tensor = self._model((small - mean) / deviation).last_hidden_state
        # Before the patches stand the class token and, in some versions, registers.
        patches = features[:, -rows * columns :].unflatten(0, (pixels.shape[0], -1)).flatten(1, 2)
        return functional.normalize(patches.to(torch.float32), dim=-1)
