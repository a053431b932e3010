"""The memories of several videos are shown as rows of one batch."""

from __future__ import annotations

import torch

from recap.memory.base import WindowMemory
from recap.memory.joined import JoinedMemory
from recap.memory.window import Window
from recap.types import Block, Role, Segment


class MadeWhenAsked(WindowMemory):
    """Makes what a layer sees whenever it is asked, and keeps none of it."""

    def __init__(self, spec, number):
        super().__init__(Window(spec))
        self.number = number

    def arrange(self, layer, own):
        spec = self.window.spec
        tokens = torch.zeros(1, 1, spec.heads, spec.head_dim)
        positions = torch.full((1, 1, 3), 100.0 * self.number + layer)
        return [Segment(Role.BANK, tokens, tokens, positions), *own]


def test_every_layer_has_its_own_positions_though_tensors_come_and_go(backbone):
    spec = backbone.spec
    members = [MadeWhenAsked(spec, number) for number in range(2)]
    blocks = [Block(0, 0, spec.frames_per_block, ("a red boat",))] * 2
    joined = JoinedMemory(members, blocks, torch.zeros(spec.frames_per_block), 3)
    for layer in range(spec.layers):
        (segment,) = joined.arrange(layer, [])
        assert segment.positions[:, 0, 0].tolist() == [layer, 100 + layer, layer]
