"""This module generates runs in batches on one device, and has them judged in processes next to it.

Runs that differ in prompts and seed alone are rows of one batch: noise depends on (seed, block), and no row sees
another.
"""

from __future__ import annotations

import gc
import math
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from recap.contracts import Backbone
from recap.eval.embedders import build_embedder
from recap.eval.judged import EMBEDDED
from recap.eval.judges.probe import Probe, load_probe
from recap.eval.witnesses import Embedder
from recap.fast.accelerate import accelerate
from recap.io.report import Notice
from recap.plan import Shot
from recap.run import build_backbone
from recap.tables.executors import Processes, describe
from recap.tables.generating import config_of, generate_batch, needs_readable_path, score_generated
from recap.tables.runner import Done, Executor, Job, canonical
from recap.types import BackboneSpec

ROWS = 100
"""Rows that fill a large GPU with the embedded model; more than its memory holds are halved."""
SHORTEST_S = 1.0
"""A shot that is shorter than half a block moves all that follows, so only rows of longer ones are put together."""
SHARED_MEMORY = Path("/dev/shm")
SHARE_OF_DISK = 4
"""The pictures of one batch take no more than one of so many parts of the free space."""


class Batches(Executor):
    """Generates on one device, and keeps `scorers` processes busy with what was generated.

    `alone` waits for the scores of a run before the next one begins, so that times mean something.
    """

    def __init__(self, folder: Path, rows: int, scorers: int, *, alone: bool = False, notice: Notice = print):
        self._rows, self._alone, self._notice = rows, alone, notice
        self._scorers = Processes(score_generated, folder, scorers, background=True)
        self._pending: dict[str, Job] = {}
        self._ended: list[Done] = []
        self._kind = ""
        # Rows that memory holds, by kind.
        self._fits: dict[str, int] = {}
        self._plain: Backbone | None = None
        self._settings: object = None
        # Where there is most room: batches are large, and what is deleted soon hardly reaches a disk.
        places = [place for place in (Path(tempfile.gettempdir()), SHARED_MEMORY) if place.is_dir()]
        place = max(places, key=lambda each: shutil.disk_usage(each).free)
        self._scratch = tempfile.TemporaryDirectory(dir=place, ignore_cleanup_errors=True)
        self._most_bytes = shutil.disk_usage(self._scratch.name).free // SHARE_OF_DISK
        self._former = None
        self._threads = torch.get_num_threads()
        if threading.current_thread() is threading.main_thread():
            # On SIGTERM the process exits normally, so that the pictures, which are gigabytes, are deleted.
            self._former = signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))

    def close(self) -> None:
        torch.set_num_threads(self._threads)
        self._scorers.close()
        self._scratch.cleanup()
        if self._former is not None:
            signal.signal(signal.SIGTERM, self._former)

    def batches(self, jobs: Sequence[Job]) -> list[list[Job]]:
        """Sort jobs kind after kind, as evenly as possible: every new size is captured again on a GPU."""
        self._prompts = dict.fromkeys(s["prompt"] for job in jobs for s in job.data["config"]["shots"])
        kinds: dict[str, list[Job]] = {}
        for job in jobs:
            kinds.setdefault(kind_of(job), []).append(job)
        found = []
        for alike in kinds.values():
            size = math.ceil(len(alike) / math.ceil(len(alike) / self._rows))
            found += [alike[start : start + size] for start in range(0, len(alike), size)]
        return found

    def has_room(self) -> bool:
        return len(self._pending) <= (0 if self._alone else self._rows)

    def submit(self, batch: Sequence[Job]) -> None:
        """Generate a batch, by halves where memory does not hold it; what fails is given up."""
        kind = kind_of(batch[0])
        try:
            backbone = self._take_path(batch[0])
            most = min(self._fits.get(kind, len(batch)), self._most_rows(batch[0], backbone.spec))
        except Exception as error:
            self._give_up(batch, error)
            return
        if len(batch) > most:
            for start in range(0, len(batch), most):
                self.submit(batch[start : start + most])
            return
        if self._generate(batch, backbone):
            return
        # Only here are the tensors released that the error referred to.
        del backbone
        self._kind = ""
        self._fits[kind] = (len(batch) + 1) // 2
        self._notice(f"{len(batch)} rows are too many for the memory: again by {self._fits[kind]}")
        self.submit(batch)

    def _generate(self, batch: Sequence[Job], backbone: Backbone) -> bool:
        """Generate a batch and hand it to the scorers; return False if memory does not hold so many rows."""
        first = batch[0].data
        try:
            device, judged = first["config"]["device"], first["config"]["backbone"]["name"] == EMBEDDED
            embedder, probe = _embedder(first["embedder"], device), _probe(device) if judged else None
            folder = Path(self._scratch.name)
            made = generate_batch(batch, backbone, folder, embedder, probe, self._collect)
        except Exception as error:
            for job in batch:
                self._delete(job)
            if isinstance(error, torch.OutOfMemoryError) and len(batch) > 1:
                return False
            self._give_up(batch, error)
            return True
        for job, run in zip(batch, made, strict=True):
            self._pending[job.key] = job
            options = {**job.options, "generated": run, "judged_on_cpu": True}
            self._scorers.submit([replace(job, options=options)])
        return True

    def _give_up(self, batch: Sequence[Job], error: Exception) -> None:
        self._ended += [Done(job, None, describe(error), final=True) for job in batch]

    def _take_path(self, job: Job) -> Backbone:
        """Return the path of a job; a kind gets its own fast path, as what was captured for the last is large."""
        config = config_of(job)
        # Where a GPU does it all, the host has little to do: as many threads as cores would only wait, and do so by
        # spinning, on the cores of the scorers.
        busy = config.device == "cpu" or config.flow == "classical"
        torch.set_num_threads(self._threads if busy else 1)
        if self._plain is None or (config.backbone, config.precision) != self._settings:
            shots = tuple(Shot(prompt, 1.0) for prompt in self._prompts)
            self._plain = build_backbone(replace(config, eager=True, shots=shots), self._notice)
            self._settings = config.backbone, config.precision
        if kind_of(job) != self._kind:
            self._kind, self._backbone = kind_of(job), self._plain
            gc.collect()
            torch.cuda.empty_cache()
            if not needs_readable_path(job.wants):
                self._backbone = accelerate(self._plain)
        return self._backbone

    def _most_rows(self, job: Job, spec: BackboneSpec) -> int:
        """Return how many rows' pictures fit into the temporary folder."""
        seconds = sum(shot["seconds"] for shot in job.data["config"]["shots"])
        run_bytes = seconds * spec.pictures_per_second * math.prod(spec.picture_size) * 3
        return max(1, int(self._most_bytes / run_bytes))

    def wait(self, seconds: float) -> list[Done]:
        self._collect(0 if self._ended else seconds)
        ended, self._ended = self._ended, []
        return ended

    def _collect(self, seconds: float = 0) -> None:
        """Take what was scored and hand out the next runs, also between the blocks of a batch: no scorer idles."""
        for done in self._scorers.wait(seconds):
            job = self._pending.pop(done.job.key)
            self._delete(job)
            self._ended.append(done._replace(job=job))

    def _delete(self, job: Job) -> None:
        for file in Path(self._scratch.name).glob(f"{job.key}.*"):
            file.unlink()


@cache
def _embedder(name: str, device: str) -> Embedder | None:
    """Return the network that is run where the pictures are; colours are counted by the scorers."""
    return None if device == "cpu" or name == "hsv" else build_embedder(name, device=device)


@cache
def _probe(device: str) -> Probe | None:
    """Return the probe that judges where the pictures are: one core takes longer for a run than a GPU to make it."""
    return None if device == "cpu" else load_probe(device=device)


def kind_of(job: Job) -> str:
    """Return a text that is equal for runs that can be rows of one batch."""
    config = job.data["config"]
    plain = {**config, "seeds": [], "shots": _scenes(config["shots"])}
    return canonical([plain, needs_readable_path(job.wants)])


def _scenes(shots: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return shots without their prompts; those that only change the prompt are part of the one before."""
    plain = [{**shot, "prompt": ""} for shot in shots]
    if min(shot["seconds"] for shot in shots) < SHORTEST_S:
        return plain
    scenes: list[dict[str, Any]] = []
    for shot in plain:
        if scenes and not shot["cut"] and not shot.get("reread"):
            # Rounded, as sums of the same length may differ in their last digit.
            scenes[-1]["seconds"] = round(scenes[-1]["seconds"] + shot["seconds"], 6)
        else:
            scenes.append(shot)
    return scenes
