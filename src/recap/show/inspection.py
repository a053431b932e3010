"""What would the bank remember of any clip? The novelty and the bank of generation, run on a video file.

Pictures are read, scored, marked and written block by block; only the scores of the tokens stay, so the
length of a clip costs next to no memory. The bank is the very one of generation, with the pixels of a token
in the place of its keys.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from recap import __version__
from recap.admission.base import retain_top
from recap.admission.flow import FlowNovelty, FlowNoveltyConfig, Noticed
from recap.contracts import FlowEstimator
from recap.errors import refuse
from recap.io.files import staged_folder, write_whole
from recap.io.framing import Lens, cut_tokens, fit
from recap.io.video import Clip, ClipWriter, open_clip
from recap.memory.bank import NoveltyBank
from recap.show.overlay import tint
from recap.show.page import Story, build_page
from recap.show.png import write_png
from recap.show.preview import embed
from recap.show.sheet import Patches, contact_sheet
from recap.show.timeline import Timeline
from recap.types import Candidates

RECORD = "inspect.json"
RESULTS = ("overlay.mp4", "scores.npz", "bank.png", "index.html", RECORD)

# A clip has no backbone to ask, so it is cut as the Wan family cuts video.
TOKEN_PIXELS = 16
PICTURES_PER_FRAME = 4
FRAMES_PER_BLOCK = 3

Notice = Callable[[str], None]
Progress = Callable[[int, int | None, float], None]
"""Called with (pictures done, pictures in all or None where the file does not say, pictures per second)."""


def no_progress(done: int, total: int | None, rate: float) -> None:
    """The progress that shows nothing."""


@dataclass(frozen=True, slots=True)
class InspectionSummary:
    """What an inspection found; `notices` are lines for the user."""

    out: Path
    clip: str
    fps: float
    size: tuple[int, int]  # rows, columns of the pictures as scored
    grid: tuple[int, int]  # rows, columns of tokens
    num_pictures: int
    num_scored_pictures: int
    num_frames: int
    fired_tokens: int
    bank_capacity: int
    bank_new: int  # slots that hold something new, that is with a score above 0
    bank_edge_share: float  # of these, in the first or last column
    bank_cutoff: float  # the lowest score in a full bank, which a newcomer must beat; 0 while there is room
    elapsed_s: float
    notices: tuple[str, ...]

    @property
    def page(self) -> Path:
        return self.out / "index.html"


def inspect_clip(
    path: Path | str,
    out: Path | str,
    *,
    flow: FlowEstimator,
    config: FlowNoveltyConfig,
    capacity_frames: float = 1.0,
    size: tuple[int, int] | None = None,
    device: torch.device | str = "cpu",
    progress: Progress = no_progress,
    notice: Notice = print,
) -> InspectionSummary:
    """Write `out/`: overlay.mp4, scores.npz, bank.png, index.html and inspect.json; whole or not at all.

    size (rows, columns) rescales every picture first. `device` is where the flow and the scores are computed.
    """
    started = time.monotonic()
    clip = open_clip(path)
    lens = fit(clip, size, TOKEN_PIXELS)
    if not 0 < capacity_frames <= 1000:
        limit = "must be above 0 and at most 1000 frames"
        raise refuse("capacity_frames", capacity_frames, limit, "1 is the paper's")
    novelty = FlowNovelty(config, flow, lens.grid, TOKEN_PIXELS, PICTURES_PER_FRAME)
    capacity = max(1, round(capacity_frames * lens.grid[0] * lens.grid[1]))
    scan = _Scan(clip, lens, novelty, NoveltyBank(capacity, num_layers=1), torch.device(device))
    with staged_folder(Path(out), RESULTS) as folder:
        with ClipWriter(folder / "overlay.mp4", lens.size, clip.fps) as overlay:
            for pictures in _blocks(clip, lens):
                overlay.write(scan.take(pictures))
                rate = scan.num_pictures / (time.monotonic() - started)
                progress(scan.num_pictures, clip.num_pictures, rate)
        summary = scan.summary(Path(out), lens.notices, started)
        settings = {
            **dataclasses.asdict(config),
            "flow": type(flow).__name__,
            "capacity_frames": capacity_frames,
        }
        _write_results(folder, scan, summary, settings)
    for line in summary.notices:
        notice(line)
    return summary


def _blocks(clip: Clip, lens: Lens) -> Iterator[Tensor]:
    """Pictures T 3 Y X, uint8, of one block after the other; the last one may be short."""
    pictures = clip.pictures()
    length = 1 + (FRAMES_PER_BLOCK - 1) * PICTURES_PER_FRAME
    while block := [lens(picture) for picture in islice(pictures, length)]:
        yield torch.stack(block)
        length = FRAMES_PER_BLOCK * PICTURES_PER_FRAME


class _Frames:
    """Arrays rows columns, one per frame, in one buffer that doubles.

    A list of small arrays would grow the process far beyond their size: each pins a part of the heap that the
    large tensors of its block leave behind.
    """

    def __init__(self, kind: type[np.generic]) -> None:
        self._buffer: NDArray[Any] = np.empty((0, 0, 0), kind)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def array(self) -> NDArray[Any]:
        return self._buffer[: self._count]

    def extend(self, frames: NDArray[Any]) -> None:
        end = self._count + len(frames)
        if end > len(self._buffer):
            grown = np.empty((max(64, 2 * end), *frames.shape[1:]), self._buffer.dtype)
            grown[: self._count] = self.array if self._count else 0
            self._buffer = grown
        self._buffer[self._count : end] = frames
        self._count = end


@dataclass
class _Scan:
    """All that is known so far of a clip under way."""

    clip: Clip
    lens: Lens
    novelty: FlowNovelty
    bank: NoveltyBank
    device: torch.device
    num_pictures: int = 0
    num_scored: int = 0
    raw: _Frames = field(default_factory=lambda: _Frames(np.float32))  # rows columns of every frame
    score: _Frames = field(default_factory=lambda: _Frames(np.float32))
    appeared: _Frames = field(default_factory=lambda: _Frames(np.int32))  # the picture of a token's maximum
    filling: list[tuple[float, float, float]] = field(default_factory=list)  # the timeline's view of the bank

    def take(self, pictures: Tensor) -> Tensor:
        """Score the next block and offer its tokens to the bank; returns its pictures, what fired marked."""
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
        place = _peak(noticed.fired[0].cpu(), self.lens.grid, opening)  # in the block
        first_frame = len(self.raw)
        self.raw.extend(raw.numpy())
        self.score.extend(score.numpy())
        self.appeared.extend((place + self.num_scored).numpy())
        # The sink owns the first frame, so its tokens are not offered.
        offered = slice(1, None) if opening else slice(None)
        rows, columns = self.lens.grid
        frames = torch.arange(first_frame, first_frame + len(raw))[offered]
        source = torch.cartesian_prod(frames, torch.arange(rows), torch.arange(columns))[None]
        patches = cut_tokens(pictures, place)[offered].reshape(1, 1, source.shape[1], 1, -1)
        self.bank.admit(Candidates(source, score[offered].reshape(1, -1)), patches, patches, retain_top)
        self.num_scored += len(pictures)
        new = int((self.bank.entries.score > 0).sum())
        self.filling.append((self.num_scored / self.clip.fps, new / self.bank.capacity, self.cutoff))

    @property
    def cutoff(self) -> float:
        return float(self.bank.entries.score.min()) if self.bank.count == self.bank.capacity else 0.0

    def summary(self, out: Path, notices: tuple[str, ...], started: float) -> InspectionSummary:
        left = self.num_pictures - self.num_scored
        if left:
            ending = "the last picture does" if left == 1 else f"the last {left} pictures do"
            notices += (f"{ending} not fill a frame of {PICTURES_PER_FRAME} and went unscored",)
        return InspectionSummary(
            out=out,
            clip=os.fsencode(_title(self.clip.path)).decode(errors="replace"),
            fps=self.clip.fps,
            size=self.lens.size,
            grid=self.lens.grid,
            num_pictures=self.num_pictures,
            num_scored_pictures=self.num_scored,
            num_frames=len(self.raw),
            fired_tokens=int((self.raw.array > 0).sum()),
            bank_capacity=self.bank.capacity,
            bank_new=int((self.bank.entries.score > 0).sum()),
            bank_edge_share=self._edge_share(),
            bank_cutoff=self.cutoff,
            elapsed_s=round(time.monotonic() - started, 2),
            notices=notices,
        )

    def _edge_share(self) -> float:
        new, column = self.bank.entries.score > 0, self.bank.entries.source[..., 2]
        edge = new & ((column == 0) | (column == self.lens.grid[1] - 1))
        return float(edge.sum() / new.sum().clamp(min=1))

    def patches(self) -> Patches:
        """What the bank holds and was new, by the second in which it scored highest."""
        held, appeared = self.bank.entries, torch.from_numpy(self.appeared.array)
        source, score = held.source[0], held.score[0]
        when = appeared[source[:, 0], source[:, 1], source[:, 2]]
        order = (when.long() * self.lens.grid[0] + source[:, 1]) * self.lens.grid[1] + source[:, 2]
        kept = order.argsort()
        kept = kept[score[kept] > 0]
        pixels = self.bank.keys[0, 0, kept, 0].unflatten(-1, (TOKEN_PIXELS, TOKEN_PIXELS, 3))
        frames, rows, columns = source[kept].T.numpy()
        seconds = when[kept].double().numpy() / self.clip.fps
        return Patches(pixels.numpy(), seconds, frames, rows, columns, score[kept].numpy())

    def timeline(self) -> Timeline:
        fired = (self.raw.array > 0).sum(axis=(1, 2)).tolist()
        first = [max(0, _last_picture(frame) - PICTURES_PER_FRAME + 1) for frame in range(len(fired))]
        times = [picture / self.clip.fps for picture in first]
        return Timeline(self.num_pictures / self.clip.fps, list(zip(times, fired, strict=True)), self.filling)

    def tokens(self) -> dict[str, NDArray[Any]]:
        """One entry per token of every frame, frame by frame and row-major, in arrays of equal length."""
        score, raw, appeared = (each.array for each in (self.score, self.raw, self.appeared))
        frame, row, column = np.indices(score.shape, dtype=np.int32)
        return {
            "score": score.ravel(),
            "raw": raw.ravel(),
            "picture": _last_picture(frame).ravel(),
            "appeared": appeared.ravel(),
            "row": row.ravel(),
            "column": column.ravel(),
            "block": (frame // FRAMES_PER_BLOCK).ravel(),
        }


def _title(clip: Path) -> str:
    """Name a clip by its file; the video of a run, which is called the same in every run, also by its folder."""
    folder = clip.resolve().parent
    return f"{folder.name}/{clip.name}" if (folder / "run.json").is_file() else clip.name


def _last_picture(frame: Any) -> Any:
    return frame * PICTURES_PER_FRAME


def _peak(fired: Tensor, grid: tuple[int, int], opening: bool) -> Tensor:
    """The picture of the block, F rows columns, in which each token fired hardest; fired is T y x."""
    patches = functional.adaptive_max_pool2d(fired[None], grid)[0]
    tail = patches[1:] if opening else patches
    frames = tail.reshape(-1, PICTURES_PER_FRAME, *grid).argmax(dim=1)
    frames += torch.arange(len(frames))[:, None, None] * PICTURES_PER_FRAME + opening
    return torch.cat([torch.zeros_like(patches[:1], dtype=torch.long), frames]) if opening else frames


def _write_results(
    folder: Path, scan: _Scan, summary: InspectionSummary, settings: dict[str, object]
) -> None:
    versions = {"recap": __version__, "torch": torch.__version__, "numpy": np.__version__}
    versions |= {"av": av.__version__, "python": platform.python_version()}
    with (folder / "scores.npz").open("wb") as file:
        np.savez_compressed(
            file, allow_pickle=False, settings=np.array(json.dumps(settings)), **scan.tokens()
        )
    patches = scan.patches()
    write_png(folder / "bank.png", contact_sheet(patches))
    video, remark = embed(folder / "overlay.mp4")
    story = Story(
        title=summary.clip,
        subtitle=f"What a bank of {summary.bank_capacity} slots would remember of it",
        video=video,
        remarks=(*summary.notices, remark),
        numbers=_numbers(summary),
        settings={**settings, **versions},
        timeline=scan.timeline(),
        grid=summary.grid,
        patches=patches,
    )
    write_whole(folder / "index.html", build_page(story).encode())
    about = dataclasses.asdict(summary) | {"out": str(summary.out)}
    record = {"summary": about, "settings": settings, "versions": versions}
    write_whole(folder / RECORD, json.dumps(record, indent=2).encode())


def _numbers(summary: InspectionSummary) -> list[tuple[str, str]]:
    seconds = summary.num_pictures / summary.fps
    tokens = summary.num_frames * summary.grid[0] * summary.grid[1]
    return [
        (f"{seconds:.1f} s", f"{summary.num_pictures} pictures at {summary.fps:g} per second"),
        (
            f"{summary.size[1]}x{summary.size[0]}",
            f"pixels, {summary.grid[1]}x{summary.grid[0]} tokens a frame",
        ),
        (
            f"{summary.fired_tokens:,}",
            f"tokens showed something new, {summary.fired_tokens / tokens:.1%} of all",
        ),
        (f"{summary.bank_new:,} of {summary.bank_capacity:,}", "slots of the bank hold something new"),
        (
            f"{summary.bank_edge_share:.0%}",
            f"of these lie in the first or last column, which is {2 / summary.grid[1]:.0%} of the picture",
        ),
        (f"{summary.bank_cutoff:.2f}" if summary.bank_cutoff else "any", "score that a newcomer must beat"),
        (f"{summary.elapsed_s:.1f} s", "to inspect"),
    ]
