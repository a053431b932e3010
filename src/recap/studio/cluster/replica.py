"""A replica has one model and the sessions that are open on it; Ray Serve starts, checks and ends it.

A session on it takes a seat: a request to Ray Serve that lasts as long as the session is open here. So Ray Serve
itself counts the sessions of a replica, lets others wait, refuses when too many wait, adds replicas, and reports at
once when one died. Requests about the session go to the replica's own server, whose address is part of the seat.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from recap.errors import RecapError
from recap.io.extras import import_extra
from recap.io.files import LOCK, alone_in
from recap.studio.cluster.metrics import Metric, Stages, as_text
from recap.studio.cluster.settings import ClusterSettings
from recap.studio.cluster.shared import SharedFolder, SharedSession, SharedShelf
from recap.studio.cluster.snapshots import open_store
from recap.studio.listening import address_of, bound_socket, make_server
from recap.studio.live import LiveSession
from recap.studio.server import make_app
from recap.studio.settings import Limits, StudioSettings
from recap.studio.studio import BUSY, Studio

PREFIX = "recap-replica-"
# Its second number counts the pages of this process; other systems than Linux have no such file.
OWN_PAGES = Path("/proc/self/statm")
STUCK_S = 300.0
"""A model that has not finished a block for so long is taken for stuck."""


class ReplicaStudio(Studio):
    """Is a studio that deletes its own files of closed sessions, which are in the store."""

    folder: SharedFolder

    def open(self, name: str) -> LiveSession:
        with self._lock:
            live = self.sessions.get(name)
        if live is not None and not self._is_ours(live):
            # It was taken for dead and continued on another replica; the files here are old.
            self.close_session(name)
        return super().open(name)

    def _is_ours(self, live: LiveSession) -> bool:
        return isinstance(live.store, SharedSession) and live.store.is_ours()

    def close_lost(self) -> None:
        """Close sessions that another replica has opened."""
        for name, live in list(self.sessions.items()):
            if not self._is_ours(live):
                self.close_session(name)

    def close_session(self, name: str) -> None:
        super().close_session(name)
        self.folder.release(name)

    def close(self) -> None:
        super().close()
        self.folder.close()


class Replica:
    """Serves sessions; one process, one model."""

    def __init__(self, settings: ClusterSettings, token: str, host: str = "") -> None:
        self._settings = settings
        host = host or own_address()
        if not settings.gpus:
            torch.set_num_threads(max(1, int(settings.cpus)))
        clear_abandoned(Path(tempfile.gettempdir()))
        self._folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        # The front counts sessions; more are open here only while one opens and another closes.
        limits = Limits(open_sessions=2 * settings.sessions + 2, kept_sessions=settings.kept_sessions)
        own = settings.as_studio(StudioSettings(self._folder, host=host, port=0, token=token, limits=limits))
        self._stages = Stages()
        store = open_store(settings.store)
        folder = SharedFolder(self._folder, limits.disk_bytes, store, settings.state_mb * 2**20)
        folder.observe = self._stages.add
        shelf = SharedShelf(self._folder / "casts", limits.casts, store)
        self.studio = ReplicaStudio(own, folder, shelf)
        self._ping: tuple[float, Future[None]] | None = None
        self._seated = 0
        # The model is loaded before the first seat is taken.
        self.studio.about()
        self._listen(own)

    def _listen(self, own: StudioSettings) -> None:
        """Start the replica's own server, which needs the token."""
        app = make_app(self.studio)
        app.add_api_route("/metrics", self._metrics, include_in_schema=False, response_model=None)
        listening = bound_socket(own)
        self.address = address_of(own, listening)
        server = make_server(app, own, shutdown_s=1)
        self._server = threading.Thread(
            target=server.run, kwargs={"sockets": [listening]}, name="replica-server", daemon=True
        )
        self._server.start()

    async def seat(self) -> AsyncIterator[dict[str, Any]]:
        """Reserve a seat until the caller leaves; yields the address first, or why there is no room."""
        room = self._settings.memory_gb * 2**30 - memory_bytes()
        if room < 0:
            used = memory_bytes() / 2**30
            yield {"full": f"a replica uses {used:.3g} GB of its {self._settings.memory_gb:g}"}
            return
        self._seated += 1
        try:
            yield {"address": self.address}
            await asyncio.Event().wait()
        finally:
            self._seated -= 1

    async def check_health(self) -> None:
        """Check for Ray Serve that this replica works: its model generates, its server is alive."""
        if not self._server.is_alive():
            raise RuntimeError("the replica's server ended")
        if self._ping is None or self._ping[1].done():
            self._ping = (time.monotonic(), self.studio.engine.call(lambda: None))
        elif time.monotonic() - self._ping[0] > STUCK_S:
            raise RuntimeError(f"the model has not come to its next block for {STUCK_S:.0f} s")
        await asyncio.to_thread(self.studio.close_lost)

    async def _metrics(self) -> Any:
        from fastapi import Response

        return Response(as_text(self.metrics()), media_type="text/plain; version=0.0.4")

    def metrics(self) -> list[Metric]:
        """Return the metrics of this replica."""
        lives = list(self.studio.sessions.values())
        leads = [live.next_block - live.first_unseen for live in lives if live.playing]
        block_s = lives[0].clock.start_s(2) - lives[0].clock.start_s(1) if lives else 0.0
        gauges = {
            "sessions": ("Sessions that are open.", len(lives)),
            "seats_taken": ("Seats that are taken.", self._seated),
            "watchers": ("Streams of sessions that are open.", sum(len(live.hub) for live in lives)),
            "lead_seconds_least": (
                "The shortest lead of a playing session.",
                block_s * min(leads, default=0),
            ),
            "lead_seconds_sum": ("The leads of all playing sessions.", block_s * sum(leads)),
            "engine_waiting": (
                "Sessions that wait for the model.",
                sum(live.wants_block() for live in lives),
            ),
            "memory_bytes": ("Memory of the process.", memory_bytes()),
            "device_memory_bytes": ("Memory that torch holds on the GPU.", device_bytes()),
        }
        shown = [Metric(name, about, "gauge", value) for name, (about, value) in gauges.items()]
        return [*self._stages.shown(), *shown]

    def __del__(self) -> None:
        # Ray Serve calls this when it ends a replica; all that was shown is in the store already.
        shutil.rmtree(self._folder, ignore_errors=True)


def clear_abandoned(temporary: Path) -> None:
    """Delete the folders of replicas that were killed: a live replica has the lock of its folder."""
    if os.name != "posix":
        return
    for folder in temporary.glob(f"{PREFIX}*"):
        # Only our own: others may put anything into a folder for temporary files.
        with suppress(OSError, RecapError):
            if folder.lstat().st_uid == os.getuid() and not folder.is_symlink() and (folder / LOCK).is_file():
                with alone_in(folder, *BUSY):
                    shutil.rmtree(folder, ignore_errors=True)


def own_address() -> str:
    """Return the address of this machine in its cluster."""
    ray: Any = import_extra("ray", "recap serve", "ray")
    return str(ray.util.get_node_ip_address())


def memory_bytes() -> float:
    """Return the memory of this process, with what torch holds on the GPU; without /proc only the latter."""
    if not OWN_PAGES.is_file():
        return device_bytes()
    return int(OWN_PAGES.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") + device_bytes()


def device_bytes() -> float:
    return float(torch.cuda.memory_allocated()) if torch.cuda.is_available() else 0.0
