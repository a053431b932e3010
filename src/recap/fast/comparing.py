"""Measures how far a block's latents are from those of the readable path, on the same memory and noise."""

from __future__ import annotations

import torch

from recap.attention.context import BlockContext
from recap.backbones.noise import block_noise
from recap.backbones.wan.backbone import WanBackbone
from recap.contracts import Backbone, MemoryPolicy
from recap.plan import Plan

LIMITS = {"float32": 1e-3, "bfloat16": 2e-2, "float16": 2e-2}
"""Between two paths of one precision. 8 bits have none: how much they change depends on the model."""


def largest_error(reference: WanBackbone, backbone: Backbone, policy: MemoryPolicy, plan: Plan) -> float:
    """Return the largest relative error of a block; both continue from the reference's blocks, in its dtype."""
    worst = 0.0
    with torch.no_grad():
        pair: tuple[Backbone, Backbone] = (reference, backbone)
        conditionings = [each.condition(plan.blocks[0].prompts) for each in pair]
        decoder = backbone.decoder()
        for block in plan.blocks:
            found = []
            for each, conditioning in zip(pair, conditionings, strict=True):
                context = BlockContext(policy, policy.begin(block))
                noise = block_noise(backbone.spec, [0], block)
                found.append(each.denoise(noise, conditioning, context).double())
            error = (found[1] - found[0]).norm() / found[0].norm()
            worst = max(worst, float(error))
            context = BlockContext(policy, policy.begin(block))
            reference.settle(found[0].float(), conditionings[0], context.clean_pass())
            policy.commit(block, decoder.decode(found[0].float()))
    return worst
