"""Blocks without a model: random queries, keys and values, the values stamped with the token they belong to."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from recap.attention.context import BlockContext
from recap.types import Block, Role, Segment, frame_positions

NOISY_PASSES = 4


@dataclass(frozen=True)
class Pass:
    """What one pass over a block makes, by layer."""

    queries: list[Tensor]
    keys: list[Tensor]
    values: list[Tensor]


def random_block(spec, index, rows=1, seed=0, first=None, frames=None):
    """A block and its passes, the clean one last; value channels 0 and 1 are frame and place in the picture."""
    first = spec.frames_per_block * index if first is None else first
    block = Block(index, first, frames or spec.frames_per_block, ("",) * rows)
    generator = torch.Generator().manual_seed(1000 * seed + index)
    tokens = block.num_frames * spec.frame_tokens
    shape = (rows, tokens, spec.heads, spec.head_dim)
    passes = []
    for _ in range(NOISY_PASSES + 1):
        parts = [[torch.randn(shape, generator=generator) for _ in range(spec.layers)] for _ in range(3)]
        for values in parts[2]:
            values[..., 0] = (first + torch.arange(tokens) // spec.frame_tokens)[None, :, None]
            values[..., 1] = (torch.arange(tokens) % spec.frame_tokens)[None, :, None]
        passes.append(Pass(*parts))
    return block, passes


def generate_block(policy, spec, block, passes):
    """Take a policy through a block as a backbone would; returns its phases and, by layer, what it could see."""
    phases = policy.begin(block)
    context = BlockContext(policy, phases)
    positions = frame_positions(phases, spec.grid)
    seen: dict[int, list[Segment]] = {}
    for made in passes:
        if made is passes[-1]:
            context = context.clean_pass()
        for layer in range(spec.layers):
            own = [Segment(Role.CURRENT, made.keys[layer], made.values[layer], positions)]
            context.attend(layer, made.queries[layer], own)
            now = [s for s in policy.arrange(layer, own) if s.role is not Role.CURRENT]
            known = seen.setdefault(layer, now)
            assert all(a is b for a, b in zip(known, now, strict=True)), "the same objects all block long"
    # A view of the store may change when the block is committed.
    copied = {
        layer: [replace(s, keys=s.keys.clone(), values=s.values.clone()) for s in segments]
        for layer, segments in seen.items()
    }
    trace = policy.commit(block, torch.zeros(len(block.prompts), 1, 3, 1, 1))
    return phases, copied, trace


def drive(policy, spec, blocks, **how):
    """Generate blocks 0..blocks-1; yields (block, phases, seen, trace)."""
    for index in range(blocks):
        block, passes = random_block(spec, index, **how)
        yield block, *generate_block(policy, spec, block, passes)


def frames_of(segments, role, spec, row=0):
    """(frames, phases) of the segments of a role that hold whole frames, in the order of time."""
    pairs = []
    for segment in segments:
        if segment.role is role:
            values, positions = segment.values[row], segment.positions[row % segment.positions.shape[0]]
            for token in range(0, len(values), spec.frame_tokens):
                part = slice(token, token + spec.frame_tokens)
                assert torch.equal(values[part, 0, 1], torch.arange(spec.frame_tokens).float())
                assert torch.equal(positions[part, 1:], frame_positions(torch.zeros(1), spec.grid)[0, :, 1:])
                assert positions[part, 0].unique().numel() == 1
                pairs.append((int(positions[token, 0]), int(values[token, 0, 0])))
    pairs.sort()
    return [frame for _, frame in pairs], [phase for phase, _ in pairs]


def absolute(spec):
    return replace(spec, phases="absolute")
