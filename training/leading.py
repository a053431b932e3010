"""Where a teacher without guidance takes the openings of a few-step model.

Distribution matching keeps what is likeliest, such as a camera that stands still (docs/log.md). What an opening shows
is chosen in its first steps, and later blocks continue it. So the model learns these steps by regression: from the
same noisy latents, where does the teacher go in many small steps?
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from recap.attention.context import BlockContext
from recap.backbones.wan.model import CausalWan
from recap.backbones.wan.schedule import clean_estimate, model_time, renoise, warp
from recap.contracts import Decoder
from recap.memory.sink import NoMemoryConfig
from recap.types import Block
from training.sampling import EulerBackbone, admit_nothing, euler_sigmas


class Led(NamedTuple):
    """New openings of B prompts, `led` steps each."""

    inputs: Tensor  # B led F C rows columns: the noisy latents of the model's first steps
    sigma: Tensor  # led: their noise levels
    ends: Tensor  # B led F C rows columns: where the teacher takes them


class Leader:
    """Begins openings as the model does, and follows the teacher from each of the first `led` steps."""

    def __init__(self, teacher: CausalWan, led: int, euler_steps: int) -> None:
        self._spec = spec = teacher.spec
        self._sigmas = warp(spec.steps, spec.shift)[:led]
        self._stride = euler_steps // len(spec.steps)
        self._grid = euler_sigmas(euler_steps, spec.shift)
        self._euler = EulerBackbone(teacher, _encode_nothing, _decode_nothing)

    def begin(self, model: CausalWan, text: Tensor) -> Led:
        """Open a video of each prompt, B L text_dim."""
        inputs = self.open(model, text)
        return Led(inputs, torch.tensor(self._sigmas, device=text.device), self.lead(inputs, text))

    @torch.no_grad()
    def open(self, model: CausalWan, text: Tensor) -> Tensor:
        """Return the inputs of the model's first steps, B led F C rows columns."""
        prompt, context = model.condition(text), self._alone(len(text))
        shape = (len(text), self._spec.frames_per_block, self._spec.in_channels, *self._spec.latent_size)
        inputs = [torch.randn(shape, device=text.device)]
        for sigma, following in pairwise(self._sigmas):
            estimate = clean_estimate(
                inputs[-1], model(inputs[-1], model_time(sigma), prompt, context), sigma
            )
            inputs.append(renoise(estimate, torch.randn(shape, device=text.device), following))
        return torch.stack(inputs, dim=1)

    def lead(self, inputs: Tensor, text: Tensor) -> Tensor:
        """Return where the teacher takes openings from the inputs of their first steps."""
        prompt, context = self._euler.model.condition(text), self._alone(len(text))
        ends = []
        for step, start in enumerate(inputs.unbind(1)):
            self._euler._sigmas = self._grid[step * self._stride :]
            ends.append(self._euler.denoise(lambda start=start: start, prompt, context))
        return torch.stack(ends, dim=1)

    def _alone(self, rows: int) -> BlockContext:
        """Return the context of first blocks, which see nothing but themselves."""
        policy = NoMemoryConfig().build(self._euler.spec, admit_nothing)
        return BlockContext(policy, policy.begin(Block(0, 0, self._spec.frames_per_block, ("",) * rows)))


def _encode_nothing(prompts: tuple[str, ...]) -> Tensor:
    raise AssertionError("prompts come encoded")


def _decode_nothing() -> Decoder:
    raise AssertionError("the teacher's latents are not decoded")
