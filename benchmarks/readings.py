"""How much do the readings of the paper's novelty matter?  `python -m benchmarks.readings CLIP [CLIP ...] --out DIR`

Every clip's flow is computed once (RAFT-small, 12 updates, half resolution) and scored under every reading of what
the paper leaves open. Told for each, against `recap`'s own: which tokens fire (intersection over union), the rank
correlation of the scores of tokens that both fire, and the overlap of the final banks: of one frame's tokens, and
of as many as a clip of this length would have slots for in a minute ("/min"), since a short clip evicts little.
Also the bank's edge share: its slots in the first or last column. DIR gets readings.json, a Markdown table, and the
contact sheets of the banks by the literal reading and by ours.

The scoring here is written a second time, picture by picture, with the readings as switches; with our own switches
its tokens are checked against `FlowNovelty`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from recap.admission.flow import FlowNovelty, FlowNoveltyConfig
from recap.admission.surroundings import CUT_SHARE, Surroundings
from recap.contracts import Flow
from recap.errors import refuse
from recap.flow import build_flow
from recap.flow.exact import ExactFlow
from recap.flow.warp import backtrace, inside, sample
from recap.io.files import write_whole
from recap.io.framing import cut_tokens, fit
from recap.io.video import open_clip
from recap.show.png import write_png
from recap.show.sheet import Patches, contact_sheet

SIZE, TOKEN_PIXELS, PER_FRAME, SECONDS = (480, 832), 16, 4, 60
DEFAULTS = FlowNoveltyConfig()


@dataclass(frozen=True, slots=True)
class Reading:
    """One way to read the paper; the defaults are ours."""

    claims: str = "traced"  # traced, carried or none
    hard: bool = False  # the claimed map holds bits
    borders: str = "seen"  # seen, or literal: all that enters is new
    outside: str = "zeros"  # flow and colour there: zeros, or the border's own values
    by_centres: bool = False  # outside begins at the centres of the border pixels, not at their edges
    colours: str = "mean"  # of |RGB difference|: mean, max or norm
    full_size_px: bool = False  # the cycle threshold counts pixels of the full picture


READINGS: dict[str, Reading] = {
    "ours": Reading(),
    "literal borders": Reading(borders="literal"),
    "old: claims along any flow, literal borders": Reading("carried", borders="literal"),
    "no claims at all": Reading("none"),
    "claims as bits": Reading(hard=True),
    "border's own values outside": Reading(outside="border"),
    "outside by centres": Reading(by_centres=True),
    "largest of RGB": Reading(colours="max"),
    "norm of RGB": Reading(colours="norm"),
    "threshold in full-size pixels": Reading(full_size_px=True),
}


class Scan:
    """Novelty of one clip under one reading, one picture after the other."""

    def __init__(self, reading: Reading):
        self.reading = reading
        self._claimed: Tensor | None = None
        self._surroundings = Surroundings()

    def fired(self, before: Tensor, now: Tensor, forward: Tensor, backward: Tensor) -> Tensor:
        """nu of the pixels that fire in picture `now`, y x; pictures 3 y x and flows 2 y x of one pair."""
        cfg, read = DEFAULTS, self.reading
        height, width = now.shape[-2:]
        at = backtrace(backward)
        within = inside(at, (height, width))
        if read.by_centres:
            x, y = at
            within = (x >= 0) & (x <= width - 1) & (y >= 0) & (y <= height - 1)
        found = sample(torch.cat([forward, before]), at)
        if read.outside == "zeros":
            found = found * within
        cycle = torch.linalg.vector_norm(backward + found[:2], dim=0)
        threshold = cfg.cycle_threshold_px / (cfg.flow_downscale if read.full_size_px else 1)
        enters = ~within
        if read.borders == "seen":
            cut = (within & (cycle > threshold)).float().mean() > CUT_SHARE
            step = backward.flatten(1).median(dim=-1).values
            known = self._surroundings.known(
                torch.stack([before, now])[None], at[None, None], step[None, None], cut[None, None],
                cfg.photometric_threshold,
            )[0, 0]  # fmt: skip
            enters = enters & ~known
        difference = (now - found[2:]).abs()
        photometric = {
            "mean": difference.mean(dim=0), "max": difference.amax(dim=0),
            "norm": torch.linalg.vector_norm(difference, dim=0),
        }[read.colours]  # fmt: skip
        holds = within & (cycle <= threshold)
        flagged = enters | (within & ((cycle > threshold) | (photometric > cfg.photometric_threshold)))
        carried = torch.zeros_like(cycle)
        if self._claimed is not None and read.claims != "none":
            carried = sample(self._claimed[None], at)[0] * (holds if read.claims == "traced" else within)
        fires = flagged & (carried < 0.5)
        claimed = torch.where(fires, 1.0, carried)
        self._claimed = (claimed >= 0.5).float() if read.hard else claimed
        novelty: Tensor = (cycle + cfg.photometric_weight * photometric) * fires
        return novelty


class Scored:
    """What the tokens of a clip score under a reading: F rows columns."""

    def __init__(self, small: Tensor, flow: Flow, reading: Reading):
        scan = Scan(reading)
        pairs = zip(small[:-1], small[1:], flow.forward, flow.backward, strict=True)
        fired = torch.stack([torch.zeros_like(small[0, 0]), *(scan.fired(*pair) for pair in pairs)])
        patches = functional.max_pool2d(fired, TOKEN_PIXELS // DEFAULTS.flow_downscale)
        later = patches[1:].unflatten(0, (-1, PER_FRAME))
        self.raw = torch.cat([patches[:1], later.amax(dim=1)])
        # The picture of each token's maximum, to cut it from.
        first = 1 + PER_FRAME * torch.arange(len(later))[:, None, None]
        self.peak = torch.cat([torch.zeros_like(self.raw[:1], dtype=torch.long), later.argmax(dim=1) + first])
        self.score = self.raw.clone()
        for block in self.score.split(3):
            positive = block[block > 0]
            if len(positive):
                block /= positive.quantile(DEFAULTS.percentile / 100).clamp(min=DEFAULTS.scale_floor)

    def bank(self, capacity: int) -> Tensor:
        """Places of the best `capacity` tokens of positive score in the clip, as flat indices; ties: older first."""
        order = self.score.flatten().argsort(descending=True, stable=True)[:capacity]
        return order[self.score.flatten()[order] > 0]


def read_clip(path: Path, pictures: int) -> Tensor:
    """The first pictures of a clip, T 3 Y X uint8, in whole blocks of three frames."""
    clip = open_clip(path)
    lens = fit(clip, SIZE, TOKEN_PIXELS)
    found = torch.stack([lens(picture) for picture in islice(clip.pictures(), pictures)])
    block = 3 * PER_FRAME
    whole = (len(found) - 9) // block * block + 9
    if whole < 9:
        raise refuse("clip", str(path), f"has {len(found)} pictures, 9 are needed", "take a longer one")
    return found[:whole]


def flow_of(small: Tensor, name: str) -> Flow:
    """The flow of all pairs, a few at a time: 2 y x each."""
    estimate = build_flow(name)
    parts = [estimate(small[None, start : start + 5]) for start in range(0, len(small) - 1, 4)]
    return Flow(*(torch.cat([getattr(part, name)[0] for part in parts]) for name in Flow._fields))


def check(small: Tensor, pictures: Tensor, flow: Flow, ours: Scored) -> None:
    """What is scored here by our switches must be what `FlowNovelty` scores."""
    grid = (SIZE[0] // TOKEN_PIXELS, SIZE[1] // TOKEN_PIXELS)
    exact = ExactFlow(*(each[None] for each in flow))
    novelty = FlowNovelty(DEFAULTS, exact, grid, TOKEN_PIXELS, PER_FRAME)
    parts = [pictures[:9], *pictures[9:].split(3 * PER_FRAME)]
    got = torch.cat([novelty.notice(part[None].float() / 255).raw[0] for part in parts])
    # A pixel on the very threshold of the claimed map may differ by rounding.
    apart = (got - ours.raw).abs() > 1e-3
    assert apart.float().mean() < 1e-3, f"{int(apart.sum())} tokens differ from FlowNovelty's"


def compare(ours: Scored, other: Scored) -> dict[str, float]:
    """How far another reading's tokens and banks are from ours."""
    mine, theirs = ours.raw.flatten() > 0, other.raw.flatten() > 0
    both = mine & theirs
    grid = ours.raw.shape[1] * ours.raw.shape[2]
    capacity = {"bank": grid, "bank/min": round(grid * len(ours.raw) / (SECONDS * 4))}
    overlaps = {}
    for name, slots in capacity.items():
        a, b = (set(each.bank(slots).tolist()) for each in (ours, other))
        overlaps[name] = len(a & b) / max(len(a), len(b), 1)
    held = other.bank(grid) % ours.raw.shape[2]
    edge = (held == 0) | (held == ours.raw.shape[2] - 1)
    return {
        "fired": float(theirs.sum()),
        "iou": float(both.sum()) / max(1.0, float((mine | theirs).sum())),
        "rho": spearman(ours.score.flatten()[both].numpy(), other.score.flatten()[both].numpy()),
        **overlaps,
        "edge_share": float(edge.float().mean()) if len(edge) else 0.0,
    }


def spearman(a: NDArray[Any], b: NDArray[Any]) -> float:
    if len(a) < 2:
        return float("nan")
    first, second = (np.argsort(np.argsort(each)) for each in (a, b))
    return float(np.corrcoef(first, second)[0, 1])


def sheet(scored: Scored, pictures: Tensor, fps: float, most: int = 400) -> NDArray[np.uint8]:
    """The best tokens of a bank as one sees them, in order of appearance."""
    places = scored.bank(most).sort().values
    rows, columns = scored.raw.shape[1:]
    frames, row, column = places // (rows * columns), places // columns % rows, places % columns
    when = scored.peak.flatten()[places]
    cut = cut_tokens(pictures, scored.peak).flatten(0, 2)[places]
    pixels = cut.reshape(-1, TOKEN_PIXELS, TOKEN_PIXELS, 3).numpy()
    score = scored.score.flatten()[places]
    return contact_sheet(
        Patches(
            pixels, when.double().numpy() / fps, frames.numpy(), row.numpy(), column.numpy(), score.numpy()
        )
    )


def measure(path: Path, pictures: int, flow: str, out: Path) -> dict[str, dict[str, float]]:
    """All readings of one clip."""
    shown = read_clip(path, pictures)
    small = functional.avg_pool2d(shown.float() / 255, DEFAULTS.flow_downscale)
    flows = flow_of(small, flow)
    scored = {name: Scored(small, flows, reading) for name, reading in READINGS.items()}
    check(small, shown, flows, scored["ours"])
    for name in ("ours", "old: claims along any flow, literal borders"):
        label = name.partition(":")[0]
        write_png(out / f"{path.stem}-{label}.png", sheet(scored[name], shown, open_clip(path).fps))
    return {name: compare(scored["ours"], each) for name, each in scored.items()}


def markdown(found: dict[str, dict[str, dict[str, float]]]) -> str:
    """A row per reading; in a cell: IoU, rho, bank, bank/min, edge share, fired tokens against ours."""
    lines = ["| reading | " + " | ".join(found) + " |", "|---" * (1 + len(found)) + "|"]
    for name in READINGS:
        cells = []
        for of_clip in found.values():
            got, own = of_clip[name], of_clip["ours"]
            cells.append(
                f"{got['iou']:.2f} {got['rho']:.2f} {got['bank']:.2f} {got['bank/min']:.2f}; "
                f"{got['edge_share']:.0%}; {got['fired'] / max(1, own['fired']):.2f}"
            )
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("clips", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--pictures", type=int, default=81, help="of each clip, from its first on")
    parser.add_argument("--flow", default="raft-small")
    given = parser.parse_args(words)
    given.out.mkdir(parents=True, exist_ok=True)
    found = {}
    for path in given.clips:
        found[path.stem] = measure(path, given.pictures, given.flow, given.out)
        print(f"{path.stem}: {json.dumps(found[path.stem]['ours'])}", flush=True)
        write_whole(given.out / "readings.json", json.dumps(found, indent=1).encode())
    table = markdown(found)
    write_whole(given.out / "readings.md", table.encode())
    print(table)


if __name__ == "__main__":
    main()
