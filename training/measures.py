"""The tools of `training.evaluate`: statistics, and measurements of a rollout.

Everything takes and returns plain tensors or numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from recap.backbones.tiny.vocabulary import ACTORS
from recap.contracts import Decoder, State
from recap.eval import scores
from recap.eval.judges.colours import mean_colour
from recap.eval.judges.probe import Judged, Probe
from recap.eval.metrics.drift import contrast, sharpness
from recap.eval.scores import Estimate
from recap.types import BackboneSpec, GeneratedBlock

# Statistics


def cluster_interval(values: Tensor, clusters: Sequence[int]) -> Estimate:
    """Average the finite values; the bootstrap interval resamples whole clusters, however few there are."""
    # Padded, so that labels sort as numbers do.
    labels = [f"{cluster:09d}" for cluster in clusters]
    return scores.cluster_interval(values.double().tolist(), labels, fewest=1)


def paired_difference(ours: Tensor, theirs: Tensor, clusters: Sequence[int]) -> Estimate:
    """Average ours - theirs over the pairs in which both are finite, with its cluster interval."""
    return cluster_interval(ours.double() - theirs.double(), clusters)


def mean_of(values: Tensor) -> float:
    """Average the finite values; nan if there are none."""
    finite = values[values.isfinite()]
    return float(finite.double().mean()) if len(finite) else float("nan")


def partners(num: int, repeats: int) -> list[int]:
    """Return for each row the next repeat of the same prompt; the rows of a prompt follow each other."""
    return [row - row % repeats + (row + 1) % repeats for row in range(num - num % repeats)]


# Pictures


def psnr(made: Tensor, wanted: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Return the PSNR of pixels in 0..1, with the error averaged over `dims`."""
    return -10 * torch.log10((made - wanted).square().mean(dim=dims).clamp_min(1e-10))


# Measuring a rollout


@dataclass(frozen=True, slots=True)
class Series:
    """Measurements of one picture per frame of B rollouts, each row for its own actor, on the CPU."""

    seconds: Tensor  # T
    contrast: Tensor  # B T
    sharpness: Tensor  # B T
    found: Tensor  # B T, 1 if the probe finds the actor
    colour: Tensor  # B T 3, nan if no cell shows it
    cells: Tensor  # B T
    shares: dict[str, Tensor]  # role -> B blocks, share of attention mass; 0 before the role exists

    def within(self, first_s: float, last_s: float) -> Tensor:
        """Select the pictures of a window, T, or the nearest one if it has none."""
        inside = (self.seconds >= first_s) & (self.seconds < last_s)
        if not bool(inside.any()):
            inside[(self.seconds - (first_s + last_s) / 2).abs().argmin()] = True
        return inside

    def presence(self, first_s: float, last_s: float) -> Tensor:
        """Return the share of the window's pictures that show the actor, B."""
        return self.found[:, self.within(first_s, last_s)].mean(dim=1)

    def mean_colour(self, first_s: float, last_s: float) -> Tensor:
        """Return the actor's colour over the window's pictures that show it, weighted by cells, B 3."""
        inside = self.within(first_s, last_s)
        return mean_colour(self.found[:, inside], self.colour[:, inside], self.cells[:, inside])


def join_rows(parts: Sequence[Series]) -> Series:
    """Join the series of several batches."""
    joined = {
        name: torch.cat([getattr(part, name) for part in parts])
        for name in ("contrast", "sharpness", "found", "colour", "cells")
    }
    shares = {role: torch.cat([part.shares[role] for part in parts]) for role in parts[0].shares}
    return Series(parts[0].seconds, shares=shares, **joined)


def last_of_frames(pixels: Tensor, pictures_per_frame: int) -> tuple[Tensor, list[int]]:
    """Return the last picture of every frame of a block B T 3 Y X, and their indices in it."""
    chosen = list(range((pixels.shape[1] - 1) % pictures_per_frame, pixels.shape[1], pictures_per_frame))
    return pixels[:, chosen], chosen


def actor_by_row(judged: Judged, actors: Sequence[str]) -> tuple[Tensor, Tensor, Tensor]:
    """Return found B T, colour B T 3 and cells B T, each row for its own actor."""
    numbers = torch.tensor([ACTORS.index(actor) for actor in actors], device=judged.presence.device)
    shape = judged.presence.shape[:2]
    at = numbers[:, None, None].expand(*shape, 1)
    found = (judged.presence.gather(2, at)[..., 0] > 0.5).float()
    colour, cells = judged.colours.new_zeros(*shape, 3), judged.colours.new_zeros(shape)
    for actor in sorted(set(actors)):
        rows = (numbers == ACTORS.index(actor)).nonzero()[:, 0]
        few = Judged(judged.presence[rows], judged.cells[rows], judged.shares[rows], judged.colours[rows])
        colour[rows], count = few.actor_colour(actor)
        cells[rows] = count.float()
    return found, colour, cells


@torch.no_grad()
def watch(
    blocks: Iterator[GeneratedBlock],
    spec: BackboneSpec,
    probe: Probe,
    actors: Sequence[str],
    after: Callable[[GeneratedBlock], None] = lambda made: None,
) -> Series:
    """Generate a rollout to its end and keep only measurements; `after` is called after every block."""
    columns: dict[str, list[Tensor]] = {n: [] for n in ("contrast", "sharpness", "found", "colour", "cells")}
    seconds: list[float] = []
    masses: list[dict[str, Tensor]] = []
    num_pictures = 0
    for made in blocks:
        shown, chosen = last_of_frames(made.pixels, spec.pictures_per_frame)
        seconds += [(num_pictures + picture) / spec.pictures_per_second for picture in chosen]
        num_pictures += made.pixels.shape[1]
        found, colour, cells = actor_by_row(probe.judge(shown), actors)
        measured = (contrast(shown), sharpness(shown), found, colour, cells)
        for name, value in zip(columns, measured, strict=True):
            columns[name].append(value.float().cpu())
        masses.append({role.value: share.float().cpu() for role, share in made.shares.items()})
        after(made)
    roles = sorted({role for mass in masses for role in mass})
    shares = {r: torch.stack([m.get(r, torch.zeros(len(actors))) for m in masses], dim=1) for r in roles}
    whole = {name: torch.cat(parts, dim=1) for name, parts in columns.items()}
    return Series(torch.tensor(seconds), shares=shares, **whole)


class RowsDecoder:
    """A decoder with one stream per few rows, so that a large batch does not need large activations."""

    def __init__(self, open_decoder: Callable[[], Decoder], at_once: int = 32) -> None:
        self._open, self._at_once = open_decoder, at_once
        self._streams: list[Decoder] = []

    def decode(self, latents: Tensor) -> Tensor:
        parts = latents.split(self._at_once)
        self._streams = self._streams or [self._open() for _ in parts]
        return torch.cat([stream.decode(part) for stream, part in zip(self._streams, parts, strict=True)])

    def state(self) -> State:
        return {f"{i}.{k}": v for i, stream in enumerate(self._streams) for k, v in stream.state().items()}

    def load_state(self, state: State) -> None:
        count = 1 + max((int(name.partition(".")[0]) for name in state), default=-1)
        self._streams = [self._open() for _ in range(count)]
        for index, stream in enumerate(self._streams):
            prefix = f"{index}."
            stream.load_state({n.removeprefix(prefix): v for n, v in state.items() if n.startswith(prefix)})


# Reporting


def plain(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.1f}"


def percent(value: float) -> str:
    return "-" if math.isnan(value) else f"{100 * value:.0f} %"


def interval(estimate: Estimate, show: Callable[[float], str] = plain) -> str:
    return f"{show(estimate.mean)} [{show(estimate.low)}, {show(estimate.high)}]"


def differences(
    by_memory: dict[str, dict[str, Tensor]],
    pairs: Sequence[tuple[str, str]],
    clusters: Sequence[int],
    compared: Sequence[tuple[str, Callable[..., str]]],
) -> tuple[dict[str, Any], list[list[str]]]:
    """Compare every pair of measured memories, rollout by rollout, by every named score."""
    found: dict[str, Any] = {}
    table = [["paired difference", *(f"{name} (pairs)" for name, _ in compared)]]
    for ours, theirs in pairs:
        if ours not in by_memory or theirs not in by_memory:
            continue
        name = f"{ours} - {theirs}"
        gaps = {n: paired_difference(by_memory[ours][n], by_memory[theirs][n], clusters) for n, _ in compared}
        found[name] = gaps
        table.append([name, *(f"{interval(gaps[n], show)} ({gaps[n].n})" for n, show in compared)])
    return found, table


def markdown(table: list[list[str]]) -> str:
    """Format a table as Markdown; an empty line begins another table."""
    lines, head = [], True
    for row in table:
        lines.append(f"| {' | '.join(row)} |" if row else "")
        if row and head:
            lines.append("|" + "---|" * len(row))
        head = not row
    return "\n".join(lines)


def as_json(value: Any) -> Any:
    """Convert the result of a part for JSON, with numbers to five digits and nan as null."""
    if isinstance(value, Tensor):
        return as_json(value.tolist())
    if isinstance(value, Estimate):
        return as_json(value._asdict())
    if isinstance(value, dict):
        return {str(name): as_json(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(each) for each in value]
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else None
    return value
