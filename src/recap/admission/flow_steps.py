"""Defines the steps of novelty by flow in plain torch; `recap.fast.novelty_kernels` does the same in few launches."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from recap.admission.surroundings import CUT_SHARE, Surroundings
from recap.contracts import Flow
from recap.flow.warp import backtrace, inside, reading_grid, sample_at

if TYPE_CHECKING:
    from recap.admission.flow import FlowNoveltyConfig


class Evidence(NamedTuple):
    """Says what the pixels of a block's pictures show before claims are looked at, B P y x each."""

    novelty: Tensor  # nu, 0 where a pixel is not flagged
    flagged: Tensor  # bool
    traced: Tensor  # bool: what was claimed at `origin` is still claimed here
    origin: Tensor  # B P 2 y x: where in the picture before a claim is read


class Steps(Protocol):
    """Is this module, or another that computes the same."""

    def find_evidence(
        self, stream: Tensor, flow: Flow, config: FlowNoveltyConfig, surroundings: Surroundings
    ) -> Evidence:
        """Compare every picture of the stream B P+1 3 y x with the one before it; the surroundings move along."""

    def claim(self, evidence: Evidence, claimed: Tensor) -> tuple[Tensor, Tensor]:
        """Return nu of the pixels that fire, B P y x, and what is claimed after them, as B y x was before."""


def find_evidence(
    stream: Tensor, flow: Flow, config: FlowNoveltyConfig, surroundings: Surroundings
) -> Evidence:
    forward, backward = flow
    before, now = stream[:, :-1], stream[:, 1:]
    at = backtrace(backward)
    size = (now.shape[-2], now.shape[-1])
    within = inside(at, size)
    found = sample_at(torch.cat([forward, before], dim=2), reading_grid(at, size)) * within[:, :, None]
    cycle = torch.linalg.vector_norm(backward + found[:, :, :2], dim=2)
    photometric = (now - found[:, :, 2:]).abs().mean(dim=2)
    broken = within & ((cycle > config.cycle_threshold_px) | (photometric > config.photometric_threshold))
    enters = ~within
    if config.borders == "seen":
        cut = (within & (cycle > config.cycle_threshold_px)).flatten(2).float().mean(dim=-1) > CUT_SHARE
        step = backward.flatten(3).median(dim=-1).values
        enters &= ~surroundings.known(stream, at, step, cut, config.photometric_threshold)
    flagged = enters | broken
    holds = within & (cycle <= config.cycle_threshold_px)
    novelty = cycle + config.photometric_weight * photometric
    traced = holds if config.claims == "traced" else within
    return Evidence(novelty * flagged, flagged, traced, at)


def claim(evidence: Evidence, claimed: Tensor) -> tuple[Tensor, Tensor]:
    """Carry the claimed map through the pictures; only here does one picture depend on the last.

    So only what must be done picture by picture is: on a GPU every operation in this loop is a launch.
    """
    novelty, flagged, traced, origin = evidence
    grid = reading_grid(origin, (novelty.shape[-2], novelty.shape[-1]))
    fired = []
    for picture in range(novelty.shape[1]):
        carried = sample_at(claimed[:, None], grid[:, picture])[:, 0] * traced[:, picture]
        fires = flagged[:, picture] & (carried < 0.5)
        claimed = torch.where(fires, 1.0, carried)
        fired.append(fires)
    return novelty * torch.stack(fired, dim=1), claimed
