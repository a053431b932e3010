"""This module puts the decoder and what looks at pictures on a second device, next to a transformer that has its own.

While the clean pass of a block runs on the first device, the second one decodes the block and finds out what is new.
"""

from __future__ import annotations

from torch import Tensor

from recap.backbones.wan.backbone import WanBackbone
from recap.contracts import Admission, Backbone, Decoder, Entry, State
from recap.errors import refuse
from recap.types import Block, Candidates


class MovedDecoder:
    """Decodes on a device of its own, where the pictures stay."""

    def __init__(self, decoder: Decoder, device: str) -> None:
        self._decoder = decoder
        self._device = device

    def decode(self, latents: Tensor) -> Tensor:
        return self._decoder.decode(latents.to(self._device, non_blocking=True))

    def state(self) -> State:
        return self._decoder.state()

    def load_state(self, state: State) -> None:
        self._decoder.load_state({name: value.to(self._device) for name, value in state.items()})


def move_decoder(backbone: Backbone, device: str) -> None:
    """Let a backbone decode on another device from now on; one that cannot is refused."""
    if not isinstance(backbone, WanBackbone):
        limit = "only the models of the Wan family decode on another device than they generate on"
        raise refuse("decoder_device", device, limit, "leave it out")
    if backbone.autoencoder is not None:
        backbone.autoencoder.to(device)
        if not device.startswith("cuda"):
            # The fast versions are for GPUs.
            backbone.autoencoder = None
    here = backbone.open_decoder
    backbone.open_decoder = lambda: MovedDecoder(here(), device)


class MovedAdmission(Admission):
    """Asks a rule on the device where the pictures are, and moves its answers to the device of the memory."""

    def __init__(self, rule: Admission, device: str, home: str) -> None:
        self._rule = rule
        self._device, self._home = device, home
        self.reads_keys = rule.reads_keys  # type: ignore[misc]
        self.needs_pixels = rule.needs_pixels  # type: ignore[misc]
        self.takes_leaving = rule.takes_leaving  # type: ignore[misc]

    def look(self, block: Block, pixels: Tensor) -> None:
        self._rule.look(block, pixels)

    def read_keys(self, keys: Tensor) -> None:
        self._rule.read_keys(keys.to(self._device))

    def propose(self, block: Block, pixels: Tensor) -> Candidates:
        return self._rule.propose(block, pixels).to(self._home)

    def retain(self, pool: Candidates, capacity: int) -> Tensor:
        return self._rule.retain(pool.to(self._device), capacity).to(self._home)

    def score_leaving(self, source: Tensor) -> Candidates:
        return self._rule.score_leaving(source.to(self._device)).to(self._home)

    def state(self) -> State:
        return self._rule.state()

    def expected(self, state: State) -> dict[str, Entry]:
        return self._rule.expected(state)

    def load_state(self, state: State) -> None:
        self._rule.load_state({name: value.to(self._device) for name, value in state.items()})


def move_admission(rule: Admission, device: str, home: str) -> Admission:
    """Let a rule look at pictures on the device where they are; one that needs none stays where the keys are."""
    return MovedAdmission(rule, device, home) if rule.needs_pixels else rule
