"""Executor: a Ray cluster. The only file that imports ray.

Results come back through Ray to the process that holds the store; only files of jobs, where there are any, need a
folder that is reachable under the same path from every machine.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recap.errors import refuse
from recap.tables.jobs import Job, Result, find_work
from recap.tables.runner import Done

# How long the head of a cluster may take to answer.
ANSWER_S = 5.0


class OnRay:
    """Every processor of a cluster does one job; `address` is Ray's, "local" starts a cluster on this machine."""

    def __init__(self, work: str, folder: Path, *, address: str = "local", gpus: float = 0):
        self._ray = load_ray()
        find_work(work)
        self._work, self._folder, self._address, self._gpus = work, folder.resolve(), address, gpus
        self._under_way: dict[Any, Job] = {}
        self._ours = not self._ray.is_initialized()
        if self._ours:
            _check_address(self._address)
            dashboard = False if self._address == "local" else None
            self._ray.init(address=self._address, log_to_driver=False, include_dashboard=dashboard)
        # The runner retries: Ray's own retries would be neither counted nor delayed.
        self._task = self._ray.remote(num_cpus=1, num_gpus=self._gpus, max_retries=0)(_do)

    def close(self) -> None:
        if self._ours:
            self._ray.shutdown()

    def batches(self, jobs: Sequence[Job]) -> list[list[Job]]:
        return [[job] for job in jobs]

    def has_room(self) -> bool:
        """Keeps every processor busy and one job waiting."""
        return len(self._under_way) < int(self._ray.cluster_resources().get("CPU", 1)) + 1

    def submit(self, batch: Sequence[Job]) -> None:
        for job in batch:
            reference = self._task.remote(self._work, job.payload, str(self._folder / job.key))
            self._under_way[reference] = job

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


def load_ray() -> Any:
    """Ray, which is an extra of this package."""
    try:
        import ray
    except ImportError as missing:
        limit = "it needs Ray, which is not installed"
        raise refuse("--ray", "", limit, "pip install recap-forcing[ray]") from missing
    return ray


def _do(work: str, payload: dict[str, Any], folder: str) -> Result:
    """One job, in a process of Ray's; one thread, as in every other worker."""
    import torch

    torch.set_num_threads(1)
    return find_work(work)(payload, folder)
