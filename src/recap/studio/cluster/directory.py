"""The directory maps sessions to seats; it opens parked sessions on request, and parks idle ones."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from recap.errors import RecapError, refuse
from recap.studio.cluster.seats import Seat, Seats, busy
from recap.studio.cluster.settings import ClusterSettings
from recap.studio.cluster.shared import SESSIONS, delete_session
from recap.studio.cluster.snapshots import SnapshotStore
from recap.studio.store import ID, RECORD, SessionRecord, no_session

SPARED_S = 5.0
"""A session that was used so recently is not parked to make room for another."""

MOVING_S = 600.0
"""How long a session that lost its replica may wait for another one."""

Answer = tuple[int, bytes, str, dict[str, str]]
"""Status, body, media type, and the headers that a client needs."""


class Lost(Exception):
    """Means that a replica was lost before it answered."""


class Directory:
    """Places sessions on replicas; everything here is on the event loop of the front."""

    def __init__(
        self, settings: ClusterSettings, seats: Seats, store: SnapshotStore, client: Any, token: str
    ) -> None:
        self.settings = settings
        self.seats = seats
        self.store = store
        self.sessions: dict[str, Seat] = {}
        # Sessions that a client closed: only /open opens them again.
        self.closed: set[str] = set()
        # Sessions that a client paused; another replica that takes one over pauses it too.
        self.paused: set[str] = set()
        self.moves = 0
        self.parked = 0
        self._client = client
        self._headers = {"authorization": f"Bearer {token}"}
        self._locks: dict[str, asyncio.Lock] = {}

    # Talking to replicas

    async def send(
        self, seat: Seat, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None
    ) -> Answer:
        """Send a request to a replica, which may be gone before it answers."""
        import aiohttp

        sent = asyncio.create_task(self._send(seat.address, method, path, body, headers or {}))
        gone = asyncio.create_task(seat.gone.wait())
        try:
            await asyncio.wait({sent, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not sent.done():
                raise Lost(seat.address)
            return sent.result()
        except (aiohttp.ClientConnectionError, OSError, asyncio.TimeoutError) as error:
            # The replica does not answer; Ray may need some time to notice that a machine is gone.
            seat.leave()
            raise Lost(seat.address) from error
        except aiohttp.ClientPayloadError as error:
            raise Lost(seat.address) from error
        finally:
            sent.cancel()
            gone.cancel()
            await asyncio.gather(sent, gone, return_exceptions=True)

    async def _send(
        self, address: str, method: str, path: str, body: bytes, headers: dict[str, str]
    ) -> Answer:
        import yarl

        url = yarl.URL(address + path, encoded=True)
        asked = self._client.request(method, url, data=body or None, headers={**headers, **self._headers})
        async with asked as answer:
            data = await answer.read()
            kept = {name: answer.headers[name] for name in ("content-disposition",) if name in answer.headers}
            return answer.status, data, answer.headers.get("content-type", "application/json"), kept

    def connect(self, seat: Seat, path: str) -> Any:
        """Open a stream of a replica; a machine that vanished is noticed by its silence."""
        address = seat.address.replace("http", "ws", 1)
        return self._client.ws_connect(address + path, headers=self._headers, heartbeat=30.0, max_msg_size=0)

    # Placing sessions

    async def find(self, name: str, *, reopen: bool = False) -> Seat:
        """Return the seat of an open session; one that is parked or was lost is opened again."""
        if reopen:
            self.closed.discard(name)
        async with self._locks.setdefault(name[:16], asyncio.Lock()):
            seat = self.sessions.get(name)
            if seat is not None and not seat.gone.is_set():
                seat.used = time.monotonic()
                return seat
            if not ID.fullmatch(name) or await asyncio.to_thread(self._record, name) is None:
                self._locks.pop(name[:16], None)
                raise no_session(name)
            if name in self.closed:
                raise refuse("session", name, "is not open", f"POST /v1/sessions/{name}/open first")
            lost = self.sessions.pop(name, None) is not None
            return await self._open(name, lost)

    async def _open(self, name: str, lost: bool) -> Seat:
        """Open a session on a seat, or on another one if that replica dies meanwhile."""
        end = time.monotonic() + (MOVING_S if lost else self.settings.patience_s)
        while True:
            seat = await self.take(max(0.0, end - time.monotonic()), insist=lost)
            with suppress(Lost), _left_on_error(seat):
                status, body, _, _ = await self.send(seat, "POST", f"/v1/sessions/{name}/open")
                if name in self.paused:
                    await self.send(seat, "POST", f"/v1/sessions/{name}/commands", b'{"type": "pause"}')
                if status >= 400:
                    raise error_of(body)
                self.moves += lost
                self.sessions[name] = seat
                return seat

    async def take(self, patience_s: float, *, insist: bool = False) -> Seat:
        """Take a seat; where all are taken, the session that was idle longest makes room."""
        if len(self.sessions) >= self.settings.seats:
            await self.park_idle(SPARED_S, most=1)
        return await self.seats.take(patience_s, insist=insist)

    async def begin(self, path: str, body: bytes, headers: dict[str, str]) -> Answer:
        """Begin a session on a seat: by a description, or by an uploaded run."""
        if (kept := len(await asyncio.to_thread(self.names))) >= self.settings.kept_sessions:
            limit = f"at most {self.settings.kept_sessions} are kept"
            raise refuse("sessions", kept, limit, "delete one of them")
        while True:
            seat = await self.take(self.settings.patience_s)
            # A session that a lost replica may have begun is unknown to the client: another one is begun.
            with suppress(Lost), _left_on_error(seat):
                answer = await self.send(seat, "POST", path, body, headers)
                if answer[0] >= 400:
                    seat.leave()
                else:
                    self.sessions[json.loads(answer[1])["session"]] = seat
                return answer

    async def ask_any(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> Any:
        """Ask any replica, where all would give the same answer."""
        for seat in [seat for seat in self.sessions.values() if not seat.gone.is_set()][:3]:
            with suppress(Lost):
                return await self.send(seat, method, path, body, headers)
        seat = await self.take(self.settings.patience_s)
        try:
            return await self.send(seat, method, path, body, headers)
        except Lost as error:
            raise busy("a replica was lost") from error
        finally:
            seat.leave()

    async def park_idle(self, idle_s: float, most: int = 1000) -> None:
        """Close sessions without viewers and requests; the next request opens them again."""
        idle = sorted(
            ((seat.idle_s, name) for name, seat in self.sessions.items() if seat.idle_s > idle_s),
            reverse=True,
        )
        for _, name in idle[:most]:
            async with self._locks.setdefault(name, asyncio.Lock()):
                seat = self.sessions.get(name)
                if seat is not None and seat.idle_s > idle_s:
                    await self._close(name, seat)
                    self.parked += 1

    async def _close(self, name: str, seat: Seat) -> None:
        """Close a session on its replica, and release the seat; all that was shown is in the store."""
        with suppress(Lost):
            await self.send(seat, "POST", f"/v1/sessions/{name}/close")
        seat.leave()
        self.sessions.pop(name, None)

    async def close(self, name: str) -> dict[str, Any]:
        """Close a session, as a client asked."""
        await self.find(name)
        async with self._locks.setdefault(name, asyncio.Lock()):
            self.closed.add(name)
            if (seat := self.sessions.get(name)) is not None:
                await self._close(name, seat)
        return {"v": 1, "session": name, "open": False}

    async def delete(self, name: str) -> dict[str, Any]:
        """Close a session and delete it from the store."""
        if not ID.fullmatch(name) or await asyncio.to_thread(self._record, name) is None:
            raise no_session(name)
        async with self._locks.setdefault(name, asyncio.Lock()):
            if (seat := self.sessions.get(name)) is not None:
                await self._close(name, seat)
            await asyncio.to_thread(delete_session, self.store, name)
            self.closed.discard(name)
            self.paused.discard(name)
        self._locks.pop(name, None)
        return {"v": 1, "session": name, "deleted": True}

    # Listing sessions

    def names(self) -> list[str]:
        """Return all sessions that are in the store."""
        return [name for name in self.store.children(SESSIONS) if ID.fullmatch(name)]

    def _record(self, name: str) -> bytes | None:
        return self.store.read(f"{SESSIONS}/{name}/{RECORD}")

    async def list(self) -> list[dict[str, Any]]:
        """Return all sessions: open ones as their replicas describe them, others from their records."""
        by_address = {seat.address: seat for seat in self.sessions.values() if not seat.gone.is_set()}
        shown: dict[str, dict[str, Any]] = {}
        for seat in by_address.values():
            with suppress(Lost, ValueError):
                _, body, _, _ = await self.send(seat, "GET", "/v1/sessions")
                shown |= {one["session"]: one for one in json.loads(body) if one["session"] in self.sessions}
        return await asyncio.to_thread(
            lambda: [shown.get(name) or self._asleep(name) for name in self.names()]
        )

    def _asleep(self, name: str) -> dict[str, Any]:
        """Describe a session that is not open, as the studio does."""
        try:
            return SessionRecord.from_json(json.loads(self._record(name) or b"{}")).summary()
        except RecapError as error:
            return {"session": name, "open": False, "message": str(error)}
        except (ValueError, KeyError, TypeError):
            return {"session": name, "open": False, "message": "it is being begun, or its record is damaged"}


@contextmanager
def _left_on_error(seat: Seat) -> Iterator[None]:
    """Release a seat if what it was taken for fails."""
    try:
        yield
    except BaseException:
        seat.leave()
        raise


def error_of(body: bytes) -> RecapError:
    """Return the refusal that a replica answered with."""
    try:
        plain = json.loads(body)
        error = RecapError(str(plain["text"]))
        error.field, error.value, error.limit, error.remedy = (
            str(plain.get(part, "")) for part in ("field", "value", "limit", "remedy")
        )
        return error
    except (ValueError, KeyError, TypeError):
        return refuse("replica", body[:60], "did not answer as expected", "try again")
