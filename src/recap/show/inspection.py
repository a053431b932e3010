"""This module shows what the bank would remember of any clip: generation's novelty and bank, run on a video file.

Pictures are read, scored, marked and written block by block; only the scores of the tokens stay, so the
length of a clip costs next to no memory. The bank is the same as in generation, with the pixels of a token
instead of its keys.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from recap.admission.base import retain_top
from recap.admission.flow import FlowNovelty, FlowNoveltyConfig, Noticed
from recap.contracts import FlowEstimator
from recap.errors import refuse
from recap.io.files import staged_folder, write_whole
from recap.io.framing import Lens, cut_tokens, fit
from recap.io.record import versions
from recap.io.report import Reporter
from recap.io.video import Clip, ClipWriter, open_clip
from recap.memory.bank import NoveltyBank
from recap.show.clips import embed, tint
from recap.show.page import Method, Plot, VideoPage, build_video_page, describe_bank, edge_share
from recap.show.sheet import Patches, contact_sheet, write_png
from recap.types import Candidates

RECORD = "inspect.json"
RESULTS = ("overlay.mp4", "scores.npz", "bank.png", "index.html", RECORD)

# A clip has no backbone to ask, so it is cut as the Wan family cuts video.
TOKEN_PIXELS = 16
PICTURES_PER_FRAME = 4
FRAMES_PER_BLOCK = 3
_MOST_BARS, _BAR_S = 130, 0.25


def inspect_clip(
    path: Path | str,
    out: Path | str,
    *,
    flow: FlowEstimator,
    config: FlowNoveltyConfig,
    capacity_frames: float = 1.0,
    size: tuple[int, int] | None = None,
    device: torch.device | str = "cpu",
    reporter: Reporter = Reporter(),
) -> Path:
    """Write `out/`: overlay.mp4, scores.npz, bank.png, index.html and inspect.json; whole or not at all.

    Returns the page; inspect.json has the figures. `size` (rows, columns) rescales every picture first. `device` is
    where the flow and the scores are computed.
    """
    started = time.monotonic()
    clip = open_clip(path)
    lens = fit(clip, size, TOKEN_PIXELS)
    if not 0 < capacity_frames <= 1000:
        limit = "must be above 0 and at most 1000 frames"
        raise refuse("capacity_frames", capacity_frames, limit, "1 is the paper's")
    novelty = FlowNovelty(config, flow, lens.grid, TOKEN_PIXELS, PICTURES_PER_FRAME)
    bank = NoveltyBank(max(1, round(capacity_frames * math.prod(lens.grid))), num_layers=1)
    scan = _Scan(clip, lens, novelty, bank, torch.device(device))
    settings = {"flow": type(flow).__name__, "capacity_frames": capacity_frames}
    with staged_folder(Path(out), RESULTS) as folder:
        with ClipWriter(folder / "overlay.mp4", lens.size, clip.fps) as overlay:
            for pictures in _blocks(clip, lens):
                overlay.write(scan.take(pictures))
                rate = scan.num_pictures / (time.monotonic() - started)
                reporter.progress(scan.num_pictures, clip.num_pictures, rate)
        elapsed_s = round(time.monotonic() - started, 2)
        _write_results(folder, scan, elapsed_s, {**dataclasses.asdict(config), **settings})
    for line in scan.notices():
        reporter.notice(line)
    return Path(out) / "index.html"


def _blocks(clip: Clip, lens: Lens) -> Iterator[Tensor]:
    """Yield the pictures T 3 Y X, uint8, of one block after the other; the last one may be short."""
    pictures = clip.pictures()
    length = 1 + (FRAMES_PER_BLOCK - 1) * PICTURES_PER_FRAME
    while block := [lens(picture) for picture in islice(pictures, length)]:
        yield torch.stack(block)
        length = FRAMES_PER_BLOCK * PICTURES_PER_FRAME


@dataclass
class _Scan:
    """Collects the scores and the bank of a clip, block by block."""

    clip: Clip
    lens: Lens
    novelty: FlowNovelty
    bank: NoveltyBank
    device: torch.device
    num_pictures: int = 0
    num_scored: int = 0
    num_frames: int = 0
    # Rows columns of every frame, one after the other. A list of small arrays would grow the process far beyond their
    # size: each pins a part of the heap that the large tensors of its block leave behind.
    raw: bytearray = field(default_factory=bytearray)
    score: bytearray = field(default_factory=bytearray)
    # The picture of a token's maximum.
    appeared: bytearray = field(default_factory=bytearray)
    # After every block: the second, how many slots hold something new, and the score to beat.
    filling: list[tuple[float, int, float]] = field(default_factory=lambda: [(0.0, 0, 0.0)])

    def take(self, pictures: Tensor) -> Tensor:
        """Score the next block and offer its tokens to the bank; return its pictures, what fired marked."""
        opening = self.num_pictures == 0
        whole = (len(pictures) - opening) // PICTURES_PER_FRAME * PICTURES_PER_FRAME + opening
        if opening and whole < 1 + PICTURES_PER_FRAME:
            limit = f"the first one and a frame of {PICTURES_PER_FRAME} are needed"
            raise refuse("number of pictures in the clip", len(pictures), limit, "use a longer clip")
        self.num_pictures += len(pictures)
        if whole == 0:
            return pictures
        noticed = self.novelty.notice((pictures[:whole].to(self.device).float() / 255)[None])
        frame_of = (torch.arange(whole) + (PICTURES_PER_FRAME - 1 if opening else 0)) // PICTURES_PER_FRAME
        self._remember(noticed, pictures[:whole], opening)
        marked = tint(pictures[:whole], noticed.raw[0].cpu()[frame_of] > 0)
        return torch.cat([marked, pictures[whole:]])

    def _remember(self, noticed: Noticed, pictures: Tensor, opening: bool) -> None:
        raw, score = noticed.raw[0].cpu(), noticed.score[0].cpu()
        # In the block.
        peak = _peak(noticed.fired[0].cpu(), self.lens.grid, opening)
        self.raw += raw.numpy().tobytes()
        self.score += score.numpy().tobytes()
        self.appeared += (peak + self.num_scored).int().numpy().tobytes()
        # The sink owns the first frame, so its tokens are not offered.
        offered = slice(1, None) if opening else slice(None)
        rows, columns = self.lens.grid
        frames = torch.arange(self.num_frames, self.num_frames + len(raw))[offered]
        source = torch.cartesian_prod(frames, torch.arange(rows), torch.arange(columns))[None]
        patches = cut_tokens(pictures, peak)[offered].reshape(1, 1, source.shape[1], 1, -1)
        self.bank.admit(Candidates(source, score[offered].reshape(1, -1)), patches, patches, retain_top)
        self.num_frames += len(raw)
        self.num_scored += len(pictures)
        scores = self.bank.entries.score
        cutoff = float(scores.min()) if self.bank.count == self.bank.capacity else 0.0
        self.filling.append((self.num_scored / self.clip.fps, int((scores > 0).sum()), cutoff))

    def frames(self, kept: bytearray, kind: type[np.generic] = np.float32) -> NDArray[Any]:
        """Return what was kept of every frame as an array F rows columns."""
        return np.frombuffer(kept, kind).reshape(-1, *self.lens.grid)

    def notices(self) -> list[str]:
        """Return lines for the user: what was cropped, and what was left unscored."""
        left = self.num_pictures - self.num_scored
        ending = "the last picture does" if left == 1 else f"the last {left} pictures do"
        line = f"{ending} not fill a frame of {PICTURES_PER_FRAME} and went unscored"
        return [*self.lens.notices, *([line] if left else [])]

    def summary(self) -> dict[str, Any]:
        """Return the figures of inspect.json.

        `bank_new` counts slots with a score above 0, `bank_edge_share` is the share of them in the first or last
        column, and `bank_cutoff` the lowest score in a full bank, which a newcomer must beat; 0 while there is room.
        """
        _, new, cutoff = self.filling[-1]
        return {
            "clip": os.fsencode(clip_title(self.clip.path)).decode(errors="replace"),
            "fps": self.clip.fps,
            "size": self.lens.size,
            "grid": self.lens.grid,
            "num_pictures": self.num_pictures,
            "num_scored_pictures": self.num_scored,
            "num_frames": self.num_frames,
            "fired_tokens": int((self.frames(self.raw) > 0).sum()),
            "bank_capacity": self.bank.capacity,
            "bank_new": new,
            "bank_edge_share": edge_share(self.patches(), self.lens.grid),
            "bank_cutoff": cutoff,
            "notices": self.notices(),
        }

    def patches(self) -> Patches:
        """Return what the bank holds and was new, by the second in which it scored highest."""
        source, score = self.bank.entries.source[0].numpy(), self.bank.entries.score[0].numpy()
        frames, rows, columns = source.T
        pictures = self.frames(self.appeared, np.int32)[frames, rows, columns]
        order = np.lexsort((columns, rows, pictures))
        kept = order[score[order] > 0]
        pixels = self.bank.keys[0, 0, kept, 0].unflatten(-1, (TOKEN_PIXELS, TOKEN_PIXELS, 3)).numpy()
        seconds = pictures[kept] / self.clip.fps
        return Patches(pixels, seconds, frames[kept], rows[kept], columns[kept], score[kept])

    def plots(self) -> list[Plot]:
        """Return the curves of the page: what was new, how the bank filled, and the score a newcomer must beat."""
        duration = self.num_pictures / self.clip.fps
        fired = (self.frames(self.raw) > 0).sum(axis=(1, 2))
        first = np.maximum(0, PICTURES_PER_FRAME * np.arange(self.num_frames) - PICTURES_PER_FRAME + 1)
        bars = min(_MOST_BARS, math.ceil(duration / _BAR_S))
        counts, edges = np.histogram(first / self.clip.fps, bars, (0, duration), weights=fired)
        seconds, new, cutoff = zip(*self.filling, strict=True)
        step = f"Tokens in which something new appeared, in steps of {duration / bars:.2g} s."
        slots = f"How many of the bank's {self.bank.capacity:,} slots hold something new."
        lowest = "The lowest score in a full bank; 0 while there is room."
        rates, starts = (counts * bars / duration).tolist(), edges[:-1].tolist()
        return [
            Plot("New tokens per second", step, starts, [rates], digits=1, steps=True),
            Plot("The bank fills", slots, seconds, [new], top=self.bank.capacity, digits=0, steps=True),
            Plot("Score to beat", lowest, seconds, [cutoff], digits=2, steps=True),
        ]

    def tokens(self) -> dict[str, NDArray[Any]]:
        """Return one entry per token of every frame, frame by frame and row-major, in arrays of equal length."""
        score, raw = self.frames(self.score), self.frames(self.raw)
        positions: NDArray[Any] = np.indices(score.shape, dtype=np.int32)
        frame, row, column = positions
        arrays: dict[str, NDArray[Any]] = {
            "score": score,
            "raw": raw,
            "picture": frame * PICTURES_PER_FRAME,
            "appeared": self.frames(self.appeared, np.int32),
            "row": row,
            "column": column,
            "block": frame // FRAMES_PER_BLOCK,
        }
        return {name: array.ravel() for name, array in arrays.items()}


def clip_title(clip: Path) -> str:
    """Name a clip by its file; the video of a run, which is called the same in every run, also by its folder."""
    folder = clip.resolve().parent
    return f"{folder.name}/{clip.name}" if (folder / "run.json").is_file() else clip.name


def _peak(fired: Tensor, grid: tuple[int, int], opening: bool) -> Tensor:
    """Return the picture of the block, F rows columns, in which each token fired hardest; fired is T y x."""
    patches = functional.adaptive_max_pool2d(fired[None], grid)[0]
    tail = patches[1:] if opening else patches
    frames = tail.reshape(-1, PICTURES_PER_FRAME, *grid).argmax(dim=1)
    frames += torch.arange(len(frames))[:, None, None] * PICTURES_PER_FRAME + opening
    return torch.cat([torch.zeros_like(patches[:1], dtype=torch.long), frames]) if opening else frames


def _write_results(folder: Path, scan: _Scan, elapsed_s: float, settings: dict[str, object]) -> None:
    with (folder / "scores.npz").open("wb") as file:
        arrays = {"settings": np.array(json.dumps(settings)), **scan.tokens()}
        np.savez_compressed(file, allow_pickle=False, **arrays)
    bank, grid, summary = scan.patches(), scan.lens.grid, scan.summary() | {"elapsed_s": elapsed_s}
    write_png(folder / "bank.png", contact_sheet(bank))
    video, remark = embed(folder / "overlay.mp4")
    about, green = describe_bank(bank, grid), "Green: tokens in which something new appeared."
    page = VideoPage(
        title=summary["clip"],
        subtitle=f"What a bank of {scan.bank.capacity} slots would remember of it",
        duration_s=scan.num_pictures / scan.clip.fps,
        grid=grid,
        methods=[Method("recap", green, video, bank=bank, bank_about=about)],
        cards=[("Timeline", "", scan.plots())],
        settings={**settings, **versions()},
        remarks=[line[0].upper() + line[1:] for line in (*scan.notices(), remark) if line],
        numbers=_numbers(summary),
    )
    write_whole(folder / "index.html", build_video_page(page).encode())
    record = {"summary": summary, "settings": settings, "versions": versions()}
    write_whole(folder / RECORD, json.dumps(record, indent=2).encode())


def _numbers(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the figures of the page: values, and what they are."""
    pictures, fps, fired, cutoff = (
        summary[name] for name in ("num_pictures", "fps", "fired_tokens", "bank_cutoff")
    )
    (height, width), (rows, columns) = summary["size"], summary["grid"]
    share = f"{fired / (summary['num_frames'] * rows * columns):.1%}"
    return [
        (f"{pictures / fps:.1f} s", f"{pictures} pictures at {fps:g} per second"),
        (f"{width}x{height}", f"pixels, {columns}x{rows} tokens a frame"),
        (f"{fired:,}", f"tokens showed something new, {share} of all"),
        (f"{summary['bank_new']:,} of {summary['bank_capacity']:,}", "slots of the bank hold something new"),
        (f"{cutoff:.2f}" if cutoff else "any", "score that a newcomer must beat"),
        (f"{summary['elapsed_s']:.1f} s", "to inspect"),
    ]
