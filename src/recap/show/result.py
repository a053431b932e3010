"""This module generates a run by one call, and reads finished runs."""

from __future__ import annotations

import sys
import webbrowser
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recap import run
from recap.config import RunConfig, read_record
from recap.fast.ranks.group import LONE, Ranks
from recap.io.report import Reporter
from recap.io.run_folder import new_folder
from recap.io.trace import BlockTrace, read_trace
from recap.io.video import open_clip
from recap.plan import Shot
from recap.show.clips import embed
from recap.show.run_page import PAGE, read_summary, write_run_page


class Run:
    """Reads a finished run from its folder: `Run("runs/...")` opens an earlier one.

    Files are data: a config that names code to import is refused without `trust_code`.
    """

    def __init__(self, folder: Path | str, *, trust_code: bool = False) -> None:
        self.folder = Path(folder)
        self._trust_code = trust_code
        self.config = RunConfig.from_dict(read_record(self.folder, trust_code=trust_code)["config"])
        self.videos: tuple[Path, ...] = tuple(
            self.folder / name for name in read_summary(self.folder)["videos"]
        )
        """The video files, one per row of the batch."""

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r})"

    @property
    def video(self) -> Path:
        """Return the video file of the first row."""
        return self.videos[0]

    @cached_property
    def pictures(self) -> NDArray[np.uint8]:
        """Return all pictures of `video`, T Y X 3 in RGB, read when first asked for."""
        return np.stack(list(open_clip(self.video).pictures()))

    @cached_property
    def trace(self) -> list[BlockTrace]:
        """Return what the memory attended to, admitted and evicted, block by block."""
        return read_trace(self.folder / "trace.jsonl")

    @cached_property
    def seconds(self) -> float:
        """Return the length of the video."""
        clip = open_clip(self.video)
        return (clip.num_pictures or 0) / clip.fps

    def show(self, *, browser: bool = True) -> Path:
        """Return the page of the run, written if it is not there yet, and open it in a browser."""
        page = self.folder / PAGE
        if not page.is_file():
            write_run_page(self.folder, trust_code=self._trust_code)
        if browser:
            webbrowser.open(page.resolve().as_uri())
        return page

    def _repr_html_(self) -> str:
        """Show the video in a notebook."""
        source, _ = embed(self.video, link=str(self.video))
        return f'<video src="{escape(source)}" controls autoplay loop muted style="width:416px"></video>'


def print_progress(done: int, total: int | None, rate: float) -> None:
    """Keep one line on standard error up to date."""
    line = f"\rgenerating: {done} of {total} blocks, {rate:.1f} pictures/s"
    print(line, end="\n" if done == total else "", file=sys.stderr, flush=True)


PRINTING = Reporter(progress=print_progress)


def generate(
    prompt: str | Sequence[Shot],
    *,
    seconds: float = 10.0,
    memory: str | Mapping[str, Any] = "recap",
    backbone: str | Mapping[str, Any] = "embedded",
    seed: int = 0,
    folder: Path | str | None = None,
    reporter: Reporter = PRINTING,
    **settings: Any,
) -> Run:
    """Generate a video of a prompt, or of a list of shots, and return the run.

    `memory` and `backbone` are names (see `recap list`) or tables such as {"name": "recap", "reinforcement": 2}.
    `settings` are the other fields of `RunConfig`: flow, admission, device, dtype, opening, ...
    `folder` is new or empty; by default it lies in `runs` and is named after the time, the prompt and the memory.
    The reporter gets notices and (blocks finished, blocks in all, pictures per second); by default both are printed.
    """
    shots = [Shot(prompt, seconds)] if isinstance(prompt, str) else prompt
    chosen = {
        "shots": [asdict(shot) for shot in shots],
        "memory": memory,
        "backbone": backbone,
        "seeds": [seed],
    }
    return generate_run(RunConfig.from_dict({**chosen, **settings}), folder, reporter)


def generate_run(
    config: RunConfig, folder: Path | str | None, reporter: Reporter, ranks: Ranks = LONE
) -> Run:
    """Generate a new run in `folder`, or in a folder of `runs`, and write its page."""
    chosen = new_folder(config.shots[0].prompt, config.memory.name) if folder is None else Path(folder)
    run.generate(config, chosen, reporter=reporter, ranks=ranks)
    # Its config is the caller's own.
    return _finished(chosen, reporter, trust_code=True)


def resume(
    folder: Path | str,
    *,
    reporter: Reporter = PRINTING,
    from_block: int | None = None,
    trust_code: bool = False,
    ranks: Ranks = LONE,
) -> Run:
    """Continue a stopped run from its last whole block, or from a block of your choice, and write its page.

    A config that names code to import is refused without `trust_code`.
    """
    run.resume(Path(folder), reporter=reporter, from_block=from_block, trust_code=trust_code, ranks=ranks)
    return _finished(Path(folder), reporter, trust_code)


def _finished(folder: Path, reporter: Reporter, trust_code: bool) -> Run:
    """Write the page of a run that has just ended, and show a notice where its length is not the requested one."""
    made = Run(folder, trust_code=trust_code)
    made.show(browser=False)
    asked = sum(shot.seconds for shot in made.config.shots)
    if not made.config.opening and abs(made.seconds - asked) >= 0.1:
        limit = f"{made.seconds:.2f} s where {asked:g} s were asked for"
        reporter.notice(f"length: {limit}: a video is made of whole blocks")
    return made
