"""Doing a sweep on a Ray cluster. The only file that imports ray.

The driver alone touches the state: it claims jobs, hands them out as Ray tasks, gives signs of life for all of them
and writes the results down. So the SQLite file may lie on the driver's own disk; only the folder of the jobs' files
must be reachable under the same path from every machine.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recap.errors import refuse
from recap.tables.jobs import Job, Result, find_work
from recap.tables.pool import TELL_S, Tell, collect, in_silence
from recap.tables.status import status_of
from recap.tables.store import Claim, Rules, Store, own_name

WAIT_S = 0.2


def run_on_ray(
    jobs: Sequence[Job],
    work: str,
    folder: Path,
    *,
    address: str = "local",
    threads: int = 1,
    gpus: float = 0,
    rules: Rules | None = None,
    tell: Tell = in_silence,
) -> list[Result]:
    """As `run_sweep`, with the workers of a cluster: `address` is Ray's, "local" starts one on this machine."""
    ray = load_ray()
    find_work(work)
    store = Store(folder, rules or Rules())
    store.begin(work)
    store.add(jobs)
    store.recover()
    store.retry_failed()
    ours = not ray.is_initialized()
    if ours:
        ray.init(
            address=address, log_to_driver=False, include_dashboard=False if address == "local" else None
        )
    # Retries are the store's business: Ray's own would not be counted, nor wait.
    task = ray.remote(num_cpus=threads, num_gpus=gpus, max_retries=0)(_do)
    began, told = time.time(), 0.0
    under_way: dict[Any, Claim] = {}
    try:
        while _hand_out(ray, store, task, under_way, work, threads) or under_way:
            _take_in(ray, store, under_way)
            if time.time() - told > TELL_S:
                for claim in under_way.values():
                    store.beat(claim)
                tell(status_of(store, len(under_way), began))
                told = time.time()
    finally:
        if ours:
            ray.shutdown()
    tell(status_of(store, 1, began))
    return collect(store, jobs)


def load_ray() -> Any:
    """Ray, which is an extra of this package."""
    try:
        import ray
    except ImportError as missing:
        limit = "it needs Ray, which is not installed"
        raise refuse("--ray", "", limit, "pip install recap-forcing[ray]") from missing
    return ray


def _do(work: str, payload: dict[str, Any], place: str, threads: int) -> Result:
    """One job, in a process of Ray's."""
    import torch

    torch.set_num_threads(threads)
    return find_work(work)(payload, place)


def _hand_out(
    ray: Any, store: Store, task: Any, under_way: dict[Any, Claim], work: str, threads: int
) -> bool:
    """Keep every processor busy and one job waiting; False when nothing is left to hand out, now or later."""
    room = int(ray.cluster_resources().get("CPU", 1) // threads) + 1
    while len(under_way) < room:
        claim = store.claim(own_name())
        if claim is None:
            break
        place = str((store.folder / "jobs" / claim.key).resolve())
        under_way[task.remote(work, claim.payload, place, threads)] = claim
    return store.counts().waiting > 0


def _take_in(ray: Any, store: Store, under_way: dict[Any, Claim]) -> None:
    if not under_way:  # all that is left waits for its retry to fall due
        time.sleep(WAIT_S)
        return
    ready, _ = ray.wait(list(under_way), num_returns=1, timeout=WAIT_S)
    for reference in ready:
        claim = under_way.pop(reference)
        try:
            store.finish(claim, ray.get(reference))
        except ray.exceptions.RayTaskError as error:
            store.fail(claim, f"{type(error.cause).__name__}: {error.cause}")
        except ray.exceptions.RayError as error:  # the worker or its machine died
            store.release(claim, f"its worker died ({type(error).__name__})")
