"""Many tables in few minutes of a large GPU: runs drawn in batches, scored beside it on all cores.

    python -m recap.tables.batches --tables identity retention --device cuda --minutes 8 --out DIR
    python -m recap.tables.batches --tables identity retention --device cuda --minutes 8 --out DIR2 --resume DIR

The recipes, jobs and measures are those of `recap reproduce`, but nothing here needs PyAV: pictures are judged as
they were drawn. DIR holds results.jsonl.gz and looks.jsonl.gz; `recap reproduce TABLE --import DIR/results.jsonl.gz`
makes the table of them, on any machine.
"""

from __future__ import annotations

import argparse
import gc
import math
import multiprocessing
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from recap.contracts import Backbone
from recap.errors import refuse
from recap.eval.embedders import build_embedder
from recap.eval.witnesses import Embedder
from recap.fast.accelerate import accelerate
from recap.fast.threads import use_fair_threads
from recap.flow import FLOWS, build_flow
from recap.io.files import alone_in
from recap.run import build_backbone, build_memory
from recap.tables.about import about_this, cores
from recap.tables.drawing import Scored, Task, draw_batch, prepare_scorer, score_drawn
from recap.tables.drawn_file import (
    LOOKS,
    RESULTS,
    append_lines,
    asked_before,
    look_line,
    mend,
    question,
    read_all,
    run_line,
)
from recap.tables.draws import ONE_BY_ONE, Draw, batches_of, collect_draws
from recap.tables.preflight import settle_flows
from recap.tables.recipes import TABLES, Ask, find_recipe
from recap.tables.reproduce import resolve_embedder
from recap.tables.status import as_time

LONG = ("retention-5min",)
"""As much drawing as all the others together: only where it is named."""
USUAL = tuple(name for name in TABLES if name not in (ONE_BY_ONE, *LONG))
CAUTION = 1.25  # a batch may take so much longer than those before it
SHARED_MEMORY = Path("/dev/shm")
SOME_LEFT = 3
"""The exit status where runs are left, for want of time or since they failed."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How to draw; what is drawn is an `Ask`."""

    rows: int = 50
    eager: bool = False  # the readable path, as in a run's config
    minutes: float = math.inf
    scorers: int = 1
    commit: str = ""
    # Which part of how many: drawing waits for flow on the CPU, and two processes fill each other's pauses.
    share: tuple[int, int] = (1, 1)

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise refuse("--rows", self.rows, "must be 1 or more", "50 fill a large GPU")
        if self.scorers < 1:
            raise refuse("--scorers", self.scorers, "must be 1 or more", "leave it out for most of the cores")
        if not self.minutes > 0:  # which refuses what is no number, too
            raise refuse("--minutes", self.minutes, "must be above 0", "leave it out for as long as it takes")


class Batches:
    """Draws while there is time, and keeps the scorers busy."""

    def __init__(
        self, tables: Sequence[str], ask: Ask, embedder: str, out: Path, settings: Settings, resumed: Path | None
    ):  # fmt: skip
        self._settings, self._out, self._embedder = settings, out, embedder
        self._began = time.monotonic()
        begun = asked_before([out] if resumed is None else [out, resumed])
        ask = settle_flows(ask, [find_recipe(name) for name in tables], begun, self.say)
        if "raft-small" in (ask.flow, ask.judge_flow):
            # Weights that cannot be had are refused once, and not batch by batch.
            build_flow("raft-small", notice=self.say)
        self._device = ask.device
        self._draws = collect_draws(tables, ask, embedder)
        self._rates: list[float] = []  # seconds per second of video, of every batch
        self._scoring_s: list[float] = []
        self._waiting: dict[Future[Scored], tuple[Draw, Task]] = {}
        self._scored = self._left = 0
        # Shares of attention by role: on a GPU the fast path reads all keys without a bias as one group.
        self._readable = {draw.kind for draw in self._draws if "attention" in draw.measures}
        self._open(tables, ask, resumed)

    def _open(self, tables: Sequence[str], ask: Ask, resumed: Path | None) -> None:
        """Drop what is done, here or in the folders of earlier calls, if they answer the same question."""
        about = {
            "ask": asdict(ask),
            "embedder": self._embedder,
            "tables": {
                name: about_this(find_recipe(name), ask, self._embedder, "pictures as drawn, in batches",
                                 self._settings.commit)
                for name in tables
            },
        }  # fmt: skip
        for name in (RESULTS, LOOKS):
            mend(self._out / name)
        lines = [*read_all(self._out), *(read_all(resumed) if resumed is not None else [])]
        for line in (line["about"] for line in lines if "about" in line):
            before, now = question(line), question(about)
            if before != now:
                limit = f"it was begun with {before}, not {now}"
                place = str(resumed or self._out)
                raise refuse("--resume", place, limit, "ask as it was begun, or choose another folder")
        append_lines(self._out / RESULTS, [{"about": about}])
        unknown = [(name, row.name) for name in tables for row in find_recipe(name).rows if not row.available]
        self._tell_rows("left_out", unknown, "this version has no such memory or admission rule")
        done = {job[-1] for line in lines for job in line.get("jobs", [])}
        part, parts = self._settings.share
        kinds = set(list(dict.fromkeys(draw.kind for draw in self._draws))[part - 1 :: parts])
        for draw in self._draws:
            draw.wanted = [each for each in draw.wanted if each.job.key not in done]
        self._draws = [draw for draw in self._draws if draw.wanted and draw.kind in kinds]
        self._left = len(self._draws)
        self.say(f"{self._left} runs to draw, for {sum(len(d.wanted) for d in self._draws)} lines of tables")

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self._began:5.0f} s] {text}", flush=True)

    def _tell_rows(self, what: str, rows: Iterable[tuple[str, str]], why: str) -> None:
        """Say, and write down for the import, why rows of tables are not there."""
        told = sorted(set(rows))
        if told:
            names = ", ".join(f"{row} of {table}" for table, row in told)
            self.say(f"{what.replace('_', ' ')}: {names}: {why}")
            lines = [{what: {"table": table, "row": row, "why": why}} for table, row in told]
            append_lines(self._out / RESULTS, lines)

    def run(self) -> bool:
        """Draw and score; whether all is done that can be."""
        batches = list(batches_of(self._draws, self._settings.rows))
        if not batches:
            return True
        self._plain = build_backbone(replace(self._draws[0].config, eager=True), self.say)
        context: Any = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["recap.tables.drawing"])
        with (
            tempfile.TemporaryDirectory(dir=_scratch(batches, self._plain)) as scratch,
            ProcessPoolExecutor(self._settings.scorers, context, prepare_scorer) as pool,
        ):
            try:
                self._draw_all(batches, Path(scratch), pool)
                self._take_in(0)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                self._write_down([each for each in self._waiting if each.done() and not each.cancelled()])
                raise
        self.say(f"{self._scored} runs were scored into {self._out / RESULTS}, {self._left} are left")
        return self._left == 0

    def _draw_all(self, batches: Sequence[list[Draw]], scratch: Path, pool: ProcessPoolExecutor) -> None:
        # Colours are counted by the scorers; a network belongs to where the pictures are.
        elsewhere = self._device == "cpu" or self._embedder == "hsv"
        embedder = None if elsewhere else build_embedder(self._embedder, device=self._device)
        kind, late = "", 0
        for number, batch in enumerate(batches):
            if not self._time_for(batch):
                late += 1  # shorter ones may still fit
                continue
            if batch[0].kind != kind:
                kind = batch[0].kind
                self._take_path(kind)
            if not self._possible(batch):
                continue
            self._take_in(len(batch))  # scorers that lag behind would fill the disk
            began = time.monotonic()
            drawn = self._draw(batch, scratch, embedder)
            if not drawn:
                continue
            took = time.monotonic() - began
            self._rates.append(took / _size([draw for draw, _ in drawn]))
            for draw, task in drawn:
                self._waiting[pool.submit(score_drawn, task)] = draw, task
            self._take_in(math.inf)
            self._tell([draw for draw, _ in drawn], took, sum(_size(each) for each in batches[number + 1 :]))
        if late:
            self.say(f"out of time: {late} of {len(batches)} batches are left")

    def _take_path(self, kind: str) -> None:
        """A fresh fast path per kind, where it has one: recordings of the last are of no use to it, and large."""
        self._backbone = self._plain
        gc.collect()
        torch.cuda.empty_cache()
        if not self._settings.eager and kind not in self._readable:
            self._backbone = accelerate(self._plain)

    def _draw(
        self, batch: Sequence[Draw], scratch: Path, embedder: Embedder | None
    ) -> list[tuple[Draw, Task]]:
        """A batch, by halves where memory does not hold it. What fails is given up: the others are worth drawing."""
        try:
            return list(zip(batch, draw_batch(batch, self._backbone, scratch, embedder), strict=True))
        except Exception as error:  # Triton, OpenCV and the disk have kinds of their own
            for draw in batch:
                for file in scratch.glob(f"{draw.key}.*"):
                    file.unlink()
            if len(batch) == 1 or not isinstance(error, torch.OutOfMemoryError):
                self._give_up(batch, error)
                return []
        # Only here are the tensors gone that the error held.
        self._take_path(batch[0].kind)
        half = (len(batch) + 1) // 2
        self.say(f"{len(batch)} rows are too many for the memory of {self._device}: again by {half}")
        return [*self._draw(batch[:half], scratch, embedder), *self._draw(batch[half:], scratch, embedder)]

    def _give_up(self, batch: Sequence[Draw], error: BaseException) -> None:
        why = f"{type(error).__name__}: {error}"
        self._tell_rows("gave_up", ((each.table, each.job.row) for d in batch for each in d.wanted), why)

    def _possible(self, batch: Sequence[Draw]) -> bool:
        """Whether this memory can be built here; rows that need weights which are not there are left out."""
        try:
            build_memory(batch[0].config, self._backbone.spec, lambda _: None)
        except ValueError as error:
            rows = ((each.table, each.job.row) for draw in batch for each in draw.wanted)
            self._tell_rows("left_out", rows, str(error))
            self._left -= len(batch)
            return False
        return True

    def _time_for(self, batch: Sequence[Draw]) -> bool:
        """Whether a batch, and the scoring of all that then waits, will end in time."""
        drawing = max(self._rates[-6:], default=0.0) * _size(batch) * CAUTION
        rounds = math.ceil((len(self._waiting) + len(batch)) / self._settings.scorers)
        recent = self._scoring_s[-50:]
        scoring = rounds * sum(recent) / max(1, len(recent)) * CAUTION
        elapsed = time.monotonic() - self._began
        return elapsed + drawing + scoring <= 60 * self._settings.minutes

    def _take_in(self, most: float) -> None:
        """Write down what is scored, and wait until no more than `most` are not."""
        while self._waiting:
            patience = 0 if len(self._waiting) <= most else None
            ready, _ = wait(self._waiting, timeout=patience, return_when=FIRST_COMPLETED)
            if not ready:
                return
            self._write_down(ready)

    def _write_down(self, ready: Iterable[Future[Scored]]) -> None:
        """What these gave; a run whose scoring fails is given up, and only the end of all scorers ends the call."""
        lines, looks = [], []
        broken: BrokenProcessPool | None = None
        for future in ready:
            draw, task = self._waiting.pop(future)
            try:
                scored = future.result()
                lines.append(run_line(draw, scored.scores))
                looks += [] if scored.look is None else [look_line(draw, scored.look)]
                self._scoring_s.append(scored.seconds)
            except BrokenProcessPool as error:
                broken = error
            except Exception as error:
                job = draw.wanted[0].job
                self.say(f"the run {draw.key} ({job.prompt}, seed {job.seed}) cannot be scored")
                self._give_up([draw], error)
            for file in (task.pictures, task.vectors):
                if file is not None:
                    file.unlink(missing_ok=True)
        if looks:
            append_lines(self._out / LOOKS, looks)
        if lines:
            append_lines(self._out / RESULTS, lines)
        self._scored += len(lines)
        self._left -= len(lines)
        if broken is not None:
            raise broken

    def _tell(self, batch: Sequence[Draw], took: float, to_come: float) -> None:
        memory = batch[0].wanted[0]
        left = to_come * sum(self._rates[-6:]) / len(self._rates[-6:])
        self.say(
            f"{memory.job.row} of {memory.table}: {len(batch)} runs of {batch[0].seconds:g} s drawn in {took:.1f} s; "
            f"{self._scored} scored, {len(self._waiting)} waiting; about {as_time(left)} of drawing left"
        )


def _read_share(text: str) -> tuple[int, int]:
    part, slash, parts = text.partition("/")
    if not (slash and part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        raise refuse("--share", text, "must read part/parts", "1/2 and 2/2 do the whole beside each other")
    return int(part), int(parts)


def _size(batch: Sequence[Draw]) -> float:
    """Seconds of video in all."""
    return sum(draw.seconds for draw in batch)


def _scratch(batches: Sequence[Sequence[Draw]], backbone: Backbone) -> Path | None:
    """Shared memory where two batches fit into it easily, else the usual place of temporary files."""
    spec = backbone.spec
    picture = math.prod(spec.picture_size) * 3
    needed = 2 * max(_size(batch) for batch in batches) * spec.pictures_per_second * picture
    roomy = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > 2 * needed
    return SHARED_MEMORY if roomy else None


def read_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tables", nargs="+", choices=list(TABLES), default=list(USUAL), metavar="TABLE",
                        help=f"all but {ONE_BY_ONE} and {', '.join(LONG)}, if none is named")  # fmt: skip
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", type=Path, help="folder of an earlier call, to go on from")
    parser.add_argument("--backbone", default="embedded")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--seeds", type=int, help="of each prompt, other than the recipe's")
    parser.add_argument("--seconds", type=float, help="length of videos, other than the recipe's")
    parser.add_argument("--flow", choices=list(FLOWS), default="auto", help="of the bank")
    parser.add_argument("--judge-flow", choices=list(FLOWS), default="classical", help="who judges motion")
    parser.add_argument("--embedder", default="auto", help="who judges whole frames")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rows", type=int, default=50, help="runs in one batch")
    parser.add_argument("--eager", action="store_true", help="draw by the readable code")
    parser.add_argument("--scorers", type=int, help="processes that score [three quarters of the cores]")
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="no batch begins that would end later"
    )
    parser.add_argument(
        "--share", default="1/1", help="1/2 and 2/2, started together, draw half of the kinds each"
    )
    parser.add_argument("--commit", default="", help="of the code, where git cannot tell")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> bool:
    """Whether all was drawn and scored."""
    use_fair_threads()
    given = read_arguments(words)
    ask = Ask(
        given.backbone, given.prompts, given.seeds, given.seconds, given.flow, given.device, given.dtype,
        given.judge_flow,
    )  # fmt: skip
    embedder = resolve_embedder(given.embedder, given.device, print)
    scorers = max(1, cores() * 3 // 4) if given.scorers is None else given.scorers
    share = _read_share(given.share)
    settings = Settings(given.rows, given.eager, given.minutes, scorers, given.commit, share)
    if given.resume is not None and not given.resume.is_dir():
        raise refuse("--resume", str(given.resume), "there is no such folder", "name that of an earlier call")
    if given.out.exists() and not given.out.is_dir():
        raise refuse("--out", str(given.out), "is a file", "name a folder")
    given.out.mkdir(parents=True, exist_ok=True)
    with alone_in(given.out, "--out", "another process is writing to it", "give each a folder of its own"):
        return Batches(given.tables, ask, embedder, given.out, settings, given.resume).run()


if __name__ == "__main__":
    # Who is told to end still clears its pictures away; they are gigabytes.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        sys.exit(0 if main() else SOME_LEFT)
    except ValueError as mistake:
        sys.exit(f"error: {mistake}")
