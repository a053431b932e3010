"""Measure a flow estimator on clips with known motion, and how well novelty works with it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from recap.admission.flow import FlowNovelty, FlowNoveltyConfig
from recap.contracts import Flow, FlowEstimator
from recap.flow.exact import ExactFlow
from recap.flow.warp import backtrace, inside
from training.clips import PICTURES_PER_FRAME, TOKEN_PIXELS
from training.flow_clips import FlowClips, halve
from training.world import block_of, block_pictures


class Watched:
    """An estimator that records its results."""

    def __init__(self, estimate: FlowEstimator) -> None:
        self._estimate = estimate
        self._found: list[Flow] = []

    def __call__(self, pictures: Tensor) -> Flow:
        flow = self._estimate(pictures)
        self._found.append(flow)
        return flow

    def whole(self) -> Flow:
        """Return the flow of all pairs of the clip."""
        return Flow(*(torch.cat(parts, dim=1) for parts in zip(*self._found, strict=True)))


def notice_clip(estimate: FlowEstimator, pictures: Tensor) -> tuple[Tensor, Flow]:
    """Score the tokens of whole clips B T 3 Y X block by block; return scores B F rows columns and the flow."""
    watched = Watched(estimate)
    grid = (pictures.shape[-2] // TOKEN_PIXELS, pictures.shape[-1] // TOKEN_PIXELS)
    novelty = FlowNovelty(FlowNoveltyConfig(), watched, grid, TOKEN_PIXELS, PICTURES_PER_FRAME)
    scores = [novelty.notice(pictures[:, first:last]).score for first, last in _blocks(pictures.shape[1])]
    return torch.cat(scores, dim=1), watched.whole()


def _blocks(num_pictures: int) -> Iterator[tuple[int, int]]:
    for block in range(int(block_of(torch.tensor(num_pictures - 1))) + 1):
        yield block_pictures(block)


def hidden_next(instances: Tensor, flow: Tensor, target: Tensor) -> Tensor:
    """Find pixels B P Y X whose true flow B P 2 Y X ends outside or on another instance of `target` B P Y X."""
    at = backtrace(flow)
    height, width = flow.shape[-2:]
    x = at[:, :, 0].round().long().clamp(0, width - 1)
    y = at[:, :, 1].round().long().clamp(0, height - 1)
    owner = target.flatten(2).gather(2, (y * width + x).flatten(2)).view_as(instances)
    return (owner != instances) | ~inside(at, (height, width))


def end_point_errors(flow: Flow, clips: FlowClips) -> dict[str, float]:
    """Return the mean end-point error in pixels, in both directions: of all, actors' and soon hidden pixels."""
    before, after = clips.instances[:, :-1], clips.instances[:, 1:]
    ways = (
        (flow.forward, clips.forward, before, after),
        (flow.backward, clips.backward, after, before),
    )
    distance = torch.stack([(found - true).norm(dim=2) for found, true, _, _ in ways])
    actors = torch.stack([source > 0 for _, _, source, _ in ways])
    hidden = torch.stack([hidden_next(source, true, target) for _, true, source, target in ways])
    return {
        "error_px": distance.mean().item(),
        "error_actors_px": _mean_of(distance, actors),
        "error_hidden_px": _mean_of(distance, hidden),
    }


def _mean_of(values: Tensor, chosen: Tensor) -> float:
    return (values * chosen).sum().item() / max(1, int(chosen.sum().item()))


def actor_tokens(instances: Tensor) -> Tensor:
    """Find the tokens B F rows columns that show part of an actor, from full-size instances B T Y X."""
    covered = functional.max_pool2d((instances > 0).float(), TOKEN_PIXELS)
    later = covered[:, 1:].unflatten(1, (-1, PICTURES_PER_FRAME)).amax(dim=2)
    return torch.cat([covered[:, :1], later], dim=1) > 0


def best_tokens(scores: Tensor) -> Tensor:
    """Find the tokens B F rows columns of a bank of one frame at the end of the clip, without zero scores."""
    flat = scores.flatten(1)
    best = flat.topk(scores[0, 0].numel(), dim=1).indices
    kept = torch.zeros_like(flat, dtype=torch.bool).scatter_(1, best, True)
    return kept.view_as(scores) & (scores > 0)


def overlap(one: Tensor, other: Tensor) -> float:
    """Return intersection over union."""
    return (one & other).sum().item() / max(1, int((one | other).sum().item()))


def share_on(chosen: Tensor, actors: Tensor) -> float:
    return (chosen & actors).sum().item() / max(1, int(chosen.sum().item()))


@torch.no_grad()
def judge(estimate: FlowEstimator, clips: FlowClips) -> dict[str, float]:
    """Measure an estimator on full-size clips: its errors, and which tokens fire compared with the exact flow."""
    small = halve(clips)
    exact, _ = notice_clip(ExactFlow(small.forward, small.backward), clips.pictures)
    scores, flow = notice_clip(estimate, clips.pictures)
    actors = actor_tokens(clips.instances)
    kept, exactly_kept = best_tokens(scores), best_tokens(exact)
    return {
        **end_point_errors(flow, small),
        "fired_iou": overlap(scores > 0, exact > 0),
        "fired_ratio": (scores > 0).sum().item() / max(1, int((exact > 0).sum().item())),
        "fired_on_actors": share_on(scores > 0, actors),
        "fired_on_actors_exact": share_on(exact > 0, actors),
        "bank_iou": overlap(kept, exactly_kept),
        "bank_on_actors": share_on(kept, actors),
        "bank_on_actors_exact": share_on(exactly_kept, actors),
    }
