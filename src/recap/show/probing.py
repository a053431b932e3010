"""This module measures the keys and the heads of a model, to predict how the rule `keys` and a sink work on it.

A short video is generated with a plain sink: a scene without a subject, then the same with one. Before the change
all that flow can trace is background; after it, what flow notices is new. For every layer: how near are both to the
first frame, by cosine, and how much of its attention does every head pay to the sink? The result is a small table of
figures that can be published without any picture, prompt embedding or weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from recap.admission.flow import FlowNovelty, FlowNoveltyConfig
from recap.admission.keys import KeyNoveltyConfig
from recap.attention.attend import read_group
from recap.attention.likeness import describe_keys, nearest_distance, spread_layers, usual_distance
from recap.attention.rope import rotate, rotation
from recap.contracts import Backbone, FlowEstimator
from recap.errors import refuse
from recap.io.report import Reporter
from recap.memory.base import WindowMemory
from recap.memory.window import make_window
from recap.plan import Shot, make_plan
from recap.rollout import rollout
from recap.types import BackboneSpec, Block, MemoryTrace, Role, Tokens

# Version of the layout of the result.
VERSION = 1
PERCENTILES = (1, 5, 25, 50, 75, 95, 99)
KINDS = ("first block", "background", "traced later", "new")
"""Tokens: later frames of the first block; before the change, traced; after it, traced; after it, noticed."""
MOST_BLOCKS = 100
QUERIES = 512
"""Queries of a block by which a head's shares are measured, spread evenly."""


@dataclass(frozen=True, slots=True)
class ProbeSettings:
    """Sets up what is generated: some blocks of a scene, then some with a subject in it."""

    before: str = "an empty beach by day"
    after: str = "a fox on a beach by day"
    blocks: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        if not 2 <= self.blocks <= MOST_BLOCKS:
            raise refuse("--blocks", self.blocks, f"must be 2 to {MOST_BLOCKS}", "4 are enough")


class ProbedSink(WindowMemory):
    """Keeps a plain sink, and measures what passes through: B is 1."""

    def __init__(self, spec: BackboneSpec, flow: FlowEstimator, change: int):
        super().__init__(make_window(spec, sink_frames=1))
        self._novelty = FlowNovelty.on(spec, FlowNoveltyConfig(), flow)
        self._joined = spread_layers(KeyNoveltyConfig().num_layers, spec.layers)
        # The first block after the change of prompts.
        self._change = change
        # Of the first frame: unit keys n E by layer, and the joined ones of `keys`, 1 n E.
        self._first: list[Tensor] = []
        self._first_joined: Tensor | None = None
        self.opening: list[dict[str, float]] = []
        self.usual = math.nan
        # By kind and block: cosines to the first frame, L N, and distances of the joined keys, N.
        self.cosines: dict[str, list[Tensor]] = {kind: [] for kind in KINDS}
        self.distances: dict[str, list[Tensor]] = {kind: [] for kind in KINDS}
        # By layer: role -> the mean share of every head, H, one per block.
        self.shares: list[dict[Role, list[Tensor]]] = [{} for _ in range(spec.layers)]

    def write(self, layer: int, tokens: Tokens) -> None:
        super().write(layer, tokens)
        if kept := self.arrange(layer, []):
            step = max(1, tokens.queries.shape[1] // QUERIES)
            query = _turned(tokens.queries[:, ::step], tokens.positions[:, ::step])
            parts = [(s.role, s.keys, s.values, s.positions) for s in kept]
            parts.append((Role.CURRENT, tokens.keys, tokens.values, tokens.positions))
            masses = [
                read_group(query, _turned(keys, positions), values.transpose(1, 2), None)[1].float()
                for _, keys, values, positions in parts
            ]
            shares = torch.stack(masses).softmax(dim=0).mean(dim=(1, 3))
            for (role, *_), share in zip(parts, shares, strict=True):
                self.shares[layer].setdefault(role, []).append(share.cpu())

    def keep(self, block: Block, pixels: Tensor, trace: MemoryTrace) -> MemoryTrace:
        keys = self.window.current.keys[:, :, : block.num_frames * self.window.spec.frame_tokens]
        noticed = self._novelty.notice(pixels).score.flatten().cpu() > 0
        if not self._first:
            self._read_opening(keys[:, :, : self.window.spec.frame_tokens])
        found = torch.stack(
            [
                (_unit(own)[0] @ first.T).amax(dim=-1).cpu()
                for own, first in zip(keys, self._first, strict=True)
            ]
        )
        assert self._first_joined is not None
        distance = nearest_distance(describe_keys(keys, self._joined), self._first_joined)[0].cpu()
        if block.index == 0:
            later = slice(self.window.spec.frame_tokens, None)
            self._add("first block", found[:, later], distance[later])
        else:
            changed = block.index >= self._change
            traced = "traced later" if changed else "background"
            self._add(traced, found[:, ~noticed], distance[~noticed])
            if changed:
                self._add("new", found[:, noticed], distance[noticed])
        return trace

    def _add(self, kind: str, cosines: Tensor, distances: Tensor) -> None:
        self.cosines[kind].append(cosines)
        self.distances[kind].append(distances)

    def _read_opening(self, keys: Tensor) -> None:
        """Measure the first frame, keys L 1 n H D."""
        self._first = [_unit(own)[0] for own in keys]
        self._first_joined = describe_keys(keys, self._joined)
        self.usual = float(usual_distance(self._first_joined))
        for own in keys:
            flat, unit = own[0].flatten(1).float(), _unit(own)
            norms = flat.norm(dim=-1)
            self.opening.append(
                {
                    "usual_distance": float(usual_distance(unit)),
                    # What all keys have in common: the mean cosine of two tokens.
                    "common_cosine": float(unit[0].mean(dim=0).square().sum()),
                    "key_norm": float(norms.mean()),
                    "key_norm_spread": float(norms.std() / norms.mean()),
                }
            )


def _unit(keys: Tensor) -> Tensor:
    """Return unit vectors B N E of keys B N H D."""
    return functional.normalize(keys.flatten(2).float(), dim=-1)


def _turned(x: Tensor, positions: Tensor) -> Tensor:
    """Rotate B N H D to its positions, and return B H N D."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return rotate(x, rotation(positions.to(x.device), x.shape[-1], wide)).transpose(1, 2)


def refuse_carried(name: str) -> Exception:
    """Return the error about a backbone whose window is not ours to read."""
    limit = "it carries its history in its own sequence, and its keys are rotated by tables of its own"
    return refuse("backbone", name, limit, "probe a model of the Wan family, or embedded")


def probe(
    backbone: Backbone, flow: FlowEstimator, settings: ProbeSettings, reporter: Reporter
) -> dict[str, Any]:
    """Generate the video and return what was measured, as plain data."""
    spec = backbone.spec
    if spec.carries_history:
        raise refuse_carried(spec.name)
    seconds = settings.blocks * spec.block_s
    shots = [Shot(settings.before, seconds), Shot(settings.after, seconds, cut=False)]
    plan = make_plan([shots], spec)
    change = next(block.index for block in plan.blocks if block.prompts != plan.blocks[0].prompts)
    memory = ProbedSink(spec, flow, change)
    advance: Callable[[int], None] = reporter.counter(len(plan.blocks))
    for _ in rollout(backbone, memory, plan, seeds=[settings.seed]):
        advance(1)
    return {
        "version": VERSION,
        "asked": asdict(settings),
        "spec": {
            name: getattr(spec, name)
            for name in ("layers", "heads", "head_dim", "grid", "frames_per_block", "window_frames")
        },
        "tokens": {kind: sum(len(each) for each in parts) for kind, parts in memory.distances.items()},
        "keys_rule": _of_rule(memory),
        "layers": [_of_layer(memory, layer) for layer in range(spec.layers)],
    }


def _of_rule(memory: ProbedSink) -> dict[str, Any]:
    """Return what the rule `keys` would choose, and how much of everything it would call new."""
    config = KeyNoveltyConfig()
    limit = config.margin * memory.usual
    found = {kind: torch.cat(parts) if parts else torch.zeros(0) for kind, parts in memory.distances.items()}
    return {
        "compared_layers": memory._joined,
        "margin": config.margin,
        "usual_distance": _rounded(memory.usual),
        "new_beyond_distance": _rounded(limit),
        "called_new": {kind: _rounded(float((each > limit).float().mean())) for kind, each in found.items()},
        "distances": {kind: _percentiles(each) for kind, each in found.items()},
        "told_apart": _rounded(area_under_curve(found["new"], found["background"])),
    }


def _of_layer(memory: ProbedSink, layer: int) -> dict[str, Any]:
    found = {
        kind: torch.cat([each[layer] for each in parts]) if parts else torch.zeros(0)
        for kind, parts in memory.cosines.items()
    }
    shares = {
        role.value: [_rounded(float(share)) for share in torch.stack(parts).mean(dim=0)]
        for role, parts in memory.shares[layer].items()
    }
    return {
        **{name: _rounded(value) for name, value in memory.opening[layer].items()},
        "cosine_to_sink": {kind: _percentiles(each) for kind, each in found.items()},
        "told_apart": _rounded(area_under_curve(-found["new"], -found["background"])),
        "share_by_head": shares,
    }


def area_under_curve(high: Tensor, low: Tensor) -> float:
    """Return the chance that one of `high` exceeds one of `low`, ties counted by half; nan if either is empty."""
    if not len(high) or not len(low):
        return math.nan
    ordered = low.sort().values
    below = torch.searchsorted(ordered, high) + torch.searchsorted(ordered, high, right=True)
    return float(below.double().mean() / 2 / len(low))


def _percentiles(values: Tensor) -> dict[str, float | None]:
    if not len(values):
        return dict.fromkeys(map(str, PERCENTILES))
    # By sorting: torch's own quantile refuses more than 16 million values.
    ordered = values.double().sort().values
    ranks = [round(share / 100 * (len(values) - 1)) for share in PERCENTILES]
    return {str(share): _rounded(float(ordered[at])) for share, at in zip(PERCENTILES, ranks, strict=True)}


def _rounded(value: float) -> float | None:
    """Round for a small file; JSON has no nan."""
    return None if math.isnan(value) else round(value, 5)
