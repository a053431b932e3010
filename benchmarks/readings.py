"""Compare interpretations of the paper's novelty score: `python -m benchmarks.readings CLIP [CLIP ...] --out DIR`

The flow of each clip is computed once (RAFT-small, 12 updates, half resolution) and scored under every interpretation
of what the paper leaves open. Each is compared with that of `recap`: which tokens fire (intersection over union), the
rank correlation of the scores of tokens that fire in both, and the overlap of the final banks. One bank has the
tokens of a frame; the other ("/min") is reduced by the share of a minute that the clip lasts, since a short clip
evicts little. The edge share is the share of slots in the first or last column. DIR gets readings.json, a Markdown
table, and contact sheets of the banks of the literal interpretation and of ours.

The scoring is written here a second time, picture by picture, with the interpretations as switches; with our own
settings its tokens are checked against `FlowNovelty`.
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
from recap.show.sheet import Patches, contact_sheet, write_png

SIZE, TOKEN_PIXELS, PER_FRAME, SECONDS = (480, 832), 16, 4, 60
DEFAULTS = FlowNoveltyConfig()


@dataclass(frozen=True, slots=True)
class Interpretation:
    """One interpretation of the paper; the defaults are ours.

    `claims` are traced, carried or none, and `hard` ones are bits. With literal `borders` everything that enters is
    new; with seen ones only what was not visible before. Flow and colour `outside` are zeros or the values of the
    border, and outside begins at the edges of the border pixels or, `by_centres`, at their centres. `colours` is the
    mean, max or norm of the RGB difference. `full_size_px` counts the cycle threshold in pixels of the full picture.
    """

    claims: str = "traced"
    hard: bool = False
    borders: str = "seen"
    outside: str = "zeros"
    by_centres: bool = False
    colours: str = "mean"
    full_size_px: bool = False


READINGS: dict[str, Interpretation] = {
    "ours": Interpretation(),
    "literal borders": Interpretation(borders="literal"),
    "old: claims along any flow, literal borders": Interpretation("carried", borders="literal"),
    "no claims at all": Interpretation("none"),
    "claims as bits": Interpretation(hard=True),
    "border's own values outside": Interpretation(outside="border"),
    "outside by centres": Interpretation(by_centres=True),
    "largest of RGB": Interpretation(colours="max"),
    "norm of RGB": Interpretation(colours="norm"),
    "threshold in full-size pixels": Interpretation(full_size_px=True),
}


class Scan:
    """The novelty of one clip under one interpretation, picture by picture."""

    def __init__(self, reading: Interpretation):
        self.reading = reading
        self._claimed: Tensor | None = None
        self._surroundings = Surroundings()

    def fired(self, before: Tensor, now: Tensor, forward: Tensor, backward: Tensor) -> Tensor:
        """Return nu, y x, of the pixels that fire in picture `now`, from pictures 3 y x and flows 2 y x of a pair."""
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
            visible_before = self._surroundings.known(
                torch.stack([before, now])[None], at[None, None], step[None, None], cut[None, None],
                cfg.photometric_threshold,
            )[0, 0]  # fmt: skip
            enters = enters & ~visible_before
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


class TokenScores:
    """The scores of a clip's tokens under one interpretation, F rows columns."""

    def __init__(self, small: Tensor, flow: Flow, reading: Interpretation):
        scan = Scan(reading)
        pairs = zip(small[:-1], small[1:], flow.forward, flow.backward, strict=True)
        fired = torch.stack([torch.zeros_like(small[0, 0]), *(scan.fired(*pair) for pair in pairs)])
        patches = functional.max_pool2d(fired, TOKEN_PIXELS // DEFAULTS.flow_downscale)
        later = patches[1:].unflatten(0, (-1, PER_FRAME))
        self.raw = torch.cat([patches[:1], later.amax(dim=1)])
        # The picture of each token's maximum, from which its patch is cut.
        first = 1 + PER_FRAME * torch.arange(len(later))[:, None, None]
        self.peak = torch.cat([torch.zeros_like(self.raw[:1], dtype=torch.long), later.argmax(dim=1) + first])
        self.score = self.raw.clone()
        for block in self.score.split(3):
            positive = block[block > 0]
            if len(positive):
                block /= positive.quantile(DEFAULTS.percentile / 100).clamp(min=DEFAULTS.scale_floor)

    def bank(self, capacity: int) -> Tensor:
        """Return flat indices of the best `capacity` tokens with a positive score; of equal ones the older wins."""
        order = self.score.flatten().argsort(descending=True, stable=True)[:capacity]
        return order[self.score.flatten()[order] > 0]


def read_clip(path: Path, pictures: int) -> Tensor:
    """Read the first pictures of a clip, T 3 Y X uint8, in whole blocks of three frames."""
    clip = open_clip(path)
    lens = fit(clip, SIZE, TOKEN_PIXELS)
    found = torch.stack([lens(picture) for picture in islice(clip.pictures(), pictures)])
    block = 3 * PER_FRAME
    whole = (len(found) - 9) // block * block + 9
    if whole < 9:
        raise refuse("clip", str(path), f"has {len(found)} pictures, 9 are needed", "use a longer one")
    return found[:whole]


def flow_of(small: Tensor, name: str) -> Flow:
    """Estimate the flow of all pairs, a few at a time."""
    estimate = build_flow(name)
    parts = [estimate(small[None, start : start + 5]) for start in range(0, len(small) - 1, 4)]
    return Flow(*(torch.cat([getattr(part, name)[0] for part in parts]) for name in Flow._fields))


def check(pictures: Tensor, flow: Flow, ours: TokenScores) -> None:
    """Check that our interpretation has the scores of `FlowNovelty`."""
    grid = (SIZE[0] // TOKEN_PIXELS, SIZE[1] // TOKEN_PIXELS)
    exact = ExactFlow(*(each[None] for each in flow))
    novelty = FlowNovelty(DEFAULTS, exact, grid, TOKEN_PIXELS, PER_FRAME)
    parts = [pictures[:9], *pictures[9:].split(3 * PER_FRAME)]
    got = torch.cat([novelty.notice(part[None].float() / 255).raw[0] for part in parts])
    # A pixel at the threshold of the claimed map may differ by rounding.
    differ = (got - ours.raw).abs() > 1e-3
    assert differ.float().mean() < 1e-3, f"{int(differ.sum())} tokens differ from those of FlowNovelty"


def compare(ours: TokenScores, other: TokenScores) -> dict[str, float]:
    """Compare the tokens and banks of another interpretation with ours."""
    mine, theirs = ours.raw.flatten() > 0, other.raw.flatten() > 0
    both = mine & theirs
    grid = ours.raw.shape[1] * ours.raw.shape[2]
    capacity = {"bank": grid, "bank/min": round(grid * len(ours.raw) / (SECONDS * 4))}
    overlaps = {}
    for name, slots in capacity.items():
        a, b = (set(each.bank(slots).tolist()) for each in (ours, other))
        overlaps[name] = len(a & b) / max(len(a), len(b), 1)
    column = other.bank(grid) % ours.raw.shape[2]
    edge = (column == 0) | (column == ours.raw.shape[2] - 1)
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


def sheet(scores: TokenScores, pictures: Tensor, fps: float, most: int = 400) -> NDArray[np.uint8]:
    """Make a picture of the best tokens of a bank, in order of appearance."""
    chosen = scores.bank(most).sort().values
    frames, rows, columns = (index.numpy() for index in torch.unravel_index(chosen, scores.raw.shape))
    seconds = scores.peak.flatten()[chosen].double().numpy() / fps
    cut = cut_tokens(pictures, scores.peak).flatten(0, 2)[chosen]
    pixels = cut.reshape(-1, TOKEN_PIXELS, TOKEN_PIXELS, 3).numpy()
    score = scores.score.flatten()[chosen].numpy()
    return contact_sheet(Patches(pixels, seconds, frames, rows, columns, score))


def measure(path: Path, pictures: int, flow: str, out: Path) -> dict[str, dict[str, float]]:
    """Measure all interpretations on one clip."""
    shown = read_clip(path, pictures)
    small = functional.avg_pool2d(shown.float() / 255, DEFAULTS.flow_downscale)
    flows = flow_of(small, flow)
    scores = {name: TokenScores(small, flows, reading) for name, reading in READINGS.items()}
    check(shown, flows, scores["ours"])
    for name in ("ours", "old: claims along any flow, literal borders"):
        label = name.partition(":")[0]
        write_png(out / f"{path.stem}-{label}.png", sheet(scores[name], shown, open_clip(path).fps))
    return {name: compare(scores["ours"], each) for name, each in scores.items()}


def markdown(found: dict[str, dict[str, dict[str, float]]]) -> str:
    """Make a table of interpretations and clips; a cell has IoU, rho, both banks, edge share, and fired / ours."""
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
    parser.add_argument("--pictures", type=int, default=81, help="how many pictures of each clip")
    parser.add_argument("--flow", default="raft-small")
    options = parser.parse_args(words)
    options.out.mkdir(parents=True, exist_ok=True)
    found = {}
    for path in options.clips:
        found[path.stem] = measure(path, options.pictures, options.flow, options.out)
        print(f"{path.stem}: {json.dumps(found[path.stem]['ours'])}", flush=True)
        write_whole(options.out / "readings.json", json.dumps(found, indent=1).encode())
    table = markdown(found)
    write_whole(options.out / "readings.md", table.encode())
    print(table)


if __name__ == "__main__":
    main()
