"""Executor: runs generated in batches by this process, judged meanwhile by others.

Runs that differ in prompts and seed alone are rows of one rollout: noise depends on (seed, block), and no row sees
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
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from recap.config import RunConfig
from recap.contracts import Backbone
from recap.eval.embedders import build_embedder
from recap.fast.accelerate import accelerate
from recap.plan import Shot
from recap.run import build_backbone
from recap.tables.generating import Generated, config_of, generate_batch, needs_readable_path
from recap.tables.jobs import Job, canonical
from recap.tables.processes import Processes, describe
from recap.tables.runner import Done

ROWS = 50
"""Rows that fill a large GPU with the embedded model; more than its memory holds are halved."""
MOST_BYTES = 16 << 30
"""Of the pictures of one batch."""
SHARED_MEMORY = Path("/dev/shm")


class Batches:
    """Generates on one device, and keeps `scorers` processes busy with what was generated.

    `alone` waits for the scores of a run before the next one begins, so that times mean something.
    """

    def __init__(
        self, folder: Path, rows: int, scorers: int, *, alone: bool = False, notice: Callable[[str], None] = print
    ):  # fmt: skip
        self._rows, self._alone, self._notice = rows, alone, notice
        self._scorers = Processes("recap.tables.generating:score_generated", folder, scorers, background=True)
        self._pending: dict[str, tuple[Job, Generated]] = {}
        self._failed: list[Done] = []
        self._kind = ""
        self._fits: dict[str, int] = {}  # rows that memory holds, by kind
        self._plain: Backbone | None = None
        self._scratch = tempfile.TemporaryDirectory(dir=_scratch_folder(), ignore_cleanup_errors=True)
        self._former = None
        if threading.current_thread() is threading.main_thread():
            # On SIGTERM the process exits normally, so that the pictures, which are gigabytes, are deleted.
            self._former = signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))

    def close(self) -> None:
        self._scorers.close()
        self._scratch.cleanup()
        if self._former is not None:
            signal.signal(signal.SIGTERM, self._former)

    def batches(self, jobs: Sequence[Job]) -> list[list[Job]]:
        """Kind after kind, as even as possible: every new size is captured again on a GPU."""
        self._prompts = list(dict.fromkeys(s["prompt"] for job in jobs for s in job.data["config"]["shots"]))
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
            self._take_path(kind, config_of(batch[0].payload))
            most = min(self._fits.get(kind, len(batch)), self._most_rows(batch[0]))
        except Exception as error:
            self._failed += [Done(job, None, describe(error), final=True) for job in batch]
            return
        if len(batch) > most:
            for start in range(0, len(batch), most):
                self.submit(batch[start : start + most])
            return
        if self._generate(batch):
            return
        # Only here are the tensors released that the error referred to.
        self._kind = ""
        self._fits[kind] = (len(batch) + 1) // 2
        self._notice(f"{len(batch)} rows are too many for the memory: again by {self._fits[kind]}")
        self.submit(batch)

    def _generate(self, batch: Sequence[Job]) -> bool:
        """False if memory does not hold so many rows."""
        assert self._backbone is not None
        place = Path(self._scratch.name)
        try:
            made = generate_batch(
                [job.payload for job in batch], self._backbone, place, self._embedder(batch[0])
            )
        except Exception as error:
            for job in batch:
                for file in place.glob(f"{job.key}.*"):
                    file.unlink()
            if isinstance(error, torch.OutOfMemoryError) and len(batch) > 1:
                return False
            self._failed += [Done(job, None, describe(error), final=True) for job in batch]
            return True
        for job, run in zip(batch, made, strict=True):
            self._pending[job.key] = job, run
            options = {**job.options, "generated": run, "judged_on_cpu": True}
            self._scorers.submit([replace(job, options=options)])
        return True

    def _take_path(self, kind: str, config: RunConfig) -> None:
        """A fresh fast path per kind, where it has one: what was captured for the last is of no use, and large."""
        if kind == self._kind:
            return
        if self._plain is None:
            shots = tuple(Shot(prompt, 1.0) for prompt in self._prompts)
            self._plain = build_backbone(replace(config, eager=True, shots=shots), self._notice)
        self._kind, self._backbone = kind, self._plain
        gc.collect()
        torch.cuda.empty_cache()
        if not config.eager:
            self._backbone = accelerate(self._plain)

    def _embedder(self, job: Job) -> Any:
        """A network is run where the pictures are; colours are counted by the scorers."""
        name, device = job.data["embedder"], job.data["config"]["device"]
        if device == "cpu" or name == "hsv":
            return None
        if not hasattr(self, "_own_embedder"):
            self._own_embedder = build_embedder(name, device=device)
        return self._own_embedder

    def _most_rows(self, job: Job) -> int:
        assert self._plain is not None
        spec = self._plain.spec
        seconds = sum(shot["seconds"] for shot in job.data["config"]["shots"])
        return max(
            1, int(MOST_BYTES / (seconds * spec.pictures_per_second * math.prod(spec.picture_size) * 3))
        )

    def wait(self, seconds: float) -> list[Done]:
        ended, self._failed = self._failed, []
        for done in self._scorers.wait(0 if ended else seconds):
            job, run = self._pending.pop(done.job.key)
            run.delete()
            ended.append(done._replace(job=job))
        return ended


def kind_of(job: Job) -> str:
    """Equal for runs that can be rows of one batch."""
    config = job.data["config"]
    plain = {**config, "seeds": [], "shots": [{**shot, "prompt": ""} for shot in config["shots"]]}
    return canonical([plain, needs_readable_path(job.wants)])


def _scratch_folder() -> Path | None:
    """Shared memory where two batches fit into it easily, else the usual place of temporary files."""
    roomy = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > 4 * MOST_BYTES
    return SHARED_MEMORY if roomy else None
