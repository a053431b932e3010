"""`diversity` and `diversity-keys` fill a bank with tokens that look as different as possible.

With every block, k-means continues over the descriptors of what the bank has and what is new, and the bank keeps
the tokens nearest to the centres, equally many of each. A score is only a token's distance from all centres when
it arrived; it decides nothing. The rules differ in what describes a token: DINOv2 patch features (DINOv2 Diversity of
the paper's ablation), or the backbone's own keys, where there are no DINOv2 weights.

The k-means is by mini-batches, on unit vectors, for each row of the batch. It is deterministic: random numbers come
from a seeded generator on the CPU and are the same for all rows, and sums are matrix products. Nothing waits for the
device.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from recap.admission.described import Described, refuse_keyless, take
from recap.attention.likeness import distances
from recap.contracts import AdmissionConfig, Entry, FlowEstimator, State, copies, together
from recap.errors import check_settings, refuse
from recap.types import BackboneSpec, Block, Candidates, seeded

# Of ImageNet, as DINOv2 was trained.
_MEAN, _DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True, slots=True)
class ClusterConfig(AdmissionConfig):
    """Sets up the k-means behind both rules of diversity."""

    keeps: ClassVar[str] = "tokens near the centres of k-means, equally many of each"
    needs_flow: ClassVar[bool] = False

    num_centres: int = 64
    num_steps: int = 4  # mini-batches a block
    batch_points: int = 1024
    seed: int = 0

    def __post_init__(self) -> None:
        names, limit = ("num_centres", "num_steps", "batch_points"), "must be 1 to 65536"
        check_settings(self, names, 1, 65536, limit, "leave it out for the default")


class Diversity(Described):
    """Keeps the tokens nearest to the centres of k-means; a subclass implements `describe`."""

    def __init__(self, config: ClusterConfig, grid: tuple[int, int]):
        super().__init__(grid)
        self._config = config
        # First frame of the block last proposed; it seeds the k-means.
        self._frame = 0
        # B k D
        self._centres: Tensor | None = None

    @abstractmethod
    def describe(self, block: Block, pixels: Tensor) -> Tensor:
        """Return unit descriptors B N D of the block's tokens, frame by frame, row-major."""

    def score(self, block: Block, pixels: Tensor) -> Tensor:
        descriptor = self.describe(block, pixels)
        self._frame = block.first_frame
        self.take_fresh(block, pixels, descriptor)
        if self._centres is None:
            return torch.ones_like(descriptor[..., 0])
        return _distance(descriptor, self._centres).amin(dim=-1)

    @torch.no_grad()
    def retain(self, pool: Candidates, capacity: int) -> Tensor:
        points, random, config = self.look_up(pool), seeded(self._config.seed, self._frame), self._config
        centres = self._centres
        if centres is None:
            centres = spread_centres(points, config.num_centres, random)
        self._centres = refine_centres(
            points, centres, random, num_steps=config.num_steps, batch_points=config.batch_points
        )
        stays = nearest_to_centres(points, self._centres, capacity)
        self.keep(pool.at(stays), take(points, stays))
        return stays

    def state(self) -> State:
        return {**super().state(), **copies({"centres": self._centres})}

    def entries(self) -> dict[str, Entry]:
        centres = Entry(("B", self._config.num_centres, "E"), torch.float32)
        return {**super().entries(), "centres": centres}

    def load_state(self, state: State) -> None:
        super().load_state(state)
        self._centres = state.get("centres")


@dataclass(frozen=True, slots=True)
class DiversityConfig(ClusterConfig):
    """Keeps tokens as different as can be, by DINOv2 features and k-means; the ablation's DINOv2 Diversity."""

    needs: ClassVar[str] = "DINOv2 weights (`model`: a folder, or a name in the hub's cache) and transformers"

    model: str = "facebook/dinov2-base"

    def build(self, spec: BackboneSpec, flow: FlowEstimator) -> DinoDiversity:
        return DinoDiversity(self, load_dino(self.model), spec)


def load_dino(model: str) -> Any:
    """Load DINOv2 for inference from a folder or the hub's cache; nothing is fetched."""
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
    """Describes a frame's tokens by its last picture, resized so that one patch of DINOv2 is one token."""

    def __init__(self, config: DiversityConfig, model: Any, spec: BackboneSpec):
        super().__init__(config, spec.grid)
        self._model = model
        self._pictures_per_frame = spec.pictures_per_frame

    def describe(self, block: Block, pixels: Tensor) -> Tensor:
        self._model = self._model.to(pixels.device)
        last = pixels.flip(1)[:, :: self._pictures_per_frame].flip(1).float()
        rows, columns = self._grid
        side = self._model.config.patch_size
        size = (rows * side, columns * side)
        small = functional.interpolate(last.flatten(0, 1), size, mode="bilinear", antialias=True)
        mean, deviation = (small.new_tensor(each)[:, None, None] for each in (_MEAN, _DEVIATION))
        features: Tensor = self._model((small - mean) / deviation).last_hidden_state
        # Before the patches come the class token and, in some versions, registers.
        patches = features[:, -rows * columns :].unflatten(0, (pixels.shape[0], -1)).flatten(1, 2)
        return functional.normalize(patches.to(torch.float32), dim=-1)


@dataclass(frozen=True, slots=True)
class DiversityKeysConfig(ClusterConfig):
    """Keeps tokens as different as can be, by the backbone's own keys and k-means; not the paper's rule."""

    needs: ClassVar[str] = "a memory that passes on keys, as `recap` does; no weights"

    layer: int = -1  # whose keys describe a token; -1: the middle one

    def build(self, spec: BackboneSpec, flow: FlowEstimator) -> KeyDiversity:
        if not -1 <= self.layer < spec.layers:
            limit = f"{spec.name} has layers 0 to {spec.layers - 1}"
            raise refuse("layer", self.layer, limit, "-1 is the middle one")
        return KeyDiversity(self, spec)


class KeyDiversity(Diversity):
    """Describes a token by its key in one layer, all heads, unrotated, so that the position does not count.

    Keys share a large part, so the mean of the first block is always subtracted.
    """

    reads_keys = True
    needs_pixels = False

    def __init__(self, config: DiversityKeysConfig, spec: BackboneSpec):
        super().__init__(config, spec.grid)
        self._layer = spec.layers // 2 if config.layer < 0 else config.layer
        self._keys: Tensor | None = None  # B N H*D of the block being proposed
        self._common: Tensor | None = None  # B 1 H*D

    def read_keys(self, keys: Tensor) -> None:
        self._keys = keys[self._layer].flatten(2).float()

    def describe(self, block: Block, pixels: Tensor) -> Tensor:
        if self._keys is None:
            raise refuse_keyless("diversity-keys")
        if self._common is None:
            self._common = self._keys.mean(dim=1, keepdim=True)
        descriptor, self._keys = functional.normalize(self._keys - self._common, dim=-1), None
        return descriptor

    def state(self) -> State:
        return {**super().state(), **copies({"common": self._common})}

    def expected(self, state: State) -> dict[str, Entry]:
        common = {"common": Entry(("B", 1, "E"), torch.float32)}
        # It is made before the first token is retained.
        retained = super().expected(state)
        return {**retained, **(common if retained else together(state, common))}

    def load_state(self, state: State) -> None:
        super().load_state(state)
        self._common, self._keys = state.get("common"), None


def spread_centres(points: Tensor, num_centres: int, random: torch.Generator) -> Tensor:
    """Choose centres B k D among unit points B P D, each far from the ones before (k-means++)."""
    uniform = torch.rand(num_centres, generator=random)
    centres = [points[:, int(uniform[0] * points.shape[1]), None]]
    nearest = _distance(points, centres[0]).squeeze(-1)
    for share in uniform[1:].tolist():
        reach = nearest.cumsum(dim=1)
        index = torch.searchsorted(reach, reach[:, -1:] * share).clamp_(max=points.shape[1] - 1)
        centres.append(take(points, index))
        nearest = torch.minimum(nearest, _distance(points, centres[-1]).squeeze(-1))
    return torch.cat(centres, dim=1)


def refine_centres(
    points: Tensor, centres: Tensor, random: torch.Generator, *, num_steps: int, batch_points: int
) -> Tensor:
    """Return the centres after `num_steps` mini-batches; one that owns nothing moves to the farthest point."""
    count = points.new_zeros(centres.shape[:2])
    for _ in range(num_steps):
        picked = torch.randint(points.shape[1], (batch_points,), generator=random).to(points.device)
        some = points[:, picked]
        owner = functional.one_hot(_distance(some, centres).argmin(dim=-1), centres.shape[1]).to(points.dtype)
        members = owner.sum(dim=1)
        count = count + members
        # Every centre is the mean of all points it has owned, which is a learning rate of 1 / count.
        pull = owner.transpose(1, 2) @ some - members[..., None] * centres
        centres = functional.normalize(centres + pull / count.clamp(min=1)[..., None], dim=-1)
    return _move_idle(points, centres)


def nearest_to_centres(points: Tensor, centres: Tensor, capacity: int) -> Tensor:
    """Return indices B min(capacity, P): of every centre its nearest point, then its second, until there are enough.

    With enough points everywhere each centre has capacity / k of them. Ties: the earlier point first.
    """
    distance, owner = _distance(points, centres).min(dim=-1)
    by_distance = distance.argsort(dim=1, stable=True)
    by_owner = owner.gather(1, by_distance).argsort(dim=1, stable=True)
    grouped = by_distance.gather(1, by_owner)  # centre by centre, the nearest first
    owners = owner.gather(1, grouped)
    labels = torch.arange(centres.shape[1], device=points.device).expand(points.shape[0], -1).contiguous()
    begins = torch.searchsorted(owners, labels)
    rank = torch.arange(points.shape[1], device=points.device) - begins.gather(1, owners)
    rank_of = torch.empty_like(rank).scatter_(1, grouped, rank)
    order = rank_of.gather(1, by_distance).argsort(dim=1, stable=True)
    return by_distance.gather(1, order)[:, :capacity]


def _distance(points: Tensor, centres: Tensor) -> Tensor:
    """Return 1 - cosine, B P k, of unit vectors."""
    return distances(points, centres).clamp_(min=0)


def _move_idle(points: Tensor, centres: Tensor) -> Tensor:
    """Move every centre that owns nothing to one of the points farthest from their centres."""
    distance, owner = _distance(points, centres).min(dim=-1)
    idle = functional.one_hot(owner, centres.shape[1]).sum(dim=1) == 0
    far = distance.argsort(dim=1, descending=True, stable=True)
    turn = (idle.cumsum(dim=1) - 1).clamp_(0, points.shape[1] - 1)
    return torch.where(idle[..., None], take(points, far.gather(1, turn)), centres)
