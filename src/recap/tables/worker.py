"""What a worker process does: claim, work, report, until nothing is left; and die with whoever started it."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
import traceback
from multiprocessing.connection import wait
from pathlib import Path

from recap.tables.jobs import Work, find_work
from recap.tables.store import Claim, Rules, Store, own_name

POLL_S = 0.2


def work_through(folder: str, work: str, rules: Rules, threads: int) -> None:
    """The main function of a worker. Threads are the same for any number of workers: they decide roundings."""
    import torch

    die_with_parent()
    torch.set_num_threads(threads)
    store = Store(Path(folder), rules)
    do = find_work(work)
    while True:
        claim = store.claim(own_name())
        if claim is not None:
            do_one(store, claim, do)
            continue
        counts = store.counts()
        if counts.waiting + counts.claimed == 0:
            break
        time.sleep(POLL_S)  # somebody else's may come back, or a retry fall due
    store.close()


def do_one(store: Store, claim: Claim, do: Work) -> None:
    """Do a claimed job and report how it went."""
    with _Heart(store.folder, store.rules, claim):
        try:
            place = store.folder / "jobs" / claim.key
            result = do(claim.payload, str(place))
            store.finish(claim, result)
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            store.fail(claim, f"{type(error).__name__}: {error} ({Path(last.filename).name}:{last.lineno})")


class _Heart:
    """Renews a claim while its job is under way."""

    def __init__(self, folder: Path, rules: Rules, claim: Claim):
        self._folder, self._rules, self._claim = folder, rules, claim
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _beat(self) -> None:
        if self._stop.wait(self._rules.lease_s / 4):
            return  # most jobs of small sweeps are done before a first sign of life is due
        store = Store(self._folder, self._rules)
        while store.beat(self._claim) and not self._stop.wait(self._rules.lease_s / 4):
            pass
        store.close()


def die_with_parent() -> None:
    """Nobody listens to an orphan, and the next run would wait for it or do its job beside it."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
