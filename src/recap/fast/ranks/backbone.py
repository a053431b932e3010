"""This module splits a backbone among the processes of a run; only the leader decodes."""

from __future__ import annotations

from torch import Tensor

from recap.backbones.helios.backbone import HeliosBackbone
from recap.backbones.wan.backbone import WanBackbone
from recap.contracts import Backbone, State
from recap.errors import refuse
from recap.fast.accelerate import fast_decoder
from recap.fast.ranks.group import Ranks
from recap.fast.ranks.helios import RankedHeliosBackbone
from recap.fast.ranks.wan import RankedWanBackbone


class NoDecoder:
    """Decodes nothing: nothing reads the pictures of a follower."""

    def decode(self, latents: Tensor) -> Tensor:
        return latents.new_zeros((latents.shape[0], 1, 3, 1, 1))

    def state(self) -> State:
        return {}

    def load_state(self, state: State) -> None:
        """Do nothing: there is no state."""


def split_backbone(backbone: Backbone, ranks: Ranks, *, fast: bool = False) -> Backbone:
    """Return a backbone that generates together with the other processes; refuses one that cannot.

    The transformer is the readable one; with `fast` a decoder on a GPU is the fast one.
    """
    if not isinstance(backbone, (WanBackbone, HeliosBackbone)):
        limit = "only the models of the Wan family and Helios generate one video in several processes"
        raise refuse("backbone", backbone.spec.name, limit, "start one process, or choose another")
    heads = backbone.spec.heads
    if heads % ranks.count:
        fitting = ", ".join(str(count) for count in range(1, heads + 1) if heads % count == 0)
        limit = f"the {heads} heads of {backbone.spec.name} are split evenly"
        raise refuse("number of processes", ranks.count, limit, f"start {fitting}")
    if isinstance(backbone, HeliosBackbone):
        return RankedHeliosBackbone(backbone, ranks, backbone.decoder if ranks.leads else NoDecoder)
    if not ranks.leads:
        return RankedWanBackbone(backbone, ranks, NoDecoder)
    fast = fast and backbone.model.device.type == "cuda"
    return RankedWanBackbone(backbone, ranks, fast_decoder(backbone) if fast else backbone.open_decoder)
