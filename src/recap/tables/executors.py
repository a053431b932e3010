"""This module does jobs: one by one in processes of this machine or on a Ray cluster, or in batches on one device.

Every worker has one thread, so that results do not depend on the number of workers or on where they are. This is the
only file that imports ray. Its results come back to the process that holds the store; only files of jobs, where there
are any, need a folder that is reachable under the same path from every machine.

Runs that differ in prompts and seed alone are rows of one batch: noise depends on (seed, block), and no row sees
another.
"""

from __future__ import annotations

import gc
import math
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from recap.contracts import Backbone
from recap.errors import refuse
from recap.eval.embedders import build_embedder
from recap.eval.judged import EMBEDDED
from recap.eval.judges.probe import Probe, load_probe
from recap.eval.witnesses import Embedder
from recap.fast.accelerate import accelerate
from recap.io.lookup import look_up
from recap.io.report import Notice
from recap.plan import Shot
from recap.run import build_backbone
from recap.tables.generating import config_of, generate_batch, needs_readable_path
from recap.tables.runner import Done, Executor, Job, Result, canonical
from recap.types import BackboneSpec

# How long the head of a Ray cluster may take to answer.
ANSWER_S = 5.0

ROWS = 100
"""Rows that fill a large GPU with the embedded model; more than its memory holds are halved."""
SHORTEST_S = 1.0
"""A shot that is shorter than half a block moves all that follows, so only rows of longer ones are put together."""
SHARED_MEMORY = Path("/dev/shm")
SHARE_OF_DISK = 4
"""The pictures of one batch take no more than one of so many parts of the free space."""


def do_work(work: str, job: Job, folder: Path) -> Result:
    """Do a job by the function that "package.module:name" points at, with a folder for the job's files."""
    torch.set_num_threads(1)
    result: Result = look_up("work", work, {})(job, folder / job.key)
    return result


@dataclass(eq=False)
class _Worker:
    process: BaseProcess
    pipe: Connection
    job: Job | None = None


class Processes(Executor):
    """Does jobs in so many processes, each replaced when it dies; more jobs than that wait here."""

    def __init__(self, work: str, folder: Path, workers: int, *, background: bool = False):
        look_up("work", work, {})
        self._work, self._folder, self._size, self._background = work, folder, workers, background
        # Children of a server process that has imported everything but used nothing: they start at once, and no
        # thread or GPU of ours is copied into them as a plain fork would.
        self._context: Any = multiprocessing.get_context("forkserver" if sys.platform != "win32" else "spawn")
        if sys.platform != "win32":
            self._context.set_forkserver_preload([__name__, work.partition(":")[0]])
        self._workers: list[_Worker] = []
        self._waiting: list[Job] = []

    def close(self) -> None:
        for worker in self._workers:
            worker.process.terminate()
        for worker in list(self._workers):
            self._bury(worker)
        self._waiting = []

    @property
    def _busy(self) -> list[_Worker]:
        return [worker for worker in self._workers if worker.job]

    def has_room(self) -> bool:
        return len(self._busy) + len(self._waiting) < self._size

    def submit(self, batch: Sequence[Job]) -> None:
        self._waiting += batch
        self._hand_out()

    def wait(self, seconds: float) -> list[Done]:
        if not self._busy:
            time.sleep(seconds)
            return []
        wait([each for worker in self._busy for each in (worker.pipe, worker.process.sentinel)], seconds)
        ended = [self._end(w) for w in self._busy if w.pipe.poll() or not w.process.is_alive()]
        self._hand_out()
        return ended

    def _hand_out(self) -> None:
        while self._waiting and len(self._busy) < self._size:
            worker = next((each for each in self._workers if not each.job), None) or self._start()
            job = self._waiting[0]
            try:
                worker.pipe.send(job)
            except OSError:
                # It died while it was idle: the next one takes the job.
                self._bury(worker)
                continue
            worker.job = self._waiting.pop(0)

    def _start(self) -> _Worker:
        ours, theirs = self._context.Pipe()
        arguments = (theirs, self._work, self._folder, self._background)
        process = self._context.Process(target=_serve, args=arguments, daemon=True)
        try:
            process.start()
        except (EOFError, ConnectionError) as error:
            # The server process was killed as it answered; a new one is started with the next worker.
            limit = "the server process that starts workers was killed, perhaps for lack of memory"
            remedy = "give the same command again: finished jobs are kept"
            raise refuse("worker", None, limit, remedy) from error
        theirs.close()
        self._workers.append(_Worker(process, ours))
        return self._workers[-1]

    def _end(self, worker: _Worker) -> Done:
        """Return what became of the job of a worker that has answered or died."""
        job, worker.job = worker.job, None
        assert job is not None
        try:
            if worker.pipe.poll():
                return Done(job, *worker.pipe.recv())
        except (EOFError, OSError):
            pass
        self._bury(worker)
        return Done(job, None, f"its worker died (exit code {worker.process.exitcode})", crashed=True)

    def _bury(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        worker.process.join()
        worker.pipe.close()


def _serve(pipe: Connection, work: str, folder: Path, background: bool) -> None:
    """Do jobs until the pipe is closed: the main function of a worker process."""
    _die_with_parent()
    if background and hasattr(os, "nice"):
        # What runs in the background must not keep a GPU waiting.
        os.nice(10)
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        try:
            answer: tuple[Result | None, str] = (do_work(work, job, folder), "")
        except Exception as error:
            answer = (None, describe(error))
        pipe.send(answer)


def _die_with_parent() -> None:
    """End this process when its parent is gone: nobody would read its result."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def describe(error: BaseException) -> str:
    """Return the kind of an error, its text and where it was raised."""
    last = traceback.extract_tb(error.__traceback__)[-1:]
    place = f" ({Path(last[0].filename).name}:{last[0].lineno})" if last else ""
    return f"{type(error).__name__}: {error}{place}"


def _check_address(address: str) -> None:
    """Refuse HOST:PORT where nobody answers: Ray itself would try for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon:
        return
    try:
        with socket.create_connection((host, int(port)), ANSWER_S):
            return
    except (OSError, ValueError, OverflowError) as error:
        remedy = "name HOST:PORT of a running cluster; `local` starts one on this machine"
        raise refuse("--ray", address, f"nobody answers there ({error})", remedy) from error


class OnRay(Executor):
    """Does one job on every processor of a cluster; the address "local" starts a cluster on this machine."""

    def __init__(self, work: str, folder: Path, *, address: str = "local", gpus: float = 0):
        try:
            import ray
        except ImportError as missing:
            limit = "it needs Ray, which is not installed"
            raise refuse("--ray", "", limit, "pip install recap-forcing[ray]") from missing
        look_up("work", work, {})
        self._ray: Any = ray
        self._work, self._folder = work, folder.resolve()
        self._under_way: dict[Any, Job] = {}
        self._ours = not ray.is_initialized()
        if self._ours:
            _check_address(address)
            dashboard = False if address == "local" else None
            ray.init(address=address, log_to_driver=False, include_dashboard=dashboard)
        # The runner retries: Ray's own retries would be neither counted nor delayed.
        self._task = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=0)(do_work)

    def close(self) -> None:
        if self._ours:
            self._ray.shutdown()

    def has_room(self) -> bool:
        """Keep every processor busy and one job waiting."""
        return len(self._under_way) < int(self._ray.cluster_resources().get("CPU", 1)) + 1

    def submit(self, batch: Sequence[Job]) -> None:
        for job in batch:
            self._under_way[self._task.remote(self._work, job, self._folder)] = job

    def wait(self, seconds: float) -> list[Done]:
        if not self._under_way:
            time.sleep(seconds)
            return []
        ready, _ = self._ray.wait(list(self._under_way), num_returns=1, timeout=seconds)
        return [self._ended(reference, self._under_way.pop(reference)) for reference in ready]

    def _ended(self, reference: Any, job: Job) -> Done:
        try:
            return Done(job, self._ray.get(reference))
        except self._ray.exceptions.RayTaskError as error:
            return Done(job, None, f"{type(error.cause).__name__}: {error.cause}")
        except self._ray.exceptions.RayError as error:
            return Done(job, None, f"its worker died ({type(error).__name__})", crashed=True)


class Batches(Executor):
    """Generates on one device, and keeps `scorers` processes busy with what was generated.

    `alone` waits for the scores of a run before the next one begins, so that times mean something.
    """

    def __init__(self, folder: Path, rows: int, scorers: int, *, alone: bool = False, notice: Notice = print):
        self._rows, self._alone, self._notice = rows, alone, notice
        self._scorers = Processes("recap.tables.generating:score_generated", folder, scorers, background=True)
        self._pending: dict[str, Job] = {}
        self._ended: list[Done] = []
        self._kind = ""
        # Rows that memory holds, by kind.
        self._fits: dict[str, int] = {}
        self._plain: Backbone | None = None
        # Where there is most room: batches are large, and what is deleted soon hardly reaches a disk.
        places = [place for place in (Path(tempfile.gettempdir()), SHARED_MEMORY) if place.is_dir()]
        place = max(places, key=lambda each: shutil.disk_usage(each).free)
        self._scratch = tempfile.TemporaryDirectory(dir=place, ignore_cleanup_errors=True)
        self._most_bytes = shutil.disk_usage(self._scratch.name).free // SHARE_OF_DISK
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
        if self._plain is None:
            shots = tuple(Shot(prompt, 1.0) for prompt in self._prompts)
            config = replace(config_of(job), eager=True, shots=shots)
            self._plain = self._backbone = build_backbone(config, self._notice)
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
