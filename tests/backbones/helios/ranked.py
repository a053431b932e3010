"""Generates with a small Helios in one process or several: `python -m tests.backbones.helios.ranked FILE DTYPE`."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import torch
from safetensors.torch import save_file

from recap.attention.context import OWN_KERNELS
from recap.backbones.helios.backbone import HeliosBackbone
from recap.config import RunConfig
from recap.fast.ranks.backbone import split_backbone
from recap.fast.ranks.group import LONE, join_ranks
from recap.fast.ranks.states import join_state, load_state
from recap.fast.ranks.wan import RankedKernels
from recap.io.trace import BlockTrace
from recap.plan import Shot, make_plan
from recap.rollout import Resume, reach, rollout
from recap.run import build_memory
from tests.backbones.helios.helios_fakes import (
    ROWS,
    CheapDecoder,
    make_scheduler,
    make_transformer,
    make_vae,
    text_of,
)

# Sums over tokens round alike where the heads of a process have a multiple of 32 channels together.
HEADS = {"heads": 4, "head_dim": 32}
CASES = {
    "base, none": ("base", {"memory": "none"}),
    "base, sink": ("base", {"memory": {"name": "sink", "reinforcement": "share:0.3"}}),
    "distilled, recap": ("distilled", {"memory": "recap", "admission": "flow"}),
    "distilled, by keys": ("distilled", {"memory": "recap", "admission": {"name": "keys", "margin": 1.0}}),
    "mid, recap": ("mid", {"memory": {"name": "recap", "reinforcement": 3.0}, "admission": "random"}),
}
STOP = 2
"""The block before which a rollout is stopped, and resumed in new objects from its state."""


def make_backbone(kind, dtype):
    row = replace(ROWS[kind], **HEADS)
    transformer = make_transformer(row, ffn_dim=64, rope_dim=(8, 12, 12))
    return HeliosBackbone(row, transformer.to(dtype), make_scheduler(kind), text_of, make_vae())


def generate(case, ranks, dtype):
    """Return latents, trace and state of a rollout that was resumed before a block, with a cut and another prompt."""
    kind, memory = CASES[case]
    shots = (Shot("a fox", 3.0), Shot("a red bus", 3.0), Shot("a fox by night", 2.0, cut=False))
    config = RunConfig.from_dict(
        {"shots": [{"prompt": "a fox", "seconds": 8.0}], "flow": "classical", "eager": True, **memory}
    )
    plain = make_backbone(kind, dtype)
    plain.decoder = CheapDecoder
    backbone = plain if ranks.alone else split_backbone(plain, ranks)
    plan = make_plan([shots], backbone.spec)
    kernels = OWN_KERNELS if ranks.alone else RankedKernels(ranks)
    latents, trace = [], []

    def run(policy, resume, end):
        blocks = rollout(backbone, policy, plan, seeds=(3,), resume=resume, kernels=kernels)
        for block in blocks:
            latents.append(block.latents)
            trace.append(BlockTrace.of(block).to_json())
            if block.block.index + 1 == end:
                return

    policy = build_memory(config, backbone.spec, lambda line: None, ranks)
    run(policy, Resume(), STOP)
    state = join_state(policy, ranks)
    policy = build_memory(config, backbone.spec, lambda line: None, ranks)
    load_state(policy, ranks, state if ranks.leads else None)
    run(policy, Resume(STOP, None, latents[-reach(backbone.spec) :], latents[0][:, :1]), None)
    if policy.wants_tokens:
        assert policy.window.current.keys.shape[3] * ranks.count == HEADS["heads"]
    return {
        f"{case}/latents": torch.cat(latents, dim=1),
        f"{case}/trace": torch.tensor(list(json.dumps(trace).encode()), dtype=torch.uint8),
        **{f"{case}/state {name}": value.contiguous() for name, value in join_state(policy, ranks).items()},
    }


def generate_all(dtype, ranks=LONE):
    torch.set_num_threads(1)
    return {name: value for case in CASES for name, value in generate(case, ranks, dtype).items()}


def main():
    with join_ranks() as ranks:
        found = generate_all(getattr(torch, sys.argv[2]), ranks)
        if ranks.leads:
            save_file(found, sys.argv[1])


if __name__ == "__main__":
    main()
